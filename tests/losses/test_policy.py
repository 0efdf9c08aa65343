"""The policy loss against hand-computed numbers and a loop over sequences and tokens."""

import itertools
import math

import pytest
import torch

from mlrl.losses.policy import PolicyLossInputs, PolicyLossSettings, policy_loss

LENGTHS = [3, 1, 5, 2, 4]
ADVANTAGES = [1.5, -0.7, 0.4, -2.0, 0.0]
WEIGHTS = [0.2, 0.1, 0.3, 0.0, 0.25]  # 0: a masked response
AGGREGATIONS = ("sequence_sum", "token_mean", "constant", "sequence_mean")


def make(old_noise=0.4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    logprobs_T = -torch.rand(total, generator=generator, dtype=torch.float64) * 3
    old_T = logprobs_T + old_noise * torch.randn(total, generator=generator, dtype=torch.float64)
    entropy_T = torch.rand(total, generator=generator, dtype=torch.float64)
    return logprobs_T.requires_grad_(), old_T, entropy_T.requires_grad_()


def inputs(logprobs_T, old_T=None, entropy_T=None, chosen=None):
    """The five sequences above, or some of them in a given order."""
    order = list(range(len(LENGTHS))) if chosen is None else chosen
    ends = list(itertools.accumulate(LENGTHS))

    def pick(values_T):
        return None if values_T is None else torch.cat([values_T[ends[s] - LENGTHS[s] : ends[s]] for s in order])

    def tensor(values):
        return torch.tensor([values[s] for s in order], dtype=torch.float64)

    lengths_S = torch.tensor([LENGTHS[s] for s in order])
    return PolicyLossInputs(
        pick(logprobs_T), lengths_S, tensor(ADVANTAGES), tensor(WEIGHTS), pick(old_T), pick(entropy_T)
    )


def loop(logprobs_T, old_T, entropy_T, low, high, dual, level, aggregation, entropy_coef, mean_length, max_new_tokens):
    loss, start = 0.0, 0
    for length, advantage, weight in zip(LENGTHS, ADVANTAGES, WEIGHTS, strict=True):
        tokens, start = range(start, start + length), start + length
        ratios = [(logprobs_T[t] - old_T[t]).exp() for t in tokens]
        if level == "sequence":
            mean = sum(logprobs_T[t] - old_T[t] for t in tokens) / length
            ratios = [mean.exp()] * length  # length times the same term: × length
        objective = 0.0
        for t, ratio in zip(tokens, ratios, strict=True):
            term = advantage * logprobs_T[t]
            if low is not None:
                term = min(ratio * advantage, max(min(ratio, torch.tensor(high)), torch.tensor(low)) * advantage)
                if dual is not None and advantage < 0:
                    term = max(term, torch.tensor(dual * advantage))
            objective = objective + term + entropy_coef * entropy_T[t]
        divisor = {"sequence_sum": 1, "token_mean": mean_length, "constant": max_new_tokens, "sequence_mean": length}
        loss = loss - weight * objective / divisor[aggregation]
    return loss


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("clip", [None, (0.2, None, None), (0.2, 0.3, 1.2)])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
def test_equals_the_loop(aggregation, clip, level, entropy_coef):
    clip_range, clip_range_high, dual_clip = clip or (None, None, None)
    settings = PolicyLossSettings(
        clip_range, clip_range_high, dual_clip, level, aggregation, entropy_coef, mean_length=2.75, max_new_tokens=8
    )
    logprobs_T, old_T, entropy_T = make()
    outputs = policy_loss(inputs(logprobs_T, old_T, entropy_T), settings)
    low = None if clip_range is None else 1 - clip_range
    high = None if clip_range is None else 1 + (clip_range_high or clip_range)
    expected = loop(
        logprobs_T, old_T, entropy_T, low, high, dual_clip, level, aggregation, entropy_coef, 2.75, 8
    )  # fmt: skip
    torch.testing.assert_close(outputs.loss, expected)
    leaves = [logprobs_T] + [entropy_T] * bool(entropy_coef)
    for ours, theirs in zip(
        torch.autograd.grad(outputs.loss, leaves), torch.autograd.grad(expected, leaves), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_at_the_old_weights_the_surrogate_has_the_gradient_of_reinforce(aggregation, level):
    logprobs_T, _, _ = make()
    plain = PolicyLossSettings(loss_aggregation=aggregation, mean_length=3.0, max_new_tokens=8)
    clipped = PolicyLossSettings(0.2, 0.3, 3.0, level, aggregation, mean_length=3.0, max_new_tokens=8)
    expected = torch.autograd.grad(policy_loss(inputs(logprobs_T), plain).loss, logprobs_T)
    for old_T in (None, logprobs_T.detach()):
        outputs = policy_loss(inputs(logprobs_T, old_T), clipped)
        torch.testing.assert_close(torch.autograd.grad(outputs.loss, logprobs_T), expected)
        assert outputs.ratio_max == 1.0
        assert outputs.kl_S.tolist() == outputs.clipped_S.tolist() == [0.0] * len(LENGTHS)


def test_hand_computed_reinforce():
    # tokens (−1, −2) with A 2 and w 0.5; token (−3) with A −1 and w 0.25:
    # sequence_sum: −0.5·2·(−3) − 0.25·(−1)·(−3) = 3 − 0.75 = 2.25
    # constant with 4 tokens: 2.25/4; token_mean with length 1.5: 2.25/1.5; sequence_mean: 3/2 − 0.75/1
    data = PolicyLossInputs(
        torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([2, 1]), torch.tensor([2.0, -1.0]), torch.tensor([0.5, 0.25])
    )
    expected = {"sequence_sum": 2.25, "constant": 0.5625, "token_mean": 1.5, "sequence_mean": 0.75}
    for aggregation, value in expected.items():
        settings = PolicyLossSettings(loss_aggregation=aggregation, mean_length=1.5, max_new_tokens=4)
        outputs = policy_loss(data, settings)
        assert outputs.loss.item() == pytest.approx(value)
        assert outputs.loss_S.sum().item() == pytest.approx(value)
        assert outputs.kl_S is outputs.clipped_S is outputs.ratio_max is outputs.entropy_S is None


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "objective", "gradient"),
    [
        (1.5, 1.0, None, 1.2, 0.0),  # above 1 + ε: bounded, no gradient
        (1.5, -1.0, None, -1.5, -1.5),  # the pessimistic branch is the plain one; d(ρA)/d log π = ρA
        (0.5, 1.0, None, 0.5, 0.5),
        (0.5, -1.0, None, -0.8, 0.0),  # below 1 − ε: bounded
        (1.1, 2.0, None, 2.2, 2.2),  # inside
        (5.0, -1.0, 3.0, -3.0, 0.0),  # dual clip: max(−5, 3·(−1))
        (5.0, 1.0, 3.0, 1.2, 0.0),  # and nothing of it where A > 0
    ],
)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_hand_computed_clipping(ratio, advantage, dual_clip, objective, gradient, level):
    logprobs_T = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    data = PolicyLossInputs(logprobs_T, torch.tensor([1]), advantage * one, one, -one)
    outputs = policy_loss(data, PolicyLossSettings(0.2, dual_clip=dual_clip, importance_level=level))
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(-objective)
    assert logprobs_T.grad.item() == pytest.approx(-gradient)
    assert outputs.clipped_S.item() == (gradient == 0.0)
    assert outputs.ratio_max == pytest.approx(ratio)
    assert outputs.kl_S.item() == pytest.approx(ratio - 1 - math.log(ratio))


def test_sequence_ratio_is_the_mean_so_it_does_not_drift_with_length():
    # every token's log-ratio is log 1.1: the ratio is 1.1 at any length, not 1.1^length
    for length in (1, 7, 100):
        logprobs_T = torch.full((length,), math.log(1.1) - 1.0, dtype=torch.float64)
        one = torch.ones(1, dtype=torch.float64)
        data = PolicyLossInputs(logprobs_T, torch.tensor([length]), one, one, torch.full_like(logprobs_T, -1.0))
        outputs = policy_loss(data, PolicyLossSettings(0.2, importance_level="sequence"))
        assert outputs.ratio_max == pytest.approx(1.1)
        assert outputs.loss.item() == pytest.approx(-1.1 * length)  # surrogate × length under sequence_sum


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("clip_range", [None, 0.2])
def test_micro_batches_add_up_in_any_order(level, clip_range):
    settings = PolicyLossSettings(clip_range, importance_level=level, loss_aggregation="token_mean", mean_length=2.5)
    logprobs_T, old_T, entropy_T = make()
    whole = policy_loss(inputs(logprobs_T, old_T, entropy_T), settings)
    parts = [policy_loss(inputs(logprobs_T, old_T, entropy_T, chosen), settings) for chosen in ([3, 0], [4], [2, 1])]
    total = sum(part.loss for part in parts)
    torch.testing.assert_close(total, whole.loss)
    torch.testing.assert_close(
        torch.autograd.grad(total, logprobs_T), torch.autograd.grad(whole.loss, logprobs_T)
    )  # fmt: skip
    torch.testing.assert_close(sum(part.entropy_S.sum() for part in parts), whole.entropy_S.sum())
    if clip_range:
        torch.testing.assert_close(sum(part.kl_S.sum() for part in parts), whole.kl_S.sum())
        assert sum(part.clipped_S.sum() for part in parts) == whole.clipped_S.sum() > 0
        assert max(part.ratio_max for part in parts) == whole.ratio_max


def test_a_masked_response_has_no_gradient_and_every_other_token_has():
    logprobs_T, _, _ = make()
    policy_loss(inputs(logprobs_T), PolicyLossSettings()).loss.backward()
    # −w·A, token by token; the end token is a token like any other
    expected = [-w * a for w, a, length in zip(WEIGHTS, ADVANTAGES, LENGTHS, strict=True) for _ in range(length)]
    torch.testing.assert_close(logprobs_T.grad, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_runaway_ratio_gives_no_nan(level):
    logprobs_T = torch.tensor([-1.0, -1.0], requires_grad=True)
    data = PolicyLossInputs(
        logprobs_T, torch.tensor([1, 1]), torch.tensor([1.0, -1.0]), torch.ones(2), torch.tensor([-500.0, -500.0])
    )
    outputs = policy_loss(data, PolicyLossSettings(0.2, importance_level=level))
    outputs.loss.backward()
    assert outputs.loss.isfinite()
    assert logprobs_T.grad.tolist() == [0.0, 0.0]


def test_wrong_arguments_are_named():
    logprobs_T, _, entropy_T = make()
    with pytest.raises(ValueError, match="loss_aggregation='mean'.*sequence_sum"):
        PolicyLossSettings(loss_aggregation="mean")
    with pytest.raises(ValueError, match="importance_level='turn'.*token, sequence"):
        PolicyLossSettings(importance_level="turn")
    with pytest.raises(ValueError, match="entropy_T=None"):
        policy_loss(inputs(logprobs_T), PolicyLossSettings(entropy_coef=0.1))
    with pytest.raises(ValueError, match="entropy_T is detached"):
        policy_loss(inputs(logprobs_T, None, entropy_T.detach()), PolicyLossSettings(entropy_coef=0.1))
    for lengths in ([3], [0, 1], [2, -1]):
        data = PolicyLossInputs(
            torch.zeros(2 if lengths == [3] else 1), torch.tensor(lengths), torch.ones(len(lengths)),
            torch.ones(len(lengths)),
        )  # fmt: skip
        with pytest.raises(ValueError, match="lengths_S"):
            policy_loss(data, PolicyLossSettings())


@pytest.mark.parametrize(("clip_range", "level"), [(None, "token"), (0.2, "token"), (0.2, "sequence")])
def test_token_weights_scale_each_tokens_gradient(clip_range, level):
    """Two sequences of 2 and 1 tokens at their old weights, where every form has the gradient −w·ω_t·A a token."""
    logprobs_T = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    weights_T = torch.tensor([2.0, 0.5, 0.25], dtype=torch.float64, requires_grad=True)
    given = PolicyLossInputs(
        logprobs_T,
        torch.tensor([2, 1]),
        torch.tensor([3.0, -1.0], dtype=torch.float64),
        torch.tensor([0.5, 1.0], dtype=torch.float64),
        token_weights_T=weights_T,
    )
    loss = policy_loss(given, PolicyLossSettings(clip_range=clip_range, importance_level=level)).loss
    loss.backward()
    assert logprobs_T.grad.tolist() == pytest.approx([-0.5 * 3 * 2.0, -0.5 * 3 * 0.5, 0.25])
    assert weights_T.grad is None  # a fixed factor
    # REINFORCE: −0.5·3·(2·(−1) + 0.5·(−2)) − 1·(−1)·0.25·(−0.5) = 4.5 − 0.125; surrogates at ratio 1:
    # −0.5·3·(2 + 0.5) + 0.25 = −3.5
    assert float(loss.detach()) == pytest.approx(4.375 if clip_range is None else -3.5)


@pytest.mark.parametrize("weights", [None, [2.0, 0.5]])
def test_token_weights_under_a_sequence_ratio(weights):
    """Token ratios 1.44 and 1: r = √1.44 = 1.2, and each token's gradient is −w·ω_t·r·A, or 0 where r is clipped."""
    for clip_range, kept in ((0.5, 1.0), (0.1, 0.0)):
        logprobs_T = torch.tensor([1.44, 1.0], dtype=torch.float64).log().requires_grad_()
        given = PolicyLossInputs(
            logprobs_T,
            torch.tensor([2]),
            torch.tensor([3.0], dtype=torch.float64),
            torch.tensor([0.5], dtype=torch.float64),
            old_logprobs_T=torch.zeros(2, dtype=torch.float64),
            token_weights_T=None if weights is None else torch.tensor(weights, dtype=torch.float64),
        )
        outputs = policy_loss(given, PolicyLossSettings(clip_range=clip_range, importance_level="sequence"))
        outputs.loss.backward()
        own = weights or [1.0, 1.0]
        assert logprobs_T.grad.tolist() == pytest.approx([-0.5 * omega * 1.2 * 3.0 * kept for omega in own])
        # r or its bound 1.1, times A = 3, w = 0.5 and the sum of ω
        assert float(outputs.loss.detach()) == pytest.approx(-0.5 * 3.0 * sum(own) * (1.2 if kept else 1.1))
        assert outputs.clipped_S.tolist() == [2 * (1 - kept)] and outputs.ratio_max == pytest.approx(1.2)


def test_token_weights_multiply_the_clipped_term():
    """ρ = 1.5 and 1.1, A = 2, ε = 0.2: 0.5·1.2·2 + 3·1.1·2 = 7.8."""
    given = PolicyLossInputs(
        torch.tensor([1.5, 1.1]).log(),
        torch.tensor([2]),
        torch.tensor([2.0]),
        torch.tensor([1.0]),
        old_logprobs_T=torch.zeros(2),
        token_weights_T=torch.tensor([0.5, 3.0]),
    )
    outputs = policy_loss(given, PolicyLossSettings(clip_range=0.2))
    assert float(outputs.loss) == pytest.approx(-7.8, rel=1e-5)
    assert outputs.clipped_S.tolist() == [1.0] and outputs.ratio_max == pytest.approx(1.5)
