"""Function calls in Python syntax: reading them out of an answer, writing them, and comparing one with a gold call."""

import ast
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlrl.tasks.answer_text import without_fences

_WORDS = {"true": True, "false": False, "null": None, "none": None}
_NOISE = re.compile(r"[ ,./\-_*^()]")
_LONGEST = 20_000  # characters of an answer that are read; Python's parser is slow on hostile text


@dataclass(frozen=True)
class Call:
    """A call with arguments by name; `text` is its normal form, equal for equal calls."""

    name: str
    arguments: Mapping[str, Any]
    text: str


def read_calls(answer: str, parameters: Mapping[str, Sequence[str]] | None = None) -> list[Call] | None:
    """The calls of an answer: one a line, or a list of calls; code fences are passed over. [] for "[]".

    Args:
        parameters: the parameter names of each function in order, which name positional arguments; one too many is
            called ``_0``, ``_1``, …

    Returns:
        None where the answer is anything else.
    """
    text = without_fences(answer).strip()
    if not text or len(text) > _LONGEST:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Python has to say of a model's escapes is nobody's concern
            body = ast.parse(text).body
        calls = [_call(node, parameters or {}) for statement in body for node in _call_nodes(statement)]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return calls


def _call_nodes(statement: ast.stmt) -> list[ast.expr]:
    if not isinstance(statement, ast.Expr):
        raise ValueError("not an expression")
    value = statement.value
    return list(value.elts) if isinstance(value, ast.List | ast.Tuple) else [value]


def _call(node: ast.expr, parameters: Mapping[str, Sequence[str]]) -> Call:
    if not isinstance(node, ast.Call):
        raise ValueError("not a call")
    name = _dotted(node.func)
    order = parameters.get(name, ())
    arguments = {order[i] if i < len(order) else f"_{i}": _value(value) for i, value in enumerate(node.args)}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError("unpacked or repeated arguments")
        arguments[keyword.arg] = _value(keyword.value)
    return make_call(name, arguments)


def make_call(name: str, arguments: Mapping[str, Any]) -> Call:
    """A call with its normal form; the order of the arguments is of no account."""
    inside = ", ".join(f"{key}={arguments[key]!r}" for key in sorted(arguments))
    return Call(name, dict(arguments), f"{name}({inside})")


def _dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise ValueError("not a function name")
    return ".".join([node.id, *reversed(parts)])


def _value(node: ast.expr) -> Any:
    """A literal; tuples become lists, and JSON's true, false, null are read."""
    if isinstance(node, ast.Name) and node.id.lower() in _WORDS:
        return _WORDS[node.id.lower()]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        return {_value(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
    return ast.literal_eval(node)


@dataclass(frozen=True)
class GoldCall:
    """What a call should be: for each argument the values that are right; "" among them means that it may be left out.

    The values within a dict, and within a list of dicts, are themselves lists of what is right.
    """

    name: str
    allowed: Mapping[str, Sequence[Any]]

    def example(self) -> Call:
        """A call that is right: the first value of each argument; only what has none is left out."""
        return make_call(self.name, _example(self.allowed))


def _example(value: Any) -> Any:
    """A plain value out of one whose dicts hold lists of right values."""
    if isinstance(value, Mapping):
        chosen = {key: next((option for option in _options(right) if option != ""), "") for key, right in value.items()}
        return {key: _example(option) for key, option in chosen.items() if option != ""}
    return [_example(element) for element in value] if isinstance(value, list) else value


def similarity(call: Call, gold: GoldCall) -> float:
    """right arguments / (gold arguments + extra ones) for calls of one function, else 0.

    An argument that may be left out and is counts as right. For a gold call without arguments: 1 without any, else 0.7.
    """
    if call.name != gold.name:
        return 0.0
    if not gold.allowed:
        return 0.7 if call.arguments else 1.0
    right = sum(
        _is_right(call.arguments[key], values) if key in call.arguments else "" in values
        for key, values in gold.allowed.items()
    )
    return right / len(gold.allowed.keys() | call.arguments.keys())


def _is_right(value: Any, allowed: Sequence[Any]) -> bool:
    return any(_equal(value, option) for option in allowed)


def _equal(value: Any, option: Any) -> bool:
    """Equal as the benchmark has it: case, spaces and punctuation of strings do not count, 5 is 5.0, True is not 1."""
    if isinstance(option, str):
        return isinstance(value, str) and plain_text(value) == plain_text(option)
    if isinstance(option, bool) or isinstance(value, bool) or option is None or value is None:
        return value is option
    if isinstance(option, int | float):
        return isinstance(value, int | float) and value == option
    if isinstance(option, Mapping):
        return (
            isinstance(value, Mapping)
            and not value.keys() - option.keys()
            and all(
                _is_right(value[key], _options(right)) if key in value else "" in _options(right)
                for key, right in option.items()
            )
        )
    if isinstance(option, list | tuple):
        return (
            isinstance(value, list)
            and len(value) == len(option)
            and all(_equal(element, right) for element, right in zip(value, option, strict=True))
        )
    return False


def _options(right: Any) -> Sequence[Any]:
    return right if isinstance(right, list) else [right]


def plain_text(text: str) -> str:
    """Lower case without spaces and the punctuation that writers differ in; one kind of quote."""
    return _NOISE.sub("", text).lower().replace("'", '"')
