"""Growing rollout trees breadth-first: one sampling call a turn for all items, nodes and agents.

Every rank holds the same trees. The sequences of a turn are spread over the ranks of their agents, prompts and rewards
over all ranks, each computed once; what came out is exchanged before the next turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from mlrl.agents import Team
from mlrl.estimators.returns import joint_indices
from mlrl.parallel.group import Group, spread
from mlrl.profiling import span
from mlrl.rollout.prompts import tokenize_prompt
from mlrl.rollout.sampler import Request, Sampler, SamplingParams
from mlrl.rollout.streams import derive_seed
from mlrl.rollout.tree import Node, Response, RolloutTree, TokenizedPrompt
from mlrl.task import Environment

if TYPE_CHECKING:
    from mlrl.rollout.vllm import FrozenSampler, VLLMSampler

P, R = TypeVar("P"), TypeVar("R")


@dataclass(frozen=True)
class Growth:
    """How trees are grown.

    Attributes:
        generations: responses an agent draws at a node of each turn, so its length is the horizon.
        joint_mode: `aligned` (joint g is everyone's g-th response) or `cross` (every combination).
        threshold: a processed reward above it ends the episode early; None never. scope: `node` ends all branches of a
            node by its mean reward, `joint` each branch by its own.
        stream: which random streams are drawn from (train, eval …); seed: the run's seed.
        reseed: enters the `episode_seed` of user callables, so that an item met again is played afresh.
    """

    generations: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    joint_mode: str = "aligned"
    threshold: float | None = None
    scope: str = "node"
    stream: str = "train"
    reseed: int = 0
    greedy_baseline: bool = False
    discount: float = 1.0
    max_prompt_tokens: int | None = None
    prompt_limits: tuple[int | None, ...] = ()


@dataclass
class CollectionCost:
    """What growing trees cost: seconds of sampling and of rewards, tokens drawn, joint rewards evaluated."""

    rollout_s: float = 0.0
    reward_s: float = 0.0
    generated_tokens: int = 0
    joint_evaluations: int = 0
    truncated_prompts: int = 0


@dataclass
class Collector:
    """Grows trees for a team in an environment.

    Attributes:
        group: all ranks, as they speak of the trees; None: as they speak of everything.
    """

    team: Team
    sampler: Sampler | VLLMSampler | FrozenSampler
    environment: Environment
    on_tokens: Callable[[int], None] | None = None
    cost: CollectionCost = field(default_factory=CollectionCost)
    group: Group | None = None

    @property
    def world(self) -> Group:
        return self.group or self.team.mesh.world

    def collect(self, items: Sequence[tuple[int, dict]], growth: Growth) -> list[RolloutTree]:
        """A rollout tree of every (ordinal, item).

        Raises:
            TaskError: a callable of the task returned something wrong; names item and turn.
        """
        self.cost = CollectionCost()
        trees = []
        formatted = self.world.map(lambda numbered: self.environment.initial_prompts(numbered[1], numbered[0]), items)
        for (ordinal, item), contents in zip(items, formatted, strict=True):
            prompts = [
                self._tokenize(agent, content, growth, f"item {ordinal}, turn 0")
                for agent, content in enumerate(contents)
            ]
            trees.append(RolloutTree(item, ordinal, Node((), prompts)))
        several = len(growth.generations) > 1 or growth.greedy_baseline
        with self.sampler.steady_weights() if several else nullcontext():
            self._grow([(tree, tree.root) for tree in trees], growth)
            if growth.greedy_baseline:
                self._add_greedy_returns(trees, growth)
        return trees

    def _grow(self, frontier: list[tuple[RolloutTree, Node]], growth: Growth) -> None:
        """Fills the nodes of a frontier and all below, one turn after another."""
        while frontier:
            self._sample(frontier, growth)
            self._reward(frontier, growth)
            frontier = self._expand(frontier, growth)

    def _sample(self, frontier: list[tuple[RolloutTree, Node]], growth: Growth) -> None:
        start = time.perf_counter()
        self._draw_all(frontier, growth)
        self.cost.rollout_s += time.perf_counter() - start
        for _, node in frontier:
            self.cost.generated_tokens += sum(len(r.token_ids) for own in node.responses for r in own)

    def _draw_all(self, frontier: list[tuple[RolloutTree, Node]], growth: Growth) -> None:
        """Fills in the responses of all agents."""
        requests = [
            Request(
                agent,
                node.prompts[agent].token_ids,
                [
                    (growth.seed, growth.stream, tree.ordinal, node.path, agent, k)
                    for k in range(growth.generations[node.turn])
                ],
            )
            for tree, node in frontier
            for agent in range(len(self.team.agents))
        ]
        responses = iter(self.draw(requests, growth.sampling))
        for _, node in frontier:
            node.responses = [next(responses) for _ in self.team.agents]

    def draw(self, requests: list[Request], sampling: SamplingParams) -> list[list[Response]]:
        """Responses of all requests, each drawn on one rank of its agent."""
        if self.world.size == 1:
            return self.sampler.sample(requests, sampling, self.on_tokens)
        sequences = [(i, k) for i, request in enumerate(requests) for k in range(len(request.keys))]
        owners = self._owners(requests, sequences, sampling.max_new_tokens)
        mine: dict[int, list[int]] = {}  # places among `sequences`, by request
        for place, ((i, _), owner) in enumerate(zip(sequences, owners, strict=True)):
            if owner == self.world.rank:
                mine.setdefault(i, []).append(place)
        local = [
            Request(requests[i].agent, requests[i].prompt, [requests[i].keys[sequences[p][1]] for p in places])
            for i, places in mine.items()
        ]
        drawn = self.sampler.sample(local, sampling, self.on_tokens)
        by_place = {
            place: response
            for places, responses in zip(mine.values(), drawn, strict=True)
            for place, response in zip(places, responses, strict=True)
        }
        results: list[list[Response]] = [[] for _ in requests]
        for (i, _), response in zip(sequences, self.world.collect(by_place, len(sequences)), strict=True):
            results[i].append(response)
        return results

    def _owners(self, requests: list[Request], sequences: list[tuple[int, int]], tokens: int) -> list[int]:
        """The rank that draws each sequence: those of agents that live on the same ranks are spread evenly there."""
        owners = [0] * len(sequences)
        by_group: dict[tuple[int, ...], list[int]] = {}
        for n, (i, _) in enumerate(sequences):
            by_group.setdefault(self.team.mesh.agents[requests[i].agent].ranks, []).append(n)
        for ranks, members in by_group.items():
            if self.sampler.draws_on_first_rank:
                ranks = ranks[:1]
            costs = [
                tokens + len(requests[i].prompt) / len(requests[i].keys) for i, _ in (sequences[n] for n in members)
            ]
            for n, place in zip(members, spread(costs, len(ranks)), strict=True):
                owners[n] = ranks[place]
        return owners

    def _reward(self, frontier: list[tuple[RolloutTree, Node]], growth: Growth) -> None:
        for _, node in frontier:
            node.joints = joint_indices(len(self.team.agents), len(node.responses[0]), growth.joint_mode)
            self.cost.joint_evaluations += len(node.joints)
        start = time.perf_counter()
        with span("reward"):
            judged = self._map(lambda place: self._rewards_of(*place, growth), frontier)
        self.cost.reward_s += time.perf_counter() - start
        for (_, node), (processed, raw, failed) in zip(frontier, judged, strict=True):
            node.rewards, node.raw_rewards, node.reward_failed = processed, raw, failed

    def _map(self, function: Callable[[P], R], pieces: Sequence[P]) -> list[R]:
        """`function` of every piece on all ranks, each computed on one of them, there maybe in parallel."""
        owners = spread([1.0] * len(pieces), self.world.size)
        own = [i for i, owner in enumerate(owners) if owner == self.world.index]
        results = self.environment.map(lambda i: function(pieces[i]), own)
        return self.world.collect(dict(zip(own, results, strict=True)), len(pieces))

    def _rewards_of(self, tree: RolloutTree, node: Node, growth: Growth) -> tuple[list, list, bool]:
        """A node's rewards through the processor, as they were returned, and whether the call had failed."""
        prompt_history, response_history = node.history()
        result = self.environment.rewards(
            item=tree.item,
            completions=[
                [node.responses[agent][joint[agent]].text for joint in node.joints]
                for agent in range(len(self.team.agents))
            ],
            prompts=[prompt.content for prompt in node.prompts],
            turn=node.turn,
            prompt_history=prompt_history,
            response_history=response_history,
            episode_seed=self._episode_seed(tree, growth),
            item_index=tree.ordinal,
        )
        return result.processed.tolist(), result.raw.tolist(), result.failed

    def _expand(self, frontier: list[tuple[RolloutTree, Node]], growth: Growth) -> list[tuple[RolloutTree, Node]]:
        """Children of the joints that go on, in joint order."""
        branches = [
            (tree, node, joint, reward) for tree, node in frontier for joint, reward in self._going_on(node, growth)
        ]
        with span("transition"):
            prompted = self._map(lambda branch: self._next_contents(*branch, growth), branches)
        children = []
        for (tree, node, joint, _), contents in zip(branches, prompted, strict=True):
            prompts = [
                self._tokenize(
                    agent,
                    content,
                    growth,
                    f"item {tree.ordinal}, turn {node.turn + 1}",
                    (node.prompts[agent], node.responses[agent][node.joints[joint][agent]]),
                )
                for agent, content in enumerate(contents)
            ]
            node.children[joint] = Node((*node.path, joint), prompts, parent=node)
            children.append((tree, node.children[joint]))
        return children

    def _going_on(self, node: Node, growth: Growth) -> list[tuple[int, float]]:
        """(joint, reward) of the branches that have a next turn."""
        if node.turn + 1 >= len(growth.generations):
            return []
        shared = [sum(r) / len(r) if isinstance(r, list) else r for r in node.rewards]
        if growth.threshold is None:
            return list(enumerate(shared))
        if growth.scope == "node":
            return [] if sum(shared) / len(shared) > growth.threshold else list(enumerate(shared))
        return [(joint, reward) for joint, reward in enumerate(shared) if not reward > growth.threshold]

    def _next_contents(self, tree: RolloutTree, node: Node, joint: int, reward: float, growth: Growth) -> list:
        """The agents' prompts of the turn after a joint response, before they are tokenized."""
        prompt_history, response_history = node.history()
        completions = node.completions(joint)
        return self.environment.next_prompts(
            item=tree.item,
            turn=node.turn,
            completions=completions,
            reward=reward,
            prompt_history=[[*h, p.content] for h, p in zip(prompt_history, node.prompts, strict=True)],
            response_history=[[*h, c] for h, c in zip(response_history, completions, strict=True)],
            episode_seed=self._episode_seed(tree, growth),
            item_index=tree.ordinal,
        )

    def _add_greedy_returns(self, trees: list[RolloutTree], growth: Growth) -> None:
        """The return of playing greedily from every node on: ReMax's own baseline."""
        nodes = [(tree, node) for tree in trees for node in tree.nodes()]
        shadows = [(tree, Node(node.path, node.prompts, node.parent)) for tree, node in nodes]
        sampling = SamplingParams(temperature=0.0, max_new_tokens=growth.sampling.max_new_tokens)
        greedy = Growth(**{**growth.__dict__, "generations": (1,) * len(growth.generations), "sampling": sampling})
        counted = self.cost.truncated_prompts
        self._grow(shadows, greedy)
        self.cost.truncated_prompts = counted  # of the tree alone, whose prompts it is compared with
        for (_, node), (_, shadow) in zip(nodes, shadows, strict=True):
            node.greedy_return = shadow.returns(growth.discount)[0]

    def _tokenize(self, agent: int, content, growth: Growth, where: str, previous=None) -> TokenizedPrompt:
        prompt = tokenize_prompt(
            self.team.agents[agent].tokenizer,
            content,
            previous=previous,
            max_prompt_tokens=growth.max_prompt_tokens,
            limit=growth.prompt_limits[agent] if growth.prompt_limits else None,
            where=f"{where}, agent {agent}",
        )
        self.cost.truncated_prompts += prompt.truncated > 0
        return prompt

    def _episode_seed(self, tree: RolloutTree, growth: Growth) -> int:
        return derive_seed(growth.seed, growth.stream, growth.reseed, tree.ordinal)
