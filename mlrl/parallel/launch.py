"""What `accelerate launch` set up: this process, its device, its precision."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from accelerate import PartialState

from mlrl.errors import ConfigError

_PRECISIONS = {"bf16": "bfloat16", "no": None}


@dataclass(frozen=True)
class Launch:
    """The process this is.

    Attributes:
        rank, world_size: place among all processes; device: where its models live.
        mixed_precision: of the launch configuration, None where it names none.
    """

    rank: int
    world_size: int
    device: torch.device
    mixed_precision: str | None

    @classmethod
    def detect(cls) -> Launch:
        """Reads the process state that the launcher prepared.

        Raises:
            ConfigError: several processes, or a precision that training here does not offer.
        """
        state = PartialState(cpu=not torch.cuda.is_available())
        if state.num_processes > 1:
            raise ConfigError(
                f"num_processes={state.num_processes}: this version trains in one process. "
                "Launch with --num_processes 1"
            )
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if precision not in _PRECISIONS:
            raise ConfigError(f"mixed_precision={precision!r}: not supported. Use 'no' or 'bf16' in the launch config")
        return cls(state.process_index, state.num_processes, state.device, _PRECISIONS[precision])

    @property
    def is_main(self) -> bool:
        return self.rank == 0

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
