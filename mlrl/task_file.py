"""Finds the Python module that a task name or path means, and fits task_args to the function in it."""

import difflib
import importlib
import importlib.util
import inspect
import re
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from mlrl.calling import shown
from mlrl.errors import ConfigError

_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def find_task(spec: str) -> tuple[ModuleType, str, str]:
    """The module, the attribute to look up in it and the task's short name for ``NAME`` or ``file.py[:ATTR]``.

    Raises:
        ConfigError: no shipped task of that name, or no such file.
    """
    path, colon, attribute = spec.rpartition(":")
    if not colon or not path.endswith(".py"):
        path, attribute = spec, "task"
    if not path.endswith(".py"):
        return _shipped_module(spec), attribute, spec
    name = Path(path).stem
    return _module_from_file(path, spec), attribute, name if attribute == "task" else f"{name}-{attribute}"


def _module_from_file(path: str, spec: str) -> ModuleType:
    full = Path(path).expanduser().resolve()
    if not full.is_file():
        raise ConfigError(f"task={spec!r}: there is no file {full}. Give the path of a Python file that holds a task.")
    name = f"mlrl_task_{full.stem}_{zlib.crc32(str(full).encode()):08x}"
    module_spec = importlib.util.spec_from_file_location(name, full)
    module = importlib.util.module_from_spec(module_spec)
    if str(full.parent) not in sys.path:  # as for a script: modules beside the file can be imported, also later
        sys.path.insert(0, str(full.parent))
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        if isinstance(error, SyntaxError) and (error.filename is None or "codec can't decode" in str(error)):
            raise ConfigError(
                f"task={spec!r}: {full} is no Python source ({error}). Give a file of Python code that holds a task."
            ) from error
        raise
    return module


def _shipped_module(name: str) -> ModuleType:
    shipped = _shipped_tasks()
    if name not in shipped:
        raise ConfigError(
            f"task={name!r}: no task of that name is shipped{_closest(name, shipped)}. "
            f"Right is one of {', '.join(shipped)}, or the path of a file that ends in .py."
        )
    return importlib.import_module(f"mlrl.tasks.{name}")


def _shipped_tasks() -> list[str]:
    """The modules of `mlrl.tasks` that hold a task; what they share stands beside them. None is imported."""
    files = Path(importlib.import_module("mlrl.tasks").__path__[0]).glob("*.py")
    holds_task = re.compile(r"^(?:def task\(|task\b[^=\n]*=)", re.MULTILINE)
    return sorted(file.stem for file in files if holds_task.search(file.read_text(encoding="utf-8")))


def fit_task_args(func: Callable, spec: str, task_args: Mapping[str, Any]) -> dict[str, Any]:
    """`task_args` as keyword arguments of a task function, texts turned into the type its parameter shows.

    Raises:
        ConfigError: an argument it does not take, one that it needs and lacks, or a text that is no such number.
    """
    parameters = inspect.signature(func).parameters
    by_name = {name: p for name, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    accepted = ", ".join(str(p.replace(annotation=p.empty)) for p in by_name.values()) or "none"
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name, value in task_args.items():
        if name not in by_name and not takes_any:
            raise ConfigError(
                f"task_args.{name}={shown(value)}: {spec} has no such argument{_closest(name, list(by_name))}. "
                f"It takes: {accepted}."
            )
    for name, p in by_name.items():
        if p.default is p.empty and name not in task_args:
            raise ConfigError(f"task_args.{name}: {spec} needs it. Give --task_args {name}=…; it takes: {accepted}.")
    return {
        name: _fitted(name, value, by_name[name]) if name in by_name else value for name, value in task_args.items()
    }


def _fitted(name: str, value: Any, parameter: inspect.Parameter) -> Any:
    """A command line has only texts: reads one as the bool, int, float or None of the annotation or the default."""
    annotation = parameter.annotation
    if annotation is parameter.empty:
        annotation = type(parameter.default)
    kinds = re.findall(r"\w+", annotation.__name__ if isinstance(annotation, type) else str(annotation))
    if not isinstance(value, str) or "str" in kinds:
        return value
    if "None" in kinds and value.lower() in ("none", "null"):
        return None
    readers = {"bool": lambda text: _WORDS[text.lower()], "int": int, "float": float}
    wanted = [kind for kind in readers if kind in kinds]
    for kind in wanted:
        try:
            return readers[kind](value)
        except (KeyError, ValueError):
            continue
    if wanted:
        raise ConfigError(f"task_args.{name}={value!r}: not a value of type {' or '.join(wanted)}.")
    return value


def _closest(name: str, names: list[str]) -> str:
    match = difflib.get_close_matches(name, names, n=1)
    return f" (closest: {match[0]})" if match else ""
