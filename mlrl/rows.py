"""Data sets of task items: a `datasets.Dataset` or list of dicts (rows by number), or a `datasets.IterableDataset`."""

from collections.abc import Mapping
from typing import Any

from mlrl.calling import shown
from mlrl.errors import ConfigError


def checked_dataset(dataset: Any, name: str) -> Any:
    """The data set itself, checked as far as that needs no reading of a stream; None stays None.

    Raises:
        ConfigError: not a data set, without rows, or with rows that are no dicts; the message names the setting `name`.
    """
    if dataset is None:
        return None
    form = "Give a datasets.Dataset, a datasets.IterableDataset or a list of dicts"
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
            row = dataset[index]
        except (KeyError, IndexError, TypeError) as error:
            raise ConfigError(
                f"{name}={shown(dataset)}: a {type(dataset).__name__} whose rows are not at {name}[0]. {form}."
            ) from error
        if not isinstance(row, Mapping):
            raise ConfigError(f"{name}[{index}]={shown(row)}: a row of type {type(row).__name__}. {form}.")
    return dataset


def field_names(dataset: Any) -> list[str] | None:
    """The names of the fields where they are known without reading a stream."""
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return list(dataset[0])
    return getattr(dataset, "column_names", None)
