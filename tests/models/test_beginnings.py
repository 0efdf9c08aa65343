"""Sequences cut so that what several begin with is one piece."""

import random
from collections import defaultdict

import pytest
import torch

from mlrl.models.base import Base, Policy
from mlrl.models.beginnings import common_beginnings
from mlrl.models.prefix_tree import PrefixTree
from tests.models.test_prefix_tree import looped
from tests.tiny import tiny_model

SYSTEM, FIRST, SECOND = tuple(range(10, 30)), tuple(range(40, 52)), tuple(range(60, 80))


def test_a_system_message_and_two_openings():
    prompts = [SYSTEM + FIRST + (1,), SYSTEM + FIRST + (2, 3), SYSTEM + SECOND, SYSTEM, (5, 6)]
    pieces = common_beginnings(prompts)
    assert pieces == {
        SYSTEM + FIRST + (1,): [SYSTEM, FIRST, (1,)],
        SYSTEM + FIRST + (2, 3): [SYSTEM, FIRST, (2, 3)],
        SYSTEM + SECOND: [SYSTEM, SECOND],
        SYSTEM: [SYSTEM],
        (5, 6): [(5, 6)],
    }


@pytest.mark.parametrize("least", [1, 3])
def test_random_sequences(least):
    draw = random.Random(least)
    for _ in range(300):
        sequences = {tuple(draw.choices((1, 2), k=draw.randint(1, 9))) for _ in range(draw.randint(1, 8))}
        pieces = common_beginnings(sequences, least)
        assert set(pieces) == sequences
        parents = defaultdict(set)
        for sequence, own in pieces.items():
            assert sum(own, ()) == sequence and all(own)
            assert all(len(piece) >= least for piece in own[:-1])
            for place, piece in enumerate(own):
                parents[sum(own[:place], ())].add(piece)
        for siblings in parents.values():  # no two pieces at one place still begin alike
            for one in siblings:
                for other in siblings - {one}:
                    assert one[:least] != other[:least] or min(len(one), len(other)) < least


def test_nothing_shared_and_nothing_given():
    assert common_beginnings([(1, 2), (3,)], 1) == {(1, 2): [(1, 2)], (3,): [(3,)]}
    assert common_beginnings([]) == {}
    nested = [tuple(range(length)) for length in range(1, 2000)]  # each begins with all that are shorter
    assert all(sum(map(len, own)) == len(sequence) for sequence, own in common_beginnings(nested).items())


def test_a_tree_runs_common_beginnings_once_and_exactly():
    prompts = [list(SYSTEM + FIRST), [*SYSTEM, *FIRST, 7], [*SYSTEM, 8, 9], list(SYSTEM), [3, 4, 5]]
    tree, sequences = PrefixTree(), []
    for number, prompt in enumerate(prompts):
        for k, response in enumerate(([5, 6, 7], [9])):
            parent = tree.add(prompt)
            answer = tree.add(response, parent, scored=True, key=(number, k))
            sequences.append((prompt, response))
            if k == 0:  # the second turn's prompts begin alike as well
                for j in range(2):
                    more = [*range(90, 100), j]
                    tree.add([11, 12], tree.add(more, answer), scored=True, key=("second", number, j))
                    sequences.append((prompt + response + more, [11, 12]))
    packed = tree.pack()
    # SYSTEM, FIRST, [7], [8, 9], [3, 4, 5]; of each prompt [5, 6, 7], ten shared tokens, two last ones, two [11]
    assert packed.input_ids.shape[1] == 20 + 12 + 1 + 2 + 3 + 5 * (3 + 10 + 2 + 2)
    assert tree.num_tokens >= packed.input_ids.shape[1]
    for segment, path in zip(tree.segments, packed.paths, strict=True):
        run = len(segment.token_ids) - (segment.scored and not segment.has_children)
        assert packed.input_ids[0, path].tolist()[len(path) - run :] == segment.token_ids[:run]
        assert packed.position_ids[0, path].tolist() == list(range(len(path)))
    reference, shared = tiny_model(), tiny_model()
    policy = Policy(Base(shared, "tiny"), None)
    scored, lengths = policy.logprobs(tree, 1.0)
    ours = scored.logprobs_L.split(lengths)
    expected = looped(reference, sequences)
    for logprobs, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(logprobs, theirs, rtol=1e-5, atol=1e-5)
    sum(logprobs.sum() * (i + 1) for i, logprobs in enumerate(ours)).backward()
    sum(logprobs.sum() * (i + 1) for i, logprobs in enumerate(expected)).backward()
    for mine, theirs in zip(shared.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5 * float(theirs.grad.norm()))


def test_other_weights_share_nothing():
    tree = PrefixTree()
    numbers = [
        tree.add((*SYSTEM, 1), weights=0),
        tree.add((*SYSTEM, 2), weights=1),
        tree.add((*SYSTEM, 3), weights=0),
    ]
    packed = tree.pack()
    assert packed.input_ids.shape[1] == 20 + 1 + 21 + 1
    paths = [packed.paths[number] for number in numbers]
    assert not set(paths[0]) & set(paths[1])
    assert paths[0][:20] == paths[2][:20]


def test_what_a_scored_leaf_says_is_not_its_unscored_twin():
    """The last token of a leaf is not run; of a sibling with the same tokens, and of a prompt that says them, it is."""
    prompt, said = [*SYSTEM, 1], [5, 6, 2]
    tree = PrefixTree()
    root = tree.add(prompt)
    tree.add(said, root, scored=True, key="leaf")
    twin = tree.add(said, root, key="twin")  # an ancestor only: another micro-batch scores it
    tree.add([8, 9], tree.add([3, 4], twin), scored=True, key="below the twin")
    tree.add([7, 8], tree.add(prompt + said), scored=True, key="a prompt that spells it out")
    sequences = [(prompt, said), (prompt + said + [3, 4], [8, 9]), (prompt + said, [7, 8])]
    scored, lengths = Policy(Base(tiny_model(), "tiny"), None).logprobs(tree, 1.0)
    for ours, theirs in zip(scored.logprobs_L.split(lengths), looped(tiny_model(), sequences), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    twin_path = tree.pack().paths[twin]
    assert len(twin_path) == len(prompt) + len(said)


@pytest.mark.parametrize("seed", range(6))
def test_random_trees(seed):
    """Any mixture of prompts, answers and deeper turns, equal ones among them, scored or not."""
    draw = random.Random(seed)
    stretch = [[*range(20, 20 + length)] for length in (1, 9, 17)]
    tree, sequences, texts = PrefixTree(), [], {}
    for key in range(25):
        parent = draw.choice([None, *texts])
        tokens = draw.choice(stretch) + draw.choices((1, 2), k=draw.randint(0, 2))
        is_scored = parent is not None and draw.random() < 0.5
        number = tree.add(tokens, parent, scored=is_scored, key=key if is_scored or draw.random() < 0.3 else None)
        before = texts[parent] if parent is not None else []
        texts[number] = before + tokens
        if is_scored:
            sequences.append((before, tokens))
    scored, lengths = Policy(Base(tiny_model(), "tiny"), None).logprobs(tree, 1.0)
    assert lengths == [len(answer) for _, answer in sequences]
    for ours, theirs in zip(scored.logprobs_L.split(lengths), looped(tiny_model(), sequences), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)
