"""A writing task from two roles, a rule and rows: two agents, one turn, no feedback."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlrl import Task
from mlrl.tasks.answer_text import two_sections
from mlrl.tasks.splits import train_and_held_out
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


RECOMMENDED = {"num_turns": 1, "num_generations": 4, "max_new_tokens": 256, "temperature": 0.7}
HUB_ROWS = 1100  # of each split, as published


def writing_task_function(
    field: str, sample: Sequence[str], roles: Roles, rule: Rule, held_out_split: str
) -> Callable[..., Task]:
    """The `task` function over rows whose text stands in `field`; `sample` are the texts of our own."""

    def task(
        data_path: str | None = None,
        dataset: str | None = None,
        train_split: str = "train",
        eval_split: str = held_out_split,
        train_size: int | None = HUB_ROWS,
        eval_size: int | None = None,
    ) -> Task:
        """The task over the rows of a file, of a hub data set, or texts of our own.

        `eval_size` is 1100 of a hub data set and the last tenth of a file where it is not given.
        """
        if dataset is not None and eval_size is None:
            eval_size = HUB_ROWS
        train, held_out = train_and_held_out(
            data_path,
            dataset,
            splits=(train_split, eval_split),
            sizes=(train_size, eval_size),
            sample=[{field: text} for text in sample],
            fields=(field,),
        )
        return writing_task(train, held_out, field=field, roles=roles, rule=rule)

    return task


def writing_task(train: Sequence[Row], held_out: Sequence[Row], *, field: str, roles: Roles, rule: Rule) -> Task:
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
        recommended=dict(RECOMMENDED),
    )


def item_score(answers: Sequence[str], rule: Rule) -> Score:
    """The score of one joint response."""
    return score(*both_texts(answers), rule)


def both_texts(answers: Sequence[str]) -> tuple[str, str]:
    """The two texts of a joint response: two answers, or the halves of one."""
    return (answers[0], answers[-1]) if len(answers) > 1 else two_sections(answers[0], SPLIT)
