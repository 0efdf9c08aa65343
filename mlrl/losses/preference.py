"""Losses on pairs of a preferred and a rejected joint response: MADPO's, and Bradley–Terry's for reward models.

For pair p, agent i and the N agents of a team, with log π summed over all tokens of all turns that the agent wrote
(the end tokens included),

    Δ_i = log π_i(winner | h_i) − log π_i(loser | h_i)  −  the same of the reference, where there is one
    m   = Σ_i Δ_i                                                                          the joint margin
    L_p = −(1−ε) log σ(β m) − ε log σ(−β m)                              β `dpo_beta`, ε `label_smoothing`

    L_p + α Σ_i NLL_i,  NLL_i = −log π_i(winner | h_i) a token                            α `rpo_alpha`, where it is set

which for N = 1 is DPO (2305.18290; ε as in conservative DPO), with α iterative RPO (2404.19733). Every agent has its
own weights, so agent i's loss takes the other agents' margins as constants. They are to be measured at the same
weights, before any agent steps: then the gradients of the N losses together are the gradient of L.

Without a reference the margin at the start is ruled by length: at β = 0.1 and one nat a token, winner and loser of
120 and 40 tokens have m = −80 and the gradient weight σ(8) = 0.9997, of 40 and 120 tokens σ(−8) = 0.0003.

Several turns: a sum over the turns of two trajectories of one task item is exact where the transition is
deterministic, since its probabilities then cancel from the likelihood ratio of whole trajectories.

The reward model's loss is Bradley–Terry's, −log σ(R(winner) − R(loser)).

Everything is a plain sum over the pairs given, times their weights, so that micro-batches add up.
Legend: P pairs, S sequences (a turn of one side of a pair), T tokens of all sequences one after the other, N agents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PreferenceLossSettings:
    """`dpo_beta` > 0 scales margins; `label_smoothing` in [0, 0.5) is the assumed rate of wrong preferences.

    `rpo_alpha` weighs the winners' negative log-likelihood a token.
    """

    dpo_beta: float = 0.1
    label_smoothing: float = 0.0
    rpo_alpha: float = 0.0

    def __post_init__(self) -> None:
        if not self.dpo_beta > 0:
            raise ValueError(f"dpo_beta={self.dpo_beta!r}: margins are multiplied by it. Use a number above 0.")
        if self.rpo_alpha < 0:
            raise ValueError(f"rpo_alpha={self.rpo_alpha!r}: winners would be unlearned. Use 0 or more.")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing={self.label_smoothing!r}: from 0.5 on losers would be preferred. Use 0 to below 0.5."
            )


@dataclass(frozen=True)
class PreferenceLossOutputs:
    """The loss to differentiate, and detached numbers of each pair.

    Attributes:
        loss: scalar. loss_P: each pair's loss before its weight. margin_P: m, without β.
        correct_P: 1 where the winner has the larger margin, 0 where not or where both are equal.
        gradient_weight_P: −∂L_p/∂(β m), from −ε to 1−ε: how strongly a pair still pulls.
    """

    loss: Tensor
    loss_P: Tensor
    margin_P: Tensor
    correct_P: Tensor
    gradient_weight_P: Tensor


def pair_margins(
    logprobs_T: Tensor,
    lengths_S: Tensor,
    pairs_S: Tensor,
    signs_S: Tensor,
    num_pairs: int,
    reference_logprobs_T: Tensor | None = None,
) -> Tensor:
    """Δ of one agent for each pair.

    Args:
        logprobs_T: log π of every token that the agent wrote.
        lengths_S: tokens of each sequence, all ≥ 1.
        pairs_S: which pair a sequence belongs to. signs_S: +1 for the winner's, −1 for the loser's.
        reference_logprobs_T: the same tokens under the reference.

    Returns:
        margins_P: in nats.
    """
    if int(lengths_S.sum()) != len(logprobs_T) or bool((lengths_S < 1).any()):
        raise ValueError(
            f"lengths_S={lengths_S.tolist()}: {len(logprobs_T)} log-probabilities are given. "
            "Lengths must be 1 or more and sum to that."
        )
    if not len(lengths_S) == len(pairs_S) == len(signs_S):
        raise ValueError(f"pairs_S and signs_S: {len(pairs_S)} and {len(signs_S)} for {len(lengths_S)} sequences.")
    if reference_logprobs_T is not None:
        logprobs_T = logprobs_T - reference_logprobs_T
    pair_T = torch.repeat_interleave(pairs_S, lengths_S)
    sign_T = torch.repeat_interleave(signs_S, lengths_S).to(logprobs_T.dtype)
    return logprobs_T.new_zeros(num_pairs).index_add(0, pair_T, sign_T * logprobs_T)


def winner_nll(logprobs_T: Tensor, lengths_S: Tensor, pairs_S: Tensor, signs_S: Tensor, num_pairs: int) -> Tensor:
    """−log π of each pair's winner, the mean over the tokens that the agent wrote in it, nll_P in nats.

    Args:
        logprobs_T, lengths_S, pairs_S, signs_S: see `pair_margins`.
    """
    pair_T = torch.repeat_interleave(pairs_S, lengths_S)
    wins_T = (torch.repeat_interleave(signs_S, lengths_S) > 0).to(logprobs_T.dtype)
    zeros_P = logprobs_T.new_zeros(num_pairs)
    return -zeros_P.index_add(0, pair_T, wins_T * logprobs_T) / zeros_P.index_add(0, pair_T, wins_T)


def preference_loss(
    own_margins_P: Tensor,
    weights_P: Tensor,
    settings: PreferenceLossSettings,
    other_margins_P: Tensor | None = None,
) -> PreferenceLossOutputs:
    """Σ_p weight_p · L_p, as a loss of the agent whose margins are given with gradient.

    Args:
        own_margins_P: Δ_i, with gradient.
        weights_P: 1/(number of pairs of the whole batch) for a mean over pairs.
        other_margins_P: Σ_{j≠i} Δ_j at the same weights; None for a single agent.
    """
    margin_P = own_margins_P if other_margins_P is None else own_margins_P + other_margins_P.detach()
    scaled_P = settings.dpo_beta * margin_P
    smoothing = settings.label_smoothing
    loss_P = -(1 - smoothing) * F.logsigmoid(scaled_P) - smoothing * F.logsigmoid(-scaled_P)
    margin_P = margin_P.detach()
    return PreferenceLossOutputs(
        loss=(weights_P * loss_P).sum(),
        loss_P=loss_P.detach(),
        margin_P=margin_P,
        correct_P=(margin_P > 0).to(margin_P.dtype),
        gradient_weight_P=torch.sigmoid(-scaled_P.detach()) - smoothing,
    )


def bradley_terry_loss(
    winner_scores_P: Tensor, loser_scores_P: Tensor, weights_P: Tensor, label_smoothing: float = 0.0
) -> PreferenceLossOutputs:
    """Σ_p weight_p · −log σ(R(winner) − R(loser)) (Bradley & Terry, 1952), smoothed as above; scores with gradient."""
    settings = PreferenceLossSettings(dpo_beta=1.0, label_smoothing=label_smoothing)
    return preference_loss(winner_scores_P - loser_scores_P, weights_P, settings)
