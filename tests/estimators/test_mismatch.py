"""Ratios and mismatch KL of one token at a time, by hand and by enumeration."""

import math

import pytest
import torch

from mlrl.estimators.mismatch import mean_without_worst, mismatch, truncated_weights


def test_by_hand():
    # π = 0.5, 0.2, 0.9 where μ = 0.25, 0.4, 0.9: r = 2, 0.5, 1
    sampler, trainer = torch.tensor([0.25, 0.4, 0.9]).log(), torch.tensor([0.5, 0.2, 0.9]).log()
    ratio, kl = mismatch(sampler, trainer)
    assert ratio.tolist() == pytest.approx([2.0, 0.5, 1.0], rel=1e-6)
    # 2 − 1 − log 2 = 0.306853; 0.5 − 1 + log 2 = 0.193147; 0
    assert kl.tolist() == pytest.approx([0.306853, 0.193147, 0.0], abs=1e-6)
    assert truncated_weights(ratio, 1.5).tolist() == pytest.approx([1.5, 0.5, 1.0], rel=1e-6)


def test_its_mean_under_the_sampler_is_the_divergence():
    sampler, trainer = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.2, 0.3])
    _, kl = mismatch(sampler.log(), trainer.log())
    exact = sum(p * math.log(p / q) for p, q in zip(sampler.tolist(), trainer.tolist(), strict=True))
    assert float((sampler * kl).sum()) == pytest.approx(exact, rel=1e-6)  # Σ μ (r − 1) is 0


def test_weights_without_a_cap_make_the_mean_unbiased():
    sampler, trainer = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.2, 0.3])
    value = torch.tensor([1.0, -2.0, 4.0])
    ratio, _ = mismatch(sampler.log(), trainer.log())
    assert float((sampler * truncated_weights(ratio, 100.0) * value).sum()) == pytest.approx(
        float((trainer * value).sum())  # 0.5 − 0.4 + 1.2 = 1.3
    )


def test_one_freak_token_does_not_carry_the_mean():
    # r = e^7: 1096.6 − 1 − 7 = 1088.6, over 6 tokens far above any limit
    kl = mismatch(torch.zeros(6), torch.tensor([0.0, 7.0, 0.0, 0.5, 0.0, 0.5]))[1]
    assert float(kl.mean()) > 100
    # of the sequences of 2, 3 and 1 tokens the first goes; e^0.5 − 1.5 = 0.148721, twice in 4 tokens
    assert mean_without_worst(kl, [2, 3, 1]) == pytest.approx(2 * 0.148721 / 4, abs=1e-6)
    assert mean_without_worst(kl, [6]) == pytest.approx(float(kl.mean()))
    assert mean_without_worst(torch.full((4,), 0.3), [1, 1, 2]) == pytest.approx(0.3)  # wrong weights are in all


def test_no_gradient_and_no_overflow():
    trainer = torch.tensor([0.0, -300.0], requires_grad=True)
    ratio, kl = mismatch(torch.tensor([-300.0, 0.0]), trainer)
    assert not ratio.requires_grad and bool(kl.isfinite().all()) and bool(ratio.isfinite().all())


def test_counts_must_agree():
    with pytest.raises(ValueError, match="2 log-probabilities of the sampler for 3"):
        mismatch(torch.zeros(2), torch.zeros(3))
