"""Rollout trees as pure data, and the returns and credit that follow from their rewards.

A node holds the prompts that the N agents saw, K responses of each, and the J joint responses made of them with their
rewards; its children are the nodes that the joints led to. Node order is fixed by (item, path), never by arrival.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mlrl.estimators.returns import returns_to_go


@dataclass
class TokenizedPrompt:
    """What one agent saw at a node.

    Attributes:
        content: the formatted prompt, a str or chat messages, as the agent's formatter returned it.
        token_ids: its tokens.
        reused: how many of them are the parent's prompt and response, reused id for id (0: nothing is).
        truncated: tokens cut from the left to fit `max_prompt_tokens`.
    """

    content: str | list[dict]
    token_ids: list[int]
    reused: int = 0
    truncated: int = 0


@dataclass
class Response:
    """One sampled completion.

    Attributes:
        token_ids: every sampled token, the end token included where one was sampled.
        logprobs: log-probability of each at the sampling temperature, under the sampling weights.
        text: decoded without special tokens.
        truncated: True where the token budget ended it, so that it has no end token.
    """

    token_ids: list[int]
    logprobs: list[float]
    text: str
    truncated: bool


@dataclass
class Node:
    """A decision point of one item: turn t, reached by `path` (the joints taken so far)."""

    path: tuple[int, ...]
    prompts: list[TokenizedPrompt]
    parent: Node | None = field(default=None, repr=False)
    responses: list[list[Response]] = field(default_factory=list)  # [N][K]
    joints: list[tuple[int, ...]] = field(default_factory=list)  # [J][N] generation of each agent
    rewards: list[Any] = field(default_factory=list)  # [J], or [J][N] where rewards are an agent's own
    raw_rewards: list[Any] = field(default_factory=list)  # before the reward processor
    reward_failed: bool = False  # the reward had no result, so that these are the fallback
    children: dict[int, Node] = field(default_factory=dict)  # by joint
    greedy_return: float | None = None  # return of the greedy joint response, where that is the baseline
    advantages: list[list[float]] | None = None  # [N][K], once estimated

    @property
    def turn(self) -> int:
        """Turn of this node, counted from 0."""
        return len(self.path)

    def completions(self, joint: int) -> list[str]:
        """Texts of one joint response, an agent each."""
        return [self.responses[agent][k].text for agent, k in enumerate(self.joints[joint])]

    def history(self) -> tuple[list[list], list[list[str]]]:
        """Prompts and responses of the earlier turns on this branch, [N][turn], as the agents saw and wrote them."""
        prompts: list[list] = [[] for _ in self.prompts]
        responses: list[list[str]] = [[] for _ in self.prompts]
        node = self
        while node.parent is not None:
            joint, node = node.path[-1], node.parent
            for agent, text in enumerate(node.completions(joint)):
                prompts[agent].insert(0, node.prompts[agent].content)
                responses[agent].insert(0, text)
        return prompts, responses

    def returns(self, discount: float) -> list[Any]:
        """Return of each joint: its reward plus the discounted mean of the returns below it. [J], or [J][N] where
        rewards are an agent's own here or below; a shared reward then is everyone's."""
        if not self._has_own_rewards():
            return self._returns_of(None, discount)
        return [
            list(own) for own in zip(*(self._returns_of(a, discount) for a in range(len(self.prompts))), strict=True)
        ]

    def _has_own_rewards(self) -> bool:
        own = any(isinstance(reward, list) for reward in self.rewards)
        return own or any(child._has_own_rewards() for child in self.children.values())

    def _returns_of(self, agent: int | None, discount: float) -> list[float]:
        below = [
            self.children[j]._returns_of(agent, discount) if j in self.children else [math.nan]
            for j in range(len(self.rewards))
        ]
        rewards = [own_reward(reward, agent) for reward in self.rewards]
        return returns_to_go(rewards, [sum(r) / len(r) for r in below], discount).tolist()


def own_reward(reward: float | list[float], agent: int | None) -> float:
    """One agent's part of a joint's reward, or their mean (None); a shared reward is everyone's."""
    if not isinstance(reward, list):
        return reward
    return sum(reward) / len(reward) if agent is None else reward[agent]


@dataclass
class RolloutTree:
    """All that was sampled for one task item.

    Attributes:
        item: the dataset row; ordinal: its place in training order (or in the evaluation set); root: turn 0.
        drawn_at: steps that the weights had taken which drew it, where sampling may run ahead; else None.
    """

    item: dict
    ordinal: int
    root: Node
    drawn_at: int | None = None

    def nodes(self) -> Iterator[Node]:
        """Every node, turn after turn, in path order within a turn."""
        level = [self.root]
        while level:
            yield from level
            level = [node.children[joint] for node in level for joint in sorted(node.children)]
