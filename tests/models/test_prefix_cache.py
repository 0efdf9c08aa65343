"""What was read before need not be read again: prompts whose beginning is known give the same hidden states."""

import random

import pytest
import torch

from mlrl.models.beginnings import common_length
from mlrl.models.prefix_cache import PrefixCache
from mlrl.models.prefix_tree import PrefixTree
from tests.models.test_lora import team

OLD = [list(range(10, 30)), [*range(10, 22), 90, 91, 92], list(range(40, 60)), [7, 8]]


@torch.no_grad()
def read(model, prompts, cache=None, add_to=None, weights=None):
    """Last hidden state of each prompt, its keys, and how many tokens were run."""
    tree = PrefixTree()
    segments = [tree.add(ids, weights=weights) for ids in prompts]
    packed = tree.pack("cpu", cache)
    packed.attention.captured = []
    hidden = model.hidden_states(packed.input_ids, packed.position_ids, packed.attention)[0]
    paths = [packed.paths[segment] for segment in segments]
    last = [hidden[path[-1] - packed.num_known] for path in paths]
    keys = [packed.attention.captured[1][0][path] for path in paths]
    if add_to is not None:
        add_to.add(packed.attention.captured, [(weights, ids, p) for ids, p in zip(prompts, paths, strict=True)])
    return last, keys, packed.input_ids.shape[1]


@pytest.mark.parametrize(
    ("prompts", "run"),
    [
        ([OLD[0] + [5, 6, 7]], 3),
        ([OLD[0]], 1),  # all of it is known: the last token is run for its hidden state
        ([OLD[0][:15]], 1),
        ([OLD[0] + [5], OLD[0] + [6], OLD[2] + [5]], 3),
        ([OLD[0][:8], OLD[0] + [5, 6]], 10),  # seven known tokens are too few, so the first prompt is run
        ([OLD[0] + [5, 6], OLD[0][:8]], 10),
        ([OLD[0], OLD[0][:-1], OLD[0] + [3]], 3),  # beginnings of one another
        ([OLD[1] + [1], [*OLD[0][:12], 2, 3]], 3),
        ([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]], 11),  # unknown
        ([OLD[3] + list(range(100, 120))], 22),  # too little known
    ],
)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_known_beginnings_are_left_out(prompts, run, kind):
    model = team(kind).language_model
    cache = PrefixCache()
    read(model, OLD, add_to=cache)
    expected_last, expected_keys, _ = read(model, prompts)
    last, keys, tokens = read(model, prompts, cache)
    assert tokens == run
    for ours, expected in zip([*last, *keys], [*expected_last, *expected_keys], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_what_was_known_is_known_to_the_next():
    """Turn after turn, each block holding all of its prompts."""
    model = team("llama").language_model
    prompts, cache = [list(range(10, 25)), list(range(40, 52))], PrefixCache()
    for turn in range(4):
        following = PrefixCache()
        expected = read(model, prompts)
        last, keys, tokens = read(model, prompts, cache, following)
        assert tokens == (27 if turn == 0 else 6)
        for ours, wanted in zip([*last, *keys], [*expected[0], *expected[1]], strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
        prompts, cache = [[*ids, 60 + turn, 61, 62] for ids in prompts], following


def test_weights_keep_apart():
    model = team("llama").language_model
    cache = PrefixCache()
    read(model, OLD, add_to=cache, weights="agent_0")
    assert read(model, OLD, cache, weights="agent_1")[2] == read(model, OLD)[2]
    assert read(model, OLD, cache, weights="agent_0")[2] < read(model, OLD)[2]


def test_the_longest_beginning_is_found():
    rng = random.Random(0)
    for _ in range(300):
        known = [tuple(rng.choices(range(3), k=rng.randint(1, 9))) for _ in range(rng.randint(1, 12))]
        cache, blocks = PrefixCache(), [known[::2], known[1::2]]
        for block in blocks:
            cache.add([], [("w", ids, list(range(len(ids)))) for ids in block])
        asked = tuple(rng.choices(range(3), k=rng.randint(1, 9)))
        longest = max(common_length(ids, asked) for ids in known)
        found = cache.find("w", asked)
        assert (len(found.positions) if found else 0) == longest
        if found:
            assert any(ids[:longest] == asked[:longest] for ids in blocks[found.block])
