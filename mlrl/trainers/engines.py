"""What optimizes the weights of agents and critics: plainly or by ZeRO, over the ranks that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from mlrl.agents import Agent
from mlrl.config import TrainingConfig
from mlrl.critics import Critic
from mlrl.models.base import Policy
from mlrl.parallel.engine import Engine, OptimizerSettings
from mlrl.parallel.group import Group
from mlrl.parallel.headed import HeadedEngine
from mlrl.parallel.zero import ZeroEngine, fetch_with

AnyEngine = Engine | ZeroEngine | HeadedEngine


def optimizer_settings(args: TrainingConfig, learning_rate: float, total_updates: int) -> OptimizerSettings:
    """The settings of a run's optimizers.

    Args:
        total_updates: how many a learning-rate schedule is laid over; 0 where that is not known.
    """
    return OptimizerSettings(
        learning_rate=learning_rate,
        weight_decay=args.weight_decay,
        betas=(args.adam_beta1, args.adam_beta2),
        max_grad_norm=args.max_grad_norm,
        scheduler=args.lr_scheduler,
        warmup_steps=args.warmup_steps,
        total_updates=total_updates,
    )


def make_engine(
    agents: Sequence[Agent], group: Group, settings: OptimizerSettings, zero: dict[str, Any] | None
) -> Engine | ZeroEngine:
    """The optimization of the weights that these agents train.

    Args:
        agents: those that train the same weights.
        group: the ranks that hold them.
        zero: ZeRO settings; at stage 3 adapters stay whole beside their sharded base.
    """
    return policy_engine(agents[0].policy, agents[0].parameters, group, settings, zero)


def policy_engine(
    policy: Policy,
    parameters: Sequence[nn.Parameter],
    group: Group,
    settings: OptimizerSettings,
    zero: dict[str, Any] | None,
) -> Engine | ZeroEngine:
    """The same of the weights of one policy, an adapter's or a whole network's."""
    if zero is None or (zero["stage"] == 3 and policy.adapter is not None):
        return Engine(parameters, settings, group)
    if policy.adapter is not None:
        return ZeroEngine(parameters, settings, zero, group)
    engine = ZeroEngine(parameters, settings, zero, group, policy.base.scorer)
    policy.base.score, policy.base.shard = engine.forward, engine.shard
    if engine.shard is not None:
        fetch_with(policy.base.scorer, policy.base.scorer.head_weight)
    return engine


def critic_engine(
    critic: Critic, group: Group, settings: OptimizerSettings, zero: dict[str, Any] | None
) -> Engine | HeadedEngine:
    """Of a critic with weights of its own, over the ranks that hold it; see `make_engine` for ZeRO."""
    return headed_engine(critic.policy, critic.backbone, list(critic.head.parameters()), group, settings, zero)


def headed_engine(
    policy: Policy,
    parameters: Sequence[nn.Parameter],
    heads: Sequence[nn.Parameter],
    group: Group,
    settings: OptimizerSettings,
    zero: dict[str, Any] | None,
) -> Engine | HeadedEngine:
    """Of the weights of a policy and of value heads on it, which follow one loss and are clipped together."""
    if zero is None or (zero["stage"] == 3 and policy.adapter is not None):
        return Engine([*parameters, *heads], settings, group)
    return HeadedEngine(policy_engine(policy, parameters, group, settings, zero), heads)
