import subprocess
import sys
import traceback
from pathlib import Path

import datasets
import pandas
import pytest

from mlrl import Task
from mlrl.errors import ConfigError, TaskError
from mlrl.task import Environment, load_task

ROWS = [{"prompt": "tell", "answer": 1}, {"prompt": "ask", "answer": 2}]


def reward(a, b):
    return [0.0 for _ in a]


def make(**changes):
    return Task(**{"train_dataset": ROWS, "reward_func": reward, **changes})


# ---- the Task itself


@pytest.mark.parametrize(
    ("dataset", "kind"),
    [
        (ROWS, "list"),
        (tuple(ROWS), "tuple"),
        (datasets.Dataset.from_list(ROWS), "map"),
        (datasets.Dataset.from_list(ROWS).to_iterable_dataset(), "stream"),
        (datasets.IterableDataset.from_generator(lambda: iter(ROWS)), "stream of unknown fields"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kinds_of_data_sets(dataset, kind):
    task = make(train_dataset=dataset)
    assert task.train_dataset is dataset
    environment = Environment(task, 2)
    environment.check_first_row()
    assert environment.initial_prompts(next(iter(dataset))) == ["tell", "tell"]


def test_a_stream_is_not_read_before_the_run():
    def fails():
        raise AssertionError("read")
        yield

    task = make(train_dataset=datasets.IterableDataset.from_generator(fails))
    Environment(task, 2).check_first_row()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_dataset": None}, ["train_dataset=None"]),
        ({"train_dataset": []}, ["train_dataset=[]", "no rows"]),
        ({"train_dataset": datasets.Dataset.from_list([])}, ["train_dataset", "no rows"]),
        ({"train_dataset": ["a"]}, ["train_dataset[0]='a'", "str"]),
        ({"train_dataset": [ROWS[0], 3]}, ["train_dataset[1]=3"]),
        ({"train_dataset": "trl-lib/tldr"}, ["'trl-lib/tldr'", "str"]),
        ({"train_dataset": 3}, ["train_dataset=3", "int"]),
        ({"train_dataset": {"train": ROWS}}, ["a dict", "split"]),
        ({"train_dataset": iter(ROWS)}, ["only once"]),
        ({"train_dataset": pandas.DataFrame(ROWS)}, ["DataFrame"]),
        ({"eval_dataset": []}, ["eval_dataset=[]"]),
        ({"reward_func": None}, ["reward_func=None"]),
        ({"reward_func": "reward"}, ["reward_func='reward'", "str"]),
        ({"reward_processor": 2.0}, ["reward_processor=2.0"]),
        ({"formatters": "text"}, ["formatters='text'"]),
        ({"formatters": [len, 3]}, ["formatters[1]=3"]),
        ({"external_transition": 1}, ["external_transition=1"]),
        ({"eval_logger": 1}, ["eval_logger=1"]),
        ({"eval_aggregator": 1}, ["eval_aggregator=1"]),
        ({"metrics_callback": 1}, ["metrics_callback=1"]),
        ({"recommended": [("seed", 1)]}, ["recommended="]),
        ({"recommended": {1: 1}}, ["recommended="]),
    ],
)
def test_a_wrong_task(changes, words):
    with pytest.raises(ConfigError) as error:
        make(**changes)
    for word in words:
        assert word in str(error.value)


def test_unknown_fields_are_errors():
    with pytest.raises(ConfigError, match="reward_fn=.*Did you mean 'reward_func'?"):
        make(reward_fn=reward)


def test_eval_rows_alone_will_do():
    assert make(train_dataset=None, eval_dataset=ROWS).train_dataset is None


# ---- the task bound to a team


def turn_of(environment, **changes):
    first = {
        "item": ROWS[0],
        "turn": 0,
        "completions": ["c0", "c1"],
        "reward": 0.5,
        "prompt_history": [["p0"], ["p1"]],
        "response_history": [["c0"], ["c1"]],
        "episode_seed": 1,
    }
    return environment.next_prompts(**{**first, **changes})


def test_several_turns_need_a_transition():
    with pytest.raises(ConfigError, match=r"external_transition=None: num_turns=2"):
        Environment(make(), 2, num_turns=2)
    Environment(make(), 2, num_turns=1)


@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
@pytest.mark.parametrize("dataset", [[{"question": "q", "answer": 1}], datasets.Dataset.from_list([{"question": "q"}])])
def test_a_missing_prompt_field_is_known_before_the_run(name, dataset):
    with pytest.raises(ConfigError, match=rf"'prompt', which is absent \({name}\); the fields are 'question'"):
        Environment(make(**{name: dataset}), 2)
    Environment(make(**{name: dataset}, formatters=lambda item: "p"), 2)


def test_a_missing_prompt_field_in_a_stream():
    dataset = datasets.IterableDataset.from_generator(lambda: iter([{"question": "q"}]))
    environment = Environment(make(train_dataset=dataset), 2)
    with pytest.raises(TaskError, match=r"agent 0, item 3 .*turn 0.*'question'"):
        environment.initial_prompts({"question": "q"}, item_index=3)


def test_the_first_row_shows_a_wrong_formatter():
    with pytest.raises(TaskError, match=r"formatters\[0\] returned=7"):
        Environment(make(formatters=lambda item: 7), 2).check_first_row()
    with pytest.raises(KeyError, match="question"):
        Environment(make(formatters=lambda item: item["question"]), 2).check_first_row()


def test_returned_prompts_become_the_items_prompt_and_the_external_prompts():
    seen = []

    def formatter(item, external_prompts=None):
        seen.append((item, external_prompts))
        return f"<{item['prompt']}>"

    item = {"prompt": "tell", "answer": 1}
    environment = Environment(make(formatters=formatter, external_transition=lambda: ["n0", "n1"]), 2, 2)
    assert environment.initial_prompts(item) == ["<tell>", "<tell>"]
    assert turn_of(environment, item=item) == ["<n0>", "<n1>"]
    assert seen == [
        ({"prompt": "tell", "answer": 1}, None),
        ({"prompt": "tell", "answer": 1}, None),
        ({"prompt": "n0", "answer": 1}, "n0"),
        ({"prompt": "n1", "answer": 1}, "n1"),
    ]
    assert item == {"prompt": "tell", "answer": 1}


def test_passthrough_and_no_formatter_leave_returned_prompts_alone():
    chat = [{"role": "user", "content": "x"}]
    task = make(formatters=lambda item: "formatted", external_transition=lambda: ["n0", chat])
    assert turn_of(Environment(task, 2, 2, external_prompt_passthrough=True)) == ["n0", chat]
    assert turn_of(Environment(task, 2, 2)) == ["formatted", "formatted"]
    assert turn_of(Environment(make(external_transition=lambda: ["n0", chat]), 2, 2)) == ["n0", chat]


def test_a_returned_chat_is_the_items_prompt():
    chat = [{"role": "user", "content": "x"}]
    task = make(formatters=lambda item: item["prompt"], external_transition=lambda: [chat, "n1"])
    assert turn_of(Environment(task, 2, 2)) == [chat, "n1"]


def test_the_environment_rewards_a_node():
    task = make(reward_func=lambda a, b, turn: [turn, 2.0], reward_processor=lambda r: r + 1)
    result = Environment(task, 2).rewards(
        item=ROWS[0],
        completions=[["x", "y"], ["z", "w"]],
        prompts=["p0", "p1"],
        turn=0,
        prompt_history=[[], []],
        response_history=[[], []],
        episode_seed=1,
    )
    assert (result.raw.tolist(), result.processed.tolist()) == ([0.0, 2.0], [1.0, 3.0])


@pytest.mark.parametrize(
    "changes",
    [
        {"reward_func": lambda a: [0]},
        {"formatters": [lambda item: ""]},
        {"external_transition": lambda original: []},
        {"reward_processor": lambda: 0},
        {"eval_logger": lambda rows: []},
    ],
)
def test_a_callable_that_does_not_fit_the_team(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        Environment(make(**changes), 2)


def test_metrics_of_the_task():
    task = make(
        eval_logger=lambda agent_completions_turns, batch_items: [{"n": len(row)} for row in batch_items],
        metrics_callback=lambda rollouts: {"count": len(rollouts)},
    )
    environment = Environment(task, 2)
    rows = environment.eval_rows(agent_completions_turns=[[["a"], ["b"]]] * 2, items=ROWS)
    assert environment.aggregate(rows) == {"n": 2.0}
    assert environment.callback_metrics([]) == {"count": 0.0}


# ---- loading

FILE = """
from helper_beside_it import PROMPT
from mlrl import Task

def reward(a, b):
    return [0.0 for _ in a]

task = Task(train_dataset=[{"prompt": PROMPT}], reward_func=reward)
number = 3

def build(low: float, high=3.0, *, count: int | None = None, flag=False, text="x", anything=None) -> Task:
    rows = [{"prompt": repr((low, high, count, flag, text, anything))}]
    return Task(train_dataset=rows, reward_func=reward)

def free(**task_args):
    return Task(train_dataset=[{"prompt": repr(task_args)}], reward_func=reward)

def wrong():
    return {"train_dataset": []}
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "helper_beside_it.py").write_text("PROMPT = 'from beside'\n")
    path = tmp_path / "my_task.py"
    path.write_text(FILE)
    yield path
    sys.modules.pop("helper_beside_it", None)


def test_a_shipped_task_by_name():
    task = load_task("length_ratio")
    assert isinstance(task, Task)
    assert task.name == "length_ratio"


def test_what_tasks_share_is_no_task():
    with pytest.raises(ConfigError, match="task='feedback': no task of that name is shipped") as caught:
        load_task("feedback")
    listed = str(caught.value).partition("Right is one of ")[2]
    assert {"arxiv", "bfcl", "housebuild", "length_ratio", "tldr", "travel"} <= set(listed.replace(",", " ").split())
    assert "splits" not in listed


def test_a_file_and_its_attributes(file, monkeypatch):
    task = load_task(str(file))
    assert (task.train_dataset, task.name) == ([{"prompt": "from beside"}], "my_task")
    assert load_task(file).name == "my_task"
    assert load_task(f"{file}:task").name == "my_task"
    assert load_task(f"{file}:build", {"low": 1.5}).name == "my_task-build"
    monkeypatch.chdir(file.parent)
    assert load_task("my_task.py").name == "my_task"
    assert load_task("./my_task.py:free").name == "my_task-free"


@pytest.mark.parametrize(
    ("task_args", "expected"),
    [
        ({"low": 1.5}, (1.5, 3.0, None, False, "x", None)),
        ({"low": "1e-5", "high": "4"}, (1e-5, 4.0, None, False, "x", None)),
        ({"low": 1, "count": "7", "flag": "true"}, (1, 3.0, 7, True, "x", None)),
        ({"low": 1, "count": "none", "flag": "False", "text": "7", "anything": "8"}, (1, 3.0, None, False, "7", "8")),
    ],
)
def test_task_args_reach_the_function_in_their_types(file, task_args, expected):
    assert load_task(f"{file}:build", task_args).train_dataset == [{"prompt": repr(expected)}]


def test_a_function_of_any_task_args(file):
    assert load_task(f"{file}:free", {"x": "1"}).train_dataset == [{"prompt": "{'x': '1'}"}]


@pytest.mark.parametrize(
    ("suffix", "task_args", "words"),
    [
        (":absent", None, ["'absent'", "task, build, free, wrong"]),
        (":number", None, ["3", "int", "Task"]),
        (":wrong", None, ["dict", "Task"]),
        ("", {"low": 1}, ["task_args", "takes none"]),
        (":build", None, ["task_args.low", "low, high=3.0"]),
        (":build", {"low": 1, "hihg": 2}, ["task_args.hihg=2", "closest: high", "low, high=3.0"]),
        (":build", {"low": "much"}, ["task_args.low='much'", "float"]),
        (":build", {"low": 1, "flag": "maybe"}, ["task_args.flag='maybe'", "bool"]),
        (":build", {"low": 1, "count": "2.5"}, ["task_args.count='2.5'", "int"]),
    ],
)
def test_a_file_that_does_not_give_the_task(file, suffix, task_args, words):
    with pytest.raises(ConfigError) as error:
        load_task(f"{file}{suffix}", task_args)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("lenght_ratio", ["'lenght_ratio'", "closest: length_ratio", ".py"]),
        ("path/to/file", ["'path/to/file'", ".py"]),
        ("absent/file.py", ["absent/file.py", "no file"]),
        ("absent/file.py:task", ["absent/file.py", "no file"]),
        ("length_ratio:task", ["'length_ratio:task'", ".py"]),
        ("", ["''"]),
        ("os.path", ["'os.path'"]),
    ],
)
def test_a_task_that_is_not_there(spec, words):
    with pytest.raises(ConfigError) as error:
        load_task(spec)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("source", "kind"),
    [("\nimport absent_module\n", ImportError), ("\n1 / 0\n", ZeroDivisionError), ("\ndef x(:\n", SyntaxError)],
)
def test_an_error_of_the_users_file_keeps_its_line(tmp_path, monkeypatch, source, kind):
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(kind) as error:
        load_task(str(path))
    assert f'{path}", line 2' in "".join(traceback.format_exception(error.value))
    assert not any(name.startswith("mlrl_task_broken") for name in sys.modules)


def test_the_template_is_a_short_file_that_loads(tmp_path, monkeypatch):
    from mlrl.tasks import template

    monkeypatch.setattr(sys, "path", list(sys.path))
    source = Path(template.__file__).read_text()
    assert len(source.splitlines()) <= 30
    path = tmp_path / "copied.py"
    path.write_text(source)
    task = load_task(str(path))
    environment = Environment(task, 2)
    environment.check_first_row()
    place = {"prompts": ["", ""], "turn": 0, "prompt_history": [[], []], "response_history": [[], []]}
    rewards = environment.rewards(
        item=task.train_dataset[0],
        completions=[["Water.", "Rain."], ["Rain is water from clouds.", "x"]],
        episode_seed=0,
        **place,
    )
    assert rewards.raw.tolist() == [1.0, 0.0]  # ¼ + ¼ + ½; no keyword in both, the second shorter


def test_loading_a_task_imports_neither_torch_nor_datasets():
    code = "import sys, mlrl.task as t; t.load_task('length_ratio'); print({'torch', 'datasets'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_an_aggregator_without_a_logger_is_refused():
    task = Task(
        reward_func=lambda a: [0.0], train_dataset=[{"prompt": "p"}], eval_aggregator=lambda rows, num_turns: {}
    )
    with pytest.raises(ConfigError, match="eval_logger=None: eval_aggregator is given.*Give an eval_logger"):
        Environment(task, 1)
