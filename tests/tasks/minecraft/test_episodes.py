"""Best, partial and hostile answers played through the trees that training grows."""

import pytest

from mlrl.rollout.collect import Collector
from mlrl.task import Environment, load_task
from mlrl.tasks.minecraft import house_feedback
from mlrl.tasks.minecraft.house import read_target
from mlrl.tasks.strbuild import FEEDBACK
from tests.rollout.fakes import ScriptedSampler, fake_team, growth
from tests.tasks.minecraft.test_housebuild import KILL, lines
from tests.tasks.minecraft.test_strbuild import PART, best


def played(task, items, answers, num_turns=2):
    """Trees of two generations, the items' answers by [ordinal][turn][generation][agent]."""
    team = fake_team(2)
    sampler = ScriptedSampler(team, lambda ordinal, path, agent, k: answers[ordinal][len(path)][k][agent])
    collector = Collector(team, sampler, Environment(task, 2, num_turns))
    threshold = task.recommended["early_termination_threshold"]
    trees = collector.collect(list(enumerate(items)), growth(num_turns, 2, threshold=threshold))
    return [tree.root for tree in trees]


@pytest.mark.parametrize("mode", FEEDBACK)
def test_strbuild(mode):
    hostile = ["/setblock " * 500, "\x00```{\ud7ff"]
    answers = [
        [[best("L")] * 2],  # perfect at once
        [[best("L"), hostile], [best("L"), PART]],  # mixed at first, then again
    ]
    perfect, mixed = played(load_task("strbuild", {"feedback": mode}), [{"string": "L"}] * 2, answers)
    assert perfect.rewards == pytest.approx([0.0, 0.0])
    assert not perfect.children  # ended early: the mean is above −0.1
    assert mixed.rewards == pytest.approx([0.0, -2.5])
    assert sorted(mixed.children) == [0, 1]
    for joint, child in mixed.children.items():
        # the string; two target cells, one other: 4/9 − 1.5/16 − 0.5 of unseen palettes
        assert child.rewards == pytest.approx([0.0, 4 / 9 - 1.5 / 16 - 0.5 - 2])
        told = [prompt.content[-1]["content"] for prompt in child.prompts]
        assert ("covered 9 of 9", "covered 0 of 9")[joint] in told[0]
        assert ("(0,0,0)" in told[0]) == (mode == "position_feedback" or (mode == "perfect_feedback" and joint == 1))


@pytest.mark.parametrize("mode", house_feedback.FEEDBACK)
def test_housebuild(mode):
    task = load_task("housebuild", {"feedback": mode})
    item = task.train_dataset[0]
    shares = [lines(boxes) for boxes in house_feedback.schedule(read_target(item), 2)]
    killed = [shares[0], f"{shares[1]}\n{KILL}"]
    (root,) = played(task, [item], [[[killed, ["", "{"]], [killed, shares]]])
    assert root.rewards[0] == pytest.approx(0.0)
    # nothing built: −1, and the bites of 3 spiders of strength 1, 2 or 3 on 5 hit points: 3/5, 1 or 1 of 0.1
    assert round(-1 - root.rewards[1], 9) in (0.06, 0.1)
    assert sorted(root.children) == [0, 1]
    for child in root.children.values():
        assert child.rewards[0] == pytest.approx(0.0)
        # the whole house, with the bites of the same episode
        assert child.rewards[1] == pytest.approx(root.rewards[1] + 1)
