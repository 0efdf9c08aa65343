"""A task's own metrics: its eval logger, eval aggregator and metrics callback, bound and checked."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlrl.calling import bind_call, copied, shown
from mlrl.errors import TaskError
from mlrl.prompts import Prompt
from mlrl.rewards import finite_number


@dataclass(frozen=True)
class RolloutSample:
    """One agent's response at one turn, as handed to `metrics_callback`."""

    agent_idx: int
    turn_idx: int
    """0-based."""
    prompt: Prompt
    completion: str
    reward: float
    """The processed reward of the joint response that it is part of."""
    metadata: dict[str, Any] = field(default_factory=dict)


class EvalHooks:
    """`eval_logger`, `eval_aggregator` and `metrics_callback` of a task; any of them may be None.

    Raises:
        ConfigError: one of them cannot be called as interface demands.
    """

    def __init__(self, logger: Callable | None, aggregator: Callable | None, callback: Callable | None):
        self.logger = logger and bind_call(
            logger,
            field="eval_logger",
            num_values=0,
            values_are="everything is passed by name",
            named=("agent_completions_turns", "batch_items", "prompts"),
        )
        self.aggregator = aggregator and bind_call(
            aggregator, field="eval_aggregator", num_values=1, values_are="the rows", named=("num_turns",)
        )
        self.callback = callback and bind_call(
            callback, field="metrics_callback", num_values=1, values_are="the list of samples"
        )

    def rows(
        self, *, agent_completions_turns: Sequence[Sequence[Sequence[str]]], items: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """One dict an item from the eval logger; [] without one.

        Args:
            agent_completions_turns: [agent][item][turn]; an item that ended early has fewer turns.

        Raises:
            TaskError: not a list of one dict an item.
        """
        if self.logger is None:
            return []
        named = {
            "agent_completions_turns": [[list(turns) for turns in agent] for agent in agent_completions_turns],
            "batch_items": [copied(item) for item in items],
            "prompts": [copied(item.get("prompt")) for item in items],
        }
        rows = self.logger([], named)
        if not isinstance(rows, list | tuple) or len(rows) != len(items):
            raise TaskError(f"eval_logger returned={shown(rows)}: not a list of {len(items)} dicts, one an item.")
        for index, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise TaskError(f"eval_logger returned[{index}]={shown(row)}: a {type(row).__name__}, not a dict.")
        return [dict(row) for row in rows]

    def aggregate(self, rows: Sequence[Mapping[str, Any]], num_turns: int) -> dict[str, float]:
        """Scalars of all rows: the aggregator's, or without one the mean of every numeric key.

        Raises:
            TaskError: the aggregator returned no scalars, or without one a numeric key is missing in some rows.
        """
        if not rows:
            return {}
        if self.aggregator is not None:
            returned = self.aggregator([[copied(row) for row in rows]], {"num_turns": num_turns})
            return _scalars(returned, "eval_aggregator")
        means = {}
        for key in dict.fromkeys(key for row in rows for key in row):
            values = [row.get(key) for row in rows]
            if any(isinstance(value, str | list | tuple | Mapping) for value in values):
                continue
            if any(key not in row for row in rows):
                raise TaskError(
                    f"eval_logger returned={key!r} for {sum(key in row for row in rows)} of {len(rows)} items: no mean "
                    f"of it would be fair. Give every item the key, or an eval_aggregator."
                )
            means[key] = math.fsum(_scalars({key: value}, "eval_logger")[key] for value in values) / len(rows)
        return means

    def callback_metrics(self, samples: Sequence[RolloutSample]) -> dict[str, float]:
        """The metrics callback's scalars; {} without one or where it returns None.

        Raises:
            TaskError: it returned something else.
        """
        if self.callback is None:
            return {}
        own = [replace(s, prompt=copied(s.prompt), metadata=copied(s.metadata)) for s in samples]
        returned = self.callback([own], {})
        return {} if returned is None else _scalars(returned, "metrics_callback")


def _scalars(returned: Any, source: str) -> dict[str, float]:
    if not isinstance(returned, Mapping):
        raise TaskError(f"{source} returned={shown(returned)}: a {type(returned).__name__}, not a dict of numbers.")
    scalars = {}
    for key, value in returned.items():
        value = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(value, float) and not math.isfinite(value):
            scalars[str(key)] = value  # a metric, unlike a reward, may be undefined
            continue
        try:
            scalars[str(key)] = finite_number(value)
        except ValueError as problem:
            raise TaskError(f"{source} returned[{key!r}]={shown(value)}: {problem}. Right is a number.") from None
    return scalars
