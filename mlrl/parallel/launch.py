"""What `accelerate launch` set up: this process, its device, its precision, and how models are to be sharded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import PartialState

from mlrl.errors import ConfigError
from mlrl.quiet import quiet_deepspeed

_PRECISIONS = {"bf16": "bfloat16", "no": None}


@dataclass(frozen=True)
class Launch:
    """The process this is.

    Attributes:
        rank, world_size: place among all processes; device: where its models live.
        mixed_precision: of the launch configuration, None where it names none.
        zero: DeepSpeed's `zero_optimization` settings of the launch configuration; None without ZeRO.
    """

    rank: int
    world_size: int
    device: torch.device
    mixed_precision: str | None
    zero: dict[str, Any] | None = None
    several_machines: bool = False

    @classmethod
    def detect(cls) -> Launch:
        """Reads the process state that the launcher prepared.

        Raises:
            ConfigError: processes that do not know of one another, or a precision that training here does not offer.
        """
        state = PartialState(cpu=not torch.cuda.is_available())
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if started != state.num_processes:
            raise ConfigError(
                f"num_processes={started}: {state.num_processes} of them joined. Start them with accelerate launch"
            )
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if precision not in _PRECISIONS:
            raise ConfigError(f"mixed_precision={precision!r}: not supported. Use 'no' or 'bf16' in the launch config")
        device = state.device
        several = os.environ.get("LOCAL_WORLD_SIZE", "1") != os.environ.get("WORLD_SIZE", "1")
        zero = _zero_settings()
        return cls(state.process_index, state.num_processes, device, _PRECISIONS[precision], zero, several)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def zero_stage(self) -> int:
        """0 without ZeRO."""
        return 0 if self.zero is None else self.zero["stage"]

    def dtype(self, asked: str | None) -> torch.dtype:
        """Compute type of the models: as asked, else of the launch config, else bfloat16 where the GPU has it."""
        if asked is not None and self.mixed_precision is not None and asked != self.mixed_precision:
            raise ConfigError(
                f"dtype={asked!r}: the launch config says mixed_precision {self.mixed_precision!r}. "
                "Make them agree, or drop one"
            )
        name = asked or self.mixed_precision
        if name is None:
            fast = self.device.type == "cuda" and torch.cuda.is_bf16_supported()
            name = "bfloat16" if fast else "float32"
        return getattr(torch, name)


def _zero_settings() -> dict[str, Any] | None:
    """The ZeRO block of the launch configuration; what it leaves to be chosen ("auto") is DeepSpeed's default."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
        return None
    quiet_deepspeed()
    try:
        import deepspeed  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "distributed_type='DEEPSPEED': the package deepspeed is not installed. pip install deepspeed"
        ) from error
    from accelerate.utils import DeepSpeedPlugin

    # models are loaded whole and sharded over their agent's ranks, not over all ranks while they load
    plugin = DeepSpeedPlugin(zero3_init_flag=False)
    block = plugin.hf_ds_config.config.get("zero_optimization", {})
    settings = _without_auto(block)
    return settings if settings.get("stage", 0) else None


def _without_auto(block: dict[str, Any]) -> dict[str, Any]:
    kept = {k: _without_auto(v) if isinstance(v, dict) else v for k, v in block.items() if v != "auto"}
    return {k: v for k, v in kept.items() if v is not None}
