import gzip
import json

import pytest

from mlrl.errors import ConfigError
from mlrl.tasks.feedback import checked_mode
from mlrl.tasks.task_data import load_rows, read_rows, split_rows

ROWS = [{"a": 1, "b": "é"}, {"a": 2, "b": "x\ny"}]


@pytest.fixture(params=["rows.json", "rows.jsonl", "rows.jsonl.gz", "rows.parquet"])
def path(request, tmp_path):
    path = tmp_path / request.param
    lines = "\n\n".join(json.dumps(row) for row in ROWS)
    if path.suffix == ".parquet":
        from datasets import Dataset

        Dataset.from_list(ROWS).to_parquet(str(path))
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(json.dumps(ROWS) if path.suffix == ".json" else lines)
    return str(path)


def test_rows_of_a_file(path):
    assert read_rows(path) == ROWS
    assert load_rows(path, None, "test", lambda: []) == ROWS


@pytest.mark.parametrize("content", ["", "[]", "[1, 2]", "{", '{"a": 1', "3", "\x00"])
def test_files_without_rows(tmp_path, content):
    path = tmp_path / "rows.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="task_args.data_path="):
        read_rows(str(path))


def test_what_cannot_be_had(tmp_path):
    with pytest.raises(ConfigError, match="there is no such file"):
        read_rows(str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="dataset='x/y': data_path='z' is given as well"):
        load_rows("z", "x/y", "test", lambda: [])
    with pytest.raises(ConfigError, match="dataset='no_such/set': split 'test' cannot be loaded"):
        load_rows(None, "no_such/set", "test", lambda: [])
    assert load_rows(None, None, "test", lambda: ROWS) == ROWS


def test_parts():
    rows = list(range(10))
    assert split_rows(rows, 3, 2) == ([2, 3, 4], [0, 1])
    assert split_rows(rows, None, 2) == (rows[2:], [0, 1])
    assert split_rows(rows, 3, 2, train_first=True) == ([0, 1, 2], [3, 4])
    assert split_rows(rows, None, 2, train_first=True) == (rows[:8], [8, 9])
    for train_size, eval_size, first in [(3, 10, False), (10, 3, True), (None, 10, True)]:
        with pytest.raises(ConfigError, match="of 10 rows"):
            split_rows(rows, train_size, eval_size, first)
    with pytest.raises(ConfigError, match="train_size=0"):
        split_rows(rows, 0, 2)


def test_words_of_feedback():
    assert checked_mode("plain", ("plain", "passed")) == "plain"
    with pytest.raises(ConfigError, match="feedback='Plain'.*Right is one of plain, passed"):
        checked_mode("Plain", ("plain", "passed"))
