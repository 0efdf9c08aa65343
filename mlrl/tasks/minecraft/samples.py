"""Ten small houses of our own in a world of 6 × 7 × 7 cells: five roofs on walls of planks and of bricks."""

from mlrl.tasks.task_data import Row

WIDTH, HEIGHT, DEPTH = 6, 7, 7
LEGEND = {"P": "oak_planks", "B": "bricks", "G": "glass", "F": "cobblestone", "T": "spruce_planks", "A": "air"}
ROOFS = ("flat", "terrace", "gable", "pyramid", "tower")


def houses() -> list[Row]:
    """Rows with task_id, inventory (letter → block) and target_spec (layers from the ground up)."""
    return [
        {
            "task_id": f"{roof}_{LEGEND[wall]}",
            "inventory": dict(LEGEND),
            "target_spec": {"type": "y_layers", "size": [WIDTH, HEIGHT, DEPTH], "layers": _layers(wall, roof)},
        }
        for roof in ROOFS
        for wall in "PB"
    ]


def _layers(wall: str, roof: str) -> list[dict]:
    return [
        {"y": y, "rows": ["".join(_letter(x, y, z, wall, roof) for x in range(WIDTH)) for z in range(DEPTH)]}
        for y in range(HEIGHT)
    ]


def _letter(x: int, y: int, z: int, wall: str, roof: str) -> str:
    """A floor of 6 × 6, three layers of walls with a door in front and windows at the sides, and the roof."""
    if z == DEPTH - 1:
        return "A"  # a strip of open ground behind the house
    at_side, at_front = x in (0, WIDTH - 1), z in (0, DEPTH - 2)
    if y == 0:
        return "F"
    if y <= 3:
        if not (at_side or at_front):
            return "A"
        if z == 0 and x in (2, 3) and y <= 2:
            return "A"  # the door
        return "G" if y == 2 and at_side and z in (2, 3) else wall
    return "T" if _roofed(x, y - 4, z, roof) else "A"


def _roofed(x: int, level: int, z: int, roof: str) -> bool:
    inset_x, inset_z = min(x, WIDTH - 1 - x), min(z, DEPTH - 2 - z)
    if roof == "flat":
        return level == 0
    if roof == "terrace":  # a rim around the edge of a flat roof
        return level == 0 or (level == 1 and 0 in (inset_x, inset_z))
    if roof == "gable":
        return inset_x >= level
    if roof == "pyramid":
        return min(inset_x, inset_z) >= level
    return level == 0 or (inset_x == 2 and inset_z >= 1)  # tower: a ridge above a flat roof
