"""Rows of the task travel out of the forms in which TravelPlanner is published, and their split."""

import ast
import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from mlrl import ConfigError
from mlrl.tasks.task_data import Row
from mlrl.tasks.travel_plan.reference import read_reference
from mlrl.tasks.travel_plan.trip import read_trip, trip_fields

LEVELS = ("easy", "medium", "hard")


def travel_row(row: Mapping[str, Any], number: int) -> Row:
    """A row with id, query, level, trip and reference. An annotated plan is not kept.

    Takes the fields `query` and `reference_information` (descriptions with records or printed tables), or the chat
    `messages` of a query and its reference.

    Raises:
        ConfigError: neither, or no route in it.
    """
    query, information = _query_and_information(row, number)
    reference = read_reference(information)
    trip = read_trip({**row, "query": query}, reference.pop("legs"))
    return {
        "id": number,
        "query": query,
        "level": row.get("level") or trip.level,
        "trip": trip_fields(trip),
        "reference": reference,
    }


def _query_and_information(row: Mapping[str, Any], number: int) -> tuple[str, dict[str, Any]]:
    if "messages" in row:
        said = next((m["content"] for m in row["messages"] if m["role"] == "user"), "")
        information, found, query = said.removeprefix("Given Information:").rpartition("Query:")
        if found:
            return query.strip(), _descriptions(information)
    elif "query" in row and "reference_information" in row:
        return str(row["query"]).strip(), _descriptions(row["reference_information"])
    raise ConfigError(
        f"task_args.data_path: row {number} has the fields {', '.join(row) or 'none'}. Right is query and "
        f"reference_information, or chat messages with both."
    )


def _descriptions(value: Any) -> dict[str, Any]:
    """``{description: content}`` of a dict, of a list of {Description, Content}, or of either as text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            try:
                value = ast.literal_eval(value.strip())
            except (ValueError, SyntaxError):
                raise ConfigError("task_args.data_path: reference information that cannot be read.") from None
    if isinstance(value, Mapping):
        return {key: content for key, content in value.items() if content is not None}
    return {entry["Description"]: entry["Content"] for entry in value}


def selected(rows: Sequence[Row], days: str, levels: str) -> list[Row]:
    """The rows of the wanted lengths and levels.

    Raises:
        ConfigError: words that are none, or no row left.
    """
    wanted = {word.strip() for word in levels.split(",")}
    lengths = {word.strip() for word in days.split(",")}
    if not wanted <= set(LEVELS):
        raise ConfigError(f"task_args.levels={levels!r}: right is one or more of {', '.join(LEVELS)}.")
    if not all(length.isdigit() for length in lengths):
        raise ConfigError(f"task_args.days={days!r}: right is one or more numbers of days, such as 3,5.")
    kept = [row for row in rows if row["level"] in wanted and str(row["trip"]["days"]) in lengths]
    if not kept:
        raise ConfigError(f"task_args.days={days!r}, levels={levels!r}: none of the {len(rows)} rows is of these.")
    return kept


def stratified(rows: Sequence[Row], eval_share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Rows to train on and to evaluate on, the same share of each (days, level), drawn by the seed.

    Raises:
        ConfigError: a share that leaves one of them empty.
    """
    if not 0 < eval_share < 1:
        raise ConfigError(f"task_args.eval_share={eval_share!r}: right is a number between 0 and 1.")
    strata = defaultdict(list)
    for row in rows:
        strata[row["trip"]["days"], row["level"]].append(row)
    held_out_ids = set()
    draw = random.Random(seed)
    for key in sorted(strata):
        ids = [row["id"] for row in strata[key]]
        held_out_ids.update(draw.sample(ids, round(len(ids) * eval_share)))
    parts = [row for row in rows if row["id"] not in held_out_ids], [row for row in rows if row["id"] in held_out_ids]
    if not all(parts):
        raise ConfigError(f"task_args.eval_share={eval_share!r}: of {len(rows)} rows that leaves none for one part.")
    return parts
