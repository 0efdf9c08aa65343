"""A team builds a small house from boxes of blocks while spiders are about.

No game server: commands are read and played here (`mlrl.tasks.minecraft.house` has the reward, at most 1; training sees
it 1 lower). Up to 4 turns, every one in an empty world. Feedback: score_feedback, perfect_feedback, position_feedback,
position_modification, rect_modification, resource_schedule. One agent alone builds all of it.

    accelerate launch train/magrpo.py --task housebuild --task_args data_path=house_build_data.json --agent_model MODEL
"""

from mlrl import Task
from mlrl.tasks.feedback import checked_mode
from mlrl.tasks.minecraft.builder import build_task
from mlrl.tasks.minecraft.house import COMMANDS, SPIDERS, HouseScore, limits, read_target, score, spider_strength
from mlrl.tasks.minecraft.house_feedback import FEEDBACK, feedback_text
from mlrl.tasks.minecraft.samples import houses
from mlrl.tasks.task_data import Row, read_rows, split_rows


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

    def told(built: HouseScore, seed: int, agent: int, num_agents: int) -> str:
        return feedback_text(built, spider_strength(seed), mode, agent, num_agents)

    return build_task(
        "housebuild",
        train,
        held_out,
        first_prompt=lambda item, agent, num_agents: first_prompt(item, agent, num_agents, limited_resources),
        build=lambda item, answers: score(read_target(item), answers, limited_resources),
        reward_of=lambda built, seed: built.total(spider_strength(seed)),
        told=told,
        maximum=1.0,
        final=("iou", "spiders_killed"),
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
