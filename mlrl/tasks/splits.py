"""Rows to train on and rows held out: from two splits of a hub data set, from a file, or from a sample."""

from collections.abc import Sequence

from mlrl import ConfigError
from mlrl.tasks.task_data import Row, hub_rows, load_rows, split_rows


def train_and_held_out(
    data_path: str | None,
    dataset: str | None,
    *,
    splits: tuple[str, str],
    sizes: tuple[int | None, int | None],
    sample: Sequence[Row],
    fields: Sequence[str] = (),
) -> tuple[list[Row], list[Row]]:
    """Two lists of rows, apart from each other.

    Args:
        splits: train and eval split of a hub data set, such as ``("train", "test")``.
        sizes: rows of each; None: all of a split. Of a file or the sample the last tenth (at least 1, 2 of the sample)
            is held out unless a size is given, and what stands before it is trained on.
        sample: the rows where neither a file nor a data set is given.
        fields: what every row must have.

    Raises:
        ConfigError: rows that cannot be had, that lack a field, or sizes that leave none.
    """
    if dataset is not None and data_path is None:
        train, held_out = (_first_rows(dataset, split, size) for split, size in zip(splits, sizes, strict=True))
    else:
        rows = load_rows(data_path, dataset, splits[0], lambda: sample)
        train_size, eval_size = sizes
        if eval_size is None:
            eval_size = 2 if data_path is None else max(1, len(rows) // 10)
        train, held_out = split_rows(rows, _at_most(train_size, len(rows) - eval_size), eval_size, train_first=True)
    source = f"dataset={dataset!r}" if dataset is not None else f"data_path={data_path!r}"
    for row in (*train, *held_out):
        for field in fields:
            if field not in row:
                raise ConfigError(
                    f"task_args.{source}: a row has no field {field!r}, but {', '.join(map(repr, row)) or 'none'}. "
                    f"Give rows with {', '.join(map(repr, fields))}."
                )
    return train, held_out


def _first_rows(dataset: str, split: str, size: int | None) -> list[Row]:
    if size is not None and size < 1:
        raise ConfigError(f"task_args.train_size or eval_size={size!r}: no rows. Give 1 or more.")
    return hub_rows(dataset, split if size is None else f"{split}[:{size}]")


def _at_most(size: int | None, most: int) -> int | None:
    """A default size may ask for more rows than a small file has; `split_rows` refuses sizes below 1."""
    return size if size is None or size < 1 else min(size, max(most, 0)) or None
