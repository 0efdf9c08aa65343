"""StrBuild: the world of two agents' single blocks, its score, and what a later turn is told.

    reward = 2·covered/target − 1.5·extra/background − same/adjacent − 0.25·unseen

covered counts target cells that hold a block, extra other cells of the box that do; background is the number of cells
that are no target. adjacent counts pairs of neighbouring blocks (left–right and up–down), same those of one kind;
without a pair the term is 0. unseen counts agents of whose palette some block is nowhere in the world. At most 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mlrl.tasks.minecraft.commands import Cell, setblocks
from mlrl.tasks.minecraft.font import SIZE, target_cells, width

AIR = "air"
PALETTES = (("oak_planks", "stone"), ("white_concrete", "obsidian"))
"""The blocks of agent 0 and of agent 1, beside air"""
COMMANDS = 300
"""Of the team; each agent has an equal share"""


@dataclass(frozen=True)
class StringScore:
    """What was built for a string."""

    blocks: dict[Cell, str]
    """Without air"""
    target: frozenset[Cell]
    background: int
    adjacent: int
    same: int
    unseen: int

    @property
    def covered(self) -> int:
        return len(self.target & self.blocks.keys())

    @property
    def extra(self) -> int:
        return len(self.blocks.keys() - self.target)

    @property
    def levels(self) -> tuple[float, float, float, float]:
        """The four terms of the reward."""
        return (
            2.0 * self.covered / len(self.target),
            -1.5 * self.extra / self.background if self.background else 0.0,
            -self.same / self.adjacent if self.adjacent else 0.0,
            -0.25 * self.unseen,
        )

    @property
    def total(self) -> float:
        """The reward."""
        return sum(self.levels)

    def metrics(self) -> dict[str, float]:
        """All numbers by name; iou is over target cells and cells with a block."""
        return {
            "iou": self.covered / (len(self.target) + self.extra),
            "covered": self.covered / len(self.target),
            "extra": float(self.extra),
            **{f"level_{i}": level for i, level in enumerate(self.levels, 1)},
            "level_total": self.total,
        }


def palettes(num_agents: int) -> list[tuple[str, ...]]:
    """The blocks of each agent; one agent alone has all of them."""
    return list(PALETTES) if num_agents > 1 else [PALETTES[0] + PALETTES[1]]


def score(text: str, answers: Sequence[str]) -> StringScore:
    """The world after the agents' commands, those of later agents on top, against the cells of `text`."""
    size = (width(text), SIZE, 1)
    world: dict[Cell, str] = {}
    for answer, own in zip(answers, palettes(len(answers)), strict=True):
        for box in setblocks(answer, size, frozenset((*own, AIR)), COMMANDS // len(answers)):
            world[box.low] = box.block
    blocks = {cell: block for cell, block in world.items() if block != AIR}
    target = frozenset(target_cells(text))
    pairs = [
        (block, blocks[neighbour])
        for (x, y, z), block in blocks.items()
        for neighbour in ((x + 1, y, z), (x, y + 1, z))
        if neighbour in blocks
    ]
    seen = set(blocks.values())
    return StringScore(
        blocks=blocks,
        target=target,
        background=size[0] * size[1] - len(target),
        adjacent=len(pairs),
        same=sum(first == second for first, second in pairs),
        unseen=sum(not seen.issuperset(own) for own in palettes(len(answers))),
    )


def wrong_cells(result: StringScore, agent: int, num_agents: int) -> tuple[list[Cell], list[Cell]]:
    """The cells for which an agent is responsible, (x + y) mod N: targets without a block, blocks that are too much."""
    own = [
        [cell for cell in sorted(cells) if (cell[0] + cell[1]) % num_agents == agent]
        for cells in (result.target - result.blocks.keys(), result.blocks.keys() - result.target)
    ]
    return own[0], own[1]


def feedback_text(result: StringScore, mode: str, agent: int, num_agents: int) -> str:
    """What an agent is told about the world that the team built.

    Args:
        mode: position_feedback (all target cells), perfect_feedback (the wrong cells that are the agent's), or
            score_feedback (numbers only).
    """
    text = (
        f"Your team covered {result.covered} of {len(result.target)} target cells, with {result.extra} blocks too many "
        f"and {result.same} of {result.adjacent} neighbouring pairs of one kind. Score {result.total:.2f} of 2."
    )
    if result.unseen:
        text += " Not every block of each palette was used."
    if mode == "position_feedback":
        text += (
            f" The target cells are {listed(sorted(result.target))}. Build about half of them, no two "
            "of yours neighbours; your partner builds the others."
        )
    elif mode == "perfect_feedback":
        missing, extra = wrong_cells(result, agent, num_agents)
        text += f" Yours to add: {listed(missing)}. Yours to leave out: {listed(extra)}."
    return f"{text} The world is empty again: write all of your commands anew."


def listed(cells: Sequence[Cell]) -> str:
    """Cells as text."""
    return " ".join(f"({x},{y},{z})" for x, y, z in cells) or "none"
