"""Micro-batches of pairs or texts, spread over the ranks that hold a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from mlrl.parallel.group import Group, spread


class Packed(Protocol):
    """A micro-batch; `places` are the places of what it holds."""

    places: list[int]


P = TypeVar("P", bound=Packed)


def rank_batches(
    costs: Sequence[float], pack: Callable[[list[int]], Iterable[P]], group: Group, lockstep: bool
) -> list[P | None]:
    """This rank's micro-batches of pieces with these costs.

    Args:
        pack: places of some pieces → their micro-batches, which number them from 0.
        lockstep: equally many on every rank, filled up with None; else a rank may have none at all.
    """
    owners = spread(costs, group.size)
    shares: dict[int, list[P]] = {}
    for rank in range(group.size) if lockstep else [group.index]:
        places = [place for place, owner in enumerate(owners) if owner == rank]
        shares[rank] = list(pack(places))
        for batch in shares[rank]:
            batch.places = [places[place] for place in batch.places]
    own = shares[group.index]
    return [*own, *[None] * (max(map(len, shares.values())) - len(own))]
