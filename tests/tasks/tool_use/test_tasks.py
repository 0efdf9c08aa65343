import importlib.util
import json
from itertools import pairwise

import pytest

from mlrl.errors import ConfigError
from mlrl.task import Environment, load_task
from mlrl.tasks.tool_use import source
from mlrl.tasks.tool_use.builder import ROLE_MODES, item_score, signature
from mlrl.tasks.tool_use.rows import gold_calls, tool_row
from tests.texts import logged, rewards

TOP = {"bfcl": 1.10, "bfcl_multiturn": 1.20}
PACKAGE = importlib.util.find_spec("bfcl_eval") is not None


def dealt(row, num_agents):
    """The gold calls in order, the same number for each agent but for one."""
    calls = [call.example().text for call in gold_calls(row)]
    share, rest = divmod(len(calls), num_agents)
    cuts = [agent * share + min(agent, rest) for agent in range(num_agents + 1)]
    return ["\n".join(calls[start:end]) or "[]" for start, end in pairwise(cuts)]


@pytest.mark.parametrize("name", TOP)
@pytest.mark.parametrize("num_agents", [1, 2, 3])
def test_gold_calls_of_our_own_rows_reach_the_maximum(name, num_agents):
    task = load_task(name, {"dataset": "sample"})
    rows = [*task.train_dataset, *task.eval_dataset]
    assert len(rows) == 10
    for row in rows:
        answers = dealt(row, num_agents)
        assert rewards(task, row, *([answer] for answer in answers)) == pytest.approx([TOP[name]])
        turn = logged(task, row, *answers)["turns"][0]
        assert turn["reward"] == pytest.approx(TOP[name])
        assert turn["exact_match"] == turn["f1"] == turn["argument_match"] == turn["balance"] == 1.0


@pytest.mark.skipif(not PACKAGE, reason="bfcl-eval is not installed (pip install bfcl-eval --no-deps)")
def test_gold_calls_of_the_benchmark_reach_the_maximum():
    every = {"bfcl": "parallel,parallel_multiple,live_parallel,live_parallel_multiple", "bfcl_multiturn": "base"}
    for name, categories in every.items():
        task = load_task(name, {"dataset": "bfcl-eval", "categories": categories})
        rows = [*task.train_dataset, *task.eval_dataset]
        assert len(rows) == 440 or name != "bfcl"
        below = [r["id"] for r in rows if item_score(r, dealt(r, 2), name != "bfcl").total < TOP[name] - 1e-9]
        assert below == []


@pytest.mark.parametrize("name", TOP)
def test_the_logger_has_the_reward(name):
    task = load_task(name, {"dataset": "sample"})
    row = task.train_dataset[0]
    for answers in [("", ""), ("[]", "f(x=1)"), (dealt(row, 1)[0], "[]"), (dealt(row, 1)[0], dealt(row, 1)[0])]:
        assert logged(task, row, *answers)["turns"][0]["reward"] == rewards(task, row, *([a] for a in answers))[0]


def test_metrics_are_those_of_turn_1():
    task = load_task("bfcl", {"dataset": "sample"})
    environment = Environment(task, 2)
    rows = [logged(task, task.train_dataset[0], *answers) for answers in [("", ""), dealt(task.train_dataset[0], 2)]]
    assert environment.aggregate(rows)["turn_1/exact_match"] == 0.5


@pytest.mark.parametrize("mode", ROLE_MODES)
def test_prompts_hold_functions_request_and_share(mode):
    task = load_task("bfcl_multiturn", {"dataset": "sample", "role_mode": mode})
    item = task.train_dataset[0]
    prompts = [prompt[0]["content"] for prompt in Environment(task, 2).initial_prompts(item)]
    for prompt in prompts:
        assert item["user_prompt"] in prompt
        assert all(function["name"] + "(" in prompt for function in item["function"])
        assert not any(call.example().text in prompt for call in gold_calls(item))
    assert (prompts[0] == prompts[1]) == (mode == "same_prompt")
    assert len(Environment(task, 1).initial_prompts(item)) == 1


def test_a_signature():
    function = {
        "name": "f",
        "description": "Long preface. Tool description: Does it. ",
        "parameters": {
            "properties": {
                "x": {"type": "integer", "description": "How many."},
                "y": {"type": "string", "enum": ["a"]},
            },
            "required": ["x"],
        },
    }
    assert signature(function).splitlines() == [
        "f(x: integer, y: string (optional))",
        "    Does it.",
        "    x: How many.",
        '    y:  {"enum": ["a"]}',
    ]


FUNCTION = {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}, "y": {"type": "dict"}}}}


@pytest.mark.parametrize(
    "call",
    [
        {"f": {"x": [1], "y": [{"k": [2]}]}},
        {"name": "f", "arguments": {"x": 1, "y": {"k": 2}}},
        {"name": "f", "arguments": '{"x": 1, "y": {"k": 2}}'},
        "f(x=1, y={'k': 2})",
        "f(1, {'k': 2})",
    ],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_forms_of_gold_calls(call, as_text):
    fields = {"function": [FUNCTION], "ground_truth": [call, call]}
    if as_text:
        fields = {key: json.dumps(value) for key, value in fields.items()}
    row = tool_row({"user_prompt": "Do it.", **fields})
    assert row["ground_truth"] == [["f", {"x": [1], "y": [{"k": [2]}]}]]  # the same call twice is one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ground_truth": ["no call at all"]}, "gold call 'no call at all'"),
        ({"ground_truth": [{"f": {}, "g": {}}]}, "gold call"),
        ({"user_prompt": None}, "no field 'user_prompt'"),
    ],
)
def test_rows_in_another_form(change, message):
    row = {"user_prompt": "Do it.", "function": [FUNCTION], "ground_truth": []} | change
    with pytest.raises(ConfigError, match=message):
        tool_row({key: value for key, value in row.items() if value is not None})


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder with the benchmark's files, three rows each."""

    def write(name, rows):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(map(json.dumps, rows)))

    for category in ("parallel", "parallel_multiple"):
        ids = [f"{category}_{i}" for i in range(5)]
        question = [[{"role": "user", "content": "Do it."}]]
        write(f"BFCL_v4_{category}.json", [{"id": i, "question": question, "function": [FUNCTION]} for i in ids])
        write(f"possible_answer/BFCL_v4_{category}.json", [{"id": i, "ground_truth": [{"f": {"x": [1]}}]} for i in ids])
    steps = [[{"role": "user", "content": f"Step {i}."}] for i in range(3)]
    row = {"question": steps, "involved_classes": ["MathAPI"], "missed_function": {"2": ["g"]}}
    answers = [["f(x=1)"], [], ["f(2)", "g()"]]
    write("BFCL_v4_multi_turn_miss_func.json", [{"id": f"m_{i}", **row, "excluded_function": ["h"]} for i in range(5)])
    write(
        "possible_answer/BFCL_v4_multi_turn_miss_func.json",
        [{"id": f"m_{i}", "ground_truth": answers} for i in range(5)],
    )
    for file in [
        "gorilla_file_system",
        "math_api",
        "message_api",
        "posting_api",
        "ticket_api",
        "trading_bot",
        "travel_booking",
        "vehicle_control",
    ]:
        write(
            f"multi_turn_func_doc/{file}.json", [FUNCTION, {"name": "g"}, {"name": "h"}] if file == "math_api" else []
        )
    monkeypatch.setattr(source, "data_folder", lambda: tmp_path)


def test_an_installed_package_is_the_default(package):
    task = load_task("bfcl")
    assert [row["id"] for row in task.train_dataset[:4]] == [
        "parallel_0",
        "parallel_multiple_0",
        "parallel_1",
        "parallel_multiple_1",
    ]
    assert (len(task.train_dataset), len(task.eval_dataset)) == (8, 2)
    assert load_task("bfcl", {"dataset": "sample"}).train_dataset[0]["official_category"] == ""


def test_steps_of_conversations(package):
    task = load_task("bfcl_multiturn", {"categories": "miss_func", "eval_size": 2})
    first, third = task.train_dataset[:2]
    assert (first["turn_index"], third["turn_index"]) == (0, 2)  # the second step needs no call
    assert first["user_prompt"] == "Step 0."
    assert third["user_prompt"].splitlines() == [
        "User: Step 0.",
        "Calls: f(x=1)",
        "User: Step 1.",
        "Calls: none",
        "User: Step 2.",
    ]
    assert [f["name"] for f in first["function"]] == ["f"]  # g is missing until step 2, h is left out
    assert [f["name"] for f in third["function"]] == ["f", "g"]
    assert third["ground_truth"] == [["f", {"x": [2]}], ["g", {}]]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"role_mode": "chaos"}, "role_mode='chaos': right is one of self_select"),
        ({"categories": "serial"}, "categories='serial'"),
        ({"dataset": "bfcl-eval"}, "pip install bfcl-eval --no-deps"),
    ],
)
def test_words_that_are_none(args, message, monkeypatch):
    monkeypatch.setattr(source, "data_folder", lambda: None)
    with pytest.raises(ConfigError, match=message):
        load_task("bfcl", args)


def test_a_file_of_rows(tmp_path):
    path = tmp_path / "rows.json"
    rows = [{"user_prompt": f"p{i}", "function": [FUNCTION], "ground_truth": ["f(x=1)"] * (i % 2)} for i in range(20)]
    path.write_text(json.dumps(rows))
    task = load_task("bfcl", {"data_path": str(path)})
    assert [row["user_prompt"] for row in task.eval_dataset] == ["p19"]  # p18 needs no call
    with pytest.raises(ConfigError, match="num_turns=2"):
        Environment(task, 2, 2)
