"""Which pairs are made of candidates with given rewards."""

import pytest

from mlrl.errors import TaskError
from mlrl.preference.pairs import (
    candidate_pairs,
    compared_pairs,
    dropped_failures,
    is_tie,
    item_key,
    require_pairs,
    trajectories,
)
from mlrl.rollout.tree import Node, Response, RolloutTree, TokenizedPrompt
from tests.preference.build import SAMPLING, trajectory

ITEM = {"prompt": "say"}


def among(rewards, selection, limit=None, **kwargs):
    """(winner, loser) candidate numbers."""
    candidates = [None if reward is None else trajectory(reward, c) for c, reward in enumerate(rewards)]
    pairs = candidate_pairs(ITEM, 3, candidates, selection=selection, limit=limit, seed=0, **kwargs)
    return [(pair.winner.candidate, pair.loser.candidate) for pair in pairs]


def between(current, comparator, selection, limit=None):
    """(index, who won)."""
    ours = [None if r is None else trajectory(r, c) for c, r in enumerate(current)]
    theirs = [None if r is None else trajectory(r, c, "api") for c, r in enumerate(comparator)]
    pairs = compared_pairs(ITEM, 3, ours, theirs, selection=selection, limit=limit, seed=0, round=2)
    assert all(pair.winner.candidate == pair.loser.candidate for pair in pairs)
    return [(pair.winner.candidate, pair.winner.writer) for pair in pairs]


@pytest.mark.parametrize(
    ("rewards", "selection", "limit", "expected"),
    [
        # gaps: (0,1) 1, (0,2) 3, (1,2) 2
        ([1, 2, 4], "reward_gap", None, [(2, 0), (2, 1), (1, 0)]),
        ([1, 2, 4], "reward_gap", 1, [(2, 0)]),
        ([1, 2, 4], "all", None, [(1, 0), (2, 0), (2, 1)]),
        ([1, 2, 4], "all", 2, [(1, 0), (2, 0)]),
        ([1, 2, 4], "all", 9, [(1, 0), (2, 0), (2, 1)]),
        # negative rewards: the less negative one wins
        ([-1, -3], "reward_gap", None, [(0, 1)]),
        # ties make no pair, and equal gaps stay in candidate order
        ([1, 1, 0], "reward_gap", None, [(0, 2), (1, 2)]),
        ([1, 1, 0], "all", None, [(0, 2), (1, 2)]),
        ([2, 2], "all", None, []),
        ([0, 0, 0], "reward_gap", 3, []),
        ([5], "all", None, []),
        ([], "all", None, []),
        # a lost candidate is in no pair, and the others keep their numbers
        ([1, None, 4], "all", None, [(2, 0)]),
    ],
)
def test_pairs_of_one_policy(rewards, selection, limit, expected):
    assert among(rewards, selection, limit) == expected


@pytest.mark.parametrize(
    ("current", "comparator", "selection", "limit", "expected"),
    [
        # index 0: 5 > 0, index 1: 1 < 4, index 2: equal
        ([5, 1, 2], [0, 4, 2], "all", None, [(0, "current"), (1, "api")]),
        ([5, 1, 2], [0, 4, 2], "reward_gap", None, [(0, "current"), (1, "api")]),
        ([5, 1, 2], [0, 4, 2], "reward_gap", 1, [(0, "current")]),
        ([5, 1, 2], [0, 4, 2], "comparator_reward", None, [(1, "api"), (0, "current")]),
        # equal comparator rewards: the larger gap first; then index order
        ([1, 9, 3], [2, 2, 2], "comparator_reward", None, [(1, "current"), (0, "api"), (2, "current")]),
        ([-5, -1], [-2, -3], "comparator_reward", None, [(0, "api"), (1, "current")]),
        # another number of candidates, and lost ones: only the same index makes a pair
        ([1, 2, 3], [0], "all", None, [(0, "current")]),
        ([1, None, 3], [0, 5, None], "all", None, [(0, "current")]),
        ([1, 1], [1, 1], "comparator_reward", None, []),
        ([], [1], "all", None, []),
    ],
)  # fmt: skip
def test_pairs_against_a_comparator(current, comparator, selection, limit, expected):
    assert between(current, comparator, selection, limit) == expected


def test_random_selection_is_uniform_and_the_same_for_one_seed_round_and_item():
    rewards = [0, 1, 2, 3]
    counts = dict.fromkeys(among(rewards, "all"), 0)
    candidates = [trajectory(r, c) for c, r in enumerate(rewards)]
    for round in range(1200):
        [pair] = candidate_pairs(ITEM, 3, candidates, selection="random", limit=1, seed=7, round=round)
        counts[pair.winner.candidate, pair.loser.candidate] += 1
    # 1200 draws of 6 pairs: 200 each, σ = sqrt(1200·(1/6)·(5/6)) = 12.9
    assert all(abs(count - 200) < 3.5 * 12.9 for count in counts.values())
    assert among(rewards, "random", 3, round=1) == among(rewards, "random", 3, round=1)
    assert len(set(among(rewards, "random", 3, round=1))) == 3


def test_a_comparators_reward_needs_a_comparator():
    with pytest.raises(ValueError, match="comparator_reward.*no comparator"):
        among([1, 2], "comparator_reward")
    with pytest.raises(ValueError, match="pair_selection='gap'.*reward_gap"):
        among([1, 2], "gap")


def test_float_noise_is_a_tie():
    assert is_tie(0.1 + 0.2, 0.3)
    assert is_tie(-1e5, -1e5 * (1 + 1e-12))
    assert is_tie(0.0, 0.0)
    assert not is_tie(0.3, 0.3001)
    assert not is_tie(0.0, 1e-12)
    assert among([0.1 + 0.2, 0.3], "all") == []


def test_no_pair_at_all_is_a_clear_error():
    require_pairs(["a pair"], 4)
    with pytest.raises(TaskError, match="any of the 4 items.*preference_num_candidates"):
        require_pairs([], 4)
    with pytest.raises(TaskError, match=r"lost: timeout \(3\), budget \(2\)"):
        require_pairs([], 4, {"timeout": 3, "budget": 2})
    with pytest.raises(TaskError, match=r"comparator's \(history\) of the same number, of any of the 4 items"):
        require_pairs([], 4, comparator="history")


def test_a_pair_says_where_it_is_from():
    [pair] = candidate_pairs(
        ITEM, 3, [trajectory(1, 0), trajectory(4, 1)], selection="all", limit=None, seed=0, round=2
    )
    assert (pair.round, pair.item, pair.item_key, pair.gap) == (2, 3, item_key(ITEM), 3)
    assert pair.winner.raw_reward == 40
    assert item_key({"a": 1, "b": [2]}) == item_key({"b": [2], "a": 1}) != item_key({"a": 1, "b": [3]})


def make_tree():
    """Two agents, two candidates: candidate 0 goes on for a second turn, candidate 1 ends early."""

    def responses(*names):
        return [[Response([ord(name), 2], [-1.0, -1.0], name, False) for name in own] for own in names]

    prompts = [TokenizedPrompt("p", [1]), TokenizedPrompt("q", [1])]
    root = Node((), prompts, None, responses("ab", "cd"), [(0, 0), (1, 1)], [1.0, 3.0], [10.0, 30.0])
    root.children[0] = Node((0,), prompts, root, responses("e", "f"), [(0, 0)], [4.0], [40.0])
    return RolloutTree(ITEM, 3, root)


def test_trajectories_are_the_paths_of_a_tree():
    first, second = trajectories(make_tree(), discount=0.5, writer="current", sampling=SAMPLING)
    assert [[r.text for r in turn.responses] for turn in first.turns] == [["a", "c"], ["e", "f"]]
    assert [[r.text for r in turn.responses] for turn in second.turns] == [["b", "d"]]
    assert (first.reward, first.raw_reward) == (1 + 0.5 * 4, 10 + 0.5 * 40)
    assert (second.reward, second.raw_reward, second.candidate) == (3, 30, 1)
    # 3 against 3: with this discount the two are tied
    assert candidate_pairs(ITEM, 3, [first, second], selection="all", limit=None, seed=0) == []
    # the sampled objects themselves, token ids and end token included
    assert first.turns[0].responses[0].token_ids == [ord("a"), 2]


def test_a_candidate_with_an_answer_that_never_came_is_dropped():
    tree = make_tree()
    tree.root.children[0].responses[1][0] = Response([], [], "", False)
    candidates = trajectories(tree, discount=1.0, writer="api", sampling=SAMPLING)
    assert [candidate and candidate.candidate for candidate in dropped_failures(candidates)] == [None, 1]
