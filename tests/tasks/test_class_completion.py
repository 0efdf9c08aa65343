import ast
import itertools
import json
from math import isclose

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlrl.errors import ConfigError
from mlrl.task import Environment, load_task
from mlrl.tasks.class_data import case_names, class_row, share_methods
from mlrl.tasks.class_reward import ClassScore, judge
from mlrl.tasks.class_samples import CLASSES
from mlrl.tasks.classeval import FEEDBACK, role_prompt, shares_of, verdict_text
from mlrl.tasks.sandbox import Limits, Outcome, Sandbox
from tests.tasks.scripted import play

ROW = {
    "task_id": "c",
    "skeleton": "class Pair:\n    def __init__(self, a, b):\n        self.a, self.b = a, b\n\n"
    "    def total(self):\n        '''a plus b'''\n\n    def swapped(self):\n        '''(b, a)'''\n\n"
    "    def double(self):\n        '''twice the total'''\n\n    def largest(self):\n        '''of a and b'''\n",
    "class_name": "Pair",
    "class_constructor": "class Pair:\n    def __init__(self, a, b):\n        self.a, self.b = a, b\n",
    "import_statement": ["import math"],
    "methods_info": [
        {"method_name": "total", "dependencies": {"method_dependencies": []}},
        {"method_name": "swapped", "dependencies": {"method_dependencies": []}},
        {"method_name": "double", "dependencies": {"method_dependencies": ["total"]}},
        {"method_name": "largest", "dependencies": None},
    ],
    "test": "import unittest\n"
    + "\n".join(
        f"class Test{name.title()}(unittest.TestCase):\n    def test_{name}(self):\n"
        f"        self.assertEqual(Pair(2, 5).{name}(), {value})"
        for name, value in {"total": "7", "swapped": "(5, 2)", "double": "14", "largest": "5"}.items()
    ),
}
ITEM = class_row(ROW, 0)
SHARES = [["total", "double"], ["swapped", "largest"]]
TOTAL = "def total(self):\n    return self.a + self.b"
DOUBLE = "def double(self):\n    return 2 * self.total()"
SWAPPED = "def swapped(self):\n    return self.b, self.a"
LARGEST = "def largest(self):\n    return max(self.a, self.b)"
FIRST, SECOND = f"{TOTAL}\n\n{DOUBLE}", f"{SWAPPED}\n\n{LARGEST}"
SANDBOX = Sandbox(Limits(test_s=0.5, total_s=5, memory_mb=2048), 1)


def test_a_row():
    assert ITEM["methods"] == ["total", "swapped", "double", "largest"]
    assert ITEM["depends"] == {"total": [], "swapped": [], "double": ["total"], "largest": []}
    assert ITEM["head"] == "import math\n" + ROW["class_constructor"].rstrip()
    assert ITEM["tests"][0] == "TestTotal.test_total"
    assert len(ITEM["tests"]) == 4


def test_rows_that_are_askew():
    empty = class_row({**ROW, "class_constructor": "class Pair: \n"}, 0)
    assert empty["head"] == "import math\nclass Pair:\n    pass"
    unreadable = class_row({**ROW, "skeleton": ROW["skeleton"] + "    def odd(self):\n        ”“”\n"}, 0)
    assert unreadable["methods"] == [*ITEM["methods"], "odd"]
    with pytest.raises(ConfigError, match="row 4 lacks test, class_name"):
        class_row({k: v for k, v in ROW.items() if k not in ("test", "class_name")}, 4)
    with pytest.raises(ConfigError, match="4 methods, 0 tests"):
        class_row({**ROW, "test": "class A: pass"}, 0)
    with pytest.raises(ConfigError, match="test does not parse"):
        case_names("class (")


# the shares of ITEM
#   one of {total, double} with another method cuts the call between them; {total, double} and the rest cut none
@pytest.mark.parametrize(
    ("num_agents", "shares"),
    [
        (1, [["total", "swapped", "double", "largest"]]),
        (2, [["total", "double"], ["swapped", "largest"]]),
        (3, [["total", "double"], ["swapped"], ["largest"]]),
        (4, [["swapped"], ["largest"], ["total"], ["double"]]),
        (5, [["swapped"], ["largest"], ["total"], ["double"], []]),
    ],
)
def test_shares(num_agents, shares):
    assert shares_of(ITEM, num_agents) == shares


@pytest.mark.parametrize("num_methods", [1, 2, 3, 5, 8, 10, 13, 30])
@pytest.mark.parametrize("num_agents", range(1, 7))
def test_shares_are_even_and_whole(num_methods, num_agents):
    methods = [f"m{k}" for k in range(num_methods)]
    depends = {m: [f"m{7 * k % 11}", f"m{5 * k % 3}", "other"] for k, m in enumerate(methods)}
    shares = share_methods(methods, depends, num_agents)
    assert sorted(m for share in shares for m in share) == sorted(methods)
    assert len(shares) == num_agents
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


# name: (texts, reward);   2·valid/4 + 4·passed/4 − overlapping/4
LEVELS = {
    "nothing": (("", ""), 0.0),
    "one method, its test passes": ((TOTAL, ""), 0.5 + 1),
    "one method without what it calls": ((DOUBLE, ""), 0.5),
    "one method, wrong": (("def total(self):\n    return 0", ""), 0.5),
    "the first share": ((FIRST, ""), 1.0 + 2),
    "everything": ((FIRST, SECOND), 6.0),
    "everything by the second": (("", f"{FIRST}\n\n{SECOND}"), 6.0),
    "shares exchanged": ((SECOND, FIRST), 6.0),
    "one method twice": ((FIRST, f"{SECOND}\n\n{TOTAL}"), 6.0 - 0.25),
    "all methods twice": ((f"{FIRST}\n{SECOND}", f"{FIRST}\n{SECOND}"), 6.0 - 1),
    "twice, the owner's counts": ((FIRST, f"{SECOND}\n\ndef total(self):\n    return 0"), 6.0 - 0.25),
    "twice, the owner's does not parse": (
        (f"{DOUBLE}\n\ndef total(self):\n    return (", f"{SECOND}\n\n{TOTAL}"),
        6.0 - 0.25,
    ),
    "does not compile": ((FIRST, f"{SWAPPED}\n\ndef largest(self):\n    return ("), 0.0),
    "does not compile and overlaps": ((f"{FIRST}\n{SWAPPED}", f"{SWAPPED}\ndef largest(self):\n    nonlocal x"), 0.0),
    "in fences and in a class": (
        (f"Here:\n```python\n{FIRST}\n```", "class Pair:\n    " + SECOND.replace("\n", "\n    ")),
        6.0,
    ),
    "a helper of its own": (
        (FIRST, f"{SWAPPED}\n\ndef largest(self):\n    return self._l()\n\ndef _l(self):\n    return 5"),
        6.0,
    ),
    "another constructor is not taken": ((f"{FIRST}\n\ndef __init__(self):\n    pass", SECOND), 6.0),
    "a text constant keeps its lines": (
        (FIRST, f"{SWAPPED}\n\ndef largest(self):\n    return len('''\na\n''') + 2"),
        6.0,
    ),
    "imports": ((FIRST, f"from math import inf\n{SWAPPED}\n\ndef largest(self):\n    return max(self.b, -inf)"), 6.0),
    "an exit": ((FIRST, f"{SWAPPED}\n\ndef largest(self):\n    import os\n    os._exit(0)"), 2.0 + 3),
    "an endless loop": ((FIRST, f"{SWAPPED}\n\ndef largest(self):\n    while True: pass"), 2.0 + 3),
    "a module that is absent": ((FIRST, f"import no_such_module\n{SECOND}"), 2.0),
}


def test_every_level():
    scores = judge(SANDBOX, ITEM, [texts for texts, _ in LEVELS.values()], SHARES)
    found = {name: score.total for name, score in zip(LEVELS, scores, strict=True)}
    assert found == pytest.approx({name: reward for name, (_, reward) in LEVELS.items()})
    for score in scores:
        parts = score.metrics()
        names = ("level1_syntax", "level2_tests", "level3_overlap_penalty", "total")
        syntax, tests, penalty, total = (parts[f"ce_reward/{name}"] for name in names)
        assert isclose(syntax + tests - penalty, total)
        assert total == score.total


def test_the_reward_stays_in_its_range():
    runs = [("passed",), ("failed",), ("passed", "failed"), ("timeout", "skipped", "passed")]
    for valid, overlapping, problem, statuses in itertools.product(range(5), range(5), [None, "bad"], runs):
        score = ClassScore(4, valid, overlapping, problem, statuses, tuple(map(Outcome, statuses)))
        assert -1.0 <= score.total <= 6.0
        assert (score.total == 6.0) is (valid == 4 and overlapping == 0 and not problem and statuses == ("passed",))


@settings(max_examples=6, deadline=None)
@given(st.text(), st.integers(1, 120), st.integers(1, 120))
def test_any_text_is_judged(text, cut, other):
    responses = [(text, SECOND[:cut]), (FIRST[:cut], SECOND[:other]), (FIRST[:other] + text, text)]
    assert all(-1.0 <= score.total <= 6.0 for score in judge(SANDBOX, ITEM, responses, SHARES))


def test_our_own_classes_are_solved_by_their_solutions():
    rows = [class_row(row, k) for k, row in enumerate(CLASSES)]
    assert len({row["task_id"] for row in rows}) == len(rows) >= 8
    for row, sample in zip(rows, CLASSES, strict=True):
        ast.parse(row["prompt"])
        assert judge(SANDBOX, row, [("", sample["solution_code"])], shares_of(row, 2))[0].total == 6.0, row["task_id"]


# ------------------------------------------------------------------------------------------------------------ the task


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{**ROW, "task_id": f"c{k}"} for k in range(3)]))
    return str(path)


def test_shipped_and_sized(data):
    task = load_task("classeval")
    assert (len(task.train_dataset), len(task.eval_dataset)) == (6, 2)
    assert task.reward_processor(6.0) == 0.0
    Environment(task, 3, 2).check_first_row()
    task = load_task("classeval", {"data_path": data, "train_size": 2, "eval_size": 1})
    assert [row["task_id"] for row in [*task.train_dataset, *task.eval_dataset]] == ["c0", "c1", "c2"]
    with pytest.raises(ConfigError, match="of 3 rows that leaves 3 to train and 0"):
        load_task("classeval", {"data_path": data})
    with pytest.raises(ConfigError, match="feedback='personal'.*code_feedback"):
        load_task("classeval", {"feedback": "personal"})


def test_roles():
    text = role_prompt(ITEM, 0, 2)[0]["content"]
    assert text.startswith(f"Complete this class.\n\n{ITEM['prompt']}")
    assert "Write `total`, `double`. Answer with these method definitions only" in text
    assert "Others write `swapped`, `largest`" in text
    assert "nothing for you to write" in role_prompt(ITEM, 4, 5)[0]["content"]
    assert "Others" not in role_prompt(ITEM, 0, 1)[0]["content"]


def test_what_each_mode_tells():
    best, broken, wrong = judge(
        SANDBOX,
        ITEM,
        [(FIRST, SECOND), (FIRST, "def largest(self):\n    return ("), (TOTAL, f"{TOTAL}\n{SWAPPED}\n{LARGEST[:-7]}")],
        SHARES,
    )
    assert verdict_text(best, "plain") == verdict_text(wrong, "plain")
    assert verdict_text(best, "passed") == "All tests passed: yes."
    assert verdict_text(wrong, "passed") == "All tests passed: no."
    assert verdict_text(best, "level_passed").count(": passed") == 3
    assert verdict_text(broken, "code_feedback").startswith("The class does not compile: '(' was never closed (line")
    assert verdict_text(best, "code_feedback") == "The class compiles. Tests passed: 4 of 4."


def test_failing_tests_are_named():
    score = judge(SANDBOX, ITEM, [(TOTAL, f"{TOTAL}\n{SWAPPED}\ndef largest(self):\n    return 1")], SHARES)[0]
    compiled = "The class compiles. Tests passed: 2 of 4."
    failing = "TestDouble.test_double, TestLargest.test_largest"
    assert verdict_text(score, "code_feedback") == f"{compiled}\nFailing: {failing}."
    assert verdict_text(score, "level_feedback").splitlines() == [
        compiled,
        "1 methods are missing or broken.",
        "1 methods were written by several agents.",
        "TestDouble.test_double: AttributeError: 'Pair' object has no attribute 'double'",
        "TestLargest.test_largest: AssertionError: 1 != 5",
    ]
    signals = "syntax: not passed\ntests: not passed\nno method written twice: not passed"
    assert verdict_text(score, "level_passed") == signals


def test_the_history_holds_an_agents_own_methods(data):
    team = Environment(load_task("classeval", {"data_path": data, "train_size": 2, "eval_size": 1}), 2, 2)
    item = team.task.train_dataset[0]
    first = team.initial_prompts(item)
    answers = [f"Sure!\n```python\n{TOTAL}\n\n{SWAPPED}\n```", "no code"]
    following = team.next_prompts(
        item=item,
        turn=0,
        completions=answers,
        reward=-6.0,
        prompt_history=[[prompt] for prompt in first],
        response_history=[[answer] for answer in answers],
        episode_seed=0,
    )
    assert following[0][:2] == [*first[0], {"role": "assistant", "content": TOTAL}]
    assert "Tests passed: 2 of 4" in following[0][2]["content"]
    request = "Write again, better: `total`, `double`. Answer with these method definitions only"
    assert request in following[0][2]["content"]
    assert following[1][1]["content"] == "no code"


SLOW = [pytest.param(word, marks=pytest.mark.slow) for word in FEEDBACK if word != "code_feedback"]


@pytest.mark.parametrize("feedback", ["code_feedback", *SLOW])
def test_answers_through_the_trainer(feedback, data, tiny_llama, tmp_path, monkeypatch):
    from mlrl.trainers import MAGRPOConfig, MAGRPOTrainer

    texts = {
        (0, 0): [FIRST, ""],
        (1, 0): ["def largest(self):\n    return (", SWAPPED],
        (0, 1): [FIRST, FIRST],
        (1, 1): [SECOND, f"{SECOND}\n{TOTAL}"],
    }
    play(monkeypatch, lambda agent, turn, k: texts[agent, turn][k])
    args = MAGRPOConfig(
        num_turns=2, num_generations=2, rollout_batch_size=1, max_steps=1, max_prompt_tokens=60, eval_num_samples=1,
        early_termination_threshold=-0.2, output_dir=str(tmp_path), run_name="r", completions_steps=1,
    )  # fmt: skip
    task = load_task("classeval", {"data_path": data, "feedback": feedback, "train_size": 2, "eval_size": 1})
    trainer = MAGRPOTrainer(task=task, agent_model=tiny_llama, num_agents=2, args=args)
    trainer.train()
    nodes = [json.loads(line) for line in (tmp_path / "r/completions/train-000001.jsonl").read_text().splitlines()]
    assert [node["path"] for node in nodes] == [[], [0], [1]]
    assert nodes[0]["rewards"] == [-6.0, 0.5 + 1 - 6]
    assert nodes[1]["rewards"] == nodes[2]["rewards"] == [0.0, -0.25]
    told = verdict_text(judge(SANDBOX, ITEM, [("", SWAPPED)], SHARES)[0], feedback)
    assert told in nodes[2]["prompts"][0][-1]["content"]
    assert trainer.evaluate()["eval/final/solved"] == 1.0
