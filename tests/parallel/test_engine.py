"""The engine: float32 masters, accumulation, clipping, schedules; numbers by hand."""

import math

import pytest
import torch
from torch import nn

from mlrl.parallel.engine import Engine, OptimizerSettings, schedule

BF16, F32 = torch.bfloat16, torch.float32


def parameter(values, dtype=F32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def test_adamw_by_hand():
    """First update: m̂ = g and v̂ = g², so the step is lr·g/(|g|+eps); decay takes lr·wd·w first."""
    weight = parameter([1.0, -2.0, 3.0])
    engine = Engine([weight], OptimizerSettings(0.1, weight_decay=0.5, max_grad_norm=None))
    engine.backward((weight * torch.tensor([3.0, -0.2, 0.0])).sum())
    engine.step(engine.grad_norm())
    # 1·0.95 − 0.1, −2·0.95 + 0.1, 3·0.95
    assert weight.tolist() == pytest.approx([0.85, -1.8, 2.85], abs=1e-6)
    assert engine.updates == 1 and weight.grad is None


def test_betas_by_hand():
    """Gradients 3 and −1 under β = (0.5, 0.9): m = 0.25, m̂ = m/0.75, v = 0.9·0.9 + 0.1, v̂ = v/0.19."""
    weight = parameter([0.0])
    engine = Engine([weight], OptimizerSettings(0.1, max_grad_norm=None, betas=(0.5, 0.9)))
    for gradient in (3.0, -1.0):
        engine.backward(gradient * weight.sum())
        engine.step(engine.grad_norm())
    assert weight.item() == pytest.approx(-0.1 - 0.1 * (0.25 / 0.75) / (0.91 / 0.19) ** 0.5, abs=1e-6)


def test_no_decay_by_default():
    weight = parameter([1.0])
    engine = Engine([weight], OptimizerSettings(0.1))
    engine.backward(weight.sum() * 0.0)
    engine.step(engine.grad_norm())
    assert weight.item() == 1.0


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_norm_is_the_one_before_clipping_and_clipping_scales_all(dtype):
    """Gradients (3, 0) and (4,): norm 5; clipped to 2 they are (1.2, 0) and (1.6,)."""
    weights = [parameter([0.0, 0.0], dtype), parameter([0.0], dtype)]
    engine = Engine(weights, OptimizerSettings(1.0, max_grad_norm=2.0))
    engine.backward(3 * weights[0][0] + 4 * weights[1][0])
    assert engine.grad_norm() == pytest.approx(5.0)
    seen = []
    engine.optimizer.register_step_pre_hook(lambda *_: seen.extend(m.grad.clone() for m in engine.masters))
    engine.step(engine.grad_norm())
    assert seen[0].tolist() == pytest.approx([1.2, 0.0], rel=1e-5) and seen[1].tolist() == pytest.approx(
        [1.6], rel=1e-5
    )


@pytest.mark.parametrize("limit", [None, 5.1])
def test_small_gradients_are_not_clipped(limit):
    weight = parameter([0.0, 0.0])
    engine = Engine([weight], OptimizerSettings(1.0, max_grad_norm=limit))
    engine.backward(3 * weight[0] + 4 * weight[1])
    seen = []
    engine.optimizer.register_step_pre_hook(lambda *_: seen.append(engine.masters[0].grad.clone()))
    engine.step(engine.grad_norm())
    assert seen[0].tolist() == [3.0, 4.0]


def test_gradients_of_bfloat16_weights_add_up_in_float32():
    """1 + 16 × 2^-9: in bfloat16 every addend is half a unit in the last place and is rounded away."""
    weight = parameter([0.5], BF16)
    engine = Engine([weight], OptimizerSettings(1.0))
    engine.backward(weight.sum())
    for _ in range(16):
        engine.backward(weight.sum() * 2**-9)
    assert engine.masters[0].grad.dtype == F32
    assert engine.grad_norm() == 1 + 16 * 2**-9
    rounded = torch.ones((), dtype=BF16)
    for _ in range(16):
        rounded += 2**-9
    assert rounded.item() == 1.0


def test_masters_keep_what_bfloat16_rounds_away():
    """Updates of 5e-6 on weights around 0.02: single ones are lost in bfloat16, together they arrive."""
    generator = torch.Generator().manual_seed(0)
    start = (0.02 * torch.randn(20_000, generator=generator)).to(BF16)
    direction = torch.randn(20_000, generator=generator)
    direct = nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([direct], lr=5e-6, weight_decay=0.0)
    ours = nn.Parameter(start.clone())
    engine = Engine([ours], OptimizerSettings(5e-6, max_grad_norm=None))
    first = None
    for _ in range(30):
        (direct.float() * direction).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward((ours.float() * direction).sum())
        engine.step(engine.grad_norm())
        first = first if first is not None else (engine.masters[0] != start.float()).float().mean().item()
    moved_direct = (direct != start).float().mean().item()
    moved_ours = (ours != start).float().mean().item()
    assert first > 0.999 and ours.dtype == BF16  # every master moves at the first update already
    # 30 constant updates are 1.5e-4; bfloat16 numbers around 0.02 are 6e-5 to 1.2e-4 apart
    assert moved_direct < 0.3 < 0.8 < moved_ours
    wanted = start.float() - 30 * 5e-6 * direction.sign()
    assert torch.allclose(engine.masters[0], wanted, atol=1e-6)
    assert torch.equal(ours, engine.masters[0].to(BF16))
    # so the weights are as near to the wanted ones as the type allows
    assert bool(((ours.float() - wanted).abs() <= wanted.abs() * 2**-8 + 1e-6).all())


def test_float32_weights_are_their_own_masters():
    weights = [parameter([1.0]), parameter([1.0], BF16)]
    engine = Engine(weights, OptimizerSettings(0.1))
    assert engine.masters[0] is weights[0] and engine.masters[1] is not weights[1]
    assert [m.dtype for m in engine.masters] == [F32, F32]
    state = engine.optimizer.state
    engine.backward(weights[0].sum() + weights[1].float().sum())
    engine.step(engine.grad_norm())
    assert all(s["exp_avg"].dtype == F32 for s in state.values())
    assert weights[1].item() == pytest.approx(0.9, abs=2**-9)


def test_zero_grad_drops_everything_and_no_gradient_is_no_update():
    weights = [parameter([1.0]), parameter([1.0], BF16)]
    engine = Engine(weights, OptimizerSettings(0.1, weight_decay=0.5))
    assert engine.grad_norm() == 0.0
    engine.backward(weights[0].sum() * math.nan + weights[1].float().sum())
    assert math.isnan(engine.grad_norm())
    engine.zero_grad()
    assert engine.grad_norm() == 0.0
    engine.backward(weights[1].float().sum())
    assert engine.grad_norm() == 1.0
    engine.step(1.0)
    assert weights[0].item() == 1.0 and weights[1].item() < 1.0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_norm_tells_of_a_non_finite_gradient(value):
    weights = [parameter([1.0, 2.0]), parameter([1.0])]
    engine = Engine(weights, OptimizerSettings(0.1))
    engine.backward((weights[0] * torch.tensor([1.0, value])).sum() + weights[1].sum())
    assert not math.isfinite(engine.grad_norm())


@pytest.mark.parametrize(
    "scheduler, warmup, total, expected",
    [
        ("constant", 0, 4, [1, 1, 1, 1, 1]),
        ("constant", 2, 4, [0.5, 1, 1, 1, 1]),
        # from 1 down by 1/4 each; the update after the last would have 0
        ("linear", 0, 4, [1, 0.75, 0.5, 0.25, 0, 0]),
        # two of warm-up, then 4 down
        ("linear", 2, 6, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0]),
        # (1 + cos(π·n/4)) / 2
        ("cosine", 0, 4, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0, 0]),
        ("cosine", 1, 5, [1, 1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]),
        ("linear", 4, 2, [0.25, 0.5, 0.75, 1.0]),  # a warm-up longer than the run
    ],
)
def test_schedules_by_hand(scheduler, warmup, total, expected):
    assert [schedule(n, scheduler, warmup, total) for n in range(len(expected))] == pytest.approx(expected)


def test_engine_follows_its_schedule():
    """With a constant gradient AdamW moves by the learning rate: 0.4·(1/2, 1, 1, 1/2) sums to 1.2."""
    weight = parameter([0.0])
    engine = Engine([weight], OptimizerSettings(0.4, scheduler="linear", warmup_steps=2, total_updates=4))
    rates = []
    for _ in range(4):
        rates.append(engine.learning_rate)
        engine.backward(weight.sum())
        engine.step(engine.grad_norm())
    assert rates == pytest.approx([0.2, 0.4, 0.4, 0.2])
    assert weight.item() == pytest.approx(-1.2, abs=1e-4)
