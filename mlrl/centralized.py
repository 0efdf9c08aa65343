"""One model that writes all roles: their prompts as one prompt, and its one text split into the roles' answers.

The form is `<agent_1> … </agent_1> <agent_2> … </agent_2>`, in any order, each exactly once. `CentralizedEnvironment`
lets one actor play a task of several roles, which every trainer then sees as a team of one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlrl.errors import ConfigError
from mlrl.eval_hooks import RolloutSample
from mlrl.prompts import Prompt
from mlrl.rewards import RewardResult
from mlrl.rollout.tree import RolloutTree
from mlrl.task import Environment, Task

_SECTION = re.compile(r"<agent_(\d+)>(.*?)</agent_\1>", re.DOTALL)


def centralized_prompt(prompts: Sequence[Prompt]) -> list[dict]:
    """One chat prompt that asks for the answers of all N agents in tagged sections.

    Args:
        prompts: what each agent would see by itself, a text or chat messages.
    """
    tasks = "\n\n".join(
        f"Task of agent {agent}:\n<task_{agent}>\n{prompt_text(prompt)}\n</task_{agent}>"
        for agent, prompt in enumerate(prompts, start=1)
    )
    form = "\n".join(
        f"<agent_{agent}>\nthe answer of agent {agent}\n</agent_{agent}>" for agent in range(1, len(prompts) + 1)
    )
    text = (
        f"You write for a team of {len(prompts)}. Every agent of the team has a task of its own and answers only that "
        f"task.\n\n{tasks}\n\nWrite the answer of every agent, and nothing else, in this form:\n\n{form}"
    )
    return [{"role": "user", "content": text}]


def split_roles(text: str, num_agents: int) -> list[str] | None:
    """The N answers in a tagged text, without surrounding blanks; None where a section is absent or comes twice."""
    found = [(int(number), answer.strip()) for number, answer in _SECTION.findall(text)]
    if sorted(number for number, _ in found) != list(range(1, num_agents + 1)):
        return None
    return [answer for _, answer in sorted(found)]


def prompt_text(prompt: Prompt) -> str:
    """A prompt as plain text: of a single message its content, of a chat every message under its role."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return prompt[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


class CentralizedEnvironment(Environment):
    """A task of R roles as one actor plays it, in one turn.

    The actor sees all roles' prompts as one. Rewards and evaluation functions see the roles' answers; a text that
    cannot be split gives every role an empty answer, and is counted.
    """

    def initial_prompts(self, item: Mapping[str, Any], item_index: int | None = None) -> list[Prompt]:
        """The actor's one prompt."""
        return [centralized_prompt(super().initial_prompts(item, item_index))]

    def rewards(
        self, *, item: Mapping[str, Any], completions: Sequence[Sequence[str]], item_index: int | None, **rest: Any
    ) -> RewardResult:
        """As `Environment.rewards`, of the actor's texts [1][joint]; roles' own rewards by their mean."""
        roles = [self._roles(text) for text in completions[0]]
        none = [[] for _ in range(self.num_agents)]
        rest |= {"prompt_history": none, "response_history": none}
        rest["prompts"] = super().initial_prompts(item, item_index)
        own = list(zip(*roles, strict=True))
        result = super().rewards(item=item, completions=own, item_index=item_index, **rest)
        if result.raw.ndim == 1:
            return result
        return dataclasses.replace(result, processed=result.processed.mean(1), raw=result.raw.mean(1))

    def eval_rows(
        self, *, agent_completions_turns: Sequence[Sequence[Sequence[str]]], items: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """As `Environment.eval_rows`, of the actor's texts [1][item][turn]."""
        roles = [[self._roles(text) for text in turns] for turns in agent_completions_turns[0]]
        own = [[[answers[role] for answers in turns] for turns in roles] for role in range(self.num_agents)]
        return super().eval_rows(agent_completions_turns=own, items=items)

    def callback_metrics(self, samples: Sequence[RolloutSample]) -> dict[str, float]:
        """As `Environment.callback_metrics`; each role's sample holds the prompt that the actor saw."""
        return super().callback_metrics(
            [
                dataclasses.replace(sample, agent_idx=role, completion=answer)
                for sample in samples
                for role, answer in enumerate(self._roles(sample.completion))
            ]
        )

    def response_metrics(self, trees: Sequence[RolloutTree]) -> dict[str, tuple[float, float]]:
        """The share of texts that cannot be split."""
        texts = [response.text for tree in trees for response in tree.root.responses[0]]
        lost = sum(split_roles(text, self.num_agents) is None for text in texts)
        return {"turn_1/unparseable_fraction": (lost, len(texts))}

    def _roles(self, text: str) -> list[str]:
        return split_roles(text, self.num_agents) or [""] * self.num_agents


def make_environment(task: Task, num_roles: int, args: Any, per_agent_rewards: bool) -> Environment:
    """The environment that a team of `num_roles` agents, or one actor for as many roles, plays in."""
    kind = CentralizedEnvironment if args.collaboration_mode == "centralized" else Environment
    return kind(task, num_roles, args.num_turns, args.external_prompt_passthrough, per_agent_rewards)


def actors(models: list[Any], args: Any) -> list[Any]:
    """The models that act: all of them, or the one that writes all roles.

    Raises:
        ConfigError: there are several for one actor.
    """
    if args.collaboration_mode != "centralized":
        return models
    if any(model is not models[0] and model != models[0] for model in models):
        raise ConfigError(
            "collaboration_mode='centralized': several models are given, and one actor writes all roles. Give one "
            "agent_model, and num_agents for the number of roles"
        )
    return models[:1]
