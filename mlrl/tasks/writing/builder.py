"""A writing task from two roles, a rule and rows: two agents, one turn, no feedback."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlrl import Task
from mlrl.tasks.answer_text import two_sections
from mlrl.tasks.task_data import Row
from mlrl.tasks.team import checked_team
from mlrl.tasks.writing.reward import Rule, Score, score

SPLIT = "[SPLIT]"
"""What an agent that writes both texts puts between them."""


@dataclass(frozen=True)
class Roles:
    """The prompts of a writing task; each has a place {source} for the row's text."""

    name: str
    """Of the task, for messages"""
    first: str
    second: str
    both: str
    """For one agent alone"""


def writing_task(
    train: Sequence[Row], held_out: Sequence[Row], *, field: str, roles: Roles, rule: Rule, recommended: dict[str, Any]
) -> Task:
    """The Task over rows whose text stands in `field`. It has no transition, so it has one turn."""

    def formatter(item: Row, agent_idx: int, num_agents: int) -> list[dict[str, str]]:
        checked_team(num_agents, roles.name)
        role = roles.both if num_agents == 1 else (roles.first, roles.second)[agent_idx]
        return [{"role": "user", "content": role.replace("{source}", str(item[field]).strip())}]

    def reward(*completions: list[str]) -> list[float]:
        return [score(*both_texts(answers), rule).total for answers in zip(*completions, strict=True)]

    def log_scores(agent_completions_turns: list[list[list[str]]]) -> list[dict[str, float]]:
        return [
            item_score([turns[-1] for turns in agents], rule).metrics()
            for agents in zip(*agent_completions_turns, strict=True)
        ]

    return Task(
        train_dataset=list(train),
        eval_dataset=list(held_out),
        formatters=formatter,
        reward_func=reward,
        eval_logger=log_scores,
        recommended=dict(recommended),
    )


def item_score(answers: Sequence[str], rule: Rule) -> Score:
    """The score of one joint response."""
    return score(*both_texts(answers), rule)


def both_texts(answers: Sequence[str]) -> tuple[str, str]:
    """The two texts of a joint response: two answers, or the halves of one."""
    return (answers[0], answers[-1]) if len(answers) > 1 else two_sections(answers[0], SPLIT)
