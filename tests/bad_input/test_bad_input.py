"""Bad input: one clear error that names field, value and remedy, within seconds, and nothing is written.

The model folders here hold a config and a tokenizer but no weights, so what gets as far as reading them fails with
another message than the one that a test wants.
"""

import dataclasses
import importlib.util
import json
import os
import pkgutil
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import mlrl
from mlrl import ConfigError, Task, TaskError
from mlrl.cli import config_errors, parse
from mlrl.config import CheckedConfig, MAGRPOConfig, MAREINFORCEConfig, TaskArguments, field_names
from mlrl.rewards import Reward
from mlrl.trainers import EvaluationConfig, MAGRPOTrainer, evaluate_team
from tests.bad_input.table import CALLABLES, COMMANDS, DATA, DATA_FILES, SETTINGS, TASK_FILES, chat
from tests.tiny import tiny_config, tiny_tokenizer

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "train").glob("*.py"))
LIMIT_S = 5.0
ROWS = [{"prompt": "Tell me about the sea."}, {"prompt": "Tell me about the town."}]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # a task file's folder is put there


@pytest.fixture(scope="module")
def arguments() -> dict[str, type]:
    """The settings of every script."""
    found = {}
    for script in SCRIPTS:
        spec = importlib.util.spec_from_file_location(f"script_{script}", ROOT / "train" / f"{script}.py")
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # the help needs to find its file
        spec.loader.exec_module(module)
        found[script] = module.Arguments
    return found


def shown_as(value: Any, length: int) -> str:
    """The beginning of a value as a test's name: without addresses, which differ from process to process."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))[:length]


def config_classes() -> list[type]:
    """Every class of settings in mlrl."""
    for module in pkgutil.iter_modules(mlrl.__path__):
        if module.name.startswith("config"):
            importlib.import_module(f"mlrl.{module.name}")
    found, classes = [CheckedConfig], []
    while found:
        found += found.pop().__subclasses__()
        classes += [c for c in found if c.__module__.startswith("mlrl.") and c not in classes]
    return [TaskArguments, *classes]


CLASSES = config_classes()


def files(folder: str = ".") -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def refused(call: Any, parts: tuple[str, ...] | list[str], kinds: Any = ConfigError) -> str:
    """The message of a call that is refused: in time, with these parts, and without a file written."""
    before, began = files(), time.monotonic()
    with pytest.raises(kinds) as caught:
        call()
    assert time.monotonic() - began < LIMIT_S
    assert files() == before
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], message
    return message


def printed(capsys: Any, config_class: type, script: str, *words: str, code: int = 2) -> str:
    """What a command line that is refused prints: in time, and without a file written."""
    before, began = files(), time.monotonic()
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        parse(config_class, "What it does.", list(words))
    out, err = capsys.readouterr()
    assert time.monotonic() - began < LIMIT_S
    assert (stop.value.code, out) == (code, "") and files() == before
    if code == 2:
        assert err.startswith(f"{script}.py: error: ") and err.count("\n") == 1, err
    return err


# ------------------------------------------------------------------------------------------------------------- settings
def test_every_setting_has_a_row():
    rows = [row[0] for row in SETTINGS]
    settings = {name for config_class in CLASSES for name in field_names(config_class)}
    assert len(CLASSES) >= 12
    assert settings - set(rows) == set(), "give each of these a row in SETTINGS"
    assert set(rows) - settings == set() and len(rows) == len(set(rows))


def test_there_are_rows_enough_beside_the_settings():
    assert len(TASK_FILES) + len(DATA_FILES) + len(DATA) + len(CALLABLES) >= 40
    assert len(COMMANDS) >= 10


def as_words(field: str, value: Any) -> list[str]:
    """A setting as one would type it."""
    if isinstance(value, dict):
        return [f"--{field}", *(f"{name}={entry}" for name, entry in value.items())]
    return [f"--{field}", *map(str, value if isinstance(value, list) else [value])]


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row[0])
def test_a_wrong_value_of_a_setting(row, arguments, capsys):
    field, value, remedy, given = (*row, {})[:4]
    names = rf"{field}(={re.escape(repr(value))}|\.\w+=)"
    tried = 0
    for config_class in (c for c in CLASSES if field in field_names(c) and c is not TaskArguments):
        message = refused(lambda c=config_class: c(**{field: value}, **given), ())
        assert re.match(names, message) and re.search(remedy, message), message
        tried += 1
    scripts = [script for script, config_class in arguments.items() if field in field_names(config_class)]
    script = scripts[SETTINGS.index(row) % len(scripts)]  # every script has its turn
    words = [word for name, entry in ({field: value} | given).items() for word in as_words(name, entry)]
    message = printed(capsys, arguments[script], script, *words).partition(": error: ")[2]
    assert re.match(names, message) and re.search(remedy, message), message
    assert tried >= 1 or field in field_names(TaskArguments)


# ------------------------------------------------------------------------------------------------------ tasks and files
@pytest.mark.parametrize("row", TASK_FILES, ids=lambda row: row.fault)
def test_a_wrong_task_file(row, arguments, capsys):
    if row.source is not None:
        Path("mine.py").write_bytes(row.source if isinstance(row.source, bytes) else row.source.encode())
    code = 2 if row.users_line is None else 1
    message = printed(capsys, arguments["magrpo"], "magrpo", *row.words, code=code)
    assert [part for part in row.says if part not in message] == [], message
    if row.users_line is not None:
        assert message.count(row.users_line) >= 1
        assert str(ROOT) not in message and "importlib" not in message  # nothing of ours above the user's line


@pytest.mark.parametrize(("name", "content", "parts"), DATA_FILES, ids=lambda value: shown_as(value, 20))
def test_a_wrong_data_file(name, content, parts, arguments, capsys):
    if content is not None:
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    words = ["--task", "tldr", "--task_args", f"data_path={name}"]
    message = printed(capsys, arguments["magrpo"], "magrpo", *words)
    assert [part for part in (f"data_path={name!r}", *parts) if part not in message] == [], message


# ------------------------------------------------------------------------------------------------------------- trainers
@pytest.fixture(scope="module")
def weightless(tmp_path_factory) -> dict[str, str]:
    """Model folders without weights, by kind of tiny model."""
    folders = {}
    for kind, architecture in (
        ("llama", "LlamaForCausalLM"),
        ("gpt2", "GPT2LMHeadModel"),
        ("qwen2", "Qwen2ForCausalLM"),
    ):
        folder = tmp_path_factory.mktemp("weightless") / kind
        tiny_config(kind).save_pretrained(folder)
        content = json.loads((folder / "config.json").read_text())
        content["architectures"] = [architecture]
        (folder / "config.json").write_text(json.dumps(content))
        tiny_tokenizer(kind).save_pretrained(folder)
        folders[kind] = str(folder)
    return folders


def reward(first, second):
    return [float(len(a) > len(b)) for a, b in zip(first, second, strict=True)]


def make(folder: str, settings: dict | None = None, config=MAGRPOConfig, **arguments):
    """A trainer that is right but for its weights, and for what is changed here."""
    arguments = {"agent_model": folder, "reward_func": reward, "train_dataset": ROWS} | arguments
    settings = {"max_new_tokens": 16, "num_generations": 2} | (settings or {})
    return MAGRPOTrainer(**arguments, args=config(**settings))


def test_without_a_fault_it_is_the_weights_that_fail(weightless):
    with pytest.raises(ConfigError, match="agent_model=.*weights cannot be loaded"):
        make(weightless["llama"])


# what is changed in the trainer's arguments, and what the message must hold: field, value, remedy
ARGUMENTS = [
    ({"agent_model": None}, ["agent_model=None", "Give agent_model"]),
    ({"agent_model": "./nothing-here"}, ["agent_model='./nothing-here'", "Give"]),
    ({"agent_model": "nobody/no-such-model"}, ["'nobody/no-such-model'", "hub id"]),
    ({"agent_model": None, "agents": []}, ["agents=[]", "Give one model an agent"]),
    ({"agent_model": None, "agents": [1, 2]}, ["agents=int", "not a model"]),
    ({"num_agents": 0}, ["num_agents=0", "Give 1 or more"]),
    ({"num_agents": 3}, ["reward_func=reward", "num_agents=3"]),
    ({"agents": ["a", "b"]}, ["agent_model=", "agents is given too"]),
    ({"tokenizer": []}, ["tokenizer", "0 tokenizers for 2 agents"]),
    ({"model_config": {"dtpye": "float32"}}, ["model_config='dtpye'", "dtype"]),
    ({"model_config": {"dtype": torch.float16}}, ["dtype='float16'", "bfloat16"]),
    ({"model_config": {"attn_implementation": "flash_attention_2"}}, ["'flash_attention_2'", "sdpa or eager"]),
    ({"model_config": "float32"}, ["model_config='float32'", "dict"]),
    ({"wandb_config": {"projekt": "x"}}, ["wandb_config='projekt'", "project"]),
    ({"task": Task(train_dataset=ROWS, reward_func=reward)}, ["reward_func", "not both"]),
    ({"task": "length_ratio", "reward_func": None, "train_dataset": None}, ["task='length_ratio'", "load_task"]),
]

OTHER = "(a model with other tokens)"

ONLY_THE_TRAINER_KNOWS = [
    ({"num_turns": 2}, ["external_transition=None", "num_turns=2"]),
    ({"num_agents": 3}, ["num_agents=3", "reward_func=reward"]),
    ({"agent_learning_rate": [1e-4, 1e-4, 1e-4]}, ["agent_learning_rate=[0.0001", "3 values for 2 agents"]),
    ({"max_new_tokens": 256}, ["max_new_tokens=256", "Give less than 256"]),
    ({"max_new_tokens": 250}, ["item 0", "max_new_tokens", "max_prompt_tokens"]),
    ({"lora_target_modules": ["q_prj"]}, ["lora_target_modules=['q_prj']", "q_proj"]),
    ({"lora_target_modules": ["q_proj", "kproj"]}, ["lora_target_modules=", "'kproj'", "k_proj"]),
    ({"lora_target_modules": ".*attn\\.x"}, ["lora_target_modules='.*attn\\\\.x'", "q_proj"]),
    ({"lora_target_modules": "q_proj("}, ["lora_target_modules='q_proj('", "no regex"]),
    ({"lora_target_modules": ["lm_head"]}, ["lora_target_modules=['lm_head']", "output layer", "all-linear"]),
    ({"reference_model": "nobody/no-such-model", "reference_kl_coef": 0.1}, ["'nobody/no-such-model'", "hub id"]),
    ({"reference_model": OTHER, "reference_kl_coef": 0.1}, ["reference_model=", "448 tokens", "384"]),
    ({"report_to": ["swanlab"]}, ["report_to=['swanlab']", "wandb"]),
]


def returns(value):
    return lambda item: value


FORMATTED = [
    (returns(None), ["None", "item 0"]),
    (returns(""), ["item 0", "empty"]),
    (returns(5), ["5", "item 0"]),
    (returns([{"role": "user"}]), ["content", "item 0"]),
    (returns([]), ["[]", "item 0"]),
    (returns("word " * 300), ["item 0", "agent 0", "max_prompt_tokens"]),
]


def refused_by_trainer(folder, parts, settings=None, **arguments):
    message = refused(lambda: make(folder, settings, **arguments), parts, (ConfigError, TaskError))
    assert "weights" not in message


@pytest.mark.parametrize(("arguments", "parts"), ARGUMENTS, ids=lambda value: shown_as(value, 50))
def test_wrong_arguments(weightless, arguments, parts):
    refused_by_trainer(weightless["llama"], parts, **arguments)


@pytest.mark.parametrize(("arguments", "parts"), CALLABLES, ids=lambda value: shown_as(value, 50))
def test_wrong_callables(weightless, arguments, parts):
    refused_by_trainer(weightless["llama"], parts, **arguments)


@pytest.mark.parametrize(("fault", "arguments", "parts"), DATA, ids=lambda value: shown_as(value, 30))
def test_wrong_data(weightless, fault, arguments, parts):
    refused_by_trainer(weightless["llama"], parts, **arguments)


@pytest.mark.parametrize(("settings", "parts"), ONLY_THE_TRAINER_KNOWS, ids=lambda value: shown_as(value, 50))
def test_wrong_settings_that_only_the_trainer_can_know(weightless, settings, parts):
    if settings.get("reference_model") == OTHER:
        settings = settings | {"reference_model": weightless["qwen2"]}
    refused_by_trainer(weightless["llama"], parts, settings)


@pytest.mark.parametrize(("formatter", "parts"), FORMATTED, ids=lambda value: shown_as(value, 30))
def test_what_formatters_return(weightless, formatter, parts):
    refused_by_trainer(weightless["llama"], parts, formatters=formatter)


def test_chat_messages_without_a_chat_template(weightless):
    parts = ["item 0", "no chat template", "Return a str"]
    refused_by_trainer(weightless["gpt2"], parts, formatters=lambda item: chat(item["prompt"]))


def test_args_of_another_kind(weightless):
    with pytest.raises(ConfigError, match="args=dict: not a config. Give a MAGRPOConfig"):
        MAGRPOTrainer(agent_model=weightless["llama"], reward_func=reward, train_dataset=ROWS, args={"seed": 1})


def test_an_endless_data_set_needs_max_steps_for_a_schedule(weightless):
    from datasets import IterableDataset

    rows = IterableDataset.from_generator(lambda: iter([{"prompt": "a"}]))
    parts = ["lr_scheduler='linear'", "max_steps"]
    with pytest.raises(ConfigError) as caught:
        make(weightless["llama"], {"lr_scheduler": "linear"}, train_dataset=rows)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_a_run_folder_that_exists(weightless, tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    refused_by_trainer(weightless["llama"], ["run_name='mine'", "exists already"], {"run_name": "mine"})


def test_a_setting_that_was_changed_after_the_config_was_made(weightless):
    args = MAREINFORCEConfig(agent_model=weightless["llama"])
    args.num_generations = "4"
    with pytest.raises(ConfigError, match="num_generations='4'"):
        MAGRPOTrainer(reward_func=reward, train_dataset=ROWS, args=args)


def test_evaluation_needs_rows_and_a_team(weightless, tmp_path):
    folder = weightless["llama"]
    rows = Task(eval_dataset=ROWS, reward_func=reward)

    def fails(task, parts, **settings):
        refused(lambda: evaluate_team(task, EvaluationConfig(**settings)), parts)

    fails(Task(train_dataset=ROWS, reward_func=reward), ["eval_dataset=None", "Give"], agent_model=folder)
    fails(rows, ["eval_num_samples=0", "None for all"], agent_model=folder, eval_num_samples=0)
    fails(rows, ["agent_model=None", "Give"])
    fails(rows, ["agents_dir", "agent_0"], agents_dir=str(tmp_path))
    fails(rows, ["num_agents=3", "reward_func=reward"], agent_model=folder, num_agents=3)
    fails(rows, [f"output={str(tmp_path)!r}", "results.json"], agent_model=folder, output=str(tmp_path))
    with pytest.raises(ConfigError, match="EvaluationConfig"):
        evaluate_team(rows, MAGRPOConfig(agent_model=folder))


# ------------------------------------------------------------------------------------------------ a user's own mistakes
USERS = """
def reward(first):
    return helper(first)

def helper(texts):
    return 1 + "a"
"""


def test_an_error_of_the_users_own_starts_at_their_line(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [__file__])  # this file is the script
    Path("mine.py").write_text(USERS)
    spec = importlib.util.spec_from_file_location("mine", "mine.py")
    mine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mine)
    place = {"turn": 0, "prompts": ["p"], "prompt_history": [[]], "response_history": [[]], "episode_seed": 1}
    with pytest.raises(SystemExit) as stop, config_errors():
        Reward(mine.reward, None, 1)(item={"prompt": "p"}, completions=[["x"]], item_index=7, **place)
    assert stop.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    shown = [line.strip() for line in lines if line.startswith("  File")]
    assert [line.split("mine.py")[1] for line in shown] == ['", line 3, in reward', '", line 6, in helper']
    assert any(line.startswith("TypeError: unsupported operand") for line in lines)


def test_an_error_of_ours_keeps_all_of_its_lines(monkeypatch):
    monkeypatch.setattr(sys, "argv", [__file__])
    with pytest.raises(KeyError), config_errors():
        exec(compile("raise KeyError('ours')", str(ROOT / "mlrl" / "x.py"), "exec"), {})


# ------------------------------------------------------------------------------------------------------------- commands
FAST = 2


@pytest.mark.parametrize(
    ("script", "words", "parts"),
    [pytest.param(*row, marks=[] if number < FAST else pytest.mark.slow) for number, row in enumerate(COMMANDS)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_as_a_command(script, words, parts):
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(ROOT / "train" / f"{script}.py"), *words.split()],
        capture_output=True, text=True, env=variables, timeout=60,
    )  # fmt: skip
    assert time.monotonic() - began < LIMIT_S
    assert (done.returncode, done.stdout) == (2, "") and files() == {}
    assert done.stderr.startswith(f"{script}.py: error: ") and done.stderr.count("\n") == 1, done.stderr
    assert [part for part in parts if part not in done.stderr] == [], done.stderr


def test_every_class_of_settings_is_a_dataclass():
    assert all(dataclasses.is_dataclass(config_class) for config_class in CLASSES)
