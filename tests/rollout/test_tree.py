"""Trees as data: order, histories, returns."""

import pytest

from mlrl.rollout.tree import Node, Response, RolloutTree, TokenizedPrompt


def node(path, parent=None, rewards=(1.0, 2.0), texts=(("a0", "a1"), ("b0", "b1")), joints=((0, 0), (1, 1))):
    name = "".join(map(str, path)) or "root"
    prompts = [TokenizedPrompt(f"{name}-{agent}", [1]) for agent in range(len(texts))]
    responses = [[Response([5, 2], [0.0, 0.0], f"{text}@{name}", False) for text in own] for own in texts]
    made = Node(tuple(path), prompts, parent, responses, list(joints), list(rewards), list(rewards))
    if parent is not None:
        parent.children[path[-1]] = made
    return made


def test_nodes_come_turn_after_turn_in_path_order():
    root = node(())
    for path in ((1,), (0,)):  # in whatever order they arrive
        node(path, root)
    node((1, 0), root.children[1])
    node((0, 1), root.children[0])
    node((0, 0), root.children[0])
    tree = RolloutTree({"prompt": "go"}, 0, root)
    assert [n.path for n in tree.nodes()] == [(), (0,), (1,), (0, 0), (0, 1), (1, 0)]
    assert [n.turn for n in tree.nodes()] == [0, 1, 1, 2, 2, 2]


def test_histories_follow_the_branch():
    joints = [(0, 0), (0, 1), (1, 0), (1, 1)]
    root = node((), joints=joints, rewards=[0.0] * 4)
    child = node((2,), root, joints=joints, rewards=[0.0] * 4)
    leaf = node((2, 1), child)
    assert root.history() == ([[], []], [[], []])
    # joint 2 of the root is (1, 0): a1 and b0; joint 1 of the child is (0, 1): a0 and b1
    assert leaf.history() == (
        [["root-0", "2-0"], ["root-1", "2-1"]],
        [["a1@root", "a0@2"], ["b0@root", "b1@2"]],
    )
    assert child.completions(1) == ["a0@2", "b1@2"]


def test_returns_are_discounted_means_below():
    root = node((), rewards=[1.0, 2.0])
    left = node((0,), root, rewards=[3.0, 5.0])
    node((0, 1), left, rewards=[-1.0, 0.0])
    assert left.returns(0.9) == pytest.approx([3.0, 5.0 + 0.9 * -0.5])  # 3, 4.55
    # joint 1 of the root has no child: its return is its reward
    assert root.returns(0.9) == pytest.approx([1.0 + 0.9 * (3.0 + 4.55) / 2, 2.0])  # 1 + 0.9 · 3.775 = 4.3975
    assert root.returns(0.0) == [1.0, 2.0]
    assert root.returns(1.0) == pytest.approx([1.0 + (3.0 + 4.5) / 2, 2.0])
