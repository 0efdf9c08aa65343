"""From rollout trees and values to what a critic learns from, and its loss on a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlrl.critic_inputs import (
    CriticBatch,
    CriticInput,
    action_inputs,
    counterfactual_inputs,
    state_inputs,
)
from mlrl.critics import Critic
from mlrl.estimators.returns import credit
from mlrl.estimators.td import child_indices, counterfactual_advantages, leave_one_out, q_targets, v_targets
from mlrl.estimators.weights import value_weight
from mlrl.losses.value import ExplainedVariance, ValueLossInputs, ValueLossOutputs, ValueLossSettings, value_loss
from mlrl.rollout.tree import Node, RolloutTree, own_reward


@dataclass
class ValueSample:
    """One input of a critic and what its value should be.

    Attributes:
        targets: Y of the joints that the value speaks of: all J of a node for V, one for Q.
        weight: of each target in the loss. old_value: at the weights before the update.
    """

    node: Node
    input: CriticInput
    targets: list[float]
    weight: float
    old_value: float


@dataclass
class CriticEstimate:
    """What one critic says of a batch of trees. Nodes are in tree order; A counts its inputs a node.

    Attributes:
        values_MA: before the update; A = 1 for V, J joints or K responses of one agent for Q.
        targets_MJ: Y. samples: one an input, node after node.
        explained_variance: by turn.
    """

    values_MA: Tensor
    targets_MJ: Tensor
    samples: list[ValueSample]
    explained_variance: dict[int, ExplainedVariance]


def estimate_critic(
    critic: Critic,
    trees: Sequence[RolloutTree],
    *,
    discount: float,
    gae_lambda: float,
    num_turns: int,
    max_tokens: int,
) -> CriticEstimate:
    """Values of all nodes in shared forwards, TD targets, and the samples of the critic's update."""
    inputs = state_inputs(critic.reader, trees) if critic.critic_type == "v" else action_inputs(critic.reader, trees)
    values = critic.values(inputs, max_tokens)
    return from_values(critic, trees, inputs, values, discount=discount, gae_lambda=gae_lambda, num_turns=num_turns)


def from_values(
    critic: Critic,
    trees: Sequence[RolloutTree],
    inputs: Sequence[CriticInput],
    values: Tensor,
    *,
    discount: float,
    gae_lambda: float,
    num_turns: int,
) -> CriticEstimate:
    """The same from values that are there already, in the order of the inputs."""
    agent = critic.reader.agent
    places = [(number, node.path) for number, tree in enumerate(trees) for node in tree.nodes()]
    nodes = [node for tree in trees for node in tree.nodes()]
    joints, num_generations = nodes[0].joints, len(nodes[0].responses[0])
    children_MJ = child_indices(places, len(joints))
    rewards_MJ = agent_rewards(nodes, agent)
    values_MA = values.reshape(len(nodes), -1)
    if critic.critic_type == "v":
        targets_MJ = v_targets(rewards_MJ, values_MA[:, 0], children_MJ, discount, gae_lambda)
        wanted_MAT = targets_MJ[:, None]
    else:
        targets_MJ = q_targets(rewards_MJ, values_MA, children_MJ, discount, gae_lambda)
        wanted_MA = targets_MJ if agent is None else credit(targets_MJ, joints, num_generations)[agent]
        wanted_MAT = wanted_MA[:, :, None]
    samples = []
    given = iter(inputs)
    for node, old_A, wanted_AT in zip(nodes, values_MA.tolist(), wanted_MAT.tolist(), strict=True):
        weight = value_weight(
            node.turn,
            num_items=len(trees),
            num_joints=len(joints),
            num_targets=len(wanted_AT) * len(wanted_AT[0]),
            num_turns=num_turns,
        )
        for old, targets in zip(old_A, wanted_AT, strict=True):
            samples.append(ValueSample(node, next(given), targets, weight, old))
    # λ = 1 makes the Monte-Carlo returns of the tree, whatever the values
    returns_M = v_targets(rewards_MJ, torch.zeros(len(nodes)), children_MJ, discount, 1.0).mean(1)
    explained: dict[int, ExplainedVariance] = {}
    for turn in sorted({node.turn for node in nodes}):
        rows = torch.tensor([node.turn == turn for node in nodes])
        explained[turn] = ExplainedVariance.of(returns_M[rows], values_MA.mean(1)[rows])
    return CriticEstimate(values_MA, targets_MJ, samples, explained)


def mean_return(trees: Sequence[RolloutTree], agent: int | None, discount: float) -> float:
    """Mean over turns of the mean return of their nodes: where the values of a critic begin.

    From 0 they would take many updates to come to the size of returns, and all that time advantages, which are not
    centred, would say little but that."""
    turns: dict[int, list[float]] = {}
    for node in (node for tree in trees for node in tree.nodes()):
        returns = [own_reward(r, agent) for r in node.returns(discount)]
        turns.setdefault(node.turn, []).append(math.fsum(returns) / len(returns))
    return math.fsum(math.fsum(means) / len(means) for means in turns.values()) / len(turns)


def task_advantages(critic: Critic, estimate: CriticEstimate, trees: Sequence[RolloutTree], agent: int) -> Tensor:
    """The task part of an agent's advantages, [M, K], before normalization.

    V: the credited mean of Y − V(h). Q: the credited mean of Q minus that of the agent's other responses.
    """
    joints, num_generations = trees[0].root.joints, len(trees[0].root.responses[0])
    if critic.critic_type == "v":
        return credit(estimate.targets_MJ - estimate.values_MA, joints, num_generations)[agent]
    if critic.reader.agent is not None:
        return leave_one_out(estimate.values_MA)
    return leave_one_out(credit(estimate.values_MA, joints, num_generations)[agent])


def counterfactual_task_advantages(critic: Critic, trees: Sequence[RolloutTree], agent: int, max_tokens: int) -> Tensor:
    """The same for a centralized Q critic on aligned joints, against the agent's own other responses with the partners'
    same ones: K² further values a node, without gradient."""
    num_generations = len(trees[0].root.responses[0])
    values = critic.values(counterfactual_inputs(critic.reader, trees, agent), max_tokens)
    return counterfactual_advantages(values.reshape(-1, num_generations, num_generations))


def agent_rewards(nodes: Sequence[Node], agent: int | None) -> Tensor:
    """Rewards [M, J] of one agent; of all (None) their mean, where each has its own."""
    return torch.tensor([[own_reward(r, agent) for r in node.rewards] for node in nodes], dtype=torch.float64)


def critic_loss(
    critic: Critic,
    batch: CriticBatch,
    samples: Sequence[ValueSample],
    settings: ValueLossSettings,
    scale: float = 1.0,
    head_only: bool = False,
) -> ValueLossOutputs:
    """Value loss of a micro-batch, one forward. Call inside `critic.policy.use()`, with the backward.

    Args:
        scale: M/n for a minibatch of n of the M samples of a rollout batch.
        head_only: the head alone gets gradients.
    """
    values = critic.forward(batch.tree, head_only)
    counts = torch.tensor([len(sample.targets) for sample in samples], device=values.device)

    def tensor(numbers: list[float]) -> Tensor:
        return torch.tensor(numbers, dtype=values.dtype, device=values.device)

    inputs = ValueLossInputs(
        values_S=values.repeat_interleave(counts),
        targets_S=tensor([target for sample in samples for target in sample.targets]),
        weights_S=tensor([sample.weight * scale for sample in samples]).repeat_interleave(counts),
        old_values_S=tensor([sample.old_value for sample in samples]).repeat_interleave(counts),
    )
    return value_loss(inputs, settings)
