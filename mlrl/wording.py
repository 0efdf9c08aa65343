"""Words of messages."""


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 turn`, `2 turns`."""
    return f"{number:,} {noun if number == 1 else f'{noun}s'}"
