"""Sequences drawn by one system and learned from in another: how far the two policies are apart, token by token.

A sampling engine and a trainer round differently, and an engine may hold slightly older weights. With μ the policy that
drew and π the trainer's at its present weights, r_t = π(a_t|h_t) / μ(a_t|h_t):

    weight         min(r_t, cap), a fixed factor of the token's loss: truncated importance sampling. Full importance
                   sampling would multiply the ratios of all tokens before t too; those are left out for their variance
    mismatch KL    r_t − 1 − log r_t: never negative, and under μ its mean is KL(μ ‖ π) of the next token
                   (the k3 estimate, http://joschu.net/blog/kl-approx.html)

Legend: T tokens of all sequences one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# beyond e^20 a ratio says no more, and would overflow in float32
_MAX_LOG_RATIO = 20.0


def mismatch(sampler_logprobs_T: Tensor, trainer_logprobs_T: Tensor) -> tuple[Tensor, Tensor]:
    """Ratios r (T,) and mismatch KL (T,) in nats, from two log-probabilities of each token at the sampling temperature.

    Both come in float64 and without gradient.
    """
    if sampler_logprobs_T.shape != trainer_logprobs_T.shape:
        raise ValueError(
            f"{len(sampler_logprobs_T)} log-probabilities of the sampler for {len(trainer_logprobs_T)} of the trainer."
        )
    log_ratio_T = trainer_logprobs_T.detach().to(torch.float64) - sampler_logprobs_T.detach().to(torch.float64)
    log_ratio_T = log_ratio_T.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio_T = log_ratio_T.exp()
    return ratio_T, ratio_T - 1 - log_ratio_T


def mean_without_worst(kl_T: Tensor, lengths: Sequence[int]) -> float:
    """Mean mismatch KL a token without the sequence of the largest sum, where there are several.

    r − 1 − log r grows with r itself, so one freak token can carry the mean of thousands; weights that are not the
    right ones show in all sequences.
    """
    sums, counts = [float(own.sum()) for own in kl_T.split(list(lengths))], list(lengths)
    if len(sums) > 1:
        worst = max(range(len(sums)), key=sums.__getitem__)
        del sums[worst], counts[worst]
    return sum(sums) / sum(counts)


def truncated_weights(ratio_T: Tensor, cap: float) -> Tensor:
    """min(r, cap) in float32: the weight of each token in the loss."""
    return ratio_T.clamp(max=cap).to(torch.float32)
