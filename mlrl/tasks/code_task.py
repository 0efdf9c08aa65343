"""What the tasks have in common whose answers are code under test: reward, later prompts, metrics."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mlrl import Task
from mlrl.rewards import RewardProcessors
from mlrl.tasks.feedback import next_prompt
from mlrl.tasks.pass_at_k import mean_pass_at_k, turn_means
from mlrl.tasks.task_data import Row


class CodeScore(Protocol):
    """What a joint response earned: the reward, whether all tests passed, and everything as numbers by name."""

    @property
    def total(self) -> float: ...

    @property
    def solved(self) -> bool: ...

    def metrics(self) -> dict[str, float]: ...


def code_task(
    train: Sequence[Row],
    held_out: Sequence[Row],
    *,
    formatter: Callable,
    scores: Callable[[Row, Sequence[Sequence[str]]], Sequence[CodeScore]],
    told: Callable[[Any, Row, Sequence[str]], Sequence[str]],
    maximum: float,
    recommended: dict[str, Any],
    include_original_prompt: bool,
    include_previous_response: bool,
    kept: Callable[[Row, Sequence[str]], Sequence[str]] = lambda item, answers: answers,
) -> Task:
    """A Task over rows with a `task_id`, whose reward training sees lower by its maximum.

    Args:
        scores: (item, joints) → a score a joint; a joint is one text an agent.
        told: (score, item, answers) → what each agent is told before it writes again.
        include_original_prompt, include_previous_response: what a later prompt repeats; with both the chat goes on.
        kept: (item, answers) → each answer as its agent is shown it again.
    """

    def reward(*completions: list[str], batch_items: list[Row]) -> list[float]:
        return [score.total for score in scores(batch_items[0], list(zip(*completions, strict=True)))]

    def transition(item: Row, agent_completions: list[str], prompt_history_per_agent: list[list[Any]]) -> list[Any]:
        texts = told(scores(item, [agent_completions])[0], item, agent_completions)
        return [
            next_prompt(history, answer, text, include_original_prompt, include_previous_response)
            for history, answer, text in zip(
                prompt_history_per_agent, kept(item, agent_completions), texts, strict=True
            )
        ]

    def log(agent_completions_turns: list[list[list[str]]], batch_items: list[Row]) -> list[dict[str, Any]]:
        rows = []
        for item, *turns_by_agent in zip(batch_items, *agent_completions_turns, strict=True):
            judged = scores(item, list(zip(*turns_by_agent, strict=True)))
            turns = [score.metrics() for score in judged]
            rows.append({"task_id": item["task_id"], "solved": judged[-1].solved, "turns": turns})
        return rows

    def aggregate(rows: list[dict[str, Any]], num_turns: int) -> dict[str, float]:
        return turn_means(rows, num_turns, ("pass_rate", "solved")) | mean_pass_at_k(
            (row["task_id"], row["solved"]) for row in rows
        )

    return Task(
        train_dataset=list(train),
        eval_dataset=list(held_out),
        formatters=formatter,
        reward_func=reward,
        reward_processor=RewardProcessors.shift(value=-maximum),
        external_transition=transition,
        eval_logger=log,
        eval_aggregator=aggregate,
        recommended=dict(recommended),
    )
