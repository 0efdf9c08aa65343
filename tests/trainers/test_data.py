"""Items in training order: every row once an epoch, whole epochs, no row read in vain."""

import pytest
from datasets import Dataset

from mlrl.errors import ConfigError
from mlrl.trainers.data import batches, first_items
from mlrl.trainers.run_length import total_steps

ROWS = [{"prompt": str(number)} for number in range(5)]
KINDS = {
    "list": ROWS,
    "Dataset": Dataset.from_list(ROWS),
    "IterableDataset": Dataset.from_list(ROWS).to_iterable_dataset(),
}


class Stream:
    """Rows that can be read again and tell no length; counts how many were read."""

    def __init__(self, rows):
        self.rows, self.read = rows, 0

    def __iter__(self):
        for row in self.rows:
            self.read += 1
            yield row


def taken(batch):
    return [(ordinal, row["prompt"]) for ordinal, row in batch.items]


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_once_an_epoch(kind):
    made = list(batches(KINDS[kind], 2, num_epochs=2, max_steps=None))
    assert [taken(b) for b in made] == [
        [(0, "0"), (1, "1")],
        [(2, "2"), (3, "3")],
        [(4, "4")],  # the last of an epoch is smaller, and not mixed with the next one
        [(5, "0"), (6, "1")],
        [(7, "2"), (8, "3")],
        [(9, "4")],
    ]
    assert [b.first for b in made] == [True, False, False, True, False, False]
    assert [b.position for b in made] == [0, 2, 4, 0, 2, 4]
    assert [b.epoch for b in made] == [0, 0, 0, 1, 1, 1]
    known = kind != "IterableDataset"
    expected = [0.4, 0.8, 1.0, 1.4, 1.8, 2.0] if known else [0, 0, 0, 1, 1, 1]
    assert [b.epoch_after for b in made] == pytest.approx(expected)
    assert total_steps(KINDS[kind], 2, 2, None) == (6 if known else None)  # 2 · ceil(5 / 2)


@pytest.mark.parametrize("max_steps", [1, 4, 6, 9])
def test_steps_or_epochs_whichever_comes_first(max_steps):
    assert len(list(batches(ROWS, 2, 2, max_steps))) == min(6, max_steps) == total_steps(ROWS, 2, 2, max_steps)
    assert total_steps(Stream(ROWS), 2, 2, max_steps) == max_steps


def test_reads_no_row_in_vain():
    stream = Stream(ROWS)
    assert len(list(batches(stream, 2, 1, max_steps=2))) == 2 and stream.read == 4
    stream = Stream(ROWS)
    assert len(first_items(stream, 2)) == 2 and stream.read <= 3


def test_a_stream_that_is_empty_or_cannot_be_read_again():
    with pytest.raises(ConfigError, match="train_dataset: epoch 1 has no rows"):
        list(batches(Stream([]), 2, 1, None))
    once = iter(ROWS)

    class Once:
        def __iter__(self):
            return once

    with pytest.raises(ConfigError, match="train_dataset: epoch 2 has no rows"):
        list(batches(Once(), 2, 3, None))


def test_rows_are_copies():
    rows = [{"prompt": "a"}]
    batch = next(batches(rows, 1, 1, None))
    batch.items[0][1]["prompt"] = "changed"
    first_items(rows, None)[0][1]["prompt"] = "changed"
    assert rows == [{"prompt": "a"}]


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_items(kind):
    assert first_items(KINDS[kind], 2) == [(0, ROWS[0]), (1, ROWS[1])]
    assert first_items(KINDS[kind], 99) == first_items(KINDS[kind], None) == list(enumerate(ROWS))
    assert first_items(KINDS[kind], 0) == []


@pytest.mark.parametrize("kind", KINDS)
def test_batches_go_on_from_any_place(kind):
    whole = list(batches(KINDS[kind], 2, 3, 7))
    for number, batch in enumerate(whole):
        assert batch.number == number
        assert list(batches(KINDS[kind], 2, 3, 7, batch.before)) == whole[number:]
        assert list(batches(KINDS[kind], 2, 3, 7, batch.after)) == whole[number + 1 :]
