"""A team builds a small house from boxes of blocks while spiders are about.

No game server: commands are read and played here (`mlrl.tasks.minecraft.house` has the reward, at most 1; training sees
it 1 lower). Up to 4 turns, every one in an empty world. Feedback: score_feedback, perfect_feedback, position_feedback,
position_modification, rect_modification, resource_schedule. One agent alone builds all of it.

    accelerate launch train/magrpo.py --task housebuild --task_args data_path=house_build_data.json --agent_model MODEL
"""

from functools import partial
from typing import Any

from mlrl import Task
from mlrl.rewards import RewardProcessors
from mlrl.tasks.feedback import checked_mode, next_prompt
from mlrl.tasks.minecraft.house import COMMANDS, SPIDERS, limits, read_target, score, spider_strength
from mlrl.tasks.minecraft.house_feedback import FEEDBACK, feedback_text
from mlrl.tasks.minecraft.samples import houses
from mlrl.tasks.pass_at_k import turn_means
from mlrl.tasks.task_data import Row, read_rows, split_rows
from mlrl.tasks.team import checked_team

RECOMMENDED = {
    "num_turns": 4,
    "num_generations": 2,
    "max_new_tokens": 512,
    "temperature": 0.6,
    "discount": 0.9,
    "early_termination_threshold": -0.1,  # a raw reward of 0.9
}


def task(
    data_path: str | None = None,
    feedback: str = "score_feedback",
    limited_resources: bool = False,
    train_size: int | None = None,
    eval_size: int = 2,
) -> Task:
    """The task over rows with `inventory` and `target_spec` of a JSON file, or houses of our own.

    Args:
        feedback: what later turns are told, a word of `mlrl.tasks.minecraft.house_feedback.FEEDBACK`.
        limited_resources: each agent has only so many blocks of each kind.
        train_size, eval_size: the first so many rows to train on (None: all that are left), the next to evaluate on.

    Raises:
        ConfigError: an unknown word, or rows that cannot be had or hold no house.
    """
    mode = checked_mode(feedback, FEEDBACK)
    rows = houses() if data_path is None else read_rows(data_path)
    for row in rows:
        read_target(row)
    train, held_out = split_rows(rows, train_size, eval_size, train_first=True)

    def formatter(item: Row, external_prompts: Any, agent_idx: int, num_agents: int) -> Any:
        checked_team(num_agents, "housebuild")
        return external_prompts or first_prompt(item, agent_idx, num_agents, limited_resources)

    def reward(*completions: list[str], batch_items: list[Row], episode_seed: int) -> list[float]:
        target, strength = read_target(batch_items[0]), spider_strength(episode_seed)
        return [score(target, answers, limited_resources).total(strength) for answers in zip(*completions, strict=True)]

    def transition(
        item: Row,
        agent_completions: list[str],
        num_agents: int,
        prompt_history_per_agent: list[list[Any]],
        episode_seed: int,
    ) -> list[Any]:
        result = score(read_target(item), agent_completions, limited_resources)
        strength = spider_strength(episode_seed)
        return [
            next_prompt(prompts, agent_completions[agent], feedback_text(result, strength, mode, agent, num_agents))
            for agent, prompts in enumerate(prompt_history_per_agent)
        ]

    def log_turns(agent_completions_turns: list[list[list[str]]], batch_items: list[Row]) -> list[dict[str, Any]]:
        rows = []
        for item, *agents in zip(batch_items, *agent_completions_turns, strict=True):
            target = read_target(item)
            results = [score(target, answers, limited_resources) for answers in zip(*agents, strict=True)]
            rows.append({"turns": [result.metrics() for result in results]})
        return rows

    return Task(
        train_dataset=train,
        eval_dataset=held_out,
        formatters=formatter,
        reward_func=reward,
        reward_processor=RewardProcessors.shift(-1.0),
        external_transition=transition,
        eval_logger=log_turns,
        eval_aggregator=partial(turn_means, final=("iou", "spiders_killed")),
        recommended=dict(RECOMMENDED),
    )


def first_prompt(item: Row, agent: int, num_agents: int, limited: bool) -> list[dict[str, str]]:
    """The first prompt of an agent."""
    target = read_target(item)
    x, y, z = (length - 1 for length in target.size)
    layers = [
        f"y={layer['y']}\n" + "\n".join(layer["rows"])
        for layer in sorted(item["target_spec"]["layers"], key=lambda layer: layer["y"])
    ]
    lines = [
        f"Build the house below in an empty world, x 0 to {x}, y 0 (ground) to {y}, z 0 to {z}. Layers from the ground "
        "up; in each, the first row is z=0 and the first letter x=0.",
        "Letters: " + ", ".join(f"{letter} {block}" for letter, block in target.legend.items()) + ".",
        *layers,
    ]
    if num_agents > 1:
        start = "Start from the ground" if agent == 0 else "Start from the roof"
        lines.append(f"A partner builds at the same time; the last block in a cell counts. {start} and share the work.")
    lines.append(f"{SPIDERS} spiders bite unless one of you writes /kill @e[type=spider].")
    if limited:
        stock = ", ".join(f"{count} {block}" for block, count in limits(target, num_agents).items())
        lines.append(f"You have {stock}. A box that needs more than you have left is not built.")
    lines.append(
        "Answer with lines of the form\n/fill x1 y1 z1 x2 y2 z2 block\n(both corners included) and nothing else, "
        f"{COMMANDS // num_agents} at most."
    )
    return [{"role": "user", "content": "\n".join(lines)}]
