"""Advantages against hand-computed numbers and a loop over nodes and generations."""

import itertools
import statistics

import pytest
import torch

from mlrl.estimators.advantages import ADVANTAGE_MODES, advantages, batch_statistics, centred_returns

RETURNS = [[1.0, 2.0, 6.0], [0.0, 0.0, 3.0], [-1.0, -1.5, 4.0]]
KL = [[0.1, 0.4, 0.1], [0.0, -0.2, 0.8], [0.5, 0.5, 0.2]]
GREEDY = [2.5, 1.0, -1.0]


def loop(mode, normalization, kl_coef):
    centred = []
    for returns, greedy in zip(RETURNS, GREEDY, strict=True):
        for k, value in enumerate(returns):
            others = returns[:k] + returns[k + 1 :]
            baselines = {"raw": 0.0, "mean": sum(returns) / 3, "rloo": sum(others) / 2, "max": max(returns)}
            centred.append(value - (baselines | {"greedy": greedy})[mode])
    expected = []
    for node, k in itertools.product(range(3), range(3)):
        spread = {"none": 1.0, "node": statistics.pstdev(RETURNS[node]), "batch": statistics.pstdev(centred)}
        kl, others = KL[node][k], KL[node][:k] + KL[node][k + 1 :]
        kl_baseline = {"raw": 0.0, "mean": sum(KL[node]) / 3}.get(mode, sum(others) / 2)
        expected.append(centred[3 * node + k] / spread[normalization] - kl_coef * (kl - kl_baseline))
    return torch.tensor(expected).view(3, 3)


@pytest.mark.parametrize("mode", ADVANTAGE_MODES)
@pytest.mark.parametrize("normalization", ["none", "node", "batch"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
def test_equals_the_loop(mode, normalization, kl_coef):
    estimated = advantages(
        torch.tensor(RETURNS), torch.tensor(KL), mode=mode, normalization=normalization, kl_coef=kl_coef,
        greedy_returns_M=GREEDY,
    )  # fmt: skip
    assert estimated.values_MK.dtype == torch.float32
    torch.testing.assert_close(estimated.values_MK, loop(mode, normalization, kl_coef))
    assert estimated.zero_std_M.tolist() == [False] * 3


def test_hand_computed():
    # returns 1, 2, 6: mean 3; the others' means 4, 3.5, 1.5; max 6; greedy 2.5; σ² = (4 + 1 + 9)/3 = 14/3
    expected = {
        "raw": [1.0, 2.0, 6.0],
        "mean": [-2.0, -1.0, 3.0],
        "rloo": [-3.0, -1.5, 4.5],
        "max": [-5.0, -4.0, 0.0],
        "greedy": [-1.5, -0.5, 3.5],
    }
    for mode, values in expected.items():
        plain = advantages(RETURNS[:1], mode=mode, greedy_returns_M=[2.5]).values_MK
        torch.testing.assert_close(plain, torch.tensor([values]))
        normalised = advantages(RETURNS[:1], mode=mode, normalization="node", greedy_returns_M=[2.5]).values_MK
        # dividing never re-centres: raw stays positive, max stays ≤ 0
        torch.testing.assert_close(normalised, torch.tensor([values]) / (14 / 3) ** 0.5)


@pytest.mark.parametrize("mode", ADVANTAGE_MODES)
@pytest.mark.parametrize("normalization", ["node", "batch"])
@pytest.mark.parametrize("noise", [0.0, 1e-12])
def test_equal_returns_with_kl_stay_within_the_penalty(mode, normalization, noise):
    returns = [[0.3 + noise, 0.3, 0.3 - noise]] * 2
    kl = [[0.1, 0.4, 0.1], [0.0, -0.2, 0.8]]
    # raw and greedy over a batch: E(R) is constant too, so its σ is below the floor
    estimated = advantages(
        returns, kl, mode=mode, normalization=normalization, kl_coef=0.5, greedy_returns_M=[0.1, 0.1]
    )  # fmt: skip
    assert estimated.zero_std_M.all()
    for row, penalties in zip(estimated.values_MK.tolist(), kl, strict=True):
        spread = max(penalties) - min(penalties) if mode != "raw" else max(abs(p) for p in penalties)
        assert all(abs(value) <= 0.5 * spread + 1e-7 for value in row)
        assert any(value != 0 for value in row)  # the penalty still acts


@pytest.mark.parametrize("mode", ["mean", "rloo", "max"])
@pytest.mark.parametrize("normalization", ["none", "node", "batch"])
@pytest.mark.parametrize("value", [1e5, 1e5 + 0.1, 0.1])
def test_equal_returns_give_no_advantage(mode, normalization, value):
    estimated = advantages([[value] * 3] * 2, mode=mode, normalization=normalization)
    assert estimated.values_MK.abs().max() < 1e-9
    assert estimated.zero_std_M.tolist() == [True, True]
    if normalization != "none":
        assert estimated.values_MK.abs().max() == 0


def test_float_noise_on_large_returns_is_no_signal_but_a_real_spread_is():
    # floor at 1e5 is 0.1: returns that differ by float32 rounding (0.0078) carry nothing, by 1 they do
    noisy, real = [1e5, 1e5 + 0.0078, 1e5], [1e5, 1e5 + 1, 1e5]
    estimated = advantages([noisy, real], mode="mean", normalization="node")
    assert estimated.zero_std_M.tolist() == [True, False]
    assert estimated.values_MK[0].tolist() == [0.0, 0.0, 0.0]
    # −1/3, 2/3, −1/3 over σ = √(2/9) = 0.4714
    torch.testing.assert_close(estimated.values_MK[1], torch.tensor([-0.70711, 1.41421, -0.70711]), atol=1e-4, rtol=0)
    # returns near 0: the floor is 1e-4
    assert advantages([[0.0, 1e-5]], mode="mean", normalization="node").zero_std_M.tolist() == [True]
    assert advantages([[0.0, 1e-3]], mode="mean", normalization="node").zero_std_M.tolist() == [False]


def test_without_normalisation_equal_returns_keep_a_raw_or_greedy_advantage():
    # zeroing them would bias the estimators; the fraction still counts the nodes
    assert advantages([[2.0, 2.0]], mode="raw").values_MK.tolist() == [[2.0, 2.0]]
    estimated = advantages([[2.0, 2.0]], mode="greedy", greedy_returns_M=[1.5])
    assert estimated.values_MK.tolist() == [[0.5, 0.5]]
    assert estimated.zero_std_M.tolist() == [True]


@pytest.mark.parametrize("mode", ["raw", "greedy"])
def test_one_generation(mode):
    estimated = advantages([[2.0], [3.0]], [[0.5], [1.0]], mode=mode, kl_coef=0.1, greedy_returns_M=[1.0, 1.0])
    # raw: 2 − 0.05, 3 − 0.1; greedy: 1 − 0.05, 2 − 0.1 (no sibling to centre the penalty with)
    expected = [[1.95], [2.9]] if mode == "raw" else [[0.95], [1.9]]
    torch.testing.assert_close(estimated.values_MK, torch.tensor(expected))
    assert estimated.zero_std_M.tolist() == [False, False]


@pytest.mark.parametrize("mode", ADVANTAGE_MODES)
def test_batch_statistics_of_parts_add_up(mode):
    whole = batch_statistics(RETURNS, mode, GREEDY)
    parts = batch_statistics(RETURNS[:1], mode, GREEDY[:1]) + batch_statistics(RETURNS[1:], mode, GREEDY[1:])
    assert parts.std == pytest.approx(whole.std)
    assert whole.std == pytest.approx(centred_returns(RETURNS, mode, GREEDY).std(correction=0).item())
    assert (parts.count, parts.largest) == (9, 6.0)
    part = advantages(RETURNS[1:], mode=mode, normalization="batch", greedy_returns_M=GREEDY[1:], batch=parts)
    torch.testing.assert_close(part.values_MK, loop(mode, "batch", 0.0)[1:])


@pytest.mark.parametrize("mode", ADVANTAGE_MODES)
@pytest.mark.parametrize("normalization", ["none", "node", "batch"])
def test_no_node(mode, normalization):
    empty = torch.zeros(0, 3)
    estimated = advantages(empty, empty, mode=mode, normalization=normalization, kl_coef=0.1, greedy_returns_M=[])
    assert estimated.values_MK.shape == (0, 3)
    assert estimated.zero_std_M.shape == (0,)


def test_nodes_share_nothing_but_the_batch_spread():
    for mode, normalization in itertools.product(("mean", "rloo", "max"), ("none", "node")):
        together = advantages(RETURNS, mode=mode, normalization=normalization).values_MK
        alone = [advantages([returns], mode=mode, normalization=normalization).values_MK for returns in RETURNS]
        torch.testing.assert_close(together, torch.cat(alone))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "grpo"}, "advantage_mode='grpo'.*raw, mean, rloo, max, greedy"),
        ({"mode": "mean", "normalization": "std"}, "normalization='std'.*none, node, batch"),
        ({"mode": "mean", "task_returns_MK": [[1.0]]}, "num_generations=1: advantage_mode `mean`"),
        ({"mode": "rloo", "task_returns_MK": [[1.0]]}, "num_generations=1: advantage_mode `rloo`"),
        ({"mode": "max", "task_returns_MK": [[1.0]]}, "num_generations=1: advantage_mode `max`"),
        ({"mode": "raw", "normalization": "batch", "task_returns_MK": [[1.0]]}, "num_generations=1: normalization"),
        ({"mode": "greedy"}, "greedy_returns_M=None"),
        ({"mode": "mean", "kl_coef": 0.1}, "kl_to_go_MK=None"),
        ({"mode": "mean", "kl_coef": 0.1, "kl_to_go_MK": [[1.0]]}, "kl_to_go_MK of shape"),
        ({"mode": "mean", "task_returns_MK": [1.0, 2.0]}, "task_returns_MK of shape"),
        ({"mode": "mean", "task_returns_MK": [[float("nan"), 1.0]]}, "task_returns_MK holds NaN"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        advantages(**({"task_returns_MK": [[1.0, 2.0]]} | arguments))
