"""Task items in training order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mlrl.errors import ConfigError
from mlrl.rows import read_rows


@dataclass(frozen=True)
class Place:
    """How far a run has come in its data: whole epochs, items of this one, items and batches of all."""

    epoch: int = 0
    position: int = 0
    ordinal: int = 0
    batches: int = 0


@dataclass(frozen=True)
class Batch:
    """The items of one step.

    Attributes:
        items: (ordinal, row), ordinals counting all items of the run.
        epoch: epochs done before this batch, whole; first: whether it opens its epoch.
        position: items of this epoch before the batch; length: items of an epoch, None while unknown.
        number: batches of the run before it.
    """

    items: list[tuple[int, dict]]
    epoch: int
    position: int
    length: int | None
    number: int = 0

    @property
    def before(self) -> Place:
        """How far the run had come when this batch was drawn."""
        return Place(self.epoch, self.position, self.items[0][0], self.number)

    @property
    def after(self) -> Place:
        """How far it has come when this batch is done."""
        count = len(self.items)
        return Place(self.epoch, self.position + count, self.items[0][0] + count, self.number + 1)

    @property
    def first(self) -> bool:
        return self.position == 0

    @property
    def epoch_after(self) -> float:
        """Epochs done after this batch, with fraction; the fraction is 0 where the length is unknown."""
        return self.epoch + ((self.position + len(self.items)) / self.length if self.length else 0.0)


def batches(
    dataset: Iterable[dict], batch_size: int, num_epochs: int, max_steps: int | None, start: Place = Place()
) -> Iterator[Batch]:
    """Batches of a data set in its own order, epoch after epoch, the last of an epoch maybe smaller.

    Reads no row that it does not give, apart from those before `start` where a data set cannot skip them.

    Args:
        start: where to go on.

    Raises:
        ConfigError: an epoch has no rows.
        TaskError: a row cannot be read.
    """
    length = len(dataset) if hasattr(dataset, "__len__") else None
    ordinal, number = itertools.count(start.ordinal), start.batches
    last = math.inf if max_steps is None else max_steps
    for epoch in range(start.epoch, num_epochs):
        position = start.position if epoch == start.epoch else 0
        rows = read_rows(_rows_from(dataset, position), "train_dataset", position)
        while number < last and (chunk := list(itertools.islice(rows, batch_size))):
            yield Batch([(next(ordinal), row) for row in chunk], epoch, position, length, number)
            position += len(chunk)
            number += 1
        if number < last and position == 0:
            raise ConfigError(f"train_dataset: epoch {epoch + 1} has no rows. Give a data set that can be read again")


def _rows_from(dataset: Iterable[dict], position: int) -> Iterable[dict]:
    if position == 0:
        return dataset
    if hasattr(dataset, "__len__") and position >= len(dataset):
        return ()
    if hasattr(dataset, "skip"):  # those of `datasets`
        return dataset.skip(position)
    if isinstance(dataset, Sequence):
        return (dataset[index] for index in range(position, len(dataset)))
    return itertools.islice(iter(dataset), position, None)


def first_items(dataset: Iterable[dict], count: int | None) -> list[tuple[int, dict]]:
    """The first `count` items (None: all) of an evaluation set, numbered from 0.

    Raises:
        TaskError: a row cannot be read.
    """
    return list(enumerate(itertools.islice(read_rows(dataset, "eval_dataset"), count)))
