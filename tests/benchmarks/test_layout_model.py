"""The written model of memory and traffic: its counts, its arithmetic by hand, and the table that the README shows."""

import pytest
import torch

from mlrl.parallel.engine import Engine, OptimizerSettings
from tests.benchmarks import layout_model
from tests.benchmarks.layout_model import MODELS, Layout, Model, Work, activations, kv_cache, memory, states, traffic
from tests.distributed.launching import ROOT

SMALL = Model("small", layers=2, hidden=8, kv=4, mlp=16, vocabulary=10, tied=True)
WORK = Work(sequences=4, tokens=8, micro_batch_tokens=16, lora_rank=2)


def test_readme_shows_what_the_model_prints():
    assert layout_model.table() in (ROOT / "accelerate_configs/README.md").read_text()


def test_parameters_by_hand():
    # layer: 8·8 + 2·8·4 + 8·8 + 3·8·16 = 576, biases 8 + 2·4, norms 2·8: 608; embedding 10·8, last norm 8
    assert SMALL.parameters == 2 * 608 + 88
    # rank 2 on (8,8) (8,4) (8,4) (8,8) (8,16) (8,16) (16,8): 2·(16 + 12 + 12 + 16 + 24 + 24 + 24) = 256 a layer
    assert SMALL.adapter_parameters(2) == 512
    assert MODELS[0].parameters == 1_543_714_304  # as its model card counts
    assert MODELS[1].parameters == 7_615_616_512


def test_states_by_hand():
    full, lora = "full", "lora"
    P, A = 1304, 512
    # 2 agents on each of 4 ranks: 2 + 4 + 8 bytes a weight, 4 of gradient, 2 more of the agent that is in its backward
    assert states(SMALL, Layout("shared", full, "ddp", 4), WORK) == (2 * 14 * P, (2 * 4 + 2) * P)
    # ZeRO-1 over 4 ranks: 2 + 12/4 + 4; over the 2 ranks of one agent: 2 + 12/2 + 4
    assert states(SMALL, Layout("shared", full, "zero1", 4), WORK) == (2 * 9 * P, 2 * P)
    assert states(SMALL, Layout("split", full, "zero1", 4), WORK) == (12 * P, 2 * P)
    assert states(SMALL, Layout("shared", full, "zero2", 4), WORK) == (2 * 5 * P, 2 * 1 * P)
    assert states(SMALL, Layout("shared", full, "zero3", 4), WORK) == (2 * 4.5 * P, 0)
    # one base for both adapters, and sharded alone at stage 3
    assert states(SMALL, Layout("shared", lora, "ddp", 4), WORK) == (2 * P + 2 * 12 * A, 2 * 4 * A)
    assert states(SMALL, Layout("shared", lora, "zero3", 4), WORK) == (2 * P / 4 + 2 * 12 * A, 2 * 4 * A)
    assert states(SMALL, Layout("split", lora, "zero2", 4), WORK) == (2 * P + 10 * A, 2 * A)


def test_peak_by_hand():
    assert kv_cache(SMALL, WORK) == 2 * 2 * 4 * 2 * 4 * 8  # keys and values, layers, width, bytes, sequences, tokens
    kept = 16 * (2 * 2 * 8 + 22.1 * 8 + 6 * 16 + 4 * 4)
    assert activations(SMALL, "full", WORK) == pytest.approx(kept + 1.5e9)
    of_lora = 16 * (2 * 2 * 8 + 18.3 * 8 + 4 * 16 + 4 * 4)
    assert activations(SMALL, "lora", WORK) == pytest.approx(of_lora + 1.5e9)
    # training is the larger part of so small a model: overhead, states, gradients, activations, bucket, gathered
    expected = 2e9 + 9 * 1304 + kept + 1.5e9 + 1e9 + 2 * 1304
    assert memory(SMALL, Layout("shared", "full", "zero3", 4), WORK) == pytest.approx(expected)


def test_traffic_by_hand():
    P, A = 1304, 512
    # m = 4·8/16 = 2 micro-batches a rank, 1 of each agent in shared; ρ = 3/4 over 4 ranks, 1/2 over 2
    assert traffic(SMALL, Layout("shared", "full", "ddp", 4), WORK) == 0.75 * 2 * 8 * P
    assert traffic(SMALL, Layout("split", "full", "ddp", 4), WORK) == 0.5 * 8 * P
    assert traffic(SMALL, Layout("shared", "full", "zero2", 4), WORK) == 0.75 * 2 * (2 + 2) * P
    assert traffic(SMALL, Layout("split", "full", "zero2", 4), WORK) == 0.5 * (2 * 2 + 2) * P
    # weights gathered 3 times a micro-batch and once for sampling, gradients scattered once a micro-batch
    assert traffic(SMALL, Layout("split", "full", "zero3", 4), WORK) == 0.5 * (2 * 7 + 2 * 2) * P
    assert traffic(SMALL, Layout("shared", "lora", "zero3", 4), WORK) == 0.75 * (2 * P * 7 + 2 * 8 * A)
    assert traffic(SMALL, Layout("shared", "lora", "ddp", 4), WORK) == 0.75 * 2 * 8 * A
    assert traffic(SMALL, Layout("split", "full", "zero3", 2), WORK) == 0  # an agent a rank


@pytest.mark.parametrize(
    ("dtype", "rest", "gradient"),
    [
        (torch.bfloat16, layout_model.WEIGHT + layout_model.MASTER, layout_model.GRADIENT),
        (torch.float32, layout_model.ADAPTER, layout_model.ADAPTER_GRADIENT),
    ],
)
def test_engine_holds_the_bytes_a_weight_of_the_model(dtype, rest, gradient):
    weight = torch.nn.Parameter(torch.ones(512, 512, dtype=dtype))
    engine = Engine([weight], OptimizerSettings(learning_rate=1e-3))
    for _ in range(2):
        engine.backward(weight.float().square().sum())
        training = held(engine)
        engine.step(engine.grad_norm())
    assert held(engine) == pytest.approx(rest * weight.numel(), rel=1e-3)
    assert training == pytest.approx((rest + gradient) * weight.numel(), rel=1e-3)


def held(engine: Engine) -> int:
    """Bytes of weights, masters, moments and gradients."""
    moments = [value for state in engine.optimizer.state.values() for value in state.values()]
    tensors = [*engine.parameters, *engine.masters, *moments]
    tensors += [t.grad for t in [*engine.parameters, *engine.masters] if t.grad is not None]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
