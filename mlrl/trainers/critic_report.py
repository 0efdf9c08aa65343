"""What critics say of a rollout batch: computed by the ranks that hold them, known to all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlrl.config import TrainerConfig
from mlrl.critic_inputs import action_inputs, counterfactual_inputs, state_inputs
from mlrl.critic_samples import CriticEstimate, from_values, task_advantages
from mlrl.critics import Critic
from mlrl.estimators.td import WeightedStatistics, actor_advantages, counterfactual_advantages
from mlrl.losses.value import ExplainedVariance
from mlrl.parallel.group import Group
from mlrl.rollout.tree import RolloutTree
from mlrl.trainers.estimate import kl_to_go_of_agent
from mlrl.trainers.samples import Sample


@dataclass
class CriticReport:
    """What every rank learns of one critic.

    Attributes:
        targets_MJ: Y. task_MK: by agent that it serves, the advantages before normalization.
        explained_variance: by turn. metrics: by name, as (sum, count).
    """

    targets_MJ: Tensor
    task_MK: dict[int, Tensor]
    explained_variance: dict[int, ExplainedVariance]
    metrics: dict[str, tuple[float, float]]


def estimate_over(critic: Critic, trees: Sequence[RolloutTree], group: Group, args: TrainerConfig) -> CriticEstimate:
    """`critic_samples.estimate_critic` with the inputs spread over the ranks that hold the critic."""
    inputs = state_inputs(critic.reader, trees) if critic.critic_type == "v" else action_inputs(critic.reader, trees)
    values = critic.values(inputs, args.micro_batch_tokens, group)
    return from_values(
        critic,
        trees,
        inputs,
        values,
        discount=args.discount,
        gae_lambda=args.gae_lambda,
        num_turns=args.num_turns,
    )


def report_over(
    critic: Critic,
    estimate: CriticEstimate,
    trees: Sequence[RolloutTree],
    group: Group,
    args: TrainerConfig,
    counterfactual: bool,
) -> CriticReport:
    """What other ranks need of an estimate. `counterfactual`: the baseline of aligned joints and a centralized Q."""
    num_agents = len(trees[0].root.responses)
    task = {}
    for agent in range(num_agents) if critic.reader.agent is None else [critic.reader.agent]:
        if counterfactual:
            inputs = counterfactual_inputs(critic.reader, trees, agent)
            num_generations = len(trees[0].root.responses[0])
            values = critic.values(inputs, args.micro_batch_tokens, group)
            task[agent] = counterfactual_advantages(values.reshape(-1, num_generations, num_generations))
        else:
            task[agent] = task_advantages(critic, estimate, trees, agent)
    cut, inputs_made = critic.reader.take_counts()
    metrics = {f"critic/critic_{critic.index}/truncated_input_fraction": (float(cut), float(inputs_made))}
    turns_M = torch.tensor([node.turn for tree in trees for node in tree.nodes()])
    for turn in estimate.explained_variance:
        values_RA = estimate.values_MA[turns_M == turn]
        metrics[f"critic/turn_{turn + 1}/critic_{critic.index}/value_mean"] = (
            float(values_RA.sum()),
            float(values_RA.numel()),
        )
    return CriticReport(estimate.targets_MJ, task, estimate.explained_variance, metrics)


def set_advantages(
    trees: Sequence[RolloutTree],
    samples: Sequence[Sequence[Sample]],
    reports: Sequence[CriticReport],
    args: TrainerConfig,
) -> list[list[bool]]:
    """Sets the advantage of every sample, and `Node.advantages`, from one report a critic.

    Returns:
        For each agent and node: whether the advantages of the whole batch were noise, so that there is no signal.
    """
    nodes = [node for tree in trees for node in tree.nodes()]
    for node in nodes:
        node.advantages = []
    noise = []
    for agent, own in enumerate(samples):
        [report] = [report for report in reports if agent in report.task_MK]
        task_MK = report.task_MK[agent]
        weights_MK = torch.tensor([sample.weight for sample in own], dtype=torch.float64).reshape(task_MK.shape)
        normalized = args.advantage_normalization == "batch"
        statistics = WeightedStatistics.of(task_MK, weights_MK, report.targets_MJ) if normalized else None
        kl_coef = args.reference_kl_coef
        values_MK = actor_advantages(
            task_MK,
            statistics=statistics,
            kl_to_go_MK=kl_to_go_of_agent(trees, nodes, own, agent, args.discount) if kl_coef else None,
            turns_M=[node.turn for node in nodes],
            kl_coef=kl_coef,
        )
        for sample, value in zip(own, values_MK.flatten().tolist(), strict=True):  # both in node order
            sample.advantage = value
        for node, row in zip(nodes, values_MK.tolist(), strict=True):
            node.advantages.append(row)
        noise.append([statistics is not None and statistics.is_noise] * len(nodes))
    return noise
