"""Heads of a reward model: where they start, what they can say."""

import pytest
import torch
from torch import nn

from mlrl.preference.reward_head import reward_head


@pytest.mark.parametrize("mixes", [False, True])
def test_a_head_starts_without_a_preference_and_the_same_for_one_seed(mixes):
    heads = [reward_head(6, mixes=mixes, seed=seed) for seed in (1, 1, 2)]
    states = torch.randn(5, 6)
    assert all(not head(states).any() for head in heads)
    first, same, other = ([p.detach() for p in head.parameters()] for head in heads)
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True)) is not mixes


def fitted_accuracy(mixes: bool) -> float:
    """Of pairs of lengths (of one agent, of the other), those with a ratio near 2 preferred, after a fit."""
    generator = torch.Generator().manual_seed(0)
    brief, ratio = (low + (high - low) * torch.rand(400, generator=generator) for low, high in ((0.5, 1.5), (0.5, 3.5)))
    lengths, reward = torch.stack([brief, ratio * brief], 1), -(ratio - 2).abs()
    first, second = lengths[:200], lengths[200:]
    better = torch.where((reward[:200] > reward[200:])[:, None], first, second)
    worse = torch.where((reward[:200] > reward[200:])[:, None], second, first)
    head = reward_head(2, mixes=mixes, seed=0)
    optimizer = torch.optim.Adam(head.parameters(), 0.03)
    for _ in range(400):
        optimizer.zero_grad()
        nn.functional.softplus(head(worse) - head(better)).mean().backward()
        optimizer.step()
    return float((head(better) > head(worse)).float().mean())


def test_units_can_say_what_no_sum_over_the_agents_says():
    assert fitted_accuracy(mixes=True) > 0.9
    assert fitted_accuracy(mixes=False) < 0.75
