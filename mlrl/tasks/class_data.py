"""Rows of class completion: what the skeleton gives, which methods are to be written, and by which agent."""

import ast
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mlrl import ConfigError
from mlrl.tasks.code_text import functions_in, parsed, syntax_problem
from mlrl.tasks.task_data import Row

_NEEDED = ("skeleton", "test", "class_name", "class_constructor", "import_statement", "methods_info")
_MOST_SPLITS = 1000  # those of up to 12 methods over two agents


def class_row(row: dict[str, Any], number: int) -> Row:
    """A row with `task_id`, `prompt` (the skeleton), `class_name`, `head`, `methods`, `depends`, `test` and `tests`.

    `head` is the source of the class without the methods to be written, `depends` the methods that each one calls.
    Takes rows of ClassEval's form.

    Raises:
        ConfigError: fields are missing, or nothing is to be written or tested.
    """
    missing = [name for name in _NEEDED if name not in row]
    if missing:
        raise ConfigError(f"task_args.data_path: row {number} lacks {', '.join(missing)}. Right is ClassEval's form.")
    skeleton, name = row["skeleton"].replace("\r\n", "\n"), row["class_name"]
    info = {entry["method_name"]: entry.get("dependencies") or {} for entry in row["methods_info"]}
    listed = [function.name for function in functions_in(skeleton, at_any_depth=True)]
    given = {function.name for function in functions_in(row["class_constructor"], at_any_depth=True)} | {"__init__"}
    methods = [method for method in dict.fromkeys([*listed, *info]) if method not in given]
    tests = case_names(row["test"])
    if not methods or not tests:
        raise ConfigError(f"task_args.data_path: row {number} ({name}) has {len(methods)} methods, {len(tests)} tests.")
    depends = {method: list(info.get(method, {}).get("method_dependencies") or []) for method in methods}
    return {
        "task_id": str(row.get("task_id", number)),
        "prompt": skeleton.strip("\n") + "\n",
        "class_name": name,
        "head": _head(row, name),
        "methods": methods,
        "depends": depends,
        "test": row["test"],
        "tests": tests,
    }


def _head(row: dict[str, Any], name: str) -> str:
    constructor = row["class_constructor"].replace("\r\n", "\n").rstrip()
    for source in (constructor, f"{constructor}\n    pass", f"class {name}:\n    pass"):
        if not syntax_problem(source):
            return "\n".join([*row["import_statement"], source])
    raise ConfigError(f"task_args.data_path: class_name={name!r} is no name of a class.")


def case_names(source: str) -> list[str]:
    """The tests of a source with unittest cases, as ``Class.method``.

    Raises:
        ConfigError: it does not parse.
    """
    tree = parsed(source)
    if tree is None:
        raise ConfigError("task_args.data_path: a test does not parse.")
    names = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any("TestCase" in ast.unparse(base) for base in node.bases):
            methods = [m.name for m in node.body if isinstance(m, ast.FunctionDef) and m.name.startswith("test")]
            names[node.name] = dict.fromkeys(f"{node.name}.{method}" for method in methods)
    return [name for own in names.values() for name in own]


def share_methods(methods: Sequence[str], depends: Mapping[str, Sequence[str]], num_agents: int) -> list[list[str]]:
    """Which methods each agent writes: numbers that differ by one at most, and few calls between agents.

    The first agent gets the part, of all of the right size, with the fewest dependencies on the rest (of equally good
    ones the first in order), and the others share what is left in the same way. With fewer methods than agents the
    last agents get none.
    """
    if num_agents == 1 or not methods:
        return [list(methods), *([] for _ in range(num_agents - 1))]
    size = math.ceil(len(methods) / num_agents)
    part = list(methods[:size])
    if math.comb(len(methods), size) <= _MOST_SPLITS:
        part = list(min(itertools.combinations(methods, size), key=lambda own: _cut(own, methods, depends)))
    rest = [method for method in methods if method not in part]
    return [part, *share_methods(rest, depends, num_agents - 1)]


def _cut(part: Sequence[str], methods: Sequence[str], depends: Mapping[str, Sequence[str]]) -> int:
    """Dependencies between a part of the methods and the others."""
    inside = set(part)
    return sum(
        (method in inside) != (other in inside) for method in methods for other in depends[method] if other in methods
    )
