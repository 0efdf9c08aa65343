import gzip
import json

import pytest

from mlrl.errors import ConfigError
from mlrl.tasks.feedback import checked_mode
from mlrl.tasks.task_data import hub_rows, load_rows, read_rows, split_rows

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


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_a_single_row(tmp_path, name):
    path = tmp_path / name
    text = (json.dumps(ROWS[0]) + "\n").encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    assert read_rows(str(path)) == ROWS[:1]
    (tmp_path / "rows.json").write_text('{"splits": [1, 2]}')
    with pytest.raises(ConfigError, match="no list of rows"):  # there an object is something else than a row
        read_rows(str(tmp_path / "rows.json"))


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


@pytest.fixture
def hub(monkeypatch):
    """A hub that cannot be reached, or as a test sets `answer`; counts the requests, and what was loaded how."""
    import datasets
    import huggingface_hub

    class Hub:
        answer, asked, loaded = OSError("no network"), [], []

    def dataset_info(self, dataset, timeout):
        Hub.asked.append(dataset)
        if isinstance(Hub.answer, Exception):
            raise Hub.answer

    def load_dataset(dataset, config, split):
        Hub.loaded.append((dataset, config, split, datasets.config.HF_HUB_OFFLINE))
        if datasets.config.HF_HUB_OFFLINE:
            raise ConnectionError("not loaded before")
        return datasets.Dataset.from_list(ROWS)

    Hub.asked, Hub.loaded = [], []
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    return Hub


def test_the_hub_is_asked_once_and_waited_for_never(hub):
    with pytest.raises(ConfigError, match="task_args.dataset='a/b': split 'test' cannot be loaded .not loaded before"):
        hub_rows("a/b", "test")
    assert (hub.asked, hub.loaded) == (["a/b"], [("a/b", None, "test", True)])
    import datasets

    assert datasets.config.HF_HUB_OFFLINE is False
    hub.answer = None
    assert hub_rows("a/b", "test", "part") == ROWS
    assert hub.loaded[1:] == [("a/b", "part", "test", False)]


def test_a_name_that_the_hub_does_not_know(hub):
    from huggingface_hub.errors import HFValidationError

    hub.answer = HFValidationError("a name")
    with pytest.raises(ConfigError, match="the hub has no data set of that name"):
        hub_rows("no such name", "test")
    assert hub.loaded == []


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
