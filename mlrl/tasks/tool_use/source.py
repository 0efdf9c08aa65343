"""Where the rows of a tool task come from: a file, the hub, an installed benchmark package, or the sample."""

from collections.abc import Callable, Sequence
from pathlib import Path

from mlrl import ConfigError
from mlrl.tasks.splits import train_and_held_out
from mlrl.tasks.task_data import Row, split_rows
from mlrl.tasks.tool_use.benchmark import data_folder
from mlrl.tasks.tool_use.rows import tool_row


def tool_rows(
    data_path: str | None,
    dataset: str | None,
    splits: tuple[str, str],
    sizes: tuple[int | None, int | None],
    sample: Sequence[Row],
    packaged: Callable[[Path], list[Row]],
) -> tuple[list[Row], list[Row]]:
    """Rows to train on and to evaluate on, as `tool_row` makes them.

    Args:
        dataset: a hub id, ``bfcl-eval`` for the installed package, ``sample`` for ours; None: the package where it is
            installed, else ours.
        sizes: rows of each; None: all, of which a fifth (2 of the sample) is held out where there is one list.
        packaged: reads the rows of the package's data folder.

    Raises:
        ConfigError: rows that cannot be had, or none left.
    """
    folder = data_folder()
    if dataset == "bfcl-eval" and folder is None:
        raise ConfigError(
            "task_args.dataset='bfcl-eval': the package is not installed. "
            "Install it without its dependencies: pip install bfcl-eval --no-deps"
        )
    if data_path is None and folder is not None and dataset in (None, "bfcl-eval"):
        rows = _readable(packaged(folder))
        return split_rows(rows, sizes[0], sizes[1] or max(1, len(rows) // 5), train_first=True)
    own = None if dataset in ("sample", "bfcl-eval") else dataset
    train, held_out = train_and_held_out(
        data_path, own, splits=splits, sizes=sizes, sample=sample, fields=("user_prompt", "function", "ground_truth")
    )
    return _readable(train), _readable(held_out)


def _readable(rows: Sequence[Row]) -> list[Row]:
    """Rows that need a call; a step without one gives nothing to share."""
    read = [tool_row(row, number) for number, row in enumerate(rows)]
    kept = [row for row in read if row["ground_truth"]]
    if not kept:
        raise ConfigError("task_args.data_path or dataset: no row has a gold call.")
    return kept
