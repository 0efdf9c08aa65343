"""HouseBuild: the world of two agents' filled boxes, its score, and the spiders.

    reward = IoU − 0.1·min(1, damage/hp) unless some agent kills the spiders

IoU is the number of cells with the right block over the number of cells with a block in the target or in the world. An
empty world scores 0, a perfect one 1. Each of the spiders bites once, with a strength drawn anew for every episode.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlrl import ConfigError
from mlrl.tasks.minecraft.commands import Cell, fills

AIR = "air"
COMMANDS = 600
"""Of the team; each agent has an equal share"""
SPIDERS, HIT_POINTS, STRENGTHS = 3, 5, (1, 2, 3)


@dataclass(frozen=True)
class Target:
    """A house: its world's size, blocks by cell (without air) and how each kind is drawn."""

    size: Cell
    blocks: dict[Cell, str]
    legend: dict[str, str]

    @property
    def palette(self) -> frozenset[str]:
        """All kinds of blocks, air included."""
        return frozenset((*self.legend.values(), AIR))


def read_target(row: Mapping[str, Any]) -> Target:
    """The house of a row with `inventory` and `target_spec`.

    Raises:
        ConfigError: layers that do not fit the size, or a letter that is not in the inventory.
    """
    name = f"task_args.data_path: row {row.get('task_id', '')!r}"
    try:
        legend, spec = dict(row["inventory"]), row["target_spec"]
        size, layers = tuple(spec["size"]), sorted(spec["layers"], key=lambda layer: layer["y"])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{name}: no house. Give inventory (letter to block) and target_spec (size, layers)."
        ) from None
    rows = [layer["rows"] for layer in layers]
    if len(rows) != size[1] or any(len(layer) != size[2] or any(len(r) != size[0] for r in layer) for layer in rows):
        raise ConfigError(f"{name}: layers that are not {size[1]} of {size[2]} rows of {size[0]} letters.")
    unknown = {letter for layer in rows for line in layer for letter in line} - set(legend)
    if unknown:
        raise ConfigError(f"{name}: letters {', '.join(sorted(unknown))} that the inventory does not name.")
    blocks = {
        (x, y, z): legend[letter]
        for y, layer in enumerate(rows)
        for z, line in enumerate(layer)
        for x, letter in enumerate(line)
        if legend[letter] != AIR
    }
    return Target(size, blocks, legend)


def limits(target: Target, num_agents: int) -> dict[str, int]:
    """Blocks of each kind that one agent has where resources are limited: ⌈c/N⌉ + ⌊c/2N⌋ of the c that are needed."""
    return {
        block: -(-count // num_agents) + count // (2 * num_agents)
        for block, count in Counter(target.blocks.values()).items()
    }


@dataclass(frozen=True)
class HouseScore:
    """What was built for a house."""

    target: Target
    blocks: dict[Cell, str]
    """Without air"""
    killed: bool
    """Some agent killed the spiders"""

    @property
    def wrong(self) -> list[Cell]:
        """Cells whose block is not that of the target, from the ground up."""
        cells = self.target.blocks.keys() | self.blocks.keys()
        return sorted(
            (cell for cell in cells if self.target.blocks.get(cell) != self.blocks.get(cell)),
            key=lambda cell: (cell[1], cell[2], cell[0]),
        )

    @property
    def iou(self) -> float:
        """Right cells over cells with a block here or there; 1 where nothing was to be built and nothing was."""
        union = len(self.target.blocks.keys() | self.blocks.keys())
        return 1.0 - len(self.wrong) / union if union else 1.0

    def penalty(self, strength: int) -> float:
        """What the bites cost."""
        return 0.0 if self.killed else 0.1 * min(1.0, SPIDERS * strength / HIT_POINTS)

    def total(self, strength: int) -> float:
        """The reward."""
        return self.iou - self.penalty(strength)

    def metrics(self) -> dict[str, float]:
        """What does not depend on the spiders' strength, by name."""
        x, y, z = self.target.size
        return {
            "iou": self.iou,
            "voxel_accuracy": 1.0 - len(self.wrong) / (x * y * z),
            "blocks": float(len(self.blocks)),
            "spiders_killed": float(self.killed),
        }


def spider_strength(episode_seed: int) -> int:
    """The strength of this episode's spiders."""
    return random.Random(episode_seed).choice(STRENGTHS)


def score(target: Target, answers: Sequence[str], limited: bool = False) -> HouseScore:
    """The world after the agents' commands, those of later agents on top.

    Args:
        limited: each agent has the blocks of `limits`; a box that needs more than are left is not built.
    """
    world: dict[Cell, str] = {}
    killed = False
    for answer in answers:
        boxes, kills = fills(answer, target.size, target.palette, COMMANDS // len(answers))
        killed = killed or kills
        left = limits(target, len(answers))
        for box in boxes:
            cells = box.cells()
            if limited and box.block != AIR:
                if len(cells) > left.get(box.block, 0):
                    continue
                left[box.block] -= len(cells)
            world.update(dict.fromkeys(cells, box.block))
    return HouseScore(target, {cell: block for cell, block in world.items() if block != AIR}, killed)
