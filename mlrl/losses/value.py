"""Value loss of a critic, and how much of the returns' variance its values explain.

    L = Σ_s w_s · ℓ_s

| value_clip_range | ℓ_s                                                                                     |
|------------------|-----------------------------------------------------------------------------------------|
| None             | (V_s − Y_s)²                                                                            |
| ε                | max((V_s − Y_s)², (V_old,s + clip(V_s − V_old,s, −ε, ε) − Y_s)²)    (PPO, 1707.06347)   |

Everything is a plain sum over the targets given, so that micro-batches add up. Targets and old values are fixed before
the update. Legend: S targets; a value that is compared with several targets is given once for each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ValueLossSettings:
    """What is fixed for a rollout batch.

    Attributes:
        value_clip_range: ε in units of the reward; None: plain squared error.
    """

    value_clip_range: float | None = None

    def __post_init__(self) -> None:
        if self.value_clip_range is not None and not self.value_clip_range > 0:
            raise ValueError(f"value_clip_range={self.value_clip_range!r}: Give a number above 0, or None for off.")


@dataclass(frozen=True)
class ValueLossInputs:
    """Values and what they should have been.

    Attributes:
        values_S: V, with gradient.
        targets_S, weights_S: Y and w; a minibatch of n of M samples has w already multiplied by M/n.
        old_values_S: V at the weights before the update; None where these still are the current ones.
    """

    values_S: Tensor
    targets_S: Tensor
    weights_S: Tensor
    old_values_S: Tensor | None = None


@dataclass(frozen=True)
class ValueLossOutputs:
    """The loss to differentiate, and detached numbers whose sums over targets give the metrics.

    Attributes:
        loss: scalar. loss_S: each target's share of it.
        clipped_S: 1 where clipping took the gradient away; None without clipping.
    """

    loss: Tensor
    loss_S: Tensor
    clipped_S: Tensor | None


def value_loss(inputs: ValueLossInputs, settings: ValueLossSettings) -> ValueLossOutputs:
    """The loss of the module's table over the given targets."""
    shapes = {name: tuple(getattr(inputs, name).shape) for name in ("values_S", "targets_S", "weights_S")}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"shapes {shapes}: there is one value, target and weight a comparison. Give equal shapes.")
    # targets are constants of the update, however they were computed
    targets_S = inputs.targets_S.detach()
    error_S = (inputs.values_S - targets_S).square()
    clipped_S = None
    if settings.value_clip_range is not None:
        old_S = (inputs.values_S if inputs.old_values_S is None else inputs.old_values_S).detach()
        change_S = (inputs.values_S - old_S).clamp(-settings.value_clip_range, settings.value_clip_range)
        bounded_S = (old_S + change_S - targets_S).square()
        outside_S = (inputs.values_S - old_S).abs() > settings.value_clip_range
        # rounding of old + change must not choose between two equal errors, which halves the gradient in torch.max
        worse_S = outside_S & (bounded_S > error_S)
        error_S = torch.where(worse_S, bounded_S, error_S)
        clipped_S = worse_S.to(error_S.dtype).detach()
    loss_S = inputs.weights_S * error_S
    return ValueLossOutputs(loss_S.sum(), loss_S.detach(), clipped_S)


@dataclass(frozen=True)
class ExplainedVariance:
    """Sums for 1 − Var(R̄ − V_old) / Var(R̄) over the nodes of a turn; `+` joins those of steps and of ranks.

    R̄ is a node's mean tree return. The TD target would refer to the values themselves.
    """

    count: float = 0.0
    returns: float = 0.0
    returns_squared: float = 0.0
    errors: float = 0.0
    errors_squared: float = 0.0

    @classmethod
    def of(cls, returns_M, values_M) -> ExplainedVariance:
        """From the mean return and the value (of action values: their mean) of each node."""
        returns_M = torch.as_tensor(returns_M, dtype=torch.float64).detach()
        errors_M = returns_M - torch.as_tensor(values_M, dtype=torch.float64).detach()
        sums = (returns_M.sum(), returns_M.square().sum(), errors_M.sum(), errors_M.square().sum())
        return cls(float(len(returns_M)), *map(float, sums))

    def __add__(self, other: ExplainedVariance) -> ExplainedVariance:
        return ExplainedVariance(*(a + b for a, b in zip(self.sums(), other.sums(), strict=True)))

    def sums(self) -> tuple[float, ...]:
        """The fields in order: what ranks add up."""
        return (self.count, self.returns, self.returns_squared, self.errors, self.errors_squared)

    @property
    def value(self) -> float | None:
        """1: exact up to a constant; 0: no better than a constant; None where the returns do not vary."""
        variance = _variance(self.count, self.returns, self.returns_squared)
        # float64 sums of squares cannot tell less than this from nothing
        if variance <= 1e-12 * max(1.0, self.returns_squared / max(self.count, 1.0)):
            return None
        return 1.0 - _variance(self.count, self.errors, self.errors_squared) / variance


def _variance(count: float, total: float, squares: float) -> float:
    return max(squares / count - (total / count) ** 2, 0.0) if count else 0.0
