import pytest
from hypothesis import given

from mlrl.tasks.minecraft.commands import Box, fills, setblocks
from tests.texts import HOSTILE, THOUSAND, pairs, pieces

SIZE, PALETTE = (5, 5, 1), frozenset({"stone", "air"})


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("/setblock 0 1 0 stone", True),
        ("setblock 0 1 0 minecraft:stone", True),
        ("  /setblock  4  4  0  air  ", True),
        ("/setblock 5 1 0 stone", False),  # x is 0 to 4
        ("/setblock -1 1 0 stone", False),
        ("/setblock 0 1 1 stone", False),
        ("/setblock ~0 ~1 ~0 stone", False),  # relative
        ("/setblock 0 1 0 gold_block", False),  # not of the palette
        ("/setblock 0 1 0 stone replace", False),
        ("/setblock 0.5 1 0 stone", False),
        ("/fill 0 0 0 1 1 0 stone", False),
        ("I write /setblock 0 1 0 stone", False),
        ("/setblock 0 1 stone", False),
        ("/setblock 99999999999999999999 1 0 stone", False),
    ],
)
def test_single_blocks(line, read):
    assert bool(setblocks(line, SIZE, PALETTE, 10)) == read


def test_the_first_so_many_commands_count():
    text = "nonsense\n" + "/setblock 9 9 9 stone\n" * 5 + "\n".join(f"/setblock {x} 0 0 stone" for x in range(5))
    assert [box.low[0] for box in setblocks(text, SIZE, PALETTE, 3)] == [0, 1, 2]  # those that are refused do not


def test_code_fences_are_passed_over():
    assert len(setblocks("Sure!\n```\n/setblock 0 0 0 stone\n```\nDone.", SIZE, PALETTE, 10)) == 1


@pytest.mark.parametrize(
    ("line", "boxes", "kills"),
    [
        ("/fill 0 0 0 4 4 0 stone", [Box((0, 0, 0), (4, 4, 0), "stone")], False),
        ("/fill 4 4 0 0 0 0 stone", [Box((0, 0, 0), (4, 4, 0), "stone")], False),  # corners in any order
        ("/fill 0 0 0 4 5 0 stone", [], False),
        ("/fill 0 0 0 4 4 0 stone hollow", [], False),
        ("/setblock 0 0 0 stone", [], False),
        ("/kill @e[type=spider]", [], True),
        ("/kill @e[type=minecraft:spider,limit=3]", [], True),
        ("kill @e", [], True),
        ("/kill @e[type=cow]", [], False),
        ("/kill @p", [], False),
    ],
)
def test_boxes_and_kill(line, boxes, kills):
    assert fills(line, SIZE, PALETTE, 10) == (boxes, kills)


def test_kill_counts_as_a_command():
    text = "/fill 0 0 0 0 0 0 stone\n/kill @e\n/fill 1 0 0 1 0 0 stone"
    assert fills(text, SIZE, PALETTE, 1) == ([Box((0, 0, 0), (0, 0, 0), "stone")], False)
    assert fills(text, SIZE, PALETTE, 2) == ([Box((0, 0, 0), (0, 0, 0), "stone")], True)


def test_cells_of_a_box():
    assert Box((0, 1, 2), (1, 1, 3), "stone").cells() == [(0, 1, 2), (1, 1, 2), (0, 1, 3), (1, 1, 3)]


@THOUSAND
@given(
    pairs(
        HOSTILE | pieces("/fill ", "/setblock ", "0 ", "4 ", "-1 ", "9 ", "stone", "\n", "/kill @e[type=spider]", "~")
    )
)
def test_any_text_gives_boxes_within_the_world(drawn):
    for text in map("".join, drawn):
        boxes = setblocks(text, SIZE, PALETTE, 7)
        more, _ = fills(text, SIZE, PALETTE, 7)
        assert len(boxes) <= 7
        assert len(more) <= 7
        for box in (*boxes, *more):
            assert box.block in PALETTE
            assert all(0 <= x < 5 and 0 <= y < 5 and z == 0 for x, y, z in box.cells())
