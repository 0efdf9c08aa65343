"""What an agent writes: a JSON object with one assignment for each slot that it owns; and how two are merged."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlrl.tasks.answer_text import json_object

Slot = tuple[int, str]
"""Day (from 1) and field"""

ROLES: tuple[tuple[str, ...], ...] = (
    ("current_city", "transportation", "accommodation"),
    ("breakfast", "attraction", "lunch", "dinner"),
)
"""The fields of agent 0 (logistics) and agent 1 (experience)"""
EMPTY = "-"
_FENCE = re.compile(r"\s*(?:```(?:json)?\s*```)?\s*")


def owned_slots(agent: int, num_agents: int, days: int) -> list[Slot]:
    """The slots of an agent, day by day; one agent alone owns all."""
    own = ROLES[agent] if num_agents > 1 else ROLES[0] + ROLES[1]
    return [(day, name) for day in range(1, days + 1) for name in own]


@dataclass(frozen=True)
class Action:
    """One agent's answer."""

    values: dict[Slot, str] = field(default_factory=dict)
    """Of the owned slots, the first assignment of each"""
    valid: bool = False
    """Nothing but a JSON object with the right agent_id and one assignment for each owned slot"""
    rejected: float = 1.0
    """Share of the assignments that are unreadable, of no slot, or the second of a slot; 1 where there are none"""
    foreign: float = 0.0
    """Share of the assignments to slots of the partner"""
    outside: str = ""
    """The answer's text around the JSON object"""
    too_long: bool = False
    """More than 240 characters and 180 for each owned slot"""


def read_action(answer: str, agent: int, num_agents: int, days: int) -> Action:
    """Reads an answer; what can be read of a faulty one is kept."""
    own = owned_slots(agent, num_agents, days)
    too_long = len(answer) > 240 + 180 * len(own)
    body, outside = json_object(answer)
    entries = body.get("assignments") if body is not None else None
    if not isinstance(entries, list) or not entries:
        return Action(outside=outside, too_long=too_long)
    every = {(day, name) for day in range(1, days + 1) for role in ROLES for name in role}
    values: dict[Slot, str] = {}
    rejected = foreign = 0
    for entry in entries:
        slot, value = _assignment(entry)
        if slot not in every or slot in values or value is None:
            rejected += 1
        elif slot not in own:
            foreign += 1
        else:
            values[slot] = value
    return Action(
        values=values,
        valid=bool(_FENCE.fullmatch(outside))
        and _is_index(body.get("agent_id"), agent)
        and len(values) == len(own) == len(entries),
        rejected=rejected / len(entries),
        foreign=foreign / len(entries),
        outside=outside,
        too_long=too_long,
    )


def _assignment(entry: object) -> tuple[Slot | None, str | None]:
    if not isinstance(entry, Mapping):
        return None, None
    day, name, value = entry.get("day"), entry.get("field"), entry.get("value")
    slot = (day, name) if type(day) is int and isinstance(name, str) else None
    return slot, value.strip() if isinstance(value, str) and value.strip() else None


def _is_index(value: object, agent: int) -> bool:
    return type(value) is int and value == agent


def merged(actions: Sequence[Action]) -> dict[Slot, str]:
    """The team's plan: each agent's values in its own slots."""
    return {slot: value for action in actions for slot, value in action.values.items()}


def written(values: Mapping[Slot, str], agent: int, num_agents: int, days: int) -> str:
    """The answer of an agent that assigns `values`, "-" elsewhere; for examples and tests."""
    assignments = [
        {"day": day, "field": name, "value": values.get((day, name)) or EMPTY}
        for day, name in owned_slots(agent, num_agents, days)
    ]
    return json.dumps({"agent_id": agent, "assignments": assignments}, ensure_ascii=False)
