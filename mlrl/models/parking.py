"""Networks that only some phases of a run use: in main memory meanwhile, where they leave a GPU to others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from mlrl.models.base import Base


class Parking:
    """Networks at rest but inside `use`.

    Those that others use too, and those that lie sharded over ranks, stay where they are.

    Args:
        bases: the networks; None is left out. used: by others, all the time.
        device: where they are used.
    """

    def __init__(self, bases: Iterable[Base | None], used: Sequence[Base], device: torch.device):
        busy = {id(base.model) for base in used}
        distinct = {id(base.model): base for base in bases if base is not None}
        self.bases = [base for key, base in distinct.items() if key not in busy and base.shard is None]
        self.device = device
        self._rest()

    @contextmanager
    def use(self) -> Iterator[None]:
        """They are on their device inside."""
        for base in self.bases:
            base.model.to(self.device)
        try:
            yield
        finally:
            self._rest()

    def _rest(self) -> None:
        for base in self.bases:
            base.model.to("cpu")
