"""Metrics of rollouts and advantages, as (sum, count) pairs, so that means are exact over intervals and processes."""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Sequence

from mlrl.config import TrainerConfig
from mlrl.rollout.collect import CollectionCost
from mlrl.rollout.tree import Node, RolloutTree
from mlrl.trainers.samples import Sample

Pairs = dict[str, tuple[float, float]]


def rollout_metrics(
    trees: Sequence[RolloutTree], cost: CollectionCost, discount: float, num_turns: int, raw_rewards: bool = False
) -> Pairs:
    """Rewards, returns and lengths by turn, and what sampling cost.

    `raw_rewards` adds the rewards before the processor: in every step or in none, so that their mean over an interval
    leaves no step out.
    """
    pairs: Pairs = {}
    for turn in range(num_turns):
        nodes = [node for tree in trees for node in tree.nodes() if node.turn == turn]
        full = len(trees) * len(trees[0].root.joints) ** turn
        pairs[f"turn_{turn + 1}/reached_fraction"] = (len(nodes), full)
        if nodes:
            pairs.update(_reward_pairs(f"turn_{turn + 1}", nodes, discount, raw_rewards))
            for agent in range(len(nodes[0].responses)):
                responses = [r for node in nodes for r in node.responses[agent]]
                name = f"turn_{turn + 1}/agent_{agent}"
                pairs[f"{name}/completion_tokens_mean"] = (sum(len(r.token_ids) for r in responses), len(responses))
                pairs[f"{name}/empty_fraction"] = (sum(not r.text.strip() for r in responses), len(responses))
                pairs[f"{name}/truncated_fraction"] = (sum(r.truncated for r in responses), len(responses))
    nodes = [node for tree in trees for node in tree.nodes()]
    pairs["reward_failure_fraction"] = (sum(node.reward_failed for node in nodes), len(nodes))
    prompts = sum(len(node.prompts) for tree in trees for node in tree.nodes())
    pairs["truncated_prompt_fraction"] = (cost.truncated_prompts, prompts)
    pairs["time/rollout_s"] = (cost.rollout_s, 1)
    pairs["time/reward_s"] = (cost.reward_s, 1)
    pairs["throughput/generated_tokens_per_s"] = (cost.generated_tokens, cost.rollout_s)
    return pairs


def _reward_pairs(name: str, nodes: Sequence[Node], discount: float, raw_rewards: bool) -> Pairs:
    rewards = [flat(node.rewards) for node in nodes]
    every = [r for own in rewards for r in own]
    returns = [r for node in nodes for r in flat(node.returns(discount))]
    pairs = {
        f"{name}/reward_mean": (sum(every), len(every)),
        f"{name}/reward_std": (statistics.pstdev(every), 1),
        f"{name}/within_node_std": (sum(statistics.pstdev(own) for own in rewards), len(rewards)),
        f"{name}/expected_return": (sum(returns), len(returns)),
    }
    if raw_rewards:
        raw = [r for node in nodes for r in flat(node.raw_rewards)]
        pairs[f"{name}/raw_reward_mean"] = (sum(raw), len(raw))
    return pairs


def reward_sums(trees: Sequence[RolloutTree], name: str) -> Pairs:
    """Present rewards of the trees by turn, as `turn_k/<name>`."""
    pairs: Pairs = {}
    for node in (node for tree in trees for node in tree.nodes()):
        total, count = pairs.get(f"turn_{node.turn + 1}/{name}", (0.0, 0.0))
        rewards = flat(node.rewards)
        pairs[f"turn_{node.turn + 1}/{name}"] = (total + sum(rewards), count + len(rewards))
    return pairs


def reward_correlation(nodes: Sequence[Node], learned: Sequence[Sequence[float]]) -> Pairs:
    """How learned rewards go with the present ones among the joint responses of a node, by turn.

    Pearson's r of both less their means over the node, as `turn_k/task_reward_correlation`: 1 where the learned reward
    prefers as the task does, 0 where it tells nothing. A turn on which one of them is constant in every node has none.
    """
    moments: dict[int, tuple[float, float, float]] = {}
    for node, own in zip(nodes, learned, strict=True):
        sides = [_centred(side) for side in (flat(node.rewards), own)]
        products = [math.fsum(map(operator.mul, sides[i], sides[j])) for i, j in ((0, 0), (0, 1), (1, 1))]
        before = moments.get(node.turn, (0.0, 0.0, 0.0))
        moments[node.turn] = tuple(map(sum, zip(before, products, strict=True)))
    return {
        f"turn_{turn + 1}/task_reward_correlation": (both / (math.sqrt(task) * math.sqrt(learned)), 1)
        for turn, (task, both, learned) in moments.items()
        if task > 0 < learned
    }


def _centred(values: Sequence[float]) -> list[float]:
    """Less their mean; zeros, not what rounding leaves, where all are equal."""
    mean = values[0] if min(values) == max(values) else statistics.fmean(values)
    return [value - mean for value in values]


def advantage_metrics(
    samples: Sequence[Sequence[Sample]], zero_std: Sequence[Sequence[bool]], args: TrainerConfig
) -> Pairs:
    """Size of the advantages, share of nodes without signal, and the reference KL, by turn and agent."""
    pairs: Pairs = {}

    def add(name: str, value: float, count: float = 1.0) -> None:
        total, number = pairs.get(name, (0.0, 0.0))
        pairs[name] = (total + value, number + count)

    for agent, own in enumerate(samples):
        for sample in own:
            name = f"turn_{sample.node.turn + 1}/agent_{agent}"
            add(f"{name}/advantage_abs_mean", abs(sample.advantage))
            if sample.kl is not None:
                add(f"{name}/reference_kl_mean", sample.kl)
                add(f"{name}/reference_kl_penalty_mean", args.reference_kl_coef * sample.kl)
        firsts = [sample for sample in own if sample.generation == 0]
        for sample, zero in zip(firsts, zero_std[agent], strict=True):
            add(f"turn_{sample.node.turn + 1}/zero_std_fraction", float(zero))
    return pairs


def mean_return(trees: Sequence[RolloutTree], discount: float) -> float:
    """Mean return from the first turn on, of one turn the mean reward: the number that a step's line shows."""
    return statistics.fmean(r for tree in trees for r in flat(tree.root.returns(discount)))


def flat(values: Sequence) -> list[float]:
    """Rewards as numbers; those of several agents by their mean."""
    return [sum(v) / len(v) if isinstance(v, list) else float(v) for v in values]
