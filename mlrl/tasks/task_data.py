"""Rows of a task: from a file, from the hub, or from what ships here."""

import contextlib
import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mlrl import ConfigError

Row = dict[str, Any]


def load_rows(
    data_path: str | None,
    dataset: str | None,
    split: str,
    default: Callable[[], Sequence[Row]],
    config: str | None = None,
) -> list[Row]:
    """The rows of a file, of one split of a hub data set (and of one of its configurations), or else the default ones.

    Raises:
        ConfigError: both are given, or the rows cannot be had.
    """
    if data_path is not None and dataset is not None:
        raise ConfigError(f"task_args.dataset={dataset!r}: data_path={data_path!r} is given as well. Give one of them.")
    if data_path is not None:
        return read_rows(data_path)
    return hub_rows(dataset, split, config) if dataset is not None else [dict(row) for row in default()]


def read_rows(data_path: str) -> list[Row]:
    """The rows of a JSON, JSONL (also .gz) or parquet file.

    Raises:
        ConfigError: no such file, or not rows of fields.
    """
    path = Path(data_path).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"task_args.data_path={data_path!r}: there is no such file. Give a JSON, JSONL or parquet file."
        )
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet  # comes with datasets, and is quicker to load

            return pyarrow.parquet.read_table(path).to_pylist()
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        rows = _from_json(raw.decode())
        if isinstance(rows, dict) and ".jsonl" in path.suffixes:  # a file of a single row
            rows = [rows]
    except Exception as error:  # each format has errors of its own
        raise ConfigError(
            f"task_args.data_path={data_path!r}: cannot be read ({error}). Correct it, or give another file."
        ) from error
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(
            f"task_args.data_path={data_path!r}: no list of rows with named fields. Give one object a row."
        )
    return rows


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
        if len(lines) < 2 or not _is_json(lines[0][1]):
            raise ValueError(f"no JSON: {error}") from None
    rows = []
    for number, line in lines:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} is no JSON: {error.msg} at column {error.colno}") from None
        if not isinstance(rows[-1], dict):
            raise ValueError(f"line {number} is no row of named fields: {line[:80]}")
    return rows


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def hub_rows(dataset: str, split: str, config: str | None = None) -> list[Row]:
    """The rows of one split of a hub data set, or of a folder that looks like one.

    Raises:
        ConfigError: it cannot be loaded.
    """
    from datasets import load_dataset

    try:
        with _offline_unless(Path(dataset).exists() or _is_on_hub(dataset)):
            return load_dataset(dataset, config, split=split).to_list()
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"task_args.dataset={dataset!r}: split {split!r} cannot be loaded ({reason}). Give a hub id that this "
            f"machine can reach, or data_path= with a file of the same rows."
        ) from error


def _is_on_hub(dataset: str) -> bool:
    """Asks once, where loading would ask again and again: False where the hub cannot be reached.

    Raises:
        ValueError: there is no such data set.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        HfApi().dataset_info(dataset, timeout=10)
    except (HFValidationError, RepositoryNotFoundError):
        raise ValueError("the hub has no data set of that name, or not for you") from None
    except Exception:  # each kind of network trouble has a kind of its own
        return False
    return True


@contextlib.contextmanager
def _offline_unless(online: bool) -> Iterator[None]:
    """Where the hub cannot be reached, only what was loaded before is looked for."""
    import datasets
    import huggingface_hub.constants

    places = (datasets.config, huggingface_hub.constants)
    before = [place.HF_HUB_OFFLINE for place in places]
    try:
        for place in places if not online else ():
            place.HF_HUB_OFFLINE = True
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value


def split_rows(
    rows: Sequence[Row], train_size: int | None, eval_size: int, train_first: bool = False
) -> tuple[list[Row], list[Row]]:
    """Rows to train on and to evaluate on, apart: one part after the other from the start.

    Args:
        train_size: None for all that is left.
        train_first: the training rows stand before the evaluation rows, else after them.

    Raises:
        ConfigError: one of them would be empty.
    """
    for name, size in (("train_size", train_size), ("eval_size", eval_size)):
        if size is not None and size < 1:
            raise ConfigError(f"task_args.{name}={size!r}: no rows. Give 1 or more.")
    if train_first:
        train_size = max(len(rows) - eval_size, 0) if train_size is None else train_size
        train, held_out = rows[:train_size], rows[train_size : train_size + eval_size]
    else:
        held_out, rest = rows[:eval_size], rows[eval_size:]
        train = rest if train_size is None else rest[:train_size]
    if not train or not held_out:
        raise ConfigError(
            f"task_args.train_size={train_size!r}, eval_size={eval_size!r}: of {len(rows)} rows that leaves "
            f"{len(train)} to train and {len(held_out)} to evaluate on. Give smaller sizes."
        )
    return list(train), list(held_out)
