"""Value loss and explained variance, by hand and against loops."""

import pytest
import torch

from mlrl.losses.value import ExplainedVariance, ValueLossInputs, ValueLossSettings, value_loss


def loss_of(values, targets, weights, old=None, clip=None):
    values = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    tensors = [None if x is None else torch.tensor(x, dtype=torch.float64) for x in (targets, weights, old)]
    outputs = value_loss(ValueLossInputs(values, *tensors), ValueLossSettings(clip))
    outputs.loss.backward()
    return outputs, values.grad.tolist()


def test_squared_error_by_hand():
    # 0.25·(2−4)² + 0.25·(2−1)² + 0.5·(−1−0)²
    outputs, gradient = loss_of([2.0, 2.0, -1.0], [4.0, 1.0, 0.0], [0.25, 0.25, 0.5])
    assert outputs.loss.item() == 0.25 * 4 + 0.25 + 0.5
    assert outputs.loss_S.tolist() == [1.0, 0.25, 0.5] and not outputs.loss_S.requires_grad
    assert gradient == [0.25 * 2 * -2, 0.25 * 2 * 1, 0.5 * 2 * -1]
    assert outputs.clipped_S is None


def test_clipping_by_hand():
    # ε = 0.5 around V_old = 1. V = 2 → clipped to 1.5.
    # target 3: (2−3)² = 1 < (1.5−3)² = 2.25: the clipped one counts, no gradient
    # target 0: (2−0)² = 4 > (1.5−0)² = 2.25: the plain one counts
    # V = 1.25 is inside
    outputs, gradient = loss_of([2.0, 2.0, 1.25], [3.0, 0.0, 2.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], 0.5)
    assert outputs.loss_S.tolist() == [2.25, 4.0, 0.5625]
    assert gradient == [0.0, 4.0, -1.5]
    assert outputs.clipped_S.tolist() == [1.0, 0.0, 0.0]


def test_at_the_old_values_clipping_changes_nothing():
    torch.manual_seed(0)
    values, targets = torch.randn(50).tolist(), torch.randn(50).tolist()
    plain, clipped = (loss_of(values, targets, [0.1] * 50, values, clip) for clip in (None, 0.2))
    assert plain[1] == clipped[1] and plain[0].loss == clipped[0].loss
    assert loss_of(values, targets, [0.1] * 50, None, 0.2)[1] == plain[1]


def test_equals_the_loop_with_autograd():
    generator = torch.Generator().manual_seed(3)
    values, targets, weights, old = (torch.randn(200, generator=generator, dtype=torch.float64) for _ in range(4))
    outputs, gradient = loss_of(values.tolist(), targets.tolist(), weights.abs().tolist(), old.tolist(), 0.3)
    leaf = values.clone().requires_grad_()
    total = 0.0
    for v, y, w, o in zip(leaf, targets, weights.abs(), old, strict=True):
        bounded = o + torch.clamp(v - o, -0.3, 0.3)
        total = total + w * torch.max((v - y) ** 2, (bounded - y) ** 2)
    total.backward()
    assert outputs.loss.item() == pytest.approx(total.item())
    inside = (values - old).abs() <= 0.3
    assert 0 < int(inside.sum()) < 200
    torch.testing.assert_close(torch.tensor(gradient, dtype=torch.float64), leaf.grad)


def test_micro_batches_add_up():
    values, targets, old = torch.randn(3, 10, generator=torch.Generator().manual_seed(1)).tolist()
    whole = loss_of(values, targets, [0.1] * 10, old, 0.2)
    parts = [loss_of(values[s], targets[s], [0.1] * len(values[s]), old[s], 0.2) for s in (slice(3), slice(3, 10))]
    assert whole[0].loss.item() == pytest.approx(sum(part[0].loss.item() for part in parts))
    assert whole[1] == parts[0][1] + parts[1][1]


def test_targets_carry_no_gradient():
    target = torch.tensor([1.0], requires_grad=True)
    value = torch.tensor([0.0], requires_grad=True)
    value_loss(ValueLossInputs(value, target, torch.ones(1)), ValueLossSettings()).loss.backward()
    assert target.grad is None and value.grad.tolist() == [-2.0]


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="value_clip_range=0"):
        ValueLossSettings(0.0)
    with pytest.raises(ValueError, match="targets_S"):
        loss_of([1.0], [1.0, 2.0], [1.0])


def test_explained_variance():
    # returns 1, 3 have the variance 1; errors 0, 1 have 0.25
    assert ExplainedVariance.of([1.0, 3.0], [1.0, 2.0]).value == 0.75
    assert ExplainedVariance.of([1.0, 3.0], [1.0, 3.0]).value == 1.0
    assert ExplainedVariance.of([1.0, 3.0], [11.0, 13.0]).value == 1.0  # up to a constant
    assert ExplainedVariance.of([1.0, 3.0], [2.0, 2.0]).value == 0.0
    assert ExplainedVariance.of([1.0, 3.0], [3.0, 1.0]).value == -3.0  # errors −2, 2
    assert ExplainedVariance.of([0.1, 0.1, 0.1], [1.0, 2.0, 3.0]).value is None
    assert ExplainedVariance().value is None


def test_explained_variance_of_parts_is_that_of_the_whole():
    returns, values = torch.randn(2, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = ExplainedVariance.of(returns, values)
    parts = [ExplainedVariance.of(returns[s], values[s]) for s in (slice(4), slice(4, 5), slice(5, 30))]
    summed = parts[0] + parts[1] + parts[2]
    assert summed.value == pytest.approx(whole.value)
    # it is a ratio: means of the parts' values would be another number
    assert ExplainedVariance(*map(sum, zip(*(p.sums() for p in parts), strict=True))).value == pytest.approx(
        whole.value
    )
    errors = returns - values
    assert whole.value == pytest.approx(float(1 - errors.var(correction=0) / returns.var(correction=0)))
