"""Evaluation of a team: independent episodes of each item, and what they amount to."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

from mlrl.config import EvaluationConfig, TrainingConfig
from mlrl.errors import ConfigError
from mlrl.eval_hooks import RolloutSample
from mlrl.rollout.collect import Collector, Growth
from mlrl.rollout.sampler import SamplingParams
from mlrl.rollout.tree import Node, RolloutTree
from mlrl.task import Environment
from mlrl.trainers.intervals import jackknife_intervals
from mlrl.trainers.metrics import flat


def evaluation_growth(args: TrainingConfig | EvaluationConfig, prompt_limits: tuple[int | None, ...]) -> Growth:
    """How evaluation plays: independent episodes, on random streams of their own that hold no step."""
    temperature = args.temperature if args.eval_temperature is None else args.eval_temperature
    return Growth(
        generations=(args.eval_num_generations,) + (1,) * (args.num_turns - 1),
        sampling=SamplingParams(temperature, args.top_p, args.top_k, args.max_new_tokens),
        seed=args.seed,
        threshold=args.early_termination_threshold,
        scope="joint",
        stream="eval",
        discount=args.discount,
        max_prompt_tokens=args.max_prompt_tokens,
        prompt_limits=prompt_limits,
    )


def evaluate(
    collector: Collector, items: Sequence[tuple[int, dict]], growth: Growth, batch_size: int | None = None
) -> tuple[dict[str, float], list[RolloutTree]]:
    """Plays `growth.generations[0]` episodes of every item.

    Returns:
        Metrics named `eval/…`, and the trees. Means are over all episodes that reached a turn; standard errors over
        items (episodes of one item are not independent of its prompt); best@n is the mean over items of the best of n.

    Raises:
        ConfigError: there are no items.
    """
    metrics, _, trees = evaluate_with_intervals(collector, items, growth, batch_size, confidence=None)
    return metrics, trees


def evaluate_with_intervals(
    collector: Collector,
    items: Sequence[tuple[int, dict]],
    growth: Growth,
    batch_size: int | None = None,
    confidence: float | None = 0.95,
    drafts: int = 0,
) -> tuple[dict[str, float], dict[str, tuple[float, float]], list[RolloutTree]]:
    """As `evaluate`, with confidence intervals over items (see `jackknife_intervals`) between metrics and trees.

    The answers of the first `drafts` turns are no results: see `reward_metrics`.
    """
    if not items:
        raise ConfigError("eval_dataset: it has no rows. Give one with at least one row, or none")
    size = batch_size or len(items)
    trees = [
        tree for start in range(0, len(items), size) for tree in collector.collect(items[start : start + size], growth)
    ]
    has_raw = collector.environment.task.reward_processor is not None
    metrics = reward_metrics(trees, growth, has_raw, drafts)
    counted = collector.environment.response_metrics(trees)
    metrics |= {f"eval/{name}": total / count for name, (total, count) in counted.items()}
    own, intervals = collector.world.from_first(lambda: _task_metrics(collector, trees, growth, confidence, drafts))
    metrics.update({f"eval/{k}": v for k, v in own.items()})
    return metrics, intervals, trees


def by_item(trees: Sequence[RolloutTree]) -> list[list[RolloutTree]]:
    """The trees of each item: one, or one an episode."""
    groups: dict[int, list[RolloutTree]] = {}
    for tree in trees:
        groups.setdefault(tree.ordinal, []).append(tree)
    return list(groups.values())


def reward_metrics(trees: Sequence[RolloutTree], growth: Growth, has_raw: bool, drafts: int = 0) -> dict[str, float]:
    """Reward and return of every turn over the episodes of an evaluation; raw rewards where a processor is set.

    Answers of the first `drafts` turns, which every episode goes past, earn no return: an episode's is that of its turn
    `drafts` + 1, undiscounted.
    """
    items, metrics = by_item(trees), {}
    for turn in range(len(growth.generations)):
        nodes = [[n for tree in own for n in tree.nodes() if n.turn == turn] for own in items]
        rewards = [[r for n in own for r in n.rewards] for own in nodes]
        returns = _returns(items, max(turn, drafts), growth.discount)
        reached = [flat(own) for own in rewards if own]
        name = f"eval/turn_{turn + 1}"
        if reached:
            metrics[f"{name}/reward_mean"] = _mean([r for own in reached for r in own])
            metrics[f"{name}/reward_stderr"] = _standard_error([_mean(own) for own in reached])
            metrics[f"{name}/expected_return"] = _mean([r for own in returns for r in own])
            if has_raw:
                metrics[f"{name}/raw_reward_mean"] = _mean(
                    [r for own in nodes for n in own for r in flat(n.raw_rewards)]
                )
        if turn > 0:
            metrics[f"{name}/reached_fraction"] = sum(map(len, rewards)) / (len(items) * growth.generations[0])
    every = [node for tree in trees for node in tree.nodes()]
    if any(node.reward_failed for node in every):
        metrics["eval/reward_failure_fraction"] = sum(node.reward_failed for node in every) / len(every)
    if growth.generations[0] > 1:
        best = [max(own) for own in _returns(items, drafts, growth.discount)]
        metrics[f"eval/return_best@{growth.generations[0]}"] = _mean(best)
    return metrics


def _returns(items: Sequence[Sequence[RolloutTree]], turn: int, discount: float) -> list[list[float]]:
    """Returns from a turn on of the episodes of each item that reached it."""
    return [
        [r for tree in own for node in tree.nodes() if node.turn == turn for r in flat(node.returns(discount))]
        for own in items
    ]


def episodes(tree: RolloutTree) -> list[list[tuple[Node, int]]]:
    """Every path of a tree from root to leaf, as (node, joint) turn by turn."""
    paths = []
    stack = [(tree.root, [])]
    while stack:
        node, before = stack.pop()
        for joint in range(len(node.rewards)):
            path = [*before, (node, joint)]
            if joint in node.children:
                stack.append((node.children[joint], path))
            else:
                paths.append(path)
    return sorted(paths, key=lambda path: [joint for _, joint in path])


def _task_metrics(
    collector: Collector, trees: Sequence[RolloutTree], growth: Growth, confidence: float | None, drafts: int
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """What the task's own evaluation functions make of the episodes, and intervals of these and of the rewards."""
    environment, num_agents = collector.environment, len(collector.team.agents)
    played = [(tree, path) for tree in trees for path in episodes(tree)]
    completions = [
        [[node.responses[agent][node.joints[joint][agent]].text for node, joint in path] for _, path in played]
        for agent in range(num_agents)
    ]
    rows = environment.eval_rows(agent_completions_turns=completions, items=[tree.item for tree, _ in played])
    metrics = environment.aggregate(rows)
    samples = [
        RolloutSample(
            agent_idx=agent,
            turn_idx=node.turn,
            prompt=node.prompts[agent].content,
            completion=node.responses[agent][node.joints[joint][agent]].text,
            reward=flat([node.rewards[joint]])[0],
            metadata={"item": tree.item, "path": list(node.path), "joint": joint},
        )
        for tree, path in played
        for node, joint in path
        for agent in range(num_agents)
    ]
    intervals = {}
    if confidence is not None:
        ordinals = [tree.ordinal for tree, _ in played]
        intervals = _intervals(environment, trees, ordinals, rows, growth, confidence, drafts)
    return metrics | environment.callback_metrics(samples), intervals


def _intervals(
    environment: Environment,
    trees: Sequence[RolloutTree],
    ordinals: Sequence[int],
    rows: Sequence[dict],
    growth: Growth,
    confidence: float,
    drafts: int,
) -> dict[str, tuple[float, float]]:
    """Intervals of the rewards' metrics and of what the task makes of its rows, each of the item `ordinals` says."""
    items, has_raw = by_item(trees), environment.task.reward_processor is not None
    rows_of: dict[int, list[dict]] = {}
    for ordinal, row in zip(ordinals, rows, strict=False):  # no rows without a logger
        rows_of.setdefault(ordinal, []).append(row)

    def of_rewards(numbers: Sequence[int]) -> dict[str, float]:
        return reward_metrics([tree for number in numbers for tree in items[number]], growth, has_raw, drafts)

    def of_task(numbers: Sequence[int]) -> dict[str, float]:
        own = [row for number in numbers for row in rows_of.get(items[number][0].ordinal, [])]
        return {f"eval/{name}": value for name, value in environment.aggregate(own).items()}

    intervals = jackknife_intervals(of_rewards, len(items), confidence)
    with contextlib.suppress(Exception):  # an aggregator need not bear that items are missing: then it has no intervals
        intervals |= jackknife_intervals(of_task, len(items), confidence)
    return {name: interval for name, interval in intervals.items() if not name.endswith("_stderr")}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _standard_error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    mean = _mean(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
