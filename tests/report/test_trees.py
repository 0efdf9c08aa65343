"""Trees out of completions: branches, what agents wrote, and what fits the page."""

import json

import pytest

from mlrl.report.runs import read_run
from mlrl.report.trees import Tree, cut_text, read_blocks, read_trees, spread_order
from tests.report.runs import node, two_turns, write_run


def test_branches_and_their_discounted_rewards():
    tree = Tree(0, two_turns())
    # first turn 0 or 1, then half of 0.5 and 0.25 below joint 0, of 0.5 and 0 below joint 1
    assert tree.branches(0.5) == [([0, 0], 0.25), ([0, 1], 0.125), ([1, 0], 1.25), ([1, 1], 1.0)]
    ended = Tree(0, two_turns()[:2])  # joint 1 ended the episode
    assert ended.branches(1.0) == [([0, 0], 0.5), ([0, 1], 0.25), ([1], 1.0)]
    own = node(0, [], [[1.0, 3.0], None], [["a", "b"], ["c", "d"]])  # a reward an agent, and one that was NaN
    assert Tree(0, [own]).branches(1.0) == [([0], 2.0), ([1], 0.0)]


def test_best_and_worst_of_the_page(tmp_path):
    folder = write_run(tmp_path / "a", [], discount=0.5)
    folder.write_completions(two_turns(), "train", 1)
    (block,) = read_blocks(read_run(folder.path), 10**6)
    (tree,) = map(json.loads, block.trees)
    assert (tree["best"], tree["best_reward"]) == ([1, 0], 1.25)
    assert (tree["worst"], tree["worst_reward"]) == ([0, 1], 0.125)
    assert [own["path"] for own in tree["nodes"]] == [[], [0], [1]]
    assert tree["nodes"][0]["advantages"] == [[0.5, -0.5]] * 2
    assert (block.split, block.step, block.env_step, block.total, block.cut) == ("train", 1, 10, 1, 0)


def test_what_each_agent_wrote(tmp_path):
    folder = write_run(tmp_path / "a", [])
    folder.write_completions(two_turns(), "train", 1)
    (block,) = read_blocks(read_run(folder.path), 0)  # also of trees that do not fit
    one, other = block.writing
    assert (one.responses, one.empty, len(one.texts), one.tokens, one.example) == (6, 0, 6, 6, "a")
    # agent 1 wrote c, f, i and three times nothing
    assert (other.responses, other.empty, len(other.texts), other.tokens) == (6, 3, 4, 3)
    assert (block.trees, block.total) == ([], 1)


def test_trees_written_in_parts_and_again(tmp_path):
    folder = write_run(tmp_path / "a", [])
    first, again, other = two_turns(0), two_turns(0, first="new"), two_turns(1)
    path = folder.write_completions([*first, *other[:2], *again[:1], *again[2:], other[2]], "train", 1)
    with path.open("a") as file:
        file.write(json.dumps(two_turns(7)[1]) + "\n" + json.dumps({"path": []}) + '\n{"ite')
    notes = []
    trees = read_trees(path, notes)
    assert [(tree.item, len(tree.nodes)) for tree in trees] == [(0, 2), (1, 3)]  # item 0 as it was written last
    assert trees[0].nodes[0]["responses"][0][0] == "new"
    assert notes == [
        "train-000001.jsonl: the last line is only half written",
        "train-000001.jsonl: 2 records left out, which have no root or lack fields",
    ]


def test_steps_are_taken_from_both_ends_inwards():
    assert spread_order(0) == [] and spread_order(1) == [0] and spread_order(2) == [0, 1]
    assert spread_order(5) == [0, 4, 2, 1, 3]
    assert sorted(spread_order(37)) == list(range(37))


def test_the_limit_keeps_first_trees_of_steps_that_cover_the_run(tmp_path):
    folder = write_run(tmp_path / "a", [])
    for step in range(1, 6):
        trees = [node(item, [], [0.0, 1.0], [["x" * 300, "y"]]) for item in range(4)]
        folder.write_completions(trees, "train", step)
    run = read_run(folder.path)
    size = len(read_blocks(run, 10**6)[0].trees[0])
    shown = [(len(b.trees), b.total) for b in read_blocks(run, 11 * size)]
    assert shown == [(2, 4), (2, 4), (2, 4), (3, 4), (2, 4)]  # shares: 11/5, 9/4, 7/3, 5/2, then 3 trees for step 4
    assert [len(b.trees) for b in read_blocks(run, 5 * size)] == [1, 1, 1, 1, 1]
    assert sum(len(tree) for b in read_blocks(run, 11 * size) for tree in b.trees) <= 11 * size
    # each may have a quarter at most: a smaller limit cuts the texts first
    (first, *_) = read_blocks(run, 4 * size - 8)
    assert first.cut == 0 or "characters …" in first.trees[0]


def test_long_texts_are_cut_in_the_middle():
    assert cut_text("abcdefgh", 8) == "abcdefgh"
    assert cut_text("abcdefgh", 4) == "ab\n[… 4 characters …]\ngh"


def test_a_huge_tree_is_shown_with_shorter_texts(tmp_path):
    folder = write_run(tmp_path / "a", [])
    nodes = [node(0, path, [0.0, 1.0], [["x" * 9000, "y"]]) for path in ([], [0], [1])]
    folder.write_completions(nodes, "train", 1)
    run = read_run(folder.path)
    (block,) = read_blocks(run, 10**6)
    assert (len(block.trees), block.cut) == (1, 3) and "[… 1,000 characters …]" in block.trees[0]
    (block,) = read_blocks(run, 20_000)  # a tree may take 5,000: 3 × 2,000 is too much, 3 × 500 is not
    assert (len(block.trees), block.cut) == (1, 3) and "[… 8,500 characters …]" in block.trees[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rewards_that_are_no_number_stay_readable_to_a_browser(tmp_path, value):
    folder = write_run(tmp_path / "a", [])
    folder.write_completions([node(0, [], [value, 1.0], [["a", "b"]])], "eval", 0)
    (block,) = read_blocks(read_run(folder.path), 10**6)
    assert json.loads(block.trees[0], parse_constant=pytest.fail)["nodes"][0]["rewards"] == [None, 1.0]
