"""Data sets of task items: a `datasets.Dataset` or list of dicts (rows by number), or a `datasets.IterableDataset`."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mlrl.calling import shown
from mlrl.errors import ConfigError, TaskError

_FORM = "Give a datasets.Dataset, a datasets.IterableDataset or a list of dicts"


def checked_dataset(dataset: Any, name: str) -> Any:
    """The data set itself, checked as far as that needs no reading of a stream; None stays None.

    Raises:
        ConfigError: not a data set, without rows, or with rows that are no dicts; the message names the setting `name`.
    """
    if dataset is None:
        return None
    form = _FORM
    if isinstance(dataset, Mapping):
        raise ConfigError(f"{name}={shown(dict(dataset))}: a dict, maybe of splits. {form}, e.g. one split of it.")
    readable = hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")
    if isinstance(dataset, str | bytes) or not readable:
        raise ConfigError(f"{name}={shown(dataset)}: a {type(dataset).__name__} holds no rows. {form}.")
    if hasattr(dataset, "__next__"):
        raise ConfigError(f"{name}={shown(dataset)}: an iterator can be read only once, epochs need more. {form}.")
    if not hasattr(dataset, "__len__"):
        return dataset
    if len(dataset) == 0:
        raise ConfigError(f"{name}={shown(dataset)}: it has no rows. {form} with at least one row.")
    if not hasattr(dataset, "__getitem__"):
        raise ConfigError(f"{name}={shown(dataset)}: a {type(dataset).__name__} has no row order. {form}.")
    for index in range(len(dataset)) if isinstance(dataset, list | tuple) else [0]:
        try:
            read_row(dataset, name, index)
        except ConfigError as error:
            if not isinstance(error.__cause__, KeyError | IndexError | TypeError):
                raise
            raise ConfigError(
                f"{name}={shown(dataset)}: a {type(dataset).__name__} whose rows are not at {name}[0]. {form}."
            ) from error
    return dataset


def read_row(dataset: Any, name: str, number: int) -> dict[str, Any]:
    """One row of a data set whose rows have numbers, as a dict of its own.

    Raises:
        ConfigError: it cannot be read, or is no dict; the message names the setting `name` and the row's number.
    """
    try:
        row = dataset[number]
    except Exception as error:  # whatever a data set raises where a row is broken
        raise ConfigError(_unreadable(name, number, error)) from error
    if not isinstance(row, Mapping):
        raise ConfigError(f"{name}[{number}]={shown(row)}: a row of type {type(row).__name__}. {_FORM}.")
    return dict(row)


def read_rows(dataset: Iterable[Any], name: str, first: int = 0) -> Iterator[dict[str, Any]]:
    """The rows of a data set in its order, as dicts of their own; the first one is number `first`.

    Raises:
        TaskError: a row cannot be read, or is no dict; the message names the setting `name` and the row's number.
    """
    rows, number = None, first
    while True:
        try:
            rows = iter(dataset) if rows is None else rows
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # whatever a data set raises where a row is broken
            raise TaskError(_unreadable(name, number, error)) from error
        if not isinstance(row, Mapping):
            kind = type(row).__name__
            raise TaskError(f"{name}[{number}]={shown(row)}: a row of type {kind}. Right is a dict of named fields.")
        yield dict(row)
        number += 1


def _unreadable(name: str, number: int, error: Exception) -> str:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{name}[{number}]: the row cannot be read ({reason[:300]}). Correct it, or take it out."


def field_names(dataset: Any) -> list[str] | None:
    """The names of the fields where they are known without reading a stream."""
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return list(dataset[0])
    return getattr(dataset, "column_names", None)
