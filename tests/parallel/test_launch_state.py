"""What the launcher set up, and what training here refuses."""

from types import SimpleNamespace

import pytest
import torch

from mlrl.errors import ConfigError
from mlrl.parallel import launch as module
from mlrl.parallel.launch import Launch


def state(monkeypatch, num_processes: int = 1, device: str = "cpu", precision: str | None = None) -> None:
    made = SimpleNamespace(num_processes=num_processes, process_index=0, device=torch.device(device))
    monkeypatch.setattr(module, "PartialState", lambda **_: made)
    if precision is None:
        monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    else:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)


def test_without_a_launcher_there_is_one_process():
    found = Launch.detect()
    assert (found.rank, found.world_size, found.is_main) == (0, 1, True)
    assert found.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_processes_that_do_not_know_of_one_another_are_refused(monkeypatch):
    state(monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"num_processes=2: 1 of them joined.*accelerate launch"):
        Launch.detect()


def zero(monkeypatch, **settings) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    for name, value in settings.items():
        monkeypatch.setenv(f"ACCELERATE_DEEPSPEED_{name}", value)


def test_zero_settings_come_from_the_launch_configuration(monkeypatch):
    state(monkeypatch)
    assert (Launch.detect().zero, Launch.detect().zero_stage) == (None, 0)
    zero(monkeypatch, ZERO_STAGE="3", OFFLOAD_OPTIMIZER_DEVICE="cpu", OFFLOAD_PARAM_DEVICE="none")
    found = Launch.detect()
    assert found.zero_stage == 3
    assert found.zero["offload_optimizer"]["device"] == "cpu"
    assert "auto" not in str(found.zero)


def test_stage_0_is_no_zero(monkeypatch):
    state(monkeypatch)
    zero(monkeypatch, ZERO_STAGE="0")
    assert Launch.detect().zero is None


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_precisions_that_need_loss_scaling_are_refused(monkeypatch, precision):
    state(monkeypatch, precision=precision)
    with pytest.raises(ConfigError, match=f"mixed_precision='{precision}'.*bf16"):
        Launch.detect()


@pytest.mark.parametrize(
    "precision, asked, expected",
    [
        (None, None, torch.float32),
        ("no", None, torch.float32),
        ("no", "bfloat16", torch.bfloat16),
        (None, "float32", torch.float32),
        ("bf16", None, torch.bfloat16),
        ("bf16", "bfloat16", torch.bfloat16),
    ],
)
def test_compute_type_on_a_cpu(monkeypatch, precision, asked, expected):
    state(monkeypatch, precision=precision)
    assert Launch.detect().dtype(asked) == expected


def test_contradicting_types_are_refused(monkeypatch):
    state(monkeypatch, precision="bf16")
    with pytest.raises(ConfigError, match=r"dtype='float32'.*mixed_precision 'bfloat16'"):
        Launch.detect().dtype("float32")


@pytest.mark.parametrize("supported, expected", [(True, torch.bfloat16), (False, torch.float32)])
def test_a_gpu_computes_in_bfloat16_where_it_has_it(monkeypatch, supported, expected):
    state(monkeypatch, device="cuda:0")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supported)
    assert Launch.detect().dtype(None) == expected
