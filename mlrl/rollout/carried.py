"""What one sampling call leaves to the next, for as long as no weight changes.

The turns of a tree are drawn one call after another. The weights that were laid out for decoding still hold, and the
prompts of a turn begin, as a rule, with those of the turn before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mlrl.models.base import Base
from mlrl.models.decode_attention import DecodeAttention
from mlrl.models.decoding import DecodeStep
from mlrl.models.lora import MixedRoute
from mlrl.models.prefix_cache import Layers, PrefixCache


@dataclass
class Carried:
    """Of one base. Enter it for each call; it is good for one call alone, too.

    Attributes:
        lasting: whether another call may follow.
        prompts: what was read in the call before.
    """

    base: Base
    lasting: bool = False
    prompts: PrefixCache = field(default_factory=PrefixCache)
    _next: PrefixCache = field(default_factory=PrefixCache)
    _bytes: int = 0
    _largest_store: int = 0
    _step: tuple[tuple[str, ...], MixedRoute | None, DecodeStep] | None = None

    def route(self, adapters: list[str]) -> MixedRoute | None:
        """The route of these adapters, if that is what decodes."""
        return self._step[1] if self._step is not None and self._step[0] == tuple(adapters) else None

    def step(self, adapters: list[str], route: MixedRoute | None, rows: int, steps: int) -> DecodeStep:
        """What decodes with these adapters. Call it inside the route."""
        known = self._step is not None and self._step[0] == tuple(adapters) and self._step[1] is route
        if known and self._step[2].serves(rows, steps):
            return self._step[2]
        self._step = None  # before the next is laid out
        step = DecodeStep(self.base.language_model, route, rows, steps)
        if self.lasting and self.base.shard is None:  # the weights of a sharded network go after each call
            self._step = (tuple(adapters), route, step)
        return step

    def read(
        self, layers: Layers, prompts: list[tuple[str | None, list[int], list[int]]], store: DecodeAttention
    ) -> None:
        """Keeps the prompts of a batch for the next call: in all no more bytes than the largest batch's own store."""
        self._largest_store = max(self._largest_store, store.nbytes)
        size = sum(states.nbytes for layer in layers for states in layer)
        if self._bytes + size <= self._largest_store:
            self._bytes += size
            self._next.add(layers, prompts)

    def __enter__(self) -> Carried:
        return self

    def __exit__(self, *_) -> None:
        """What this call has read is for the next one."""
        self.prompts, self._next, self._bytes, self._largest_store = self._next, PrefixCache(), 0, 0
