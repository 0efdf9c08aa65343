"""Policy-gradient loss over ragged completions: REINFORCE, or the clipped surrogate of PPO (1707.06347).

    L = − Σ_s w_s · c_s · ℓ_s

| clip_range | importance_level | ℓ_s                                                                            |
|------------|------------------|--------------------------------------------------------------------------------|
| None       |                  | A_s · Σ_t log π_t                                                              |
| ε          | token            | Σ_t min(ρ_t A_s, clip(ρ_t, 1−ε, 1+ε_high) A_s),    ρ_t = π_t / π_old,t         |
| ε          | sequence         | L_s · min(r_s A_s, clip(r_s, 1−ε, 1+ε_high) A_s),  r_s = exp(mean_t log ρ_t)   |

The sequence ratio is the one of GSPO (2507.18071). The factor L_s, the length, gives it at the old weights the gradient
of REINFORCE, which the token form has anyway. `dual_clip` c > 1 bounds each min from below by c·A_s where A_s < 0
(1912.09729). An entropy bonus adds −w_s · c_s · `entropy_coef` · Σ_t H_t to L.

| loss_aggregation | c_s                                                                            |
|------------------|--------------------------------------------------------------------------------|
| sequence_sum     | 1: the policy gradient                                                         |
| token_mean       | 1 / mean length of the whole rollout batch: same direction                     |
| constant         | 1 / max_new_tokens: same direction (Dr. GRPO, 2503.20783)                      |
| sequence_mean    | 1 / L_s: optimises reward a token                                              |

Where sequences were drawn by another system than the one that scores them, token t has a fixed weight ω_t
(`token_weights_T`): A_s·Σ_t ω_t log π_t, or Σ_t ω_t·min(…). For that the sequence form is written as a sum too, of
min(r_t A_s, clip(r_t, 1−ε, 1+ε_high) A_s) with r_t = r_s · π_t / sg(π_t): it has the value of r_s, so that tokens are
clipped together, and the gradient of token t alone (GSPO-token of the same paper). Without weights value and gradient
are those of the table; with them each token's gradient is the one of the table times ω_t.

Everything is a plain sum over the sequences given, so that micro-batches add up. Weight 0 drops a sequence.
Legend: S sequences, T tokens of all sequences one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Beyond e^20 a ratio has no use, and an infinite one turns the zero gradient of a clipped branch into NaN.
MAX_LOG_RATIO = 20.0

AGGREGATIONS = ("sequence_sum", "token_mean", "constant", "sequence_mean")
IMPORTANCE_LEVELS = ("token", "sequence")


@dataclass(frozen=True)
class PolicyLossSettings:
    """What is fixed for a rollout batch.

    Attributes:
        mean_length: w-weighted mean length of the whole rollout batch, for `token_mean`.
        max_new_tokens: token budget of a response, for `constant`.
    """

    clip_range: float | None = None
    clip_range_high: float | None = None
    dual_clip: float | None = None
    importance_level: str = "token"
    loss_aggregation: str = "sequence_sum"
    entropy_coef: float = 0.0
    mean_length: float = 1.0
    max_new_tokens: int = 1

    def __post_init__(self) -> None:
        if self.loss_aggregation not in AGGREGATIONS:
            raise ValueError(
                f"loss_aggregation={self.loss_aggregation!r}: unknown word. Use one of {', '.join(AGGREGATIONS)}."
            )
        if self.importance_level not in IMPORTANCE_LEVELS:
            raise ValueError(
                f"importance_level={self.importance_level!r}: unknown word. Use one of {', '.join(IMPORTANCE_LEVELS)}."
            )


@dataclass(frozen=True)
class PolicyLossInputs:
    """Scored sequences.

    Attributes:
        logprobs_T: log π of every completion token at the sampling temperature, with gradient.
        lengths_S: tokens of each sequence, all ≥ 1.
        advantages_S, weights_S: A and w; a minibatch of n of M samples has w already multiplied by M/n.
        old_logprobs_T: at the weights that sampled; None where these still are the current ones (ratios are 1).
        entropy_T: full-vocabulary entropy of each token, with gradient if `entropy_coef` is used.
        token_weights_T: ω, of tokens that another system drew (`mlrl.estimators.mismatch`); None: all 1.
    """

    logprobs_T: Tensor
    lengths_S: Tensor
    advantages_S: Tensor
    weights_S: Tensor
    old_logprobs_T: Tensor | None = None
    entropy_T: Tensor | None = None
    token_weights_T: Tensor | None = None


@dataclass(frozen=True)
class PolicyLossOutputs:
    """The loss to differentiate, and detached per-sequence numbers whose sums over sequences give the metrics.

    Attributes:
        loss: scalar. loss_S: each sequence's share of it, entropy bonus excluded.
        entropy_S: summed token entropy, None if not given.
        kl_S: Σ_t (ρ_t − 1 − log ρ_t), the non-negative estimate of KL(π_old ‖ π); clipped_S: tokens whose gradient
            clipping took away (all or none of a sequence at sequence level); both None without clipping.
        ratio_max: largest importance ratio (of a token, or of a sequence at sequence level).
    """

    loss: Tensor
    loss_S: Tensor
    entropy_S: Tensor | None
    kl_S: Tensor | None
    clipped_S: Tensor | None
    ratio_max: float | None


def policy_loss(inputs: PolicyLossInputs, settings: PolicyLossSettings) -> PolicyLossOutputs:
    """The loss of the module's tables over the given sequences."""
    lengths_S = inputs.lengths_S
    if int(lengths_S.sum()) != len(inputs.logprobs_T) or bool((lengths_S < 1).any()):
        raise ValueError(
            f"lengths_S={lengths_S.tolist()}: {len(inputs.logprobs_T)} log-probabilities are given. "
            "Lengths must be 1 or more and sum to that."
        )
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths_S), device=lengths_S.device), lengths_S)

    def total(values_T: Tensor) -> Tensor:
        return values_T.new_zeros(len(lengths_S)).index_add(0, sequence_T, values_T)

    def weighted(values_T: Tensor) -> Tensor:
        return values_T if inputs.token_weights_T is None else inputs.token_weights_T.detach() * values_T

    kl_S = clipped_S = ratio_max = None
    if settings.clip_range is None:
        objective_S = inputs.advantages_S * total(weighted(inputs.logprobs_T))
    else:
        old_T = inputs.logprobs_T.detach() if inputs.old_logprobs_T is None else inputs.old_logprobs_T
        log_ratio_T = (inputs.logprobs_T - old_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        if settings.importance_level == "token":
            ratio_T = log_ratio_T.exp()
            objective_T, clipped_T = _clipped(ratio_T, inputs.advantages_S[sequence_T], settings)
            objective_S, clipped_S = total(weighted(objective_T)), total(clipped_T)
            ratio_max = float(ratio_T.detach().amax())
        else:
            ratio_S = (total(log_ratio_T.detach()) / lengths_S).exp()
            ratio_T = ratio_S[sequence_T] * (log_ratio_T - log_ratio_T.detach()).exp()
            objective_T, clipped_T = _clipped(ratio_T, inputs.advantages_S[sequence_T], settings)
            objective_S, clipped_S = total(weighted(objective_T)), total(clipped_T)
            ratio_max = float(ratio_S.amax())
        with torch.no_grad():
            kl_S = total(log_ratio_T.exp() - 1 - log_ratio_T)

    scale_S = inputs.weights_S / _divisor(lengths_S, settings)
    loss_S = -scale_S * objective_S
    loss = loss_S.sum()
    entropy_S = None if inputs.entropy_T is None else total(inputs.entropy_T)
    if settings.entropy_coef:
        if entropy_S is None:
            raise ValueError(f"entropy_T=None: entropy_coef={settings.entropy_coef!r} multiplies it. Give it.")
        if inputs.logprobs_T.requires_grad and not entropy_S.requires_grad:
            raise ValueError("entropy_T is detached: the entropy bonus would train nothing. Give it with gradient.")
        loss = loss - settings.entropy_coef * (scale_S * entropy_S).sum()
    detached = None if entropy_S is None else entropy_S.detach()
    return PolicyLossOutputs(loss, loss_S.detach(), detached, kl_S, clipped_S, ratio_max)


def _clipped(ratio: Tensor, advantages: Tensor, settings: PolicyLossSettings) -> tuple[Tensor, Tensor]:
    """The clipped surrogate, and 1 where it is constant in the policy."""
    low = 1.0 - settings.clip_range
    high = 1.0 + (settings.clip_range if settings.clip_range_high is None else settings.clip_range_high)
    plain, bounded = ratio * advantages, ratio.clamp(low, high) * advantages
    objective = torch.minimum(plain, bounded)
    constant = bounded < plain
    if settings.dual_clip is not None:
        floor = settings.dual_clip * advantages
        beyond = (advantages < 0) & (objective < floor)
        objective, constant = torch.where(beyond, floor, objective), constant | beyond
    return objective, constant.to(ratio.dtype)


def _divisor(lengths_S: Tensor, settings: PolicyLossSettings) -> Tensor | float:
    return {
        "sequence_sum": 1.0,
        "token_mean": settings.mean_length,
        "constant": float(settings.max_new_tokens),
        "sequence_mean": lengths_S,
    }[settings.loss_aggregation]
