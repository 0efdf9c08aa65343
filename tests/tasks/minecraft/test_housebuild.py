import json

import pytest
from hypothesis import given

from mlrl.errors import ConfigError
from mlrl.task import Environment, load_task
from mlrl.tasks.minecraft.commands import Box
from mlrl.tasks.minecraft.house import limits, read_target, score, spider_strength
from mlrl.tasks.minecraft.house_feedback import FEEDBACK, feedback_text, rectangles, schedule
from mlrl.tasks.minecraft.samples import houses
from tests.texts import HOSTILE, THOUSAND, logged, next_prompts, pairs, pieces, rewards

# 3 × 2 × 2 cells: a floor of six bricks, and one log above the corner. 7 blocks.
HUT = {
    "task_id": "hut",
    "inventory": {"B": "bricks", "L": "log", "A": "air"},
    "target_spec": {"size": [3, 2, 2], "layers": [{"y": 1, "rows": ["LAA", "AAA"]}, {"y": 0, "rows": ["BBB", "BBB"]}]},
}
TARGET = read_target(HUT)
FLOOR, LOG, KILL = "/fill 0 0 0 2 0 1 bricks", "/fill 0 1 0 0 1 0 log", "/kill @e[type=spider]"


def lines(boxes):
    return "\n".join(f"/fill {' '.join(map(str, (*box.low, *box.high)))} {box.block}" for box in boxes)


@pytest.mark.parametrize(
    ("answers", "iou"),
    [
        (["", ""], 0.0),  # an empty world is worth nothing
        ([FLOOR, LOG], 1.0),
        ([FLOOR, ""], 6 / 7),
        ([FLOOR, "/fill 0 1 0 0 1 0 bricks"], 6 / 7),  # the wrong kind
        (["/fill 0 0 0 2 1 1 bricks", ""], 6 / 12),  # all 12 cells are bricks: 6 right
        ([FLOOR, "/fill 0 0 0 2 0 1 air"], 0.0),  # removed again
        (["/fill 0 0 0 2 0 1 air", FLOOR], 6 / 7),
        (["/fill 0 0 0 3 0 1 bricks", ""], 0.0),  # reaches out of the world
        (["/fill 0 0 0 2 0 1 stone", ""], 0.0),  # not in the inventory
    ],
)
def test_iou_by_hand(answers, iou):
    assert score(TARGET, answers).iou == pytest.approx(iou)


@pytest.mark.parametrize(("strength", "penalty"), [(1, 0.1 * 3 / 5), (2, 0.1), (3, 0.1)])
def test_spiders_bite_unless_they_are_killed(strength, penalty):
    # 3 spiders of strength 1, 2, 3 do 3, 6, 9 damage to 5 hit points
    assert score(TARGET, [FLOOR, LOG]).total(strength) == pytest.approx(1 - penalty)
    assert score(TARGET, [FLOOR, f"{LOG}\n{KILL}"]).total(strength) == 1.0
    assert score(TARGET, ["", ""]).total(strength) == pytest.approx(-penalty)


def test_strengths_differ_between_episodes_and_not_within():
    drawn = [spider_strength(seed) for seed in range(60)]
    assert set(drawn) == {1, 2, 3}
    assert drawn == [spider_strength(seed) for seed in range(60)]


def test_voxel_accuracy_counts_air():
    assert score(TARGET, ["", ""]).metrics()["voxel_accuracy"] == pytest.approx(5 / 12)


@pytest.mark.parametrize(
    ("count", "num_agents", "limit"), [(7, 2, 4 + 1), (6, 2, 3 + 1), (1, 2, 1 + 0), (7, 1, 7 + 3), (7, 3, 3 + 1)]
)
def test_limits(count, num_agents, limit):
    row = {**HUT, "target_spec": {"size": [count, 1, 1], "layers": [{"y": 0, "rows": ["B" * count]}]}}
    assert limits(read_target(row), num_agents) == {"bricks": limit}


def test_a_box_of_more_blocks_than_are_left_is_not_built():
    # Six bricks are needed: each agent has 3 + 1 = 4.
    assert score(TARGET, [FLOOR, ""], limited=True).iou == 0.0
    row = "/fill 0 0 0 2 0 0 bricks"
    assert score(TARGET, [row, ""], limited=True).iou == pytest.approx(3 / 7)
    assert score(TARGET, [f"{row}\n/fill 0 0 1 1 0 1 bricks", ""], limited=True).iou == pytest.approx(
        3 / 7
    )  # one is left
    assert score(TARGET, [f"{row}\n/fill 0 0 1 0 0 1 bricks", ""], limited=True).iou == pytest.approx(4 / 7)
    assert (
        score(TARGET, [f"{row}\n/fill 0 0 0 2 1 1 air\n{row}", ""], limited=True).iou == 0.0
    )  # air is free, bricks gone


def test_each_agent_has_half_of_the_commands():
    many = "/fill 0 0 0 0 0 0 bricks\n" * 300
    assert score(TARGET, [many + FLOOR, ""]).iou == pytest.approx(1 / 7)
    assert score(TARGET, [many + FLOOR]).iou == pytest.approx(6 / 7)  # one agent alone has 600


@pytest.mark.parametrize("row", houses(), ids=lambda row: row["task_id"])
@pytest.mark.parametrize("limited", [False, True])
def test_every_house_can_be_built(row, limited):
    task = load_task("housebuild", {"limited_resources": limited})
    answers = [lines(boxes) for boxes in schedule(read_target(row), 2)]
    assert rewards(task, row, [answers[0]], [f"{answers[1]}\n{KILL}"]) == [1.0]
    assert rewards(task, row, [answers[0]], [f"{answers[1]}\n{KILL}"], raw=False) == [0.0]
    assert sum(answers[0].count("\n") + 1 for answers in [answers]) <= 300


def test_ten_houses_of_our_own():
    targets = [read_target(row) for row in houses()]
    assert len({tuple(sorted(target.blocks.items())) for target in targets}) == 10
    assert {target.size for target in targets} == {(6, 7, 7)}
    task = load_task("housebuild")
    assert (len(task.train_dataset), len(task.eval_dataset)) == (8, 2)


def test_the_logger_has_the_reward_but_for_the_bites():
    task = load_task("housebuild")
    for seed in range(5):
        for answers in ([FLOOR, LOG], [FLOOR, KILL], ["", ""]):
            row = logged(task, HUT, *answers)["turns"][0]
            bites = 0.0 if row["spiders_killed"] else 0.1 * min(1, 3 * spider_strength(seed) / 5)
            found = rewards(task, HUT, *([answer] for answer in answers), episode_seed=seed)
            assert found == pytest.approx([row["iou"] - bites])


@pytest.mark.parametrize(
    ("mode", "first", "second"),
    [
        ("score_feedback", "overlap 0.43", "/kill @e[type=spider]"),
        # wrong: (0,0,1) (1,0,1) (2,0,1) and (0,1,0); the sums are 1, 2, 3 and 1
        ("perfect_feedback", "Should be: (1,0,1) bricks.", "Should be: (0,0,1) bricks, (2,0,1) bricks, (0,1,0) log."),
        ("position_feedback", "Wrong cells: (0,0,1) (1,0,1) (2,0,1) (0,1,0).", "Wrong cells: (0,0,1)"),
        ("position_modification", "(0,0,1) bricks, (1,0,1) bricks, (2,0,1) bricks, (0,1,0) log", "(0,1,0) log"),
        # both layers are at most 2, so all is agent 0's
        ("rect_modification", "/fill 0 0 1 2 0 1 bricks\n/fill 0 1 0 0 1 0 log", "nothing"),
        ("resource_schedule", "Your share:\n/fill", "Your share:\n/fill"),
    ],
)
def test_feedback(mode, first, second):
    task = load_task("housebuild", {"feedback": mode})
    answers = ["/fill 0 0 0 2 0 0 bricks", ""]
    before, after = next_prompts(task, HUT, 2, answers=answers, seed=3)
    for agent, words in enumerate([first, second]):
        assert after[agent][:-1] == [*before[agent], {"role": "assistant", "content": answers[agent]}]
        assert words in after[agent][-1]["content"]
    assert f"Score {3 / 7 - 0.1 * min(1, 3 * spider_strength(3) / 5):.2f} of 1" in after[0][-1]["content"]


def test_position_modification_names_twenty_cells():
    target = read_target(houses()[0])
    text = feedback_text(score(target, ["", ""]), 1, "position_modification", 0, 2)
    assert text.count("cobblestone") == 20


def test_rect_modification_shares_by_height():
    result = score(read_target(houses()[0]), ["", ""])
    heights = []
    for agent in range(2):
        text = feedback_text(result, 1, "rect_modification", agent, 2)
        heights.append({int(line.split()[2]) for line in text.splitlines() if line.startswith("/fill")})
    assert heights == [{0, 1, 2}, {2, 3, 4}]


def test_rectangles_are_the_largest_first_and_cover_all():
    blocks = {(x, 0, z): "b" for x in range(3) for z in range(2)} | {(0, 0, 2): "b", (2, 1, 2): "c"}
    boxes = rectangles(blocks)
    assert boxes[0] == Box((0, 0, 0), (2, 0, 1), "b")  # 3 × 2; the column at x 0 is 1 × 3
    assert boxes[1:] == [Box((0, 0, 2), (0, 0, 2), "b"), Box((2, 1, 2), (2, 1, 2), "c")]


def test_an_unknown_word_of_feedback():
    with pytest.raises(ConfigError, match="feedback='x'.*score_feedback.*resource_schedule"):
        load_task("housebuild", {"feedback": "x"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inventory": None}, "no house"),
        ({"target_spec": {"size": [3, 2, 2], "layers": []}}, "layers that are not 2"),
        ({"inventory": {"B": "bricks", "A": "air"}}, "letters L"),
    ],
)
def test_rows_that_hold_no_house(change, message, tmp_path):
    path = tmp_path / "houses.json"
    path.write_text(json.dumps([HUT, {key: value for key, value in (HUT | change).items() if value is not None}]))
    with pytest.raises(ConfigError, match=message):
        load_task("housebuild", {"data_path": str(path)})


def test_prompts():
    task = load_task("housebuild", {"limited_resources": "yes"})
    first, second = (prompt[0]["content"] for prompt in Environment(task, 2).initial_prompts(HUT))
    assert "y=0\nBBB\nBBB\ny=1\nLAA\nAAA" in first  # from the ground up
    assert "You have 4 bricks, 1 log" in first or "You have 1 log, 4 bricks" in first
    assert "from the ground." not in second
    assert "roof" in second
    (alone,) = Environment(task, 1).initial_prompts(HUT)
    assert "partner" not in alone[0]["content"]


@THOUSAND
@given(pairs(HOSTILE | pieces("/fill ", "0 0 0 ", "2 0 1 ", "0 1 0 ", "9 ", "bricks\n", "log\n", "air\n", KILL + "\n")))
def test_any_answers_are_rewarded_within_the_range(drawn):
    for answers in drawn:
        found = score(TARGET, answers, limited=len(answers[0]) % 2 == 0)
        assert -0.1 <= found.total(3) <= found.total(1) <= found.iou <= 1.0
        assert all(0.0 <= value <= 12.0 for value in found.metrics().values())
        for mode in FEEDBACK:
            assert feedback_text(found, 2, mode, 0, 2)
