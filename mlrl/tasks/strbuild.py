"""A team writes a string with blocks: each agent has its own two kinds, and neighbouring blocks should differ.

No game server: commands are read and played here (`mlrl.tasks.minecraft.strings` has the reward, at most 2; training
sees it 2 lower). Up to 4 turns, every one in an empty world. Feedback: position_feedback, perfect_feedback,
score_feedback. One agent alone has all four kinds.

    accelerate launch train/magrpo.py --task strbuild --task_args data_path=str_build_data.csv --agent_model MODEL
"""

from functools import partial
from typing import Any

from mlrl import Task
from mlrl.rewards import RewardProcessors
from mlrl.tasks.feedback import checked_mode, next_prompt
from mlrl.tasks.minecraft.font import SIZE, checked_letters, target_cells, width
from mlrl.tasks.minecraft.rows import read_table
from mlrl.tasks.minecraft.strings import AIR, COMMANDS, feedback_text, palettes, score
from mlrl.tasks.pass_at_k import turn_means
from mlrl.tasks.task_data import Row, split_rows
from mlrl.tasks.team import checked_team

FEEDBACK = ("position_feedback", "perfect_feedback", "score_feedback")

STRINGS = {1: ("A", "T", "H", "O"), 2: ("GO", "TO"), 3: ("LLM", "TEAM", "MARL", "AGENT")}
"""Our own strings by difficulty"""

RECOMMENDED = {
    "num_turns": 4,
    "num_generations": 2,
    "max_new_tokens": 512,
    "temperature": 0.6,
    "discount": 0.9,
    "early_termination_threshold": -0.1,  # a raw reward of 1.9
}


def task(
    data_path: str | None = None,
    feedback: str = "position_feedback",
    provide_graph: bool = True,
    train_size: int | None = None,
    eval_size: int = 2,
) -> Task:
    """The task over rows with `string` and `difficulty`, from a CSV or JSON file, or strings of our own.

    Args:
        feedback: what later turns are told, a word of `FEEDBACK`.
        provide_graph: the first prompt shows the target as a drawing.
        train_size, eval_size: the first so many rows to train on (None: all that are left), the next to evaluate on.

    Raises:
        ConfigError: an unknown word, a letter without shape, or rows that cannot be had.
    """
    mode = checked_mode(feedback, FEEDBACK)
    own = [{"string": text, "difficulty": level} for level, texts in STRINGS.items() for text in texts]
    rows = own if data_path is None else read_table(data_path)
    for row in rows:
        checked_letters(row.get("string"), f"task_args.data_path={data_path!r}: string")
    train, held_out = split_rows(rows, train_size, eval_size, train_first=True)

    def formatter(item: Row, external_prompts: Any, agent_idx: int, num_agents: int) -> Any:
        checked_team(num_agents, "strbuild")
        return external_prompts or first_prompt(item["string"], agent_idx, num_agents, provide_graph)

    def reward(*completions: list[str], batch_items: list[Row]) -> list[float]:
        return [score(batch_items[0]["string"], answers).total for answers in zip(*completions, strict=True)]

    def transition(
        item: Row, agent_completions: list[str], num_agents: int, prompt_history_per_agent: list[list[Any]]
    ) -> list[Any]:
        result = score(item["string"], agent_completions)
        return [
            next_prompt(prompts, agent_completions[agent], feedback_text(result, mode, agent, num_agents))
            for agent, prompts in enumerate(prompt_history_per_agent)
        ]

    def log_turns(agent_completions_turns: list[list[list[str]]], batch_items: list[Row]) -> list[dict[str, Any]]:
        return [
            {"turns": [score(item["string"], answers).metrics() for answers in zip(*agents, strict=True)]}
            for item, *agents in zip(batch_items, *agent_completions_turns, strict=True)
        ]

    return Task(
        train_dataset=train,
        eval_dataset=held_out,
        formatters=formatter,
        reward_func=reward,
        reward_processor=RewardProcessors.shift(-2.0),
        external_transition=transition,
        eval_logger=log_turns,
        eval_aggregator=partial(turn_means, final=("iou", "level_total")),
        recommended=dict(RECOMMENDED),
    )


def first_prompt(text: str, agent: int, num_agents: int, provide_graph: bool) -> list[dict[str, str]]:
    """The first prompt of an agent."""
    own = palettes(num_agents)[agent]
    if num_agents > 1:
        partner = f"A partner builds at the same time with {' and '.join(palettes(num_agents)[1 - agent])}. "
    else:
        partner = ""
    lines = [
        f"Write {text} with blocks in the plane z=0, x from 0 to {width(text) - 1}, y from 0 (bottom) to {SIZE - 1}.",
        f"Letters are {SIZE} cells wide and high, 2 cells apart. {partner}Fill every target cell, nothing else, and "
        "let neighbouring cells hold different kinds of blocks.",
        f"Your blocks: {', '.join((*own, AIR))}. Use each of them except {AIR} at least once.",
    ]
    if provide_graph:
        lines += ["Target, top row first:", drawing(text)]
    lines.append(
        f"Answer with lines of the form\n/setblock x y z block\nand nothing else, {COMMANDS // num_agents} at most."
    )
    return [{"role": "user", "content": "\n".join(lines)}]


def drawing(text: str) -> str:
    """The target as rows of # and ., top row first."""
    target = target_cells(text)
    return "\n".join(
        "".join("#" if (x, y, 0) in target else "." for x in range(width(text))) for y in reversed(range(SIZE))
    )
