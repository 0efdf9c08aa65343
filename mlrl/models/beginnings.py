"""What several token sequences begin with: where to cut them so that equal beginnings become one piece.

Prompts that one chat template makes begin alike (a system message, the words around the user's text), even where the
tasks have nothing in common.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LEAST_TOKENS = 8
"""Shorter common beginnings are run again: attention in one more piece costs about as much."""


def common_beginnings(
    sequences: Iterable[Sequence[int]], least: int = LEAST_TOKENS
) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    """Cuts sequences into pieces, so that a beginning of `least` tokens or more that several share is cut off.

    Returns:
        the pieces of every distinct sequence, in order; they concatenate to it, and none is empty. Two sequences with a
        common beginning have their first pieces in common.
    """
    pieces: dict[tuple[int, ...], list[tuple[int, ...]]] = {tuple(s): [] for s in sequences}
    # in lexical order the common beginning of a run of sequences is that of its first and its last
    open_runs = [(sorted(pieces), 0)] if pieces else []
    while open_runs:
        run, start = open_runs.pop()
        if len(run) == 1:
            if len(run[0]) > start:
                pieces[run[0]].append(run[0][start:])
            continue
        stop = common_length(run[0], run[-1])
        if stop - start >= least:
            for sequence in run:
                pieces[sequence].append(sequence[start:stop])
            start = stop
        by_next: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for sequence in run:
            by_next.setdefault(sequence[stop : stop + 1], []).append(sequence)
        open_runs += [(group, start) for group in by_next.values()]
    return pieces


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))
