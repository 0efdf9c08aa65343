"""The optimization of critics: of a backbone and its value head, or of an actor and the head on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from mlrl.critics import Critic
from mlrl.models.base import Policy
from mlrl.parallel.engine import Engine, OptimizerSettings
from mlrl.parallel.group import Group
from mlrl.parallel.headed import HeadedEngine
from mlrl.parallel.zero import ZeroEngine
from mlrl.trainers.setup import policy_engine

AnyEngine = Engine | ZeroEngine | HeadedEngine


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
