"""Flags, YAML, recommendations and script defaults: precedence, sources, help, errors, config.yaml."""

import os
import subprocess
import sys
import textwrap
import time
import typing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from mlrl import cli
from mlrl.config import EvaluationConfig, MAGRPOConfig, MAREINFORCEConfig, TaskArguments, field_names
from mlrl.config_file import dump_config, parse_value, read_config
from mlrl.config_help import field_docs, field_groups, format_help
from mlrl.config_preference_trainers import MARLHFIterConfig

ROOT = Path(__file__).parents[1]


@dataclass
class Arguments(TaskArguments, MAGRPOConfig):
    agent_model: str | None = "embedded"
    """Model of the script"""
    num_turns: int = 2
    max_new_tokens: int = 32


@dataclass
class Evaluation(TaskArguments, EvaluationConfig):
    agent_model: str | None = "embedded"


@pytest.fixture
def task(monkeypatch, tmp_path):
    """A task whose recommendations a test sets; runs go to a temporary folder."""
    monkeypatch.chdir(tmp_path)
    fake = SimpleNamespace(name="fake", recommended={}, loaded=[])

    def load_task(spec, task_args):
        fake.loaded.append((spec, task_args))
        return fake

    monkeypatch.setattr("mlrl.task.load_task", load_task)
    return fake


def parse(*words: str, config_class: type = Arguments) -> cli.Run:
    return cli.parse(config_class, "What it does.", list(words))


def error_of(capsys: pytest.CaptureFixture, *words: str, config_class: type = Arguments) -> str:
    """The one line that a wrong command line prints."""
    capsys.readouterr()  # of right ones before
    with pytest.raises(SystemExit) as stop:
        parse(*words, config_class=config_class)
    printed = capsys.readouterr()
    assert stop.value.code == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1 and printed.err.startswith("test_cli.py: error: ")
    return printed.err.removeprefix("test_cli.py: error: ").strip()


def yaml_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "run_settings.yaml"
    path.write_text(textwrap.dedent(text))
    return str(path)


# ------------------------------------------------------------------------------------------------------- precedence
def test_each_level_wins_over_those_before_it(task, tmp_path):
    """Five settings, of which the k-th is set on the first k levels; each level has its own value."""
    task.recommended = {"max_new_tokens": 33, "num_turns": 33, "lora_rank": 33}
    path = yaml_file(tmp_path, "num_turns: 44\nlora_rank: 44\n")
    run = parse("--config", path, "--lora_rank", "55")

    config = run.config
    assert isinstance(config, Arguments)
    assert (config.warmup_steps, run.sources["warmup_steps"]) == (0, "default")
    assert (config.agent_model, run.sources["agent_model"]) == ("embedded", "script")
    assert (config.max_new_tokens, run.sources["max_new_tokens"]) == (33, "task")  # the script said 32
    assert (config.num_turns, run.sources["num_turns"]) == (44, "yaml")  # the script said 2, the task 33
    assert (config.lora_rank, run.sources["lora_rank"]) == (55, "flag")
    # the algorithm's own default is no choice of the script
    assert (config.advantage_mode, run.sources["advantage_mode"]) == ("mean", "default")
    assert config.sources == run.sources
    assert set(run.sources) == set(field_names(Arguments))
    assert run.task is task and run.task_name == "fake" and run.script == "test_cli"


def test_the_number_of_roles_outlives_the_folder_of_their_one_actor(task, tmp_path):
    (tmp_path / "agents/agent_0").mkdir(parents=True)
    path = yaml_file(tmp_path, "agent_model: m\nnum_agents: 3\ncollaboration_mode: centralized\n")
    words = ["--config", path, "--agents_dir", str(tmp_path / "agents")]
    config = cli.parse(Evaluation, "", words).config
    assert (config.num_agents, config.agent_model) == (3, None)
    config = cli.parse(Evaluation, "", [*words, "--collaboration_mode", "decentralized"]).config
    assert config.num_agents == 1


def test_a_task_recommends_for_one_algorithm(task, capsys):
    task.recommended = {
        "max_new_tokens": 33,
        "lora_rank": 33,
        "magrpo": {"lora_rank": 4},
        "maac": {"max_new_tokens": 5},
    }
    config = parse().config
    assert (config.max_new_tokens, config.lora_rank, config.sources["lora_rank"]) == (33, 4, "task")
    task.recommended = {"magrpo": {"lora_rnk": 4}}
    assert "recommended='lora_rnk'" in error_of(capsys)
    task.recommended = {"magrpo": 4}
    assert error_of(capsys).startswith("recommended.magrpo=4: are no settings")


def test_a_flag_that_repeats_the_default_still_wins(task, tmp_path):
    task.recommended = {"num_generations": 8}
    run = parse("--num_generations", "4")  # 4 is the default
    assert (run.config.num_generations, run.sources["num_generations"]) == (4, "flag")
    run = parse("--config", yaml_file(tmp_path, "num_generations: 4"))
    assert (run.config.num_generations, run.sources["num_generations"]) == (4, "yaml")
    task.recommended = {"share_parameters": True}
    assert parse("--no_share_parameters").config.share_parameters is False


def test_settings_that_follow_from_others(task):
    run = parse()
    assert (run.config.num_agents, run.sources["num_agents"]) == (2, "derived")
    assert (run.config.agent_learning_rate, run.sources["agent_learning_rate"]) == (1e-4, "derived")
    assert run.sources["run_name"] == "derived"
    script, name, date, clock = run.config.run_name.split("-")
    assert (script, name, len(date), len(clock)) == ("test_cli", "fake", 8, 6)
    assert parse("--tuning", "full").config.agent_learning_rate == 1e-5


@pytest.mark.parametrize(
    ("recommended", "words", "rate", "source"),
    [
        ({}, [], 5e-4, "task"),
        ({}, ["--tuning", "lora"], 5e-4, "task"),
        ({}, ["--tuning", "full"], 1e-5, "derived"),  # 5e-4 was meant for adapters
        ({}, ["--tuning", "full", "--agent_learning_rate", "3e-6"], 3e-6, "flag"),
        ({"tuning": "full"}, [], 5e-4, "task"),
        ({"tuning": "full"}, ["--tuning", "lora"], 1e-4, "derived"),
    ],
)
def test_a_recommended_learning_rate_goes_with_its_tuning(task, tmp_path, recommended, words, rate, source):
    task.recommended = {"agent_learning_rate": 5e-4, **recommended}
    run = parse(*words)
    assert (run.config.agent_learning_rate, run.sources["agent_learning_rate"]) == (rate, source)
    if len(words) == 2:  # from YAML alike
        run = parse("--config", yaml_file(tmp_path, f"tuning: {words[1]}"))
        assert (run.config.agent_learning_rate, run.sources["agent_learning_rate"]) == (rate, source)


def test_recommendations_for_other_algorithms_are_left_out(task):
    task.recommended = {"eval_num_samples": 7, "num_generations": 8, "agent_learning_rate": 1e-3}
    run = parse(config_class=Evaluation)
    assert run.config.eval_num_samples == 7
    assert "num_generations" not in run.sources


# ------------------------------------------------------------------------------------------------- models and agents
def test_agents_take_back_the_weaker_agent_model(task, tmp_path):
    task.recommended = {"agent_model": "owner/recommended", "num_agents": 4}
    config = parse("--agents", "a", "b", "c").config
    assert (config.agents, config.agent_model, config.num_agents) == (["a", "b", "c"], None, 3)
    config = parse().config
    assert (config.agents, config.agent_model, config.num_agents) == (None, "owner/recommended", 4)

    path = yaml_file(tmp_path, "agents: [a, b, c]")
    config = parse("--config", path).config
    assert (config.agents, config.agent_model, config.num_agents) == (["a", "b", "c"], None, 3)
    config = parse("--config", path, "--agent_model", "m", "--num_agents", "5").config
    assert (config.agents, config.agent_model, config.num_agents) == (None, "m", 5)
    # the size of the team stays when only its one model is replaced
    path = yaml_file(tmp_path, "agent_model: x\nnum_agents: 3")
    assert parse("--config", path, "--agent_model", "m").config.num_agents == 3


def test_evaluation_takes_agents_from_a_folder(task, tmp_path, capsys):
    for i in range(3):
        (tmp_path / "agents" / f"agent_{i}").mkdir(parents=True)
    config = parse("--agents_dir", "agents", config_class=Evaluation).config
    assert (config.agents_dir, config.agent_model, config.agents, config.num_agents) == ("agents", None, None, 3)
    message = error_of(capsys, "--agents_dir", "agents", "--agent_model", "m", config_class=Evaluation)
    assert message == "agent_model='m': agents_dir='agents' is given too. Give one."
    message = error_of(capsys, "--agents_dir", "agents", "--num_agents", "2", config_class=Evaluation)
    assert "num_agents=2" in message and "3 agents" in message


def test_task_args_add_up_until_another_task_is_named(task, tmp_path):
    path = yaml_file(tmp_path, "task: first\ntask_args: {a: 1, b: 2}")
    parse("--config", path, "--task_args", "b=3", "c=4")
    parse("--config", path, "--task", "second", "--task_args", "c=4")
    run = parse("--config", path, "--task", "first")
    assert task.loaded == [
        ("first", {"a": 1, "b": 3, "c": 4}),
        ("second", {"c": 4}),
        ("first", {"a": 1, "b": 2}),
    ]
    assert (run.config.task, run.config.task_args) == ("first", {"a": 1, "b": 2})
    parse()
    assert task.loaded[-1] == ("length_ratio", {})


# ------------------------------------------------------------------------------------------------- forms of a flag
@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--lora_rank", "8"], "lora_rank", 8),
        (["--lora_rank=8"], "lora_rank", 8),
        (["--lora-rank", "8"], "lora_rank", 8),
        (["--lora-rank=8"], "lora_rank", 8),
        (["--share_parameters"], "share_parameters", True),
        (["--share-parameters"], "share_parameters", True),
        (["--share_parameters", "true"], "share_parameters", True),
        (["--share_parameters", "false"], "share_parameters", False),
        (["--share_parameters=False"], "share_parameters", False),
        (["--no_share_parameters"], "share_parameters", False),
        (["--no-share-parameters"], "share_parameters", False),
        (["--agents", "A", "B"], "agents", ["A", "B"]),
        (["--agents", "A"], "agents", ["A"]),
        (["--agents=A"], "agents", ["A"]),
        (["--report_to", "wandb", "tensorboard"], "report_to", ["wandb", "tensorboard"]),
        (["--report_to", "none"], "report_to", ["none"]),
        (["--agent_learning_rate", "1e-4"], "agent_learning_rate", 1e-4),
        (["--agent_learning_rate", "1e-4", "5e-5"], "agent_learning_rate", [1e-4, 5e-5]),
        (["--agent_learning_rate", "2"], "agent_learning_rate", 2.0),
        (["--max_grad_norm", "None"], "max_grad_norm", None),
        (["--max_steps", "none"], "max_steps", None),
        (["--eval_num_samples=null"], "eval_num_samples", None),
        (["--early_termination_threshold", "-0.2"], "early_termination_threshold", -0.2),
        (["--early_termination_threshold", "-1e-3"], "early_termination_threshold", -1e-3),
        (["--early_termination_threshold=-1"], "early_termination_threshold", -1.0),
        (["--advantage_normalization"], "advantage_normalization", "node"),
        (["--no_advantage_normalization"], "advantage_normalization", "none"),
        (["--advantage_normalization", "none"], "advantage_normalization", "none"),
        (["--advantage_normalization", "batch"], "advantage_normalization", "batch"),
        (["--lora_target_modules", "q_proj", "v_proj"], "lora_target_modules", ["q_proj", "v_proj"]),
        (["--wandb_tags", "1", "2", "--report_to", "wandb"], "wandb_tags", ["1", "2"]),
        (["--run_name", "17"], "run_name", "17"),  # a text that looks like a number stays a text
        (["--seed", "1", "--seed", "2"], "seed", 2),
    ],
)
def test_forms_of_a_flag(task, words, field, value):
    run = parse(*words)
    assert getattr(run.config, field) == value
    assert type(getattr(run.config, field)) is type(value)
    assert run.sources[field] == "flag"
    unnamed = {name for name, source in run.sources.items() if source == "flag"} - {field}
    assert not unnamed - {"agent_model", "report_to"}  # --agents takes agent_model back


def test_task_args_are_read_as_yaml(task):
    words = ["i=3", "f=1e-4", "b=true", "l=[1, two]", "s=plain text", "n=null", "e=", "q='3'", "eq=a=b", "no=no"]
    parse("--task_args", *words)
    assert task.loaded[0][1] == {
        "i": 3,
        "f": 1e-4,
        "b": True,
        "l": [1, "two"],
        "s": "plain text",
        "n": None,
        "e": "",
        "q": "3",
        "eq": "a=b",
        "no": "no",
    }
    assert parse_value("[1, ") == "[1, "  # no YAML at all: the text


# ------------------------------------------------------------------------------------------------------------ errors
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nun_turns", "2"], "--nun_turns: there is no such flag. Did you mean '--num_turns'?"),
        (["--num-turn=2"], "--num_turn: there is no such flag. Did you mean '--num_turns'?"),
        (["--xyzzy"], "--xyzzy: there is no such flag. --help lists all."),
        (["stray"], "'stray': belongs to no flag"),
        (["--seed", "1", "2"], "'2': belongs to no flag"),
        (["-n", "2"], "'-n': belongs to no flag"),
        (["--seed"], "--seed: expected 1 argument"),
        (["--agents"], "--agents: expected at least one argument"),
        (["--num_turns", "two"], "num_turns='two': has the wrong type, str. Give a whole number."),
        (["--num_turns", "2.0"], "num_turns='2.0': has the wrong type, str. Give a whole number."),
        (["--share_parameters", "maybe"], "share_parameters='maybe': has the wrong type, str. Give True or False."),
        (["--share_parameters", "true", "false"], "share_parameters='true false': is several values. Give one."),
        (["--temperature", "0"], "temperature=0: is out of range"),
        (["--temperature", "nan"], "temperature=nan: is not finite"),
        (["--joint_mode", "crossed"], "Did you mean 'cross'?"),
        (["--agent_learning_rate", "fast"], "agent_learning_rate='fast': has the wrong type"),
        (["--task_args", "size"], "task_args='size': is not of the form key=value"),
        (["--agents", "A", "B", "--agent_model", "C"], "agent_model='C': agents=['A', 'B'] is given too. Give one."),
        (["--agents", "A", "B", "--num_agents", "3"], "num_agents=3: there are 2 agents. Give 2, or leave it out."),
        (["--agent_model", "None"], "agent_model=None: there is no model. Give one of --agent_model, --agents."),
        (["--agent_model", "./nowhere"], "agent_model='./nowhere': there is no folder ./nowhere"),
        (["--config", "nowhere.yaml"], "config='nowhere.yaml': cannot be read"),
        (["--run_name", "old", "--output_dir", "."], "run_name='old': old exists already"),
    ],
)
def test_wrong_flags(task, capsys, tmp_path, words, message):
    (tmp_path / "old").mkdir()
    assert message in error_of(capsys, *words)


def test_errors_say_where_each_value_came_from(task, capsys):
    message = error_of(capsys, "--num_generations", "1")
    assert message.endswith("(advantage_mode: default, num_generations: flag)")
    task.recommended = {"num_generations": 0}
    assert error_of(capsys).endswith("Give 1 or more. (recommended by task fake)")
    task.recommended = {"num_generation": 1}
    message = error_of(capsys)
    assert "task fake recommends a setting that does not exist. Did you mean 'num_generations'?" in message


def test_only_the_first_process_looks_for_the_run_folder(task, tmp_path, monkeypatch):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    monkeypatch.setenv("RANK", "1")  # by now the first process may have made it
    assert parse("--run_name", "mine").config.run_name == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_generation: 4", "num_generation: there is no such setting. Did you mean 'num_generations'?"),
        ("num_generations: '4'", "num_generations='4': has the wrong type, str. Give a whole number."),
        ("share_parameters: yes", "share_parameters='yes': has the wrong type, str. Give True or False."),
        ("temperature: 0", "temperature=0: is out of range"),
        ("agents: gpt2", "agents='gpt2': has the wrong type, str. Give a list"),
        ("agents: [a, b]\nagent_model: c", "agent_model='c': agents=['a', 'b'] is given too. Give one."),
        ("task_args: [1]", "task_args=[1]: has the wrong type, list. Give a mapping"),
        ("- 1", "holds no settings. Write one `name: value` a line."),
        ("a: [", "is not YAML"),
        ("seed: 1\nseed: 2", "'seed' stands twice"),
    ],
)
def test_wrong_yaml(task, capsys, tmp_path, text, message):
    path = yaml_file(tmp_path, text)
    shown = error_of(capsys, "--config", path)
    assert message in shown
    assert path in shown or "is given too" in shown


def test_yaml_numbers_and_words(task, tmp_path):
    path = yaml_file(
        tmp_path,
        """\
        agent_learning_rate: 1e-4   # in YAML 1.1 this is a text
        discount: 1
        max_grad_norm: null
        report_to: none
        advantage_normalization: false
        run_name: off
        """,
    )
    config = parse("--config", path).config
    assert config.agent_learning_rate == 1e-4
    assert config.discount == 1.0
    assert config.max_grad_norm is None
    assert config.report_to == ["none"]
    assert config.advantage_normalization == "none"
    assert config.run_name == "off"
    assert read_config(yaml_file(tmp_path, "")) == {}


def test_doubts_are_one_line_on_stderr(task, capsys):
    parse("--top_p", "0.9")
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and printed.err.startswith("test_cli: warning: top_p=0.9: ")


def test_a_task_may_recommend_what_has_no_effect_here(capsys):
    """length_ratio names a replay mode for rounds, and a run without rounds has no use for it."""

    @dataclass(kw_only=True)
    class MARLHFArguments(MARLHFIterConfig, TaskArguments):
        pass

    run = parse("--task", "length_ratio", "--agent_model", "m", "--num_iterations", "0", config_class=MARLHFArguments)
    assert (run.config.preference_replay_mode, run.sources["preference_replay_mode"]) == ("all_history", "task")
    assert capsys.readouterr().err == ""
    parse(
        "--agent_model",
        "m",
        "--num_iterations",
        "0",
        "--preference_replay_mode",
        "all_history",
        config_class=MARLHFArguments,
    )
    assert "preference_replay_mode='all_history' has no effect" in capsys.readouterr().err


@pytest.mark.parametrize(("launched", "code"), [(False, 130), (True, 0)])
def test_ctrl_c_is_one_line(capsys, monkeypatch, launched, code):
    """Under launch.sh, which gives the code itself, it is 0."""
    monkeypatch.setenv("MLRL_LAUNCHED", "1" if launched else "")
    with pytest.raises(SystemExit) as stop, cli.config_errors("magrpo.py"):
        raise KeyboardInterrupt
    assert stop.value.code == code
    assert capsys.readouterr().err == "magrpo.py: ended by Ctrl-C, without a checkpoint of this moment\n"


def test_config_errors_hides_the_traceback(capsys):
    with pytest.raises(SystemExit) as stop, cli.config_errors("magrpo.py"):
        MAGRPOConfig(seed=-1)
    assert stop.value.code == 2
    assert (
        capsys.readouterr().err == "magrpo.py: error: seed=-1: is out of range. Give a number from 0 to 4294967295.\n"
    )
    with pytest.raises(SystemExit) as stop, cli.config_errors():
        raise KeyError("the user's own")
    assert stop.value.code == 1
    assert "Traceback" in (printed := capsys.readouterr().err) and 'KeyError: "the user\'s own"' in printed


# -------------------------------------------------------------------------------------------------------------- help
@pytest.mark.parametrize("config_class", [Arguments, Evaluation])
@pytest.mark.parametrize("width", [80, 120])
def test_help_has_a_line_for_every_flag(config_class, width):
    lines = format_help(config_class, "magrpo.py", "What it does.", width).splitlines()
    assert max(map(len, lines[3:])) <= max(width, 115)
    rows = [line for line in lines if line.startswith("  --")]
    assert max(map(len, rows)) <= width
    assert [row.split()[0] for row in rows] == ["--config"] + [
        f"--{name}" for _, names in field_groups(config_class) for name in names
    ]
    assert {row.split()[0][2:] for row in rows} == {"config", *field_names(config_class)}
    continued = [line for line in lines if line.startswith("    ")]
    if width == 120:
        assert not continued
        assert all(row.endswith("]") for row in rows)


def test_help_shows_groups_docs_words_and_the_defaults_of_the_script(capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--seed", "x", "--help")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("What it does.\n\nUsage: test_cli.py [--config FILE]")
    for heading in ("Task:", "Models:", "Tuning:", "Rollout trees:", "Learning:", "Policy loss:", "Evaluation:"):
        assert f"\n\n{heading}\n  --" in text
    rows = {line.split()[0][2:]: line for line in text.splitlines() if line.startswith("  --")}
    assert rows["agent_model"].split(maxsplit=1)[1] == "Model of the script [embedded]"
    assert rows["num_turns"].endswith("[2]") and "Turns of an episode" in rows["num_turns"]
    assert rows["advantage_mode"].endswith("[mean]")  # the algorithm's default
    assert text.index("  --joint_mode") < text.index("Learning:") < text.index("  --max_grad_norm")


def test_every_setting_has_a_docstring_that_lists_its_words():
    for config_class in (Arguments, Evaluation):
        docs = field_docs(config_class)
        for name, hint in typing.get_type_hints(config_class).items():
            assert docs[name], name
            for word in _words(hint):
                assert word in docs[name], f"{name} does not say {word}"


def _words(hint: Any) -> list[str]:
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    return [word for inner in typing.get_args(hint) for word in _words(inner)]


def test_a_script_cannot_loosen_a_type(task, capsys):
    @dataclass
    class Loose(Arguments):
        joint_mode: str = "cross"

    assert parse(config_class=Loose).config.joint_mode == "cross"
    assert "Use aligned or cross" in error_of(capsys, "--joint_mode", "crossed", config_class=Loose)


def test_a_field_of_the_script_alone_has_its_own_group():
    @dataclass
    class Extended(Arguments):
        extra: int = 3
        """Something else"""

    assert field_groups(Extended)[0] == ("This script", ["extra"])


# ------------------------------------------------------------------------------------------------------- config.yaml
def test_config_yaml_starts_the_same_run_again(task, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train/magrpo.py", "--seed", "7"])
    task.recommended = {"max_new_tokens": 33}
    rates = ["--agent_learning_rate", "1e-4", "5e-5", "3e-7"]
    first = parse("--agents", "a", "b", "c", "--seed", "7", *rates, "--task_args", "x=3")
    path = tmp_path / "config.yaml"
    dump_config(first.config, first.sources, path, {"num_processes": 1})

    task.recommended = {"max_new_tokens": 99, "agent_model": "other"}
    second = parse("--config", str(path), "--run_name", first.config.run_name)
    assert second.config == first.config
    assert parse("--config", str(path)).sources["run_name"] == "derived"  # not the name of the first run again


def test_evaluation_reads_the_config_yaml_of_a_training_run(task, tmp_path):
    run = parse("--max_new_tokens", "17", "--eval_num_samples", "8", "--num_turns", "3")
    dump_config(run.config, run.sources, "config.yaml")
    (tmp_path / "agents" / "agent_0").mkdir(parents=True)
    config = parse("--config", "config.yaml", "--agents_dir", "agents", config_class=Evaluation).config
    assert (config.max_new_tokens, config.eval_num_samples, config.num_turns) == (17, 8, 3)
    assert (config.num_agents, config.agent_model) == (1, None)


def test_config_yaml_records_origins_versions_and_command(task, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train/magrpo.py", "--lora_rank", "8", "--run_name", "a b"])
    task.recommended = {"max_new_tokens": 33}
    run = parse("--lora_rank", "8", "--run_name", "a b", "--config", yaml_file(tmp_path, "num_turns: 3"))
    path = tmp_path / "config.yaml"
    dump_config(run.config, run.sources, path, {"num_processes": 1})
    text = path.read_text()
    written = yaml.safe_load(text)
    assert set(written) == {*field_names(Arguments), "record"}
    assert written["lora_rank"] == 8 and written["run_name"] == "a b" and written["num_agents"] == 2
    assert "\n# Learning\nagent_learning_rate: 0.0001\n" in text
    record = written["record"]
    assert record["command"] == "train/magrpo.py --lora_rank 8 --run_name 'a b'"
    assert record["num_processes"] == 1
    assert record["python"] == sys.version.split()[0]
    assert {"mlrl", "torch", "transformers"} <= set(record["packages"])
    assert record["git_commit"] is None  # the current folder is no repository
    sources = {name: source for source, names in record["sources"].items() for name in names}
    assert sources == run.sources
    assert {sources[name] for name in ("lora_rank", "run_name")} == {"flag"}
    assert (sources["num_turns"], sources["max_new_tokens"]) == ("yaml", "task")


def test_config_yaml_from_python_without_sources(tmp_path):
    path = tmp_path / "config.yaml"
    dump_config(MAREINFORCEConfig(agent_model="m"), {}, path)
    assert yaml.safe_load(path.read_text())["agent_model"] == "m"


def test_git_commit_is_recorded(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("1")
    for arguments in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    dump_config(MAREINFORCEConfig(), {}, "config.yaml")
    assert yaml.safe_load(Path("config.yaml").read_text())["record"]["git_commit"] == commit
    (tmp_path / "file").write_text("2")
    dump_config(MAREINFORCEConfig(), {}, "config.yaml")
    assert yaml.safe_load(Path("config.yaml").read_text())["record"]["git_commit"] == commit + "+changes"


def test_config_yaml_holds_no_secret(task, capsys, monkeypatch):
    planted = "sk-planted-secret"
    for name in ("OPENAI_API_KEY", "HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, planted)
    secrets = [f"{name}={planted}" for name in ("api_key", "hf_token", "PASSWORD", "client.secret", "key")]
    words = ["--task_args", *secrets, f"nested={{api_key: {planted}}}", "max_tokens=5"]
    monkeypatch.setattr(sys, "argv", ["magrpo.py", *words])
    run = parse(*words)
    assert run.config.task_args["api_key"] == planted  # the task gets it
    dump_config(run.config, run.sources, "config.yaml", {"launch": {"token": planted}})
    text = Path("config.yaml").read_text()
    assert planted not in text
    assert yaml.safe_load(text)["task_args"]["max_tokens"] == 5
    assert "was a secret" in error_of(capsys, "--config", "config.yaml")
    suspicious = [n for n in field_names(Arguments) if n.endswith(("key", "token", "secret", "password"))]
    assert not suspicious


# ----------------------------------------------------------------------------------------------------- as a process
SCRIPT = '''
"""A script."""
import sys
from dataclasses import dataclass
from mlrl.cli import parse
from mlrl.config import MAGRPOConfig, TaskArguments

@dataclass
class Arguments(TaskArguments, MAGRPOConfig):
    agent_model: str | None = "embedded"
    """Model of the script"""

if __name__ == "__main__":
    run = parse(Arguments, __doc__)
    assert "torch" not in sys.modules and "transformers" not in sys.modules
    print(run.config.num_generations, run.sources["num_generations"], run.config.run_name)
'''


def start(tmp_path: Path, *words: str) -> tuple[subprocess.CompletedProcess, float]:
    script = tmp_path / "my_magrpo.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(script), *words], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60
    )
    return done, time.monotonic() - started


@pytest.mark.parametrize("words", [["--nun_turns", "2"], ["--num_turns", "0"], ["--num_generations", "1"]])
def test_a_wrong_flag_costs_seconds_and_no_traceback(tmp_path, words):
    done, seconds = start(tmp_path, *words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("my_magrpo.py: error: ") and done.stderr.count("\n") == 1
    assert seconds < 3


def test_help_is_quick(tmp_path):
    done, seconds = start(tmp_path, "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert "  --agent_model                  Model of the script [embedded]\n" in done.stdout
    assert not [line for line in done.stdout.splitlines() if line.startswith("    ")]  # not a terminal: wide
    assert seconds < 3


def test_a_real_task_is_loaded_without_torch(tmp_path):
    done, _ = start(tmp_path, "--num_generations", "5")
    assert done.returncode == 0, done.stderr
    said, result = done.stdout.splitlines()  # the first before what takes long
    assert said == "my_magrpo.py: loading libraries and models"
    number, source, run_name = result.split()
    assert (number, source) == ("5", "flag")
    assert run_name.startswith("my_magrpo-length_ratio-")


def test_settings_are_masked_before_they_leave_the_machine():
    from mlrl.config_file import masked

    settings = {"task_args": {"api_key": "planted-123", "style": "plain"}, "max_new_tokens": 5}
    assert masked(settings) == {"task_args": {"api_key": "***", "style": "plain"}, "max_new_tokens": 5}
