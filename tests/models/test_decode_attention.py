"""Rows that hold their prompt together attend as if each were alone, whoever leaves and when."""

import pytest
import torch

from mlrl.models.decode_attention import DecodeAttention, rows_together

HEADS, KEY_HEADS, SIZE = 6, 2, 4


class RowsAlone:
    """Keys and values of each row in a list of its own."""

    def __init__(self, prompts, prompt_of_row):
        self.rows = [prompts[p] for p in prompt_of_row]

    def attend(self, query, key, value, scaling):
        outputs = []
        for row, (keys, values) in enumerate(self.rows):
            keys, values = torch.cat([keys, key[row][None]]), torch.cat([values, value[row][None]])
            self.rows[row] = (keys, values)
            of_head = [h // (HEADS // KEY_HEADS) for h in range(HEADS)]
            scores = torch.einsum("hd,thd->ht", query[row], keys[:, of_head]) * scaling
            outputs.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values[:, of_head]))
        return torch.stack(outputs)

    def keep(self, order):
        self.rows = [self.rows[row] for row in order.tolist()]


def made(prompt_of_row, lengths, steps, together, layers=2, device="cpu"):
    """A store of random prompts, and the same as rows alone, a layer each."""
    total = sum(lengths)
    captured = [tuple(torch.randn(total, KEY_HEADS, SIZE, dtype=torch.float64) for _ in "kv") for _ in range(layers)]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    paths = [list(range(start, start + length)) for start, length in zip(starts, lengths, strict=True)]
    prompts = [[(key[path], value[path]) for path in paths] for key, value in captured]
    store = DecodeAttention(torch.tensor(prompt_of_row), torch.tensor(lengths), steps, together)
    longest = max(lengths)
    store.prefill(torch.tensor([path + path[-1:] * (longest - len(path)) for path in paths]), list(captured))
    return store, [RowsAlone(own, prompt_of_row) for own in prompts]


CASES = [
    ([0, 0, 0, 1, 1, 1], [5, 5]),  # as of two agents
    ([0, 0, 0, 1, 2, 2], [3, 7, 1]),  # uneven, of different lengths
    ([0, 1, 2, 3], [4, 4, 4, 4]),
    ([0, 1, 0, 2, 1, 0], [2, 6, 6]),  # rows of a prompt apart
    ([0] * 11 + [1] * 2, [9, 30]),
    ([0], [1]),
]


@pytest.mark.parametrize("together", [None, 1, 2, 3, 8])
@pytest.mark.parametrize(("prompt_of_row", "lengths"), CASES)
def test_attention_is_that_of_rows_alone(prompt_of_row, lengths, together):
    generator = torch.Generator().manual_seed(len(prompt_of_row) + 31 * (together or 0))
    torch.manual_seed(3)
    steps = 7
    store, alone = made(prompt_of_row, lengths, steps, together)
    rows = len(prompt_of_row)
    for step in range(steps):
        for layer, expected in enumerate(alone):
            query, key, value = (
                torch.randn(rows, heads, SIZE, dtype=torch.float64) for heads in (HEADS, KEY_HEADS, KEY_HEADS)
            )
            wanted = expected.attend(query, key, value, 0.3)
            torch.testing.assert_close(store.attend_rows(layer, query, key, value, 0.3), wanted)
            # a second time, as a trial does: it overwrites
            again = store.attend(layer, query[:, :, None], key[:, :, None], value[:, :, None], 0.3, None)
            torch.testing.assert_close(again[:, 0], wanted)
        store.advance()
        alive = torch.rand(rows, generator=generator) < (1.0 if step % 3 == 0 else 0.7)
        alive[0] |= not alive.any()
        order = store.keep(alive)
        assert sorted(order.tolist()) == alive.nonzero().flatten().tolist()
        for expected in alone:
            expected.keep(order)
        rows = len(order)


def test_an_emptied_group_gives_its_place_away():
    store, _ = made([0, 0, 1, 1, 2, 2], [3, 4, 5], 4, 2)
    assert store.groups == 3
    assert store.keep(torch.tensor([False, True, True, True, True, True])).tolist() == [1, 2, 3, 4, 5]
    assert store.groups == 3  # one row of the first is left
    assert store.keep(torch.tensor([False, True, True, True, True])).tolist() == [
        3,
        4,
        1,
        2,
    ]  # the last takes its place
    assert store.groups == 2
    assert all(keys.shape[0] == values.shape[0] == 2 for keys, values in store.layers)


def test_a_prompt_is_held_once_a_group():
    steps = 10
    apart, together = (made([0] * 8, [100], steps, m)[0] for m in (1, 8))
    assert apart.nbytes == 8 * together.nbytes * (100 + steps) // (100 + 8 * steps)


@pytest.mark.parametrize(
    ("rows", "prompt", "steps", "expected"),
    [
        ([3, 3], 100, 48, 3),
        ([16], 290, 64, 8),
        ([8], 20, 512, 1),  # new tokens outweigh the prompt
        ([1] * 64, 500, 10, 1),
        ([9], 2000, 10, 5),  # as evenly as it goes
        ([1] * 64 + [8], 500, 200, 1),  # one prompt does not make all others reserve places
        ([0, 4, 4], 300, 20, 4),
    ],
)
def test_how_many_rows_are_attended_together(rows, prompt, steps, expected):
    assert rows_together(torch.tensor(rows), prompt, steps) == expected
