"""Growing rollout trees breadth-first: one sampling call a turn for all items, nodes and agents."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlrl.agents import Team
from mlrl.estimators.returns import joint_indices
from mlrl.rollout.prompts import tokenize_prompt
from mlrl.rollout.sampler import Request, Sampler, SamplingParams
from mlrl.rollout.streams import derive_seed
from mlrl.rollout.tree import Node, RolloutTree, TokenizedPrompt
from mlrl.task import Environment


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
    """Grows trees for a team in an environment."""

    team: Team
    sampler: Sampler
    environment: Environment
    on_tokens: Callable[[int], None] | None = None
    cost: CollectionCost = field(default_factory=CollectionCost)

    def collect(self, items: Sequence[tuple[int, dict]], growth: Growth) -> list[RolloutTree]:
        """A rollout tree of every (ordinal, item).

        Raises:
            TaskError: a callable of the task returned something wrong; names item and turn.
        """
        self.cost = CollectionCost()
        trees = []
        for ordinal, item in items:
            contents = self.environment.initial_prompts(item, item_index=ordinal)
            prompts = [
                self._tokenize(agent, content, growth, f"item {ordinal}, turn 0")
                for agent, content in enumerate(contents)
            ]
            trees.append(RolloutTree(item, ordinal, Node((), prompts)))
        self._grow([(tree, tree.root) for tree in trees], growth)
        if growth.greedy_baseline:
            self._add_greedy_returns(trees, growth)
        return trees

    def _grow(self, frontier: list[tuple[RolloutTree, Node]], growth: Growth) -> None:
        """Fills the nodes of a frontier and all below, one turn after another."""
        while frontier:
            self._sample(frontier, growth)
            for tree, node in frontier:
                self._reward(tree, node, growth)
            frontier = [child for tree, node in frontier for child in self._expand(tree, node, growth)]

    def _sample(self, frontier: list[tuple[RolloutTree, Node]], growth: Growth) -> None:
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
        start = time.perf_counter()
        responses = iter(self.sampler.sample(requests, growth.sampling, self.on_tokens))
        self.cost.rollout_s += time.perf_counter() - start
        for _, node in frontier:
            node.responses = [next(responses) for _ in self.team.agents]
            self.cost.generated_tokens += sum(len(r.token_ids) for own in node.responses for r in own)

    def _reward(self, tree: RolloutTree, node: Node, growth: Growth) -> None:
        node.joints = joint_indices(len(self.team.agents), len(node.responses[0]), growth.joint_mode)
        prompt_history, response_history = node.history()
        start = time.perf_counter()
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
        self.cost.reward_s += time.perf_counter() - start
        self.cost.joint_evaluations += len(node.joints)
        node.rewards, node.raw_rewards = result.processed.tolist(), result.raw.tolist()

    def _expand(self, tree: RolloutTree, node: Node, growth: Growth) -> list[tuple[RolloutTree, Node]]:
        """Children of the joints that go on, in joint order."""
        if node.turn + 1 >= len(growth.generations):
            return []
        shared = [sum(r) / len(r) if isinstance(r, list) else r for r in node.rewards]
        if growth.threshold is not None and growth.scope == "node" and sum(shared) / len(shared) > growth.threshold:
            return []
        children = []
        prompt_history, response_history = node.history()
        for joint, reward in enumerate(shared):
            if growth.threshold is not None and growth.scope == "joint" and reward > growth.threshold:
                continue
            completions = node.completions(joint)
            contents = self.environment.next_prompts(
                item=tree.item,
                turn=node.turn,
                completions=completions,
                reward=reward,
                prompt_history=[[*h, p.content] for h, p in zip(prompt_history, node.prompts, strict=True)],
                response_history=[[*h, c] for h, c in zip(response_history, completions, strict=True)],
                episode_seed=self._episode_seed(tree, growth),
                item_index=tree.ordinal,
            )
            where = f"item {tree.ordinal}, turn {node.turn + 1}"
            prompts = [
                self._tokenize(
                    agent,
                    content,
                    growth,
                    where,
                    (node.prompts[agent], node.responses[agent][node.joints[joint][agent]]),
                )
                for agent, content in enumerate(contents)
            ]
            node.children[joint] = Node((*node.path, joint), prompts, parent=node)
            children.append((tree, node.children[joint]))
        return children

    def _add_greedy_returns(self, trees: list[RolloutTree], growth: Growth) -> None:
        """The return of playing greedily from every node on: ReMax's own baseline."""
        nodes = [(tree, node) for tree in trees for node in tree.nodes()]
        shadows = [(tree, Node(node.path, node.prompts, node.parent)) for tree, node in nodes]
        sampling = SamplingParams(temperature=0.0, max_new_tokens=growth.sampling.max_new_tokens)
        greedy = Growth(**{**growth.__dict__, "generations": (1,) * len(growth.generations), "sampling": sampling})
        self._grow(shadows, greedy)
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
