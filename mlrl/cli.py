"""The command line of every script: flags over a YAML file over a task's recommendations over a script's defaults.

::

    @dataclass
    class Arguments(TaskArguments, MAGRPOConfig):
        num_generations: int = 8
        \"\"\"A default of this script; this text is its line in --help.\"\"\"

    def main():
        run = parse(Arguments, __doc__)
        with config_errors():
            from mlrl.trainers import MAGRPOTrainer  # torch loads only now
            trainer = MAGRPOTrainer(args=run.config, ...)
        trainer.train()
"""

import contextlib
import inspect
import os
import re
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlrl.config import TaskArguments, known_fields
from mlrl.config_checks import check_field, check_names, setting_types, suggestion
from mlrl.config_file import MASK, dump_config, read_config
from mlrl.config_help import field_defaults, format_help
from mlrl.config_models import TuningArguments
from mlrl.config_rules import check_run_folder
from mlrl.config_team import DEFAULT_LEARNING_RATE, DEFAULT_NUM_AGENTS, count_agents
from mlrl.errors import ConfigError
from mlrl.flags import read_flags
from mlrl.plain_warnings import warn_in_one_line
from mlrl.resume import check_resume_request
from mlrl.run_folder import default_run_name
from mlrl.user_errors import show_users_error

__all__ = ["Run", "config_errors", "dump_config", "parse"]

# Whose settings a task may recommend beside those for all.
ALGORITHMS = ("mareinforce", "magrpo", "marloo", "maremax", "iac", "maac", "madpo", "marlhf")

# Three ways to say which models; saying it in one way takes back what a weaker level said in another way, and with
# a model an agent also the number of agents.
_MODEL_FIELDS = ("agent_model", "agents", "agents_dir")


@dataclass
class Run:
    """What a command line asks for."""

    config: Any
    """Instance of the script's config class, checked"""
    task: Any
    """The loaded `mlrl.task.Task`"""
    task_name: str
    """Short name of the task, as in the name of the run folder"""
    sources: dict[str, str]
    """Setting → default, script, task, yaml, flag, or derived (from other settings); also `config.sources`"""
    script: str
    """Name of the script, without .py"""


def parse(config_class: type, script_doc: str | None, argv: list[str] | None = None) -> Run:
    """Read the command line of a script; nothing here imports torch, so a mistake costs no time.

    Precedence: default of the config < of the script < recommended by the task < ``--config`` YAML < flag.
    ``--help`` prints the help and exits with 0; an error prints one message and exits with 2.

    Args:
        config_class: dataclass of the script, made from `TaskArguments` and a config of `mlrl.config`.
        script_doc: the script's docstring, which opens the help.
        argv: the words after the script's name; default: those of this process.
    """
    if not issubclass(config_class, TaskArguments):
        raise TypeError(f"{config_class.__name__} must have mlrl.config.TaskArguments among its base classes")
    argv = sys.argv[1:] if argv is None else argv
    _hear_signals()
    file = _script_file(config_class)
    if "-h" in argv or "--help" in argv:
        width = max(60, shutil.get_terminal_size(fallback=(120, 24)).columns)
        print(format_help(config_class, file.name, script_doc, width), end="")
        raise SystemExit(0)
    warn_in_one_line(file.stem)
    with config_errors(file.name):
        run = _resolve(config_class, file.stem, argv)
    if os.environ.get("RANK", "0") == "0":
        print(f"{file.name}: loading libraries and models", flush=True)  # which may take half a minute
    return run


def _hear_signals() -> None:
    """launch.sh has its launcher ignore the signals that are for the processes it starts, which inherit that."""
    if os.environ.get("MLRL_LAUNCHED") and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def config_errors(script: str | None = None) -> Iterator[None]:
    """Turn an error that its message explains into one line on stderr, without a traceback.

    Exit code 2 for a `ConfigError`, 1 for the other errors that mlrl defines. An exception of the user's own code keeps
    its traceback from the user's first line on, and ends the process with 1 too.
    """
    script = script or Path(sys.argv[0]).name
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("mlrl."):
            if show_users_error(error):
                raise SystemExit(1) from None
            raise
        code = 2 if isinstance(error, ConfigError) else 1
        _say_why(f"{script}: error: {error}", code)
        raise SystemExit(code) from None
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
        _say_why(f"{script}: ended by Ctrl-C, without a checkpoint of this moment", code)
        raise SystemExit(0 if os.environ.get("MLRL_LAUNCHED") else code) from None  # launch.sh gives the code itself


def _say_why(message: str, code: int) -> None:
    """Prints what ends this process. With several, all of them end here, and one prints."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from mlrl.parallel.lifeline import fail

        fail(message, code)
    print(message, file=sys.stderr)


def _resolve(config_class: type, script: str, argv: list[str]) -> Run:
    """All of `parse` that can fail."""
    from mlrl.task import load_task  # brings in numpy, which --help can do without

    defaults = field_defaults(config_class)
    hints = setting_types(config_class)
    flags = read_flags(argv, {"config": str | None, **hints})
    path = flags.pop("config", None)
    file_values = {} if path is None else _checked(read_config(path, hints), hints, f" (in {path})")
    for level in (flags, file_values):
        _check_one_model(level)

    task_spec, task_args = _task_choice(defaults, file_values, flags)
    for name, value in task_args.items():
        if value == MASK:
            raise ConfigError(f"task_args.{name}={MASK!r}: was a secret, so config.yaml hides it. Give it again.")
    task = load_task(task_spec, task_args)
    task_name = task.name
    recommended = _recommended(_for_algorithm(task.recommended, config_class), hints, task_name)

    _drop_rate_of_other_tuning(recommended, (defaults | recommended | file_values | flags).get("tuning"))

    in_script = {name: value for name, value in defaults.items() if _is_of_script(config_class, name)}
    values, sources = _merge(
        {"default": defaults, "script": in_script, "task": recommended, "yaml": file_values, "flag": flags}
    )
    values["task"], values["task_args"] = task_spec, task_args
    _derive(values, sources, default_run_name(script, task_name))

    config = _construct(config_class, values, sources, script)
    config.sources.update(sources)
    is_first_process = int(os.environ.get("RANK", "0")) == 0  # the others may come when the folder has been made
    if "run_name" in values and is_first_process:
        own_name = None if sources["run_name"] == "derived" else config.run_name
        if config.resume_from_checkpoint is None:
            check_run_folder(config.output_dir, own_name)
        else:
            check_resume_request(config.resume_from_checkpoint, config.output_dir, own_name)
    return Run(config=config, task=task, task_name=task_name, sources=sources, script=script)


def _checked(values: dict[str, Any], hints: dict[str, Any], where: str) -> dict[str, Any]:
    """The values of a YAML file or a task, each checked by itself; errors say where it stands."""
    try:
        check_names(values, list(hints))
        return {name: check_field(name, value, hints[name]) for name, value in values.items()}
    except ConfigError as error:
        raise ConfigError(f"{error}{where}") from None


def _for_algorithm(recommended: dict[str, Any], config_class: type) -> dict[str, Any]:
    """A task's recommendations with those that it makes for this script's algorithm in place of the general ones.

    A key such as `madpo` with settings as its value is for that algorithm.
    """
    own = {base.__name__.removesuffix("Config").lower() for base in config_class.__mro__}
    general = {name: value for name, value in recommended.items() if name not in ALGORITHMS}
    for name in ALGORITHMS:
        special = recommended.get(name, {})
        if not isinstance(special, dict):
            raise ConfigError(f"recommended.{name}={special!r}: are no settings. Give a dict of them.")
        if name in own:
            general |= special
    return general


def _recommended(recommended: dict[str, Any], hints: dict[str, Any], task_name: str) -> dict[str, Any]:
    """A task's recommendations for this script; those for other algorithms are left out, unknown ones an error."""
    known = known_fields()
    for name in recommended:
        if name not in known:
            raise ConfigError(
                f"recommended={name!r}: task {task_name} recommends a setting that does not exist."
                f"{suggestion(str(name), known) or ' Use names that --help lists.'}"
            )
    here = {name: value for name, value in recommended.items() if name in hints}
    here = _checked(here, hints, f" (recommended by task {task_name})")
    _check_one_model(here)
    return here


def _drop_rate_of_other_tuning(recommended: dict[str, Any], chosen: Any) -> None:
    """A recommended learning rate is meant for the task's own tuning; with another it is far from right."""
    if chosen != recommended.get("tuning", TuningArguments.tuning):
        recommended.pop("agent_learning_rate", None)


def _check_one_model(level: dict[str, Any]) -> None:
    given = [name for name in _MODEL_FIELDS if level.get(name) is not None]
    if len(given) > 1:
        raise ConfigError(f"{given[0]}={level[given[0]]!r}: {given[1]}={level[given[1]]!r} is given too. Give one.")


def _task_choice(*levels: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Task and its arguments; arguments add up over the levels, until a higher level names another task."""
    task, arguments = "", {}
    for level in levels:
        if level.get("task", task) != task:
            task, arguments = level["task"], {}
        arguments = arguments | level.get("task_args", {})
    return task, arguments


def _is_of_script(config_class: type, name: str) -> bool:
    """Whether the default of a setting stands in the script rather than in mlrl."""
    owner = next(base for base in config_class.__mro__ if name in inspect.get_annotations(base))
    return not owner.__module__.startswith("mlrl.")


def _merge(levels: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values and their sources, from the weakest level to the strongest."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    modes = [level["collaboration_mode"] for level in levels.values() if "collaboration_mode" in level]
    # one actor for all roles: its model says nothing of their number
    counts = set() if modes and modes[-1] == "centralized" else {"agents", "agents_dir"}
    for source, level in levels.items():
        given = [name for name in _MODEL_FIELDS if level.get(name) is not None]
        if given:
            stale = set(_MODEL_FIELDS) | ({"num_agents"} if counts & set(given) else set())
            level = {name: None for name in stale if values.get(name) is not None} | level
        values |= level
        sources |= dict.fromkeys(level, source)
    return values, sources


def _derive(values: dict[str, Any], sources: dict[str, str], run_name: str) -> None:
    """Fill in the settings that follow from others."""
    models = [name for name in _MODEL_FIELDS if name in values]
    if all(values[name] is None for name in models):
        raise ConfigError(f"{models[0]}=None: there is no model. Give one of {', '.join('--' + m for m in models)}.")
    derived = {}
    if values["num_agents"] is None:
        derived["num_agents"] = DEFAULT_NUM_AGENTS
        if values["agents"] is not None:
            derived["num_agents"] = len(values["agents"])
        elif values.get("agents_dir") is not None and values["collaboration_mode"] != "centralized":
            derived["num_agents"] = count_agents(values["agents_dir"])
    if "agent_learning_rate" in values and values["agent_learning_rate"] is None:
        derived["agent_learning_rate"] = DEFAULT_LEARNING_RATE[values["tuning"]]
    if "run_name" in values and values["run_name"] is None:
        derived["run_name"] = run_name
    values |= derived
    sources |= dict.fromkeys(derived, "derived")


def _construct(config_class: type, values: dict[str, Any], sources: dict[str, str], script: str) -> Any:
    """The config; an error says where the settings in it came from, a doubt is one line on stderr."""
    try:
        with warnings.catch_warnings(record=True) as doubts:
            warnings.simplefilter("always")
            config = config_class(**values)
    except ConfigError as error:
        named = [name for name in sources if re.search(rf"\b{name}\b", str(error))]
        raise ConfigError(f"{error} ({', '.join(f'{name}: {sources[name]}' for name in named)})") from None
    for doubt in doubts:
        name = str(doubt.message).partition("=")[0]
        if sources.get(name) == "task" and "has no effect" in str(doubt.message):
            continue  # a task recommends what pays where it has one
        print(f"{script}: warning: {doubt.message}", file=sys.stderr)
    return config


def _script_file(config_class: type) -> Path:
    try:
        return Path(inspect.getfile(config_class))
    except (TypeError, OSError):  # a class without a file, as in a notebook
        return Path(sys.argv[0] or "script.py")
