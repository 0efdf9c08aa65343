"""A tool task from rows: N agents share the calls that a request needs. One turn; nothing is executed."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlrl import ConfigError, Task
from mlrl.tasks.pass_at_k import turn_means
from mlrl.tasks.task_data import Row
from mlrl.tasks.tool_use.benchmark import checked_categories
from mlrl.tasks.tool_use.calls import read_calls
from mlrl.tasks.tool_use.reward import Score, score
from mlrl.tasks.tool_use.rows import gold_calls, parameter_names, properties
from mlrl.tasks.tool_use.source import tool_rows

ROLE_MODES = ("self_select", "split_by_order", "odd_even", "same_prompt")

RECOMMENDED = {"num_turns": 1, "num_generations": 4, "max_new_tokens": 256, "temperature": 0.7}


def tool_task_function(
    sample: Sequence[Row],
    packaged: Callable[[Path, Sequence[str]], list[Row]],
    known: Sequence[str],
    default: str,
    ordered: bool,
) -> Callable[..., Task]:
    """The `task` function over rows of one kind.

    Args:
        sample: rows of our own.
        packaged: reads the rows of some categories from the data folder of the package bfcl-eval.
        known: its categories; default: those that are read unless others are named.
        ordered: see `tool_task`.
    """

    def task(
        data_path: str | None = None,
        dataset: str | None = None,
        categories: str = default,
        role_mode: str = "self_select",
        train_split: str = "train",
        eval_split: str = "test",
        train_size: int | None = None,
        eval_size: int | None = None,
    ) -> Task:
        """The task over rows with user_prompt, function and ground_truth, and turn_index where calls have an order.

        Args:
            dataset: a hub id, `bfcl-eval` for the installed package, or `sample`.
            categories: of the package, with commas between them.
            role_mode: self_select, split_by_order, odd_even or same_prompt.
            eval_size: rows held out; None: a fifth of the package's rows, the last tenth of a file.
        """
        words = checked_categories(categories, known)
        train, held_out = tool_rows(
            data_path,
            dataset,
            splits=(train_split, eval_split),
            sizes=(train_size, eval_size),
            sample=sample,
            packaged=lambda folder: packaged(folder, words),
        )
        return tool_task(train, held_out, role_mode=role_mode, ordered=ordered)

    return task


def tool_task(train: Sequence[Row], held_out: Sequence[Row], *, role_mode: str, ordered: bool) -> Task:
    """The Task over rows of `mlrl.tasks.tool_use.rows.tool_row`. It has no transition, so it has one turn.

    Args:
        role_mode: how the calls are shared, a word of `ROLE_MODES`.
        ordered: the calls have an order, that of the agents one after the other.

    Raises:
        ConfigError: an unknown word.
    """
    if role_mode not in ROLE_MODES:
        raise ConfigError(f"task_args.role_mode={role_mode!r}: right is one of {', '.join(ROLE_MODES)}.")

    def formatter(item: Row, agent_idx: int, num_agents: int) -> list[dict[str, str]]:
        return role_prompt(item, agent_idx, num_agents, role_mode, ordered)

    def reward(*completions: list[str], batch_items: list[Row]) -> list[float]:
        return [item_score(batch_items[0], answers, ordered).total for answers in zip(*completions, strict=True)]

    def log_scores(agent_completions_turns: list[list[list[str]]], batch_items: list[Row]) -> list[dict[str, Any]]:
        return [
            {"turns": [item_score(item, answers, ordered).metrics() for answers in zip(*agents, strict=True)]}
            for item, *agents in zip(batch_items, *agent_completions_turns, strict=True)
        ]

    return Task(
        train_dataset=list(train),
        eval_dataset=list(held_out),
        formatters=formatter,
        reward_func=reward,
        eval_logger=log_scores,
        eval_aggregator=turn_means,
        recommended=dict(RECOMMENDED),
    )


def item_score(item: Row, answers: Sequence[str], ordered: bool) -> Score:
    """The score of one joint response."""
    order = parameter_names(item["function"])
    return score([read_calls(answer, order) for answer in answers], gold_calls(item), ordered)


def role_prompt(item: Row, agent: int, num_agents: int, role_mode: str, ordered: bool) -> list[dict[str, str]]:
    """The functions, the request, and which of the calls are the agent's."""
    lines = [
        "Functions:",
        *map(signature, item["function"]),
        "",
        f"Request:\n{item['user_prompt'].strip()}",
        "",
        _share(agent, num_agents, role_mode, ordered),
        "Answer with calls in Python syntax, one a line, arguments by name, such as\nname(argument='text', other=3)\n"
        "and nothing else. Answer [] if no call is left for you.",
    ]
    return [{"role": "user", "content": "\n".join(lines)}]


def _share(agent: int, num_agents: int, role_mode: str, ordered: bool) -> str:
    if num_agents == 1:
        return "Make all calls that the request needs" + (", in order." if ordered else ".")
    team = f"You are agent {agent + 1} of {num_agents}; together you make the calls that the request needs"
    if ordered:
        team += ", those of agent 1 first"
    part = {
        "self_select": "Make a fair share of the calls, such that none is missing and none is made twice.",
        "split_by_order": f"List all calls for yourself, in order, and make part {agent + 1} of {num_agents}.",
        "odd_even": f"List all calls for yourself, in order, and make numbers {_every_nth(agent, num_agents)}.",
        "same_prompt": "Make the calls.",
    }[role_mode]
    return f"{team}. {part}" if role_mode != "same_prompt" else "Make the calls that the request needs."


def _every_nth(agent: int, num_agents: int) -> str:
    return ", ".join(str(agent + 1 + k * num_agents) for k in range(3)) + ", …"


def signature(function: Mapping[str, Any]) -> str:
    """A function as ``name(argument: type, other: type = …)`` with its description, then a line an argument."""
    required = set((function.get("parameters") or {}).get("required") or ())
    arguments = properties(function)
    shown = [
        f"{name}: {schema.get('type', 'any')}" + ("" if name in required else " (optional)")
        for name, schema in arguments.items()
    ]
    description = str(function.get("description", "")).rpartition("Tool description: ")[2].strip()
    lines = [f"{function['name']}({', '.join(shown)})", f"    {description}"]
    for name, schema in arguments.items():
        details = {
            key: schema[key] for key in ("enum", "default", "items", "properties") if schema.get(key) is not None
        }
        text = str(schema.get("description", "")).strip()
        lines.append(f"    {name}: {text}" + (f" {json.dumps(details, ensure_ascii=False)}" if details else ""))
    return "\n".join(lines)
