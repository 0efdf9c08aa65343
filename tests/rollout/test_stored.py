"""Trees in a checkpoint are the trees, number for number."""

import json

from mlrl.rollout.stored import stored_tree, tree_record
from mlrl.rollout.tree import Response
from tests.rollout.fakes import growth
from tests.rollout.test_collect import ITEMS, collector


def test_trees_come_back_as_they_were_from_json():
    trees = collector(num_agents=2, num_turns=3).collect(ITEMS, growth(3, 2, greedy_baseline=True))
    for tree in trees:
        tree.drawn_at = 7
        tree.root.responses[0][0] = Response([3, 2], [-0.1, -1 / 3], "half a character \udce9", False)
        tree.root.raw_rewards = [[1 / 7, -0.0], [float("nan"), 1e300]]  # an agent's own
    text = json.dumps(list(map(tree_record, trees)))
    for tree, record, (_, item) in zip(trees, json.loads(text), ITEMS, strict=True):
        again = stored_tree(record, item)
        assert repr(again) == repr(tree)  # NaN is not equal to itself
        assert [n.path for n in again.nodes()] == [n.path for n in tree.nodes()] and len(list(again.nodes())) > 3
        for one, other in zip(again.nodes(), tree.nodes(), strict=True):
            assert one.history() == other.history() and one.greedy_return == other.greedy_return
            assert (one.parent and one.parent.path) == (other.parent and other.parent.path)
