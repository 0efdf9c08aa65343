"""Reading build commands out of an answer: single blocks, filled boxes, and kill. Everything else is passed over."""

import re
from dataclasses import dataclass

from mlrl.tasks.answer_text import without_fences

Cell = tuple[int, int, int]

_BLOCK = r"(?:minecraft:)?([a-z_]+)"
_NUMBER = r"(-?\d{1,6})"
_SETBLOCK = re.compile(r"/?setblock\s+" + rf"{_NUMBER}\s+" * 3 + _BLOCK)
_FILL = re.compile(r"/?fill\s+" + rf"{_NUMBER}\s+" * 6 + _BLOCK)
_KILL = re.compile(r"/?kill\s+@e(?:\[\s*type\s*=\s*(?:minecraft:)?(?:cave_)?spider\b[^\]]*\])?")


@dataclass(frozen=True)
class Box:
    """A block for all cells from `low` to `high`, both included."""

    low: Cell
    high: Cell
    block: str

    def cells(self) -> list[Cell]:
        """The cells, x fastest."""
        (x0, y0, z0), (x1, y1, z1) = self.low, self.high
        return [(x, y, z) for z in range(z0, z1 + 1) for y in range(y0, y1 + 1) for x in range(x0, x1 + 1)]


def setblocks(text: str, size: Cell, palette: frozenset[str], limit: int) -> list[Box]:
    """The first `limit` lines that are ``/setblock x y z block``, inside the box and of the palette."""
    found = []
    for line in _lines(text):
        match = _SETBLOCK.fullmatch(line)
        if match:
            x, y, z = map(int, match.groups()[:3])
            box = Box((x, y, z), (x, y, z), match[4])
            if _inside(box, size) and box.block in palette:
                found.append(box)
                if len(found) == limit:
                    break
    return found


def fills(text: str, size: Cell, palette: frozenset[str], limit: int) -> tuple[list[Box], bool]:
    """The first `limit` lines that are ``/fill x1 y1 z1 x2 y2 z2 block`` (no mode) or kill: the boxes, and whether one
    killed. A box that reaches out of the world or is not of the palette is passed over."""
    found, kills, count = [], False, 0
    for line in _lines(text):
        if count == limit:
            break
        if _KILL.fullmatch(line):
            kills, count = True, count + 1
            continue
        match = _FILL.fullmatch(line)
        if match:
            numbers = list(map(int, match.groups()[:6]))
            corners = list(zip(numbers[:3], numbers[3:], strict=True))
            box = Box(tuple(map(min, corners)), tuple(map(max, corners)), match[7])
            if _inside(box, size) and box.block in palette:
                found.append(box)
                count += 1
    return found, kills


def _lines(text: str) -> list[str]:
    """Stripped lines, the inside of code fences where there are any."""
    return [line.strip() for line in without_fences(text).splitlines()]


def _inside(box: Box, size: Cell) -> bool:
    return all(low >= 0 and high < length for low, high, length in zip(box.low, box.high, size, strict=True))
