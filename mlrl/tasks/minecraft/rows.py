"""Rows of a CSV file, or of any file that other tasks read."""

import csv
from pathlib import Path

from mlrl import ConfigError
from mlrl.tasks.task_data import Row, read_rows


def read_table(data_path: str) -> list[Row]:
    """The rows of a CSV (with a header), JSON, JSONL or parquet file.

    Raises:
        ConfigError: no such file, or no rows in it.
    """
    path = Path(data_path).expanduser()
    if path.suffix != ".csv" or not path.is_file():
        return read_rows(data_path)
    with path.open(newline="", encoding="utf-8") as file:
        rows = [dict(row) for row in csv.DictReader(file)]
    if not rows:
        raise ConfigError(f"task_args.data_path={data_path!r}: no rows under a header.")
    return rows
