"""What a team wrote, as a table for people: a row a joint response."""

from collections.abc import Mapping, Sequence
from typing import Any

MOST_ROWS = 256


def completions_table(records: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Columns and at most `MOST_ROWS` rows of nodes, which are given as in a completions file.

    Prompts that are chats become one text, each message under its role.
    """
    agents = range(len(records[0]["responses"]))
    columns = ["step", "item", "path", "reward", "return"]
    for name in ("prompt", "response", "advantage"):
        columns += [f"agent_{agent}/{name}" for agent in agents]
    rows = [_row(record, joint, agents) for record in records for joint in range(len(record["joints"]))]
    return columns, rows[:MOST_ROWS]


def _row(record: Mapping[str, Any], joint: int, agents: range) -> list[Any]:
    own = record["joints"][joint]  # a response each
    path = ".".join(map(str, [*record["path"], joint]))
    place = [record["step"], record["item"], path]
    numbers = [_mean(record["rewards"][joint]), _mean(record["returns"][joint])]
    prompts = [prompt_text(record["prompts"][agent]) for agent in agents]
    responses = [record["responses"][agent][own[agent]] for agent in agents]
    known = record["advantages"]
    advantages = [None if known is None else known[agent][own[agent]] for agent in agents]
    return [*place, *numbers, *prompts, *responses, *advantages]


def prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """A prompt as one text."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in prompt)


def _mean(value: Any) -> float:
    """A joint's reward or return; those of several agents by their mean."""
    return float(sum(value) / len(value)) if isinstance(value, list) else float(value)
