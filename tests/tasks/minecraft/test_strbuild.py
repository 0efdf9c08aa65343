import pytest
from hypothesis import given

from mlrl.errors import ConfigError
from mlrl.task import Environment, load_task
from mlrl.tasks.minecraft.font import FONT, target_cells, width
from mlrl.tasks.minecraft.strings import PALETTES, feedback_text, score, wrong_cells
from mlrl.tasks.strbuild import FEEDBACK, drawing
from tests.texts import HOSTILE, THOUSAND, logged, next_prompts, pairs, pieces, rewards


def commands(blocks):
    return "\n".join(f"/setblock {x} {y} {z} {block}" for (x, y, z), block in blocks)


def best(text):
    """Both agents, four kinds: x + 2y differs by 1 between left and right, by 2 between up and down; or 2x + y."""
    cells = sorted(target_cells(text))
    weights = next((a, b) for a, b in ((1, 2), (2, 1)) if len({(a * x + b * y) % 4 for x, y, _ in cells}) == 4)
    lists = [[], []]
    for x, y, z in cells:
        kind = (weights[0] * x + weights[1] * y) % 4
        lists[kind % 2].append(((x, y, z), PALETTES[kind % 2][kind // 2]))
    return [commands(blocks) for blocks in lists]


def test_the_font():
    assert len(FONT) == 26
    assert all(len(rows.split()) == 5 and {len(row) for row in rows.split()} == {5} for rows in FONT.values())
    assert {letter: len(target_cells(letter)) for letter in "ICML"} == {"I": 9, "C": 11, "M": 17, "L": 9}
    assert len(target_cells("ICML")) == 46
    assert width("ICML") == 26
    assert drawing("L").splitlines() == ["#....", "#....", "#....", "#....", "#####"]
    assert (0, 4, 0) in target_cells("L")  # y runs up
    assert min(x for x, _, _ in target_cells("LL") if x > 4) == 7  # 5 cells and 2 between


# L has 9 target cells: the left column and the bottom row; its box has 16 others.
@pytest.mark.parametrize(
    ("first", "second", "levels"),
    [
        ([], [], (0, 0, 0, -0.5)),
        # one target cell: 2/9; agent 0 shows stone only, agent 1 nothing
        ([((0, 0, 0), "stone")], [], (2 / 9, 0, 0, -0.5)),
        # two neighbours of one kind, side by side or one above the other
        ([((0, 0, 0), "stone"), ((1, 0, 0), "stone")], [], (4 / 9, 0, -1, -0.5)),
        ([((0, 0, 0), "stone"), ((0, 1, 0), "stone")], [], (4 / 9, 0, -1, -0.5)),
        # three in a row: stone–stone and stone–oak; agent 0's palette is seen
        (
            [((0, 0, 0), "stone"), ((1, 0, 0), "stone"), ((2, 0, 0), "oak_planks")],
            [],
            (6 / 9, 0, -1 / 2, -0.25),
        ),
        # two other cells of 16, up and down neighbours of different agents
        ([((2, 2, 0), "stone")], [((2, 3, 0), "obsidian")], (0, -1.5 * 2 / 16, 0, -0.5)),
        # agent 1 writes over agent 0, so that stone is not seen
        ([((0, 0, 0), "stone")], [((0, 0, 0), "obsidian")], (2 / 9, 0, 0, -0.5)),
        # agent 1 removes it
        ([((0, 0, 0), "stone")], [((0, 0, 0), "air")], (0, 0, 0, -0.5)),
        # blocks of the partner are refused
        ([((0, 0, 0), "obsidian")], [((1, 0, 0), "stone")], (0, 0, 0, -0.5)),
    ],
)
def test_every_term_by_hand(first, second, levels):
    found = score("L", [commands(first), commands(second)])
    assert found.levels == pytest.approx(levels)
    assert found.total == pytest.approx(sum(levels))


def test_iou():
    # 2 of 9 target cells, 1 other: 2/10
    blocks = [((0, 0, 0), "stone"), ((1, 0, 0), "stone"), ((2, 2, 0), "stone")]
    assert score("L", [commands(blocks), ""]).metrics()["iou"] == pytest.approx(0.2)


def test_each_agent_has_half_of_the_commands():
    many = [((0, 0, 0), "stone")] * 150 + [((1, 0, 0), "stone")]
    assert score("L", [commands(many), ""]).covered == 1
    assert score("L", [commands(many)]).covered == 2  # one agent alone has 300


@pytest.mark.parametrize("text", ["I", "C", "M", "L", "MC", "CM", "LI", "LLM", "ICML", "CLIM", "AGENT", *FONT])
def test_best_answers_reach_the_maximum(text):
    assert score(text, best(text)).total == pytest.approx(2.0)
    assert score(text, ["\n".join(best(text))]).total == pytest.approx(2.0)  # one agent with both palettes


def test_training_sees_it_two_lower():
    task = load_task("strbuild")
    item = task.train_dataset[0]
    answers = [[answer, ""] for answer in best(item["string"])]
    assert rewards(task, item, *answers) == pytest.approx([2.0, -0.5])
    assert rewards(task, item, *answers, raw=False) == pytest.approx([0.0, -2.5])
    assert logged(task, item, *best(item["string"]))["turns"][0]["level_total"] == pytest.approx(2.0)


def test_metrics_are_by_turn_and_last():
    environment = Environment(load_task("strbuild"), 2, 4)
    rows = environment.eval_rows(
        agent_completions_turns=[[["", best("A")[0]], [best("T")[0]]], [["", best("A")[1]], [best("T")[1]]]],
        items=[{"string": "A"}, {"string": "T"}],
    )
    means = environment.aggregate(rows)
    assert means["turn_1/level_total"] == pytest.approx((-0.5 + 2) / 2)
    assert means["turn_2/level_total"] == pytest.approx(2.0)  # of the one that reached it
    assert means["final/level_total"] == pytest.approx(2.0)


def test_rows_of_our_own_and_of_a_file(tmp_path):
    task = load_task("strbuild")
    assert (len(task.train_dataset), len(task.eval_dataset)) == (8, 2)
    path = tmp_path / "strings.csv"
    path.write_text('string,difficulty\n"I",1\n"MC",2\n"ICML",3\n')
    task = load_task("strbuild", {"data_path": str(path), "eval_size": 1})
    assert [row["string"] for row in task.train_dataset] == ["I", "MC"]
    assert task.eval_dataset == [{"string": "ICML", "difficulty": "3"}]
    path.write_text("string\nI\nab\n")
    with pytest.raises(ConfigError, match="string='ab': not of the font's letters"):
        load_task("strbuild", {"data_path": str(path)})


def test_prompts():
    task = load_task("strbuild")
    first, second = (prompt[0]["content"] for prompt in Environment(task, 2).initial_prompts({"string": "HI"}))
    assert "oak_planks, stone, air" in first
    assert "white_concrete, obsidian, air" in second
    assert "#...#...###." in first
    hidden = load_task("strbuild", {"provide_graph": "false"})
    assert "#...#" not in Environment(hidden, 2).initial_prompts({"string": "HI"})[0][0]["content"]
    with pytest.raises(ConfigError, match="num_agents=3"):
        Environment(task, 3).initial_prompts({"string": "HI"})


PART = [commands([((0, 0, 0), "stone"), ((2, 2, 0), "stone")]), commands([((1, 0, 0), "obsidian")])]


@pytest.mark.parametrize(
    ("mode", "first", "second"),
    [
        ("score_feedback", "covered 2 of 9 target cells, with 1 blocks too many", "0 of 1 neighbouring pairs"),
        ("position_feedback", "(0,0,0) (0,1,0) (0,2,0)", "about half"),
        # missing: (0,1) (0,2) (0,3) (0,4) (2,0) (3,0) (4,0); x + y even for agent 0; (2,2) is too much and even
        (
            "perfect_feedback",
            "Yours to add: (0,2,0) (0,4,0) (2,0,0) (4,0,0). Yours to leave out: (2,2,0).",
            "Yours to add: (0,1,0) (0,3,0) (3,0,0). Yours to leave out: none.",
        ),
    ],
)
def test_feedback(mode, first, second):
    task = load_task("strbuild", {"feedback": mode})
    before, after = next_prompts(task, {"string": "L"}, 2, answers=PART)
    for agent, words in enumerate([first, second]):
        assert after[agent][:-1] == [*before[agent], {"role": "assistant", "content": PART[agent]}]
        assert words in after[agent][-1]["content"]
    # 2·2/9 − 1.5·1/16 − 0 − 0.25·2
    assert f"Score {4 / 9 - 1.5 / 16 - 0.5:.2f} of 2" in after[0][-1]["content"]


def test_an_unknown_word_of_feedback():
    with pytest.raises(
        ConfigError, match="feedback='expert_edits'.*position_feedback, perfect_feedback, score_feedback"
    ):
        load_task("strbuild", {"feedback": "expert_edits"})


def test_following_perfect_feedback_builds_the_string():
    result = score("HI", ["", ""])
    shares = [wrong_cells(result, agent, 2)[0] for agent in range(2)]
    assert sorted(shares[0] + shares[1]) == sorted(target_cells("HI"))
    assert not set(shares[0]) & set(shares[1])


COMMAND = pieces(
    "/setblock ",
    "0 ",
    "1 ",
    "2 ",
    "0 0 0 ",
    "1 0 0 ",
    "stone\n",
    "oak_planks\n",
    "obsidian\n",
    "white_concrete\n",
    "air\n",
)


@THOUSAND
@given(pairs(HOSTILE | COMMAND))
def test_any_answers_are_rewarded_within_the_range(drawn):
    for answers in drawn:
        found = score("LI", answers)
        assert -3.0 <= found.total <= 2.0
        assert found.metrics()["level_total"] == found.total
        assert 0.0 <= found.metrics()["iou"] <= 1.0
        for mode in FEEDBACK:
            assert feedback_text(found, mode, 1, 2)
