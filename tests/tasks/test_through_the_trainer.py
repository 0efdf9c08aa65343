"""Best, partial and hostile answers played through the real trainer: every level of reward, feedback and early stop.

Those of the code tasks stand in `test_coding.py` and `test_class_completion.py`.
"""

import json

import pytest

from mlrl.task import load_task
from mlrl.tasks.minecraft import house_feedback
from mlrl.tasks.minecraft.house import read_target
from mlrl.tasks.strbuild import FEEDBACK
from mlrl.tasks.travel_plan.answer import written
from tests.tasks.minecraft.test_housebuild import KILL, lines
from tests.tasks.minecraft.test_strbuild import PART, best
from tests.tasks.scripted import play
from tests.tasks.tool_use.test_tasks import dealt
from tests.tasks.travel_plan.test_reward import solved
from tests.tasks.writing.test_reward import ALL_TRANSITIONS, numbered
from tests.texts import rewards

HOSTILE = ["\x00```{", '{"a": [' * 200]


def trained(task, answers, model, folder, monkeypatch, **settings):
    """The nodes of one step on the first row, whose answers are [turn][generation][agent]; what evaluation says."""
    from mlrl.trainers import MAGRPOConfig, MAGRPOTrainer

    play(monkeypatch, lambda agent, turn, k: answers[turn][k][agent])
    args = MAGRPOConfig(
        num_turns=len(answers), num_generations=len(answers[0]), rollout_batch_size=1, max_steps=1,
        max_prompt_tokens=60, eval_num_samples=1, output_dir=str(folder), run_name="r", completions_steps=1,
        early_termination_threshold=task.recommended.get("early_termination_threshold"), eval_interval=0, **settings,
    )  # fmt: skip
    trainer = MAGRPOTrainer(task=task, agent_model=model, num_agents=2, args=args)
    trainer.train()
    nodes = [json.loads(line) for line in (folder / "r/completions/train-000001.jsonl").read_text().splitlines()]
    return nodes, trainer.evaluate()


WRITING = {
    "tldr": [
        ["", numbered(10)],  # too short
        [numbered(10), numbered(10)],  # ρ 1
        [numbered(10), f"{numbered(10)} {numbered(10)}"],  # twice as long, the same words
        [numbered(40), f"{numbered(85)} {ALL_TRANSITIONS}"],
    ],
    "arxiv": [
        [numbered(140), numbered(127)],  # too short
        [numbered(140), "y" * 30 + f" {'y' * 30}" * 140],  # ρ above 2
        [numbered(140), "abcde " * 130],  # ρ 780/589, one word
        [numbered(140), f"{numbered(140)} {ALL_TRANSITIONS} {'x' * 100}"],
    ],
}


@pytest.mark.parametrize("name", ["tldr", pytest.param("arxiv", marks=pytest.mark.slow)])
def test_levels_of_writing(name, tiny_llama, tmp_path, monkeypatch):
    nodes, _ = trained(load_task(name), [WRITING[name]], tiny_llama, tmp_path, monkeypatch)
    # L1; L1 and L2; all: .5 + 1 + .5 + .4·.95 + .6
    assert nodes[0]["rewards"] == pytest.approx([0.0, 0.5, 1.5, 2.98])


@pytest.mark.parametrize("name", ["bfcl", pytest.param("bfcl_multiturn", marks=pytest.mark.slow)])
def test_calls(name, tiny_llama, tmp_path, monkeypatch):
    task = load_task(name, {"dataset": "sample"})
    row = task.train_dataset[0]
    alone, shared = dealt(row, 1)[0], dealt(row, 2)
    joints = [shared, [alone, "[]"], [alone, alone], [shared[0], "unknown(x=1)"], HOSTILE]
    expected = rewards(task, row, *(list(texts) for texts in zip(*joints, strict=True)))
    nodes, metrics = trained(task, [joints], tiny_llama, tmp_path, monkeypatch)
    assert nodes[0]["rewards"] == pytest.approx(expected)
    assert expected[0] == pytest.approx({"bfcl": 1.10, "bfcl_multiturn": 1.20}[name])
    assert expected[0] > max(expected[1:]) and min(expected) == expected[-1] <= 0
    assert len(set(expected)) == 5 and "eval/turn_1/exact_match" in metrics


def test_trips(tiny_llama, tmp_path, monkeypatch):
    task = load_task("travel")
    trip, values = solved(task.train_dataset[0])
    plan = [written(values, agent, 2, trip.days) for agent in (0, 1)]
    nothing = [written({}, agent, 2, trip.days) for agent in (0, 1)]
    joints = [plan, [plan[0], nothing[1]], nothing, [plan[0], HOSTILE[1]], HOSTILE]
    nodes, metrics = trained(task, [joints], tiny_llama, tmp_path, monkeypatch)
    found = nodes[0]["rewards"]
    assert (found[0], found[2]) == pytest.approx((1.0, 0.08))
    assert found[0] > found[1] > found[2] > 0.03 >= found[3] and found[4] <= 0
    assert "eval/reference_plan_success" in metrics


STRINGS = [pytest.param(mode, marks=[pytest.mark.slow] * (mode != "perfect_feedback")) for mode in FEEDBACK]


@pytest.mark.parametrize("mode", STRINGS)
def test_strings(mode, tiny_llama, tmp_path, monkeypatch):
    task = load_task("strbuild", {"feedback": mode})
    text = task.train_dataset[0]["string"]
    answers = [[best(text), HOSTILE], [best(text), PART]]
    nodes, metrics = trained(task, answers, tiny_llama, tmp_path, monkeypatch)
    (partial,) = rewards(task, task.train_dataset[0], *([answer] for answer in PART), raw=False)
    assert [node["path"] for node in nodes] == [[], [0], [1]]
    assert nodes[0]["rewards"] == pytest.approx([0.0, -2.5])  # nothing built: −2, and −0.25 for each palette unseen
    assert -2.5 < partial < 0 and nodes[1]["rewards"] == nodes[2]["rewards"] == pytest.approx([0.0, partial])
    told = {"position_feedback": "(0,0,0)", "perfect_feedback": "(0,0,0)", "score_feedback": "covered 0 of"}[mode]
    assert told in "".join(prompt[-1]["content"] for prompt in nodes[2]["prompts"])
    assert "eval/turn_1/iou" in metrics


def test_a_perfect_string_ends_early(tiny_llama, tmp_path, monkeypatch):
    task = load_task("strbuild")
    perfect = best(task.train_dataset[0]["string"])
    nodes, _ = trained(task, [[perfect] * 2] * 3, tiny_llama, tmp_path, monkeypatch)
    assert [node["path"] for node in nodes] == [[]]
    assert nodes[0]["rewards"] == pytest.approx([0.0, 0.0])


HOUSES = [
    pytest.param(mode, marks=[pytest.mark.slow] * (mode != "resource_schedule")) for mode in house_feedback.FEEDBACK
]


@pytest.mark.parametrize("mode", HOUSES)
def test_houses(mode, tiny_llama, tmp_path, monkeypatch):
    task = load_task("housebuild", {"feedback": mode})
    shares = [lines(boxes) for boxes in house_feedback.schedule(read_target(task.train_dataset[0]), 2)]
    killed = [shares[0], f"{shares[1]}\n{KILL}"]
    nodes, metrics = trained(task, [[killed, HOSTILE], [shares, killed]], tiny_llama, tmp_path, monkeypatch)
    assert [node["path"] for node in nodes] == [[], [0], [1]]
    bites = -1 - nodes[0]["rewards"][1]  # nothing built
    assert nodes[0]["rewards"][0] == pytest.approx(0.0) and round(bites, 9) in (0.06, 0.1)
    # the whole house, with the bites of the same episode, and without
    assert nodes[1]["rewards"] == nodes[2]["rewards"] == pytest.approx([-bites, 0.0])
    assert "eval/final/spiders_killed" in metrics


def test_a_perfect_house_ends_early(tiny_llama, tmp_path, monkeypatch):
    task = load_task("housebuild")
    shares = [lines(boxes) for boxes in house_feedback.schedule(read_target(task.train_dataset[0]), 2)]
    nodes, _ = trained(task, [[[shares[0], f"{shares[1]}\n{KILL}"]] * 2] * 2, tiny_llama, tmp_path, monkeypatch)
    assert [node["path"] for node in nodes] == [[]]
