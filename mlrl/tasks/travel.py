"""Two agents plan one trip: agent 0 travel and lodging, agent 1 meals and sights, for every day.

Each writes a JSON object with a value for each of its slots; the two are merged and compared with what is known of the
places (`mlrl.tasks.travel_plan.reward` has the reward, at most 1). One turn, no tokens are forced. One agent alone
plans all. Rows are those of TravelPlanner (Xie et al. 2024, MIT): the file of its 45 annotated rows, or the hub. This
is not its official benchmark.

    accelerate launch train/magrpo.py --task travel --task_args data_path=std_travelplanner.jsonl --agent_model MODEL
"""

from typing import Any

from mlrl import Task
from mlrl.tasks.task_data import Row, load_rows
from mlrl.tasks.team import checked_team
from mlrl.tasks.travel_plan.prompts import reference_text, role_prompt
from mlrl.tasks.travel_plan.reward import Score, score
from mlrl.tasks.travel_plan.rows import selected, stratified, travel_row
from mlrl.tasks.travel_plan.samples import trips
from mlrl.tasks.travel_plan.trip import trip_of

RECOMMENDED = {"num_turns": 1, "num_generations": 4, "max_new_tokens": 1024, "temperature": 0.7, "discount": 1.0}


def task(
    data_path: str | None = None,
    dataset: str | None = None,
    split: str = "validation",
    days: str = "3,5",
    levels: str = "easy,medium,hard",
    eval_share: float = 0.25,
    seed: int = 42,
) -> Task:
    """The task over rows with `query` and `reference_information`, or chat `messages` with both.

    Args:
        dataset: a hub id, osunlp/TravelPlanner; `split` is its configuration and split.
        days, levels: the rows to take. The level is the row's, or counts the wishes of the query: none is easy, one
            medium, more hard.
        eval_share: of each length and level, drawn by `seed`.

    Raises:
        ConfigError: rows that cannot be had or read, or none left.
    """
    rows = load_rows(data_path, dataset, split, trips, config=split)
    rows = selected([travel_row(row, number) for number, row in enumerate(rows)], days, levels)
    train, held_out = stratified(rows, eval_share, seed)

    def formatter(item: Row, agent_idx: int, num_agents: int) -> list[dict[str, str]]:
        checked_team(num_agents, "travel")
        return role_prompt(item["query"], trip_of(item["trip"]), item["reference"], agent_idx, num_agents)

    def reward(*completions: list[str], batch_items: list[Row]) -> list[float]:
        return [item_score(batch_items[0], answers).total for answers in zip(*completions, strict=True)]

    def log_scores(agent_completions_turns: list[list[list[str]]], batch_items: list[Row]) -> list[dict[str, Any]]:
        return [
            item_score(item, [turns[-1] for turns in agents]).metrics()
            for item, *agents in zip(batch_items, *agent_completions_turns, strict=True)
        ]

    return Task(
        train_dataset=train,
        eval_dataset=held_out,
        formatters=formatter,
        reward_func=reward,
        eval_logger=log_scores,
        recommended=dict(RECOMMENDED),
    )


def item_score(item: Row, answers: tuple[str, ...] | list[str]) -> Score:
    """The score of one joint response."""
    trip, reference = trip_of(item["trip"]), item["reference"]
    shown = [reference_text(trip, reference, agent, len(answers)) for agent in range(len(answers))]
    return score(answers, trip, reference, shown)
