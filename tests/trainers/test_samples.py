"""Every response is a sample once, with its weight; micro-batches share prefixes and hold their budget."""

import pytest
import torch

from mlrl.rollout.tree import Node, Response, RolloutTree, TokenizedPrompt
from mlrl.trainers.samples import make_samples, micro_batches


def response(*ids: int, truncated: bool = False) -> Response:
    return Response(list(ids), [-1.0] * len(ids), "", truncated)


def tree(ordinal: int = 0) -> RolloutTree:
    """One agent, two turns, two responses: the second prompt of joint 0 extends the first turn, that of joint 1 not."""
    root = Node((), [TokenizedPrompt("", [3, 4])])
    root.responses, root.joints, root.rewards = (
        [[response(10, 11, 12), response(20, truncated=True)]],
        [(0,), (1,)],
        [0, 0],
    )
    extended = Node((0,), [TokenizedPrompt("", [3, 4, 10, 11, 12, 5, 6], reused=5)], root)
    fresh = Node((1,), [TokenizedPrompt("", [7, 8, 9])], root)
    for child, first in ((extended, 30), (fresh, 40)):
        child.responses = [[response(first, first + 1), response(first + 2)]]
        child.joints, child.rewards = [(0,), (1,)], [0, 0]
        root.children[child.path[-1]] = child
    return RolloutTree({}, ordinal, root)


def samples_of(trees, **settings):
    defaults = {"discount": 1.0, "turn_weighting": "objective", "mask_truncated": False}
    return make_samples(trees, 0, **defaults | settings)


def test_samples_are_in_node_order_with_their_weights():
    """B 2, J 2, K 2, γ 0.5: turn 1 has 1/(2·1·2), turn 2 has 0.5/(2·2·2)."""
    own = samples_of([tree(), tree(1)], discount=0.5)
    assert [s.response.token_ids[0] for s in own] == [10, 20, 30, 32, 40, 42] * 2
    assert [s.weight for s in own] == [0.25, 0.25, *[0.0625] * 4] * 2
    assert [s.weight for s in samples_of([tree()], turn_weighting="undiscounted", discount=0.5)] == [0.5] * 2 + [
        0.25
    ] * 4
    assert [s.weight for s in samples_of([tree()], turn_weighting="node", discount=0.5)] == [1 / 6] * 6
    assert [s.weight for s in samples_of([tree()], mask_truncated=True)] == [0.5, 0.0, *[0.25] * 4]
    assert [s.length for s in own[:6]] == [3, 1, 2, 1, 2, 1]


def test_a_branch_that_ended_early_keeps_the_share_of_the_full_tree():
    cut = tree()
    del cut.root.children[1]
    assert [s.weight for s in samples_of([cut])] == [0.5, 0.5, 0.25, 0.25]


def test_prefixes_are_run_once():
    (micro,) = micro_batches(samples_of([tree()]), 10**6)
    segments = micro.tree.segments
    assert [(s.token_ids, s.parent, s.scored) for s in segments] == [
        ([3, 4], None, False),
        ([10, 11, 12], 0, True),
        ([20], 0, True),
        ([5, 6], 1, False),  # what the second prompt adds
        ([30, 31], 3, True),
        ([32], 3, True),
        ([7, 8, 9], None, False),
        ([40, 41], 6, True),
        ([42], 6, True),
    ]
    # the last token of a response at a leaf is not run: 2 + 3 + 0 + 2 + 1 + 0 + 3 + 1 + 0
    assert micro.tree.num_tokens == 12 and len(micro.tree.pack().input_ids[0]) == 12


@pytest.mark.parametrize("budget", range(1, 16))
def test_budget_is_held_and_nothing_is_lost(budget):
    own = samples_of([tree(), tree(1)])
    made = list(micro_batches(own, budget))
    assert [id(s) for micro in made for s in micro.samples] == [id(s) for s in own]
    for micro in made:
        assert micro.tree.num_tokens == len(micro.tree.pack().input_ids[0])
        assert micro.tree.num_tokens <= budget or len(micro.samples) == 1
        lengths = micro.tree.pack().lengths
        targets = [part.tolist() for part in micro.tree.pack().targets.split(lengths)]
        assert targets == [s.response.token_ids for s in micro.samples]  # each sample beside its own tokens


def test_a_parent_that_comes_after_its_child_is_scored_all_the_same():
    own = samples_of([tree()])
    (micro,) = micro_batches(own[::-1], 10**6)
    packed = micro.tree.pack()
    targets = [part.tolist() for part in packed.targets.split(packed.lengths)]
    assert targets == [s.response.token_ids for s in micro.samples]
    assert sorted(map(id, micro.samples)) == sorted(map(id, own))
    assert micro.tree.num_tokens == len(packed.input_ids[0]) == 12


def test_equal_responses_are_two_samples():
    equal = tree()
    equal.root.responses[0][1] = response(10, 11, 12)
    equal.root.children.clear()
    (micro,) = micro_batches(samples_of([equal]), 10**6)
    assert [s.generation for s in micro.samples] == [0, 1] and micro.tree.pack().lengths == [3, 3]
    assert torch.equal(micro.tree.pack().targets, torch.tensor([10, 11, 12, 10, 11, 12]))


def test_no_samples_no_micro_batches():
    assert list(micro_batches([], 10)) == []
