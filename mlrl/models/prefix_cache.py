"""Keys and values of prompts that were read before, for prompts that begin alike, while no weight changes.

In a dialogue the prompts of a turn repeat those of the turn before; `PrefixTree.pack` leaves out what is known.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from mlrl.models.beginnings import common_length

Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values (T, Hkv, D) a layer."""


@dataclass(frozen=True)
class Known:
    """The beginning of a prompt in one block of a cache: positions of its tokens there, from the first on."""

    block: int
    positions: list[int]


class PrefixCache:
    """Blocks of keys and values, each from one forward over many prompts."""

    def __init__(self):
        self.blocks: list[Layers] = []
        self._prompts: dict[Hashable, list[tuple[tuple[int, ...], int, list[int]]]] = {}  # in lexical order

    def add(self, layers: Layers, prompts: Sequence[tuple[Hashable, Sequence[int], list[int]]]) -> None:
        """A block, and its prompts: what runs each (their weights), its tokens, and their positions in the block."""
        for weights, token_ids, positions in prompts:
            bisect.insort(self._prompts.setdefault(weights, []), (tuple(token_ids), len(self.blocks), positions))
        self.blocks.append(layers)

    def find(self, weights: Hashable, token_ids: tuple[int, ...]) -> Known | None:
        """The longest beginning of a prompt that is known for these weights."""
        prompts = self._prompts.get(weights, [])
        place = bisect.bisect_left(prompts, (token_ids,))
        best, length = None, 0
        for known, block, positions in prompts[max(place - 1, 0) : place + 1]:  # one of its neighbours is the nearest
            common = common_length(known, token_ids)
            if common > length:
                best, length = Known(block, positions[:common]), common
        return best


class KnownStates:
    """The keys and values of one forward that need not be computed: places 0 … length − 1 of what can be seen."""

    def __init__(self, cache: PrefixCache, device: torch.device | str = "cpu"):
        self.length = 0
        self._cache, self._device = cache, device
        self._parts: list[tuple[int, torch.Tensor]] = []

    def take(self, block: int, positions: list[int]) -> list[int]:
        """Adds tokens of a block; returns their places here."""
        self._parts.append((block, torch.tensor(positions, device=self._device)))
        self.length += len(positions)
        return list(range(self.length - len(positions), self.length))

    def before(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Puts the known ones of a layer in front of the new (T, Hkv, D)."""
        parts = [(self._cache.blocks[block][layer], index) for block, index in self._parts]
        return (
            torch.cat([*(states[0][index] for states, index in parts), key]),
            torch.cat([*(states[1][index] for states, index in parts), value]),
        )
