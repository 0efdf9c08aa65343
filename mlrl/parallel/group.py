"""A set of processes that act together, and the few things they say to one another.

Objects (texts, token ids, rewards, metrics) travel over gloo, tensors over the device's own backend. A group of one
process needs neither, so that code reads the same whatever the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mlrl.profiling import span

T, R = TypeVar("T"), TypeVar("R")

_BUCKET = 2**25  # elements of one reduction: 128 MB of float32


@dataclass(frozen=True)
class Group:
    """Ranks in ascending order, and this process among them.

    Attributes:
        ranks: of all processes, those that belong; rank: of this process, a member or not.
        objects, tensors: process groups over these ranks; None where there is only one.
    """

    ranks: tuple[int, ...]
    rank: int
    objects: dist.ProcessGroup | None = None
    tensors: dist.ProcessGroup | None = None

    @classmethod
    def alone(cls) -> Group:
        """The group of a run in one process."""
        return cls((0,), 0)

    def apart(self) -> Group:
        """The same members with connections of their own for objects, for a second thread beside the first.

        All processes of the run call it together.
        """
        if self.size == 1:
            return self
        return replace(self, objects=dist.new_group(list(self.ranks), backend="gloo"), tensors=None)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def member(self) -> bool:
        return self.rank in self.ranks

    @property
    def index(self) -> int:
        """Place of this process among the members."""
        return self.ranks.index(self.rank)

    @property
    def is_first(self) -> bool:
        return self.rank == self.ranks[0]

    def gather(self, value: Any) -> list[Any]:
        """Every member's value, in rank order, on every member."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with span("communication"):
            dist.all_gather_object(values, value, group=self.objects)
        return values

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns on the first member, on all."""
        if self.size == 1:
            return make()
        box = [make() if self.is_first else None]
        with span("communication"):
            dist.broadcast_object_list(box, src=self.ranks[0], group=self.objects)
        return box[0]

    def map(self, function: Callable[[T], R], pieces: Sequence[T], costs: Sequence[float] | None = None) -> list[R]:
        """`function` of every piece, each computed by one member; all results, in order, on every member."""
        owners = spread(costs if costs is not None else [1.0] * len(pieces), self.size)
        mine = {i: function(piece) for i, piece in enumerate(pieces) if owners[i] == self.index}
        return self.collect(mine, len(pieces))

    def collect(self, mine: dict[int, R], count: int) -> list[R]:
        """`count` results in order, from members that hold some of them each."""
        results: dict[int, R] = {}
        for part in self.gather(mine):
            results.update(part)
        return [results[i] for i in range(count)]

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Adds up tensors of equal shapes over the members, in place and in few reductions."""
        if self.size == 1:
            return
        with span("communication"):
            self._sum_buckets(tensors)

    def _sum_buckets(self, tensors: Sequence[torch.Tensor]) -> None:
        bucket: list[torch.Tensor] = []
        for tensor in tensors:
            if bucket and (
                sum(t.numel() for t in bucket) + tensor.numel() > _BUCKET or tensor.dtype != bucket[0].dtype
            ):
                self._sum_bucket(bucket)
                bucket = []
            bucket.append(tensor)
        if bucket:
            self._sum_bucket(bucket)

    def _sum_bucket(self, bucket: list[torch.Tensor]) -> None:
        if len(bucket) == 1 and bucket[0].is_contiguous():
            dist.all_reduce(bucket[0], group=self.tensors)
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat, group=self.tensors)
        for tensor, summed in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(summed.view_as(tensor))

    def barrier(self) -> None:
        """Waits for all members."""
        if self.size > 1:
            with span("communication"):
                dist.barrier(group=self.objects)


def spread(costs: Sequence[float], size: int) -> list[int]:
    """The member that does each piece: neighbours stay together (they share prompts), and costs are even.

    The pieces are laid end to end, the whole is cut into `size` equal stretches, and each piece belongs to the stretch
    that holds its middle. Owners never decrease, so pieces of one member follow one another.
    """
    total, before, owners = sum(costs), 0.0, []
    for cost in costs:
        middle = (before + cost / 2) / total if total else 0.0
        owners.append(min(size - 1, int(middle * size)))
        before += cost
    return owners
