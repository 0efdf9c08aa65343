"""What a later turn of HouseBuild is told."""

from collections.abc import Iterable, Mapping

from mlrl.tasks.minecraft.commands import Box, Cell
from mlrl.tasks.minecraft.house import AIR, HouseScore, Target, limits

FEEDBACK = (
    "score_feedback",
    "perfect_feedback",
    "position_feedback",
    "position_modification",
    "rect_modification",
    "resource_schedule",
)
SHARED_LAYER = 2
"""rect_modification: agent 0 mends the layers up to this one, agent 1 this one and those above"""
FIRST_CELLS = 20
"""position_modification names so many wrong cells"""


def feedback_text(result: HouseScore, strength: int, mode: str, agent: int, num_agents: int) -> str:
    """What an agent is told about the world that the team built, in a mode of `FEEDBACK`."""
    bitten = (
        "killed" if result.killed else f"alive and cost {result.penalty(strength):.2f}; /kill @e[type=spider] ends them"
    )
    text = f"Score {result.total(strength):.2f} of 1 (overlap {result.iou:.2f}). The spiders are {bitten}."
    detail = {
        "score_feedback": lambda: "",
        "perfect_feedback": lambda: _cells_text(result, _owned(result.wrong, agent, num_agents)),
        "position_feedback": lambda: f" Wrong cells: {_listed(result.wrong)}.",
        "position_modification": lambda: _cells_text(result, result.wrong[:FIRST_CELLS]),
        "rect_modification": lambda: _boxes_text("Yours to mend", _mending(result, agent, num_agents)),
        "resource_schedule": lambda: _boxes_text("Your share", schedule(result.target, num_agents)[agent]),
    }[mode]()
    return f"{text}{detail} The world is empty again: write all of your commands anew."


def _owned(cells: Iterable[Cell], agent: int, num_agents: int) -> list[Cell]:
    return [cell for cell in cells if sum(cell) % num_agents == agent]


def _listed(cells: Iterable[Cell]) -> str:
    return " ".join(f"({x},{y},{z})" for x, y, z in cells) or "none"


def _cells_text(result: HouseScore, cells: Iterable[Cell]) -> str:
    parts = [f"({x},{y},{z}) {result.target.blocks.get((x, y, z), AIR)}" for x, y, z in cells]
    return f" Should be: {', '.join(parts) or 'nothing else'}."


def _boxes_text(title: str, boxes: Iterable[Box]) -> str:
    lines = [f"/fill {' '.join(map(str, (*box.low, *box.high)))} {box.block}" for box in boxes]
    return f" {title}:\n" + "\n".join(lines or ["nothing"]) + "\n"


def _mending(result: HouseScore, agent: int, num_agents: int) -> list[Box]:
    """The wrong cells of the agent's layers as rectangles of what they should be."""
    wrong = {cell: result.target.blocks.get(cell, AIR) for cell in result.wrong}
    if num_agents > 1:
        lower = agent == 0
        wrong = {
            cell: block
            for cell, block in wrong.items()
            if (cell[1] <= SHARED_LAYER if lower else cell[1] >= SHARED_LAYER)
        }
    return rectangles(wrong)


def rectangles(blocks: Mapping[Cell, str]) -> list[Box]:
    """Cuts cells into flat rectangles of one block, from the ground up, the largest that is left first."""
    left = dict(blocks)
    boxes = []
    for y in sorted({cell[1] for cell in left}):
        while layer := [cell for cell in left if cell[1] == y]:
            box = max((_largest_at(left, cell) for cell in sorted(layer)), key=_area)
            boxes.append(box)
            for cell in box.cells():
                del left[cell]
    return boxes


def _largest_at(blocks: Mapping[Cell, str], corner: Cell) -> Box:
    """The largest rectangle of one block whose lowest x and z are at `corner`."""
    x0, y, z0 = corner
    block, widest, best = blocks[corner], None, None
    z = z0
    while blocks.get((x0, y, z)) == block:
        x = x0
        while blocks.get((x + 1, y, z)) == block and (widest is None or x < widest):
            x += 1
        widest = x
        box = Box(corner, (widest, y, z), block)
        if best is None or _area(box) > _area(best):
            best = box
        z += 1
    return best


def _area(box: Box) -> int:
    return (box.high[0] - box.low[0] + 1) * (box.high[2] - box.low[2] + 1)


def schedule(target: Target, num_agents: int) -> list[list[Box]]:
    """The house as rectangles, the largest first, each to the agent that has most of its block left.

    A rectangle that is more than that agent has left is halved. The limits add up to more than the house needs.
    """
    left = [limits(target, num_agents) for _ in range(num_agents)]
    plans: list[list[Box]] = [[] for _ in range(num_agents)]
    waiting = sorted(rectangles(target.blocks), key=_area)
    while waiting:
        box = waiting.pop()
        agent = max(range(num_agents), key=lambda a: (left[a][box.block], -a))
        if left[agent][box.block] >= _area(box):
            left[agent][box.block] -= _area(box)
            plans[agent].append(box)
        else:
            waiting += _halves(box)
    return plans


def _halves(box: Box) -> list[Box]:
    """The two halves of a rectangle across its longer side."""
    (x0, y, z0), (x1, _, z1) = box.low, box.high
    if x1 - x0 >= z1 - z0:
        middle = (x0 + x1) // 2
        return [Box(box.low, (middle, y, z1), box.block), Box((middle + 1, y, z0), box.high, box.block)]
    middle = (z0 + z1) // 2
    return [Box(box.low, (x1, y, middle), box.block), Box((x0, y, middle + 1), box.high, box.block)]
