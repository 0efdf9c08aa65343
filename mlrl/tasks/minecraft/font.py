"""Capital letters of 5 × 5 cells, ours, and the cells of a written string."""

from mlrl import ConfigError
from mlrl.tasks.minecraft.commands import Cell

SIZE, SPACING = 5, 2

FONT = {
    "A": ".###. #...# ##### #...# #...#",
    "B": "####. #...# ####. #...# ####.",
    "C": ".#### #.... #.... #.... .####",
    "D": "####. #...# #...# #...# ####.",
    "E": "##### #.... ####. #.... #####",
    "F": "##### #.... ####. #.... #....",
    "G": ".#### #.... #..## #...# .####",
    "H": "#...# #...# ##### #...# #...#",
    "I": ".###. ..#.. ..#.. ..#.. .###.",
    "J": "..### ...#. ...#. #..#. .##..",
    "K": "#...# #..#. ###.. #..#. #...#",
    "L": "#.... #.... #.... #.... #####",
    "M": "##### #.#.# #.#.# #.#.# #.#.#",
    "N": "#...# ##..# #.#.# #..## #...#",
    "O": ".###. #...# #...# #...# .###.",
    "P": "####. #...# ####. #.... #....",
    "Q": ".###. #...# #.#.# #..#. .##.#",
    "R": "####. #...# ####. #..#. #...#",
    "S": ".#### #.... .###. ....# ####.",
    "T": "##### ..#.. ..#.. ..#.. ..#..",
    "U": "#...# #...# #...# #...# .###.",
    "V": "#...# #...# #...# .#.#. ..#..",
    "W": "#.#.# #.#.# #.#.# #.#.# #####",
    "X": "#...# .#.#. ..#.. .#.#. #...#",
    "Y": "#...# .#.#. ..#.. ..#.. ..#..",
    "Z": "##### ...#. ..#.. .#... #####",
}
"""Rows from the top; # is a cell."""


def checked_letters(text: str, field: str) -> str:
    """The text itself.

    Raises:
        ConfigError: it is empty or has a letter that the font has not.
    """
    missing = sorted(set(text) - set(FONT)) if isinstance(text, str) else []
    if not isinstance(text, str) or not text or missing:
        raise ConfigError(f"{field}={text!r}: not of the font's letters. Right is one or more of {''.join(FONT)}.")
    return text


def width(text: str) -> int:
    """Cells from the first letter's left side to the last one's right side."""
    return len(text) * (SIZE + SPACING) - SPACING


def target_cells(text: str) -> set[Cell]:
    """The cells (x, y, 0) of a string; x runs to the right, y up."""
    return {
        (letter * (SIZE + SPACING) + column, SIZE - 1 - row, 0)
        for letter, char in enumerate(text)
        for row, line in enumerate(FONT[char].split())
        for column, mark in enumerate(line)
        if mark == "#"
    }
