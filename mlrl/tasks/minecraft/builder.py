"""What both building tasks have in common: prompts over several turns, each in an empty world, reward and metrics."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mlrl import Task
from mlrl.rewards import RewardProcessors
from mlrl.tasks.feedback import next_prompt
from mlrl.tasks.pass_at_k import turn_means
from mlrl.tasks.task_data import Row
from mlrl.tasks.team import checked_team

RECOMMENDED = {
    "num_turns": 4,
    "num_generations": 2,
    "max_new_tokens": 512,
    "temperature": 0.6,
    "discount": 0.9,
    "early_termination_threshold": -0.1,  # a raw reward of 0.1 below the maximum
}


def build_task(
    name: str,
    train: Sequence[Row],
    held_out: Sequence[Row],
    *,
    first_prompt: Callable[[Row, int, int], list[dict[str, str]]],
    build: Callable[[Row, Sequence[str]], Any],
    reward_of: Callable[[Any, int], float],
    told: Callable[[Any, int, int, int], str],
    maximum: float,
    final: Sequence[str],
) -> Task:
    """A Task whose reward training sees lower by its maximum.

    Args:
        first_prompt: (item, agent, num_agents) → the prompt of the first turn.
        build: (item, answers) → what was built, which has `metrics()`.
        reward_of: (what was built, episode seed) → the reward.
        told: (what was built, episode seed, agent, num_agents) → what an agent is told of it.
        final: metrics that are also given for the last turn of each episode.
    """

    def formatter(item: Row, external_prompts: Any, agent_idx: int, num_agents: int) -> Any:
        checked_team(num_agents, name)
        return external_prompts or first_prompt(item, agent_idx, num_agents)

    def reward(*completions: list[str], batch_items: list[Row], episode_seed: int) -> list[float]:
        return [reward_of(build(batch_items[0], answers), episode_seed) for answers in zip(*completions, strict=True)]

    def transition(
        item: Row,
        agent_completions: list[str],
        num_agents: int,
        prompt_history_per_agent: list[list[Any]],
        episode_seed: int,
    ) -> list[Any]:
        built = build(item, agent_completions)
        return [
            next_prompt(prompts, agent_completions[agent], told(built, episode_seed, agent, num_agents))
            for agent, prompts in enumerate(prompt_history_per_agent)
        ]

    def log_turns(agent_completions_turns: list[list[list[str]]], batch_items: list[Row]) -> list[dict[str, Any]]:
        return [
            {"turns": [build(item, answers).metrics() for answers in zip(*agents, strict=True)]}
            for item, *agents in zip(batch_items, *agent_completions_turns, strict=True)
        ]

    return Task(
        train_dataset=list(train),
        eval_dataset=list(held_out),
        formatters=formatter,
        reward_func=reward,
        reward_processor=RewardProcessors.shift(-maximum),
        external_transition=transition,
        eval_logger=log_turns,
        eval_aggregator=partial(turn_means, final=final),
        recommended=dict(RECOMMENDED),
    )
