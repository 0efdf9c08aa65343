"""A team writes a string with blocks: each agent has its own two kinds, and neighbouring blocks should differ.

No game server: commands are read and played here (`mlrl.tasks.minecraft.strings` has the reward, at most 2; training
sees it 2 lower). Up to 4 turns, every one in an empty world. Feedback: position_feedback, perfect_feedback,
score_feedback. One agent alone has all four kinds.

    accelerate launch train/magrpo.py --task strbuild --task_args data_path=str_build_data.csv --agent_model MODEL
"""

from mlrl import Task
from mlrl.tasks.feedback import checked_mode
from mlrl.tasks.minecraft.builder import build_task
from mlrl.tasks.minecraft.font import SIZE, checked_letters, target_cells, width
from mlrl.tasks.minecraft.rows import read_table
from mlrl.tasks.minecraft.strings import AIR, COMMANDS, feedback_text, palettes, score
from mlrl.tasks.task_data import split_rows

FEEDBACK = ("position_feedback", "perfect_feedback", "score_feedback")

STRINGS = {1: ("A", "T", "H", "O"), 2: ("GO", "TO"), 3: ("LLM", "TEAM", "MARL", "AGENT")}
"""Our own strings by difficulty"""


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

    return build_task(
        "strbuild",
        train,
        held_out,
        first_prompt=lambda item, agent, num_agents: first_prompt(item["string"], agent, num_agents, provide_graph),
        build=lambda item, answers: score(item["string"], answers),
        reward_of=lambda built, seed: built.total,
        told=lambda built, seed, agent, num_agents: feedback_text(built, mode, agent, num_agents),
        maximum=2.0,
        final=("iou", "level_total"),
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
