"""The text of ``--help``, made from the groups and docstrings of a config class."""

import ast
import dataclasses
import inspect
import itertools
import textwrap
from typing import Any

NOTES = """\
A flag may be written with - or _. A list takes several values. A yes-or-no flag is --flag, --no_flag, or
--flag true|false. None is a value. A value may also stand in the YAML file of --config. What is given in several
places: default < script < recommended by the task < YAML < flag. config.yaml of a run says what came from where."""


def field_groups(config_class: type) -> list[tuple[str, list[str]]]:
    """The settings of a config class by group: (heading, names), in the order of its base classes.

    A group is the class that names a setting first, seen from the root; its docstring is the heading. Restating a
    setting further down changes its default, not its place.
    """
    settings = {field.name for field in dataclasses.fields(config_class) if field.init}
    group_of = {}
    for base in config_class.__mro__:
        group_of |= dict.fromkeys(_declared(base), base)
    groups: dict[str, list[str]] = {}
    for base in config_class.__mro__:
        names = [name for name in _declared(base) if name in settings and group_of[name] is base]
        if names:  # groups of one heading, such as what all critics have and what some have, are one
            groups[_heading(base)] = groups.get(_heading(base), []) + names
    return list(groups.items())


def _declared(config_class: type) -> list[str]:
    return list(inspect.get_annotations(config_class)) if dataclasses.is_dataclass(config_class) else []


def _heading(config_class: type) -> str:
    doc = (config_class.__doc__ or "").strip()
    if not doc or doc.startswith(f"{config_class.__name__}("):  # without a docstring a dataclass has its signature
        return "This script"
    return doc.splitlines()[0].rstrip(".")


def field_docs(config_class: type) -> dict[str, str]:
    """The docstring under each field, on one line; the one furthest down the class hierarchy counts."""
    docs: dict[str, str] = {}
    for base in reversed(config_class.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        except (OSError, TypeError):  # a class without a source file
            continue
        for line, following in itertools.pairwise(body):
            text = following.value if isinstance(following, ast.Expr) else None
            if isinstance(line, ast.AnnAssign) and isinstance(text, ast.Constant) and isinstance(text.value, str):
                docs[line.target.id] = " ".join(text.value.split())
    return docs


def field_defaults(config_class: type) -> dict[str, Any]:
    """The default of every setting."""
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(config_class)
        if field.init
    }


def format_help(config_class: type, script: str, script_doc: str | None, width: int) -> str:
    """The help text: what the script says, then every flag by group with its meaning and [default]."""
    docs, defaults = field_docs(config_class), field_defaults(config_class)
    groups = [
        (heading, [(name, docs.get(name, ""), defaults[name]) for name in names])
        for heading, names in field_groups(config_class)
    ]
    groups.insert(0, ("Settings from a file", [("config", "YAML file with any of the settings below", None)]))
    column = max(len(name) for _, rows in groups for name, *_ in rows) + 6
    parts = [inspect.cleandoc(script_doc or ""), "", f"Usage: {script} [--config FILE] [--flag value ...]", "", NOTES]
    for heading, rows in groups:
        parts += ["", f"{heading}:"]
        for name, doc, default in rows:
            text = f"{doc} [{_shown(default)}]".strip()
            parts.append(
                textwrap.fill(
                    text,
                    width=width,
                    initial_indent=f"  --{name}".ljust(column),
                    subsequent_indent=" " * column,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            )
    return "\n".join(parts).strip() + "\n"


def _shown(default: Any) -> str:
    if isinstance(default, list):
        return " ".join(str(element) for element in default)
    if isinstance(default, dict):
        return " ".join(f"{key}={value}" for key, value in default.items())
    return f"{default:g}" if isinstance(default, float) else str(default)
