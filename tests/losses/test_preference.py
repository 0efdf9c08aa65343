"""Preference losses against hand-computed numbers, loops and automatic differentiation of the joint loss."""

import math

import pytest
import torch

from mlrl.losses.preference import (
    PreferenceLossSettings,
    bradley_terry_loss,
    pair_margins,
    preference_loss,
    winner_nll,
)

# (pair, sign, tokens) of one agent: pair 0 has one turn a side, pair 1 two turns for the winner and one for the loser
SEQUENCES = [(0, 1, 3), (0, -1, 1), (1, 1, 2), (1, 1, 4), (1, -1, 5), (2, -1, 2), (2, 1, 1)]


def layout():
    pairs, signs, lengths = (torch.tensor(column) for column in zip(*SEQUENCES, strict=True))
    return lengths, pairs, signs


def make(seed, requires_grad=True):
    generator = torch.Generator().manual_seed(seed)
    total = sum(length for _, _, length in SEQUENCES)
    return (-3 * torch.rand(total, generator=generator, dtype=torch.float64)).requires_grad_(requires_grad)


def loop_margins(logprobs_T, reference_T=None):
    margins, start = [0.0, 0.0, 0.0], 0
    for pair, sign, length in SEQUENCES:
        for t in range(start, start + length):
            margins[pair] = margins[pair] + sign * (logprobs_T[t] - (0 if reference_T is None else reference_T[t]))
        start += length
    return margins


@pytest.mark.parametrize("with_reference", [True, False])
def test_margins_equal_the_loop_over_tokens_and_turns(with_reference):
    logprobs_T, reference_T = make(0), make(1, False) if with_reference else None
    margins_P = pair_margins(logprobs_T, *layout(), 3, reference_T)
    torch.testing.assert_close(margins_P, torch.stack(loop_margins(logprobs_T, reference_T)))
    # every token of the winner has gradient +1 and of the loser −1, its end token (the last) included
    margins_P.sum().backward()
    assert logprobs_T.grad.tolist() == [float(sign) for _, sign, length in SEQUENCES for _ in range(length)]


def test_hand_computed_loss():
    # m = 2 and −1, β = 0.5: −log σ(1) = log(1 + e^−1) = 0.313262, −log σ(−0.5) = log(1 + e^0.5) = 0.974077;
    # their mean is 0.643669
    outputs = preference_loss(torch.tensor([2.0, -1.0]), torch.tensor([0.5, 0.5]), PreferenceLossSettings(0.5))
    assert outputs.loss.item() == pytest.approx(0.643669, abs=1e-6)
    assert outputs.loss_P.tolist() == pytest.approx([0.313262, 0.974077], abs=1e-6)
    assert outputs.correct_P.tolist() == [1.0, 0.0]
    # σ(−1) = 0.268941, σ(0.5) = 0.622459
    assert outputs.gradient_weight_P.tolist() == pytest.approx([0.268941, 0.622459], abs=1e-6)


def test_hand_computed_label_smoothing():
    # β m = 1, ε = 0.1: 0.9·0.313262 + 0.1·log(1 + e) = 0.281936 + 0.131326 = 0.413262; weight σ(−1) − 0.1 = 0.168941
    outputs = preference_loss(torch.tensor([1.0]), torch.ones(1), PreferenceLossSettings(1.0, 0.1))
    assert outputs.loss.item() == pytest.approx(0.413262, abs=1e-6)
    assert outputs.gradient_weight_P.item() == pytest.approx(0.168941, abs=1e-6)


def test_hand_computed_gradient_with_a_partner():
    # β = 2, own margin 0.3, the partner's −0.8: β m = −1; ∂L/∂Δ = −β σ(1) = −2·0.731059; nothing flows to the partner
    own_P, other_P = torch.tensor([0.3], requires_grad=True), torch.tensor([-0.8], requires_grad=True)
    preference_loss(own_P, torch.ones(1), PreferenceLossSettings(2.0), other_P).loss.backward()
    assert own_P.grad.item() == pytest.approx(-1.462117, abs=1e-6)
    assert other_P.grad is None


def test_margin_zero_is_log_two_with_weight_one_half():
    outputs = preference_loss(torch.zeros(3), torch.full((3,), 1 / 3), PreferenceLossSettings())
    assert outputs.loss.item() == pytest.approx(math.log(2))
    assert outputs.gradient_weight_P.tolist() == [0.5] * 3
    assert outputs.correct_P.tolist() == [0.0] * 3  # equal margins are not correct


def test_without_a_reference_length_rules_the_start():
    # one nat a token, β = 0.1: winner and loser of 120 and 40 tokens, then of 40 and 120
    lengths_S, pairs_S = torch.tensor([120, 40, 40, 120]), torch.tensor([0, 0, 1, 1])
    logprobs_T = torch.full((320,), -1.0, dtype=torch.float64)
    layout = (lengths_S, pairs_S, torch.tensor([1, -1, 1, -1]), 2)
    free = preference_loss(pair_margins(logprobs_T, *layout), torch.ones(2), PreferenceLossSettings(0.1))
    assert free.margin_P.tolist() == pytest.approx([-80.0, 80.0])
    assert free.gradient_weight_P.tolist() == pytest.approx([0.99966, 0.00034], abs=1e-5)
    anchored = pair_margins(logprobs_T, *layout, logprobs_T)
    assert anchored.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_agents_gradients_are_the_gradient_of_the_joint_loss(smoothing):
    settings, weights_P = PreferenceLossSettings(0.7, smoothing), torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    agents = [(make(seed), make(seed + 10, False)) for seed in range(3)]
    joint = sum(torch.stack(loop_margins(*agent)) for agent in agents)
    loss = 0.0
    for weight, margin in zip(weights_P, joint, strict=True):
        loss = loss + weight * (1 - smoothing) * torch.log1p((-0.7 * margin).exp())
        loss = loss + weight * smoothing * torch.log1p((0.7 * margin).exp())
    expected = torch.autograd.grad(loss, [logprobs_T for logprobs_T, _ in agents])

    margins_NP = torch.stack([pair_margins(own, *layout(), 3, ref) for own, ref in agents]).detach()
    for i, (logprobs_T, reference_T) in enumerate(agents):
        own_P = pair_margins(logprobs_T, *layout(), 3, reference_T)
        outputs = preference_loss(own_P, weights_P, settings, margins_NP.sum(0) - margins_NP[i])
        torch.testing.assert_close(outputs.loss, loss)
        torch.testing.assert_close(outputs.margin_P, joint.detach())
        torch.testing.assert_close(torch.autograd.grad(outputs.loss, logprobs_T)[0], expected[i])


def test_micro_batches_of_pairs_add_up():
    settings, logprobs_T = PreferenceLossSettings(0.3, 0.1), make(0)
    weights_P = torch.full((3,), 1 / 3, dtype=torch.float64)
    whole = preference_loss(pair_margins(logprobs_T, *layout(), 3), weights_P, settings)
    ends = torch.tensor([length for _, _, length in SEQUENCES]).cumsum(0).tolist()
    total = 0.0
    for pair in (2, 0, 1):
        chosen = [s for s, entry in enumerate(SEQUENCES) if entry[0] == pair]
        tokens_T = torch.cat([logprobs_T[ends[s] - SEQUENCES[s][2] : ends[s]] for s in chosen])
        lengths_S = torch.tensor([SEQUENCES[s][2] for s in chosen])
        signs_S = torch.tensor([SEQUENCES[s][1] for s in chosen])
        own_P = pair_margins(tokens_T, lengths_S, torch.zeros(len(chosen), dtype=torch.long), signs_S, 1)
        total = total + preference_loss(own_P, weights_P[pair : pair + 1], settings).loss
    torch.testing.assert_close(total, whole.loss)
    torch.testing.assert_close(torch.autograd.grad(total, logprobs_T), torch.autograd.grad(whole.loss, logprobs_T))


def test_bradley_terry_hand_computed():
    # R(w) − R(l) = 1 and −2: log(1 + e^−1) + log(1 + e^2) = 0.313262 + 2.126928; d/dR(w) = −σ(−1), −σ(2)
    winners_P = torch.tensor([3.0, -1.0], requires_grad=True)
    losers_P = torch.tensor([2.0, 1.0], requires_grad=True)
    outputs = bradley_terry_loss(winners_P, losers_P, torch.ones(2))
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(2.440190, abs=1e-6)
    assert winners_P.grad.tolist() == pytest.approx([-0.268941, -0.880797], abs=1e-6)
    assert losers_P.grad.tolist() == pytest.approx([0.268941, 0.880797], abs=1e-6)
    assert outputs.correct_P.tolist() == [1.0, 0.0]


def test_large_margins_stay_finite():
    own_P = torch.tensor([1e4, -1e4], requires_grad=True)
    outputs = preference_loss(own_P, torch.ones(2), PreferenceLossSettings(1.0))
    outputs.loss.backward()
    assert outputs.loss_P.tolist() == [0.0, 1e4]
    assert own_P.grad.tolist() == [0.0, -1.0]


def test_nll_of_winners_by_hand():
    """Pair 0 wins with tokens of 1 and 2 nats and, in a second turn, of 6; pair 1 with one of 0.5."""
    logprobs_T = torch.tensor([-1.0, -2.0, -9.0, -6.0, -0.5, -8.0])
    uses = (torch.tensor([2, 1, 1, 1, 1]), torch.tensor([0, 0, 0, 1, 1]), torch.tensor([1, -1, 1, 1, -1]))
    assert winner_nll(logprobs_T, *uses, 2).tolist() == pytest.approx([3.0, 0.5])


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="rpo_alpha=-1"):
        PreferenceLossSettings(0.1, rpo_alpha=-1)
    with pytest.raises(ValueError, match="dpo_beta=0"):
        PreferenceLossSettings(0)
    with pytest.raises(ValueError, match="label_smoothing=0.5"):
        PreferenceLossSettings(0.1, 0.5)
    one = torch.ones(1, dtype=torch.long)
    with pytest.raises(ValueError, match="lengths_S"):
        pair_margins(torch.zeros(3), 2 * one, 0 * one, one, 1)
    with pytest.raises(ValueError, match="signs_S"):
        pair_margins(torch.zeros(1), one, 0 * one, torch.tensor([1, -1]), 1)
