"""Rows of the tool tasks: user_prompt, function (schemas), ground_truth (calls), from several forms."""

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlrl import ConfigError
from mlrl.tasks.task_data import Row
from mlrl.tasks.tool_use.calls import GoldCall, read_calls


def tool_row(row: Mapping[str, Any], number: int = 0) -> Row:
    """A row with user_prompt, function and ground_truth as a list of ``[name, {argument: [right values]}]``.

    Takes schemas and calls as lists or as JSON text, and a gold call as ``{name: {argument: [right values]}}`` (the
    benchmark's form), ``{"name": …, "arguments": {…}}`` or as text in call syntax.

    Raises:
        ConfigError: a field is absent or in another form.
    """
    where = f"row {row.get('id', number)!r}"
    for field in ("user_prompt", "function", "ground_truth"):
        if field not in row:
            raise ConfigError(f"task_args.data_path: {where} has no field {field!r}, but {', '.join(row) or 'none'}.")
    functions = _plain(row["function"])
    functions = [functions] if isinstance(functions, dict) else [_plain(function) for function in functions]
    order = parameter_names(functions)
    gold = [_gold(call, order, where) for call in _plain(row["ground_truth"])]
    kept = {json.dumps(call, sort_keys=True, default=str): call for call in reversed(gold)}
    return {
        "id": str(row.get("id", number)),
        "official_category": str(row.get("official_category", "")),
        "turn_index": int(row.get("turn_index") or 0),
        "user_prompt": str(row["user_prompt"]),
        "function": functions,
        "ground_truth": list(kept.values())[::-1],
    }


def gold_calls(row: Mapping[str, Any]) -> list[GoldCall]:
    """The gold calls of a `tool_row`."""
    return [GoldCall(name, allowed) for name, allowed in row["ground_truth"]]


def parameter_names(functions: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The parameters of each function in order, those that are required first."""
    return {function["name"]: list(properties(function)) for function in functions}


def properties(function: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The schemas of a function's parameters by name; the data sets leave out or null what is empty."""
    found = (function.get("parameters") or {}).get("properties") or {}
    return {name: schema for name, schema in found.items() if schema is not None}


def _plain(value: Any) -> Any:
    """JSON text as what it stands for, everything else as it is."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _literal(value: Any) -> Any:
    """A plain value in the form in which each entry of a dict is a list of right values."""
    if isinstance(value, Mapping):
        return {key: [_literal(entry)] for key, entry in value.items()}
    return [_literal(entry) for entry in value] if isinstance(value, list) else value


def _gold(call: Any, order: Mapping[str, Sequence[str]], where: str) -> list[Any]:
    call = _plain(call)
    if isinstance(call, str):
        calls = read_calls(call, order)
        if calls is not None and len(calls) == 1:
            return [calls[0].name, _literal(calls[0].arguments)]
    elif isinstance(call, Mapping) and {"name", "arguments"} <= call.keys():
        arguments = _plain(call["arguments"])
        arguments = ast.literal_eval(arguments) if isinstance(arguments, str) else arguments
        return [call["name"], _literal(arguments)]
    elif isinstance(call, Mapping):
        named = [(name, allowed) for name, allowed in call.items() if allowed is not None]
        if len(named) == 1 and isinstance(named[0][1], Mapping):
            name, allowed = named[0]
            return [name, {key: list(values) for key, values in allowed.items() if values is not None}]
    raise ConfigError(
        f"task_args.data_path: {where} has the gold call {call!r}. Right is {{name: {{argument: [values]}}}}, "
        f"{{'name': name, 'arguments': {{…}}}}, or text like name(argument=value)."
    )
