"""How long a run is, in steps, items and optimizer updates, as far as its data set tells."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mlrl.errors import ConfigError


def run_steps(dataset: Iterable[dict] | None, args: Any) -> int | None:
    """Steps of a run; None where the data set does not tell its length and nothing else bounds the run.

    Raises:
        ConfigError: a schedule of the learning rate needs to know.
    """
    if dataset is None:
        return 0
    total = total_steps(dataset, args.rollout_batch_size, args.num_train_epochs, args.max_steps)
    if total is None and args.lr_scheduler != "constant":
        raise ConfigError(
            f"lr_scheduler={args.lr_scheduler!r}: needs the number of steps, and the train set does not tell its "
            "length. Set max_steps, or use constant"
        )
    return total


def total_steps(dataset: Iterable[dict], batch_size: int, num_epochs: int, max_steps: int | None) -> int | None:
    """Steps of so many epochs, at most `max_steps`; None where nothing tells."""
    length = _length(dataset)
    if length is None:
        return max_steps
    steps = num_epochs * -(-length // batch_size)
    return steps if max_steps is None else min(steps, max_steps)


def run_items(dataset: Iterable[dict], args: Any) -> int | None:
    """Task items of a run, each epoch's counted anew; None while unknown."""
    length = _length(dataset)
    if length is None:
        return None
    items = length * args.num_train_epochs
    return items if args.max_steps is None else min(items, args.max_steps * args.rollout_batch_size)


def run_updates(
    dataset: Iterable[dict] | None, args: Any, steps: int | None, updates_per_step: Callable[[int], int]
) -> int:
    """Optimizer updates of a run, by which schedules end; 0 while unknown.

    Args:
        steps: of the whole run; updates_per_step: updates of a step with so many items.
    """
    if steps is None or dataset is None:
        return 0
    size, length = args.rollout_batch_size, _length(dataset)
    total = steps * updates_per_step(size)
    rest = length % size if length is not None else 0
    if rest:  # the last step of an epoch has fewer items
        epochs = steps // -(-length // size)
        total -= epochs * (updates_per_step(size) - updates_per_step(rest))
    return total


def _length(dataset: Iterable[dict]) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None
