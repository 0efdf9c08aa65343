import json

import pytest

from mlrl.errors import ConfigError
from mlrl.tasks.splits import train_and_held_out

SAMPLE = [{"prompt": str(i)} for i in range(10)]


def split(data_path=None, dataset=None, sizes=(None, None), fields=("prompt",)):
    train, held_out = train_and_held_out(
        data_path, dataset, splits=("train", "test"), sizes=sizes, sample=SAMPLE, fields=fields
    )
    return [row["prompt"] for row in train], [row["prompt"] for row in held_out]


@pytest.fixture
def thirty(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"row {i}"}) for i in range(30)))
    return str(path)


def test_the_last_two_of_the_sample_are_held_out():
    assert split() == ([str(i) for i in range(8)], ["8", "9"])


def test_the_last_tenth_of_a_file_is_held_out(thirty):
    train, held_out = split(thirty)
    assert train == [f"row {i}" for i in range(27)]
    assert held_out == ["row 27", "row 28", "row 29"]


def test_sizes(thirty):
    assert split(thirty, sizes=(2, 3)) == (["row 0", "row 1"], ["row 2", "row 3", "row 4"])
    train, held_out = split(thirty, sizes=(1100, 3))  # a default size for a large data set
    assert (len(train), len(held_out)) == (27, 3)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"sizes": (0, None)}, "train_size=0"),
        ({"sizes": (None, 0)}, "eval_size=0"),
        ({"sizes": (None, 10)}, "eval_size=10"),
        ({"data_path": "/no/such/file"}, "no such file"),
        ({"fields": ("prompt", "answer")}, "no field 'answer'"),
    ],
)
def test_what_leaves_nothing(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        split(**kwargs)


def test_two_sources(thirty):
    with pytest.raises(ConfigError, match="Give one of them"):
        split(thirty, "some/dataset")


def test_a_data_set_that_cannot_be_reached():
    with pytest.raises(ConfigError, match="dataset='mlrl-tests/none'"):
        split(dataset="mlrl-tests/none")
