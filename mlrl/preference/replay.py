"""Which pairs a round learns from: its own, or a draw from those of several rounds.

Rounds are weighted, S of them are drawn with these weights, and every round gives as many pairs as it was drawn.

| mode           | weight of the round that is a non-empty rounds older than the newest non-empty one (a = 0, 1 …) |
|----------------|---------------------------------------------------------------------------------------------------|
| `current`      | no draw: the pairs of the current round, all of them                                              |
| `nearest_k`    | 1/k for a < k (fewer where there are fewer)                                                       |
| `all_history`  | the same for all                                                                                  |
| `lambda_decay` | λ^a / Σ_j λ^j, with 0⁰ = 1                                                                        |

A round gives pairs without repetition; one that is drawn more often than it has pairs gives whole reshuffled passes
over them and then a part of another. Draws are keyed by (seed, round): a resumed run draws the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlrl.preference.pairs import PreferencePair
from mlrl.preference.rounds import Round, read_pairs
from mlrl.rollout.streams import derive_seed

MODES = ("current", "nearest_k", "all_history", "lambda_decay")


def replay(
    rounds: Sequence[Round],
    *,
    mode: str,
    seed: int,
    k: int | None = None,
    decay: float | None = None,
    sample_size: int | None = None,
) -> list[PreferencePair]:
    """The pairs to learn from after the last of these rounds, shuffled; [] where there are none.

    Args:
        rounds: oldest first, the current one last (it may be empty); those of an earlier run may come before.
        mode: see the module's table. k: of `nearest_k`. decay: λ of `lambda_decay`.
        sample_size: S; None takes the current round's number of pairs, or that of the newest non-empty round.
    """
    if not rounds:
        return []
    counts = [round.num_pairs for round in rounds]
    generator = np.random.default_rng(derive_seed(seed, "replay", rounds[-1].number))
    if mode == "current":
        places = [(len(rounds) - 1, pair) for pair in generator.permutation(counts[-1]).tolist()]
    else:
        weights = round_weights(counts, mode=mode, k=k, decay=decay)
        places = draw_pairs(counts, weights, default_size(counts) if sample_size is None else sample_size, generator)
    pairs: list[PreferencePair | None] = [None] * len(places)
    for number, round in enumerate(rounds):
        mine = [place for place, (drawn, _) in enumerate(places) if drawn == number]
        chosen = read_pairs(round, [places[place][1] for place in mine]) if mine else []
        for place, pair in zip(mine, chosen, strict=True):
            pairs[place] = pair
    return pairs  # type: ignore[return-value]


def round_weights(counts: Sequence[int], *, mode: str, k: int | None = None, decay: float | None = None) -> list[float]:
    """The share of each round in the draw, 0 for empty ones.

    Args:
        counts: pairs of each round, oldest first.
    """
    newest_first = [number for number in reversed(range(len(counts))) if counts[number] > 0]
    if mode == "nearest_k":
        if k is None or k < 1:
            raise ValueError(f"preference_replay_k={k!r}: nearest_k needs a number of rounds, 1 or more.")
        shares = [float(age < k) for age in range(len(newest_first))]
    elif mode == "all_history":
        shares = [1.0] * len(newest_first)
    elif mode == "lambda_decay":
        if decay is None or not 0 <= decay <= 1:
            raise ValueError(f"preference_replay_lambda={decay!r}: lambda_decay needs a number from 0 to 1.")
        shares = [decay**age for age in range(len(newest_first))]
    else:
        raise ValueError(f"preference_replay_mode={mode!r}: has no weights. Use one of {', '.join(MODES[1:])}.")
    weights = [0.0] * len(counts)
    for number, share in zip(newest_first, shares, strict=True):
        weights[number] = share / sum(shares)
    return weights


def default_size(counts: Sequence[int]) -> int:
    """Pairs of the current (last) round, or of the newest round that has any."""
    return next((count for count in reversed(counts) if count > 0), 0)


def draw_pairs(
    counts: Sequence[int], weights: Sequence[float], size: int, generator: np.random.Generator
) -> list[tuple[int, int]]:
    """`size` times (round, pair of it), shuffled; [] where every round is empty."""
    if not any(weights):
        return []
    drawn = generator.multinomial(size, weights)
    places = [
        (number, pair)
        for number, times in enumerate(drawn.tolist())
        for pair in _passes(counts[number], times, generator)
    ]
    return [places[place] for place in generator.permutation(len(places))]


def _passes(count: int, times: int, generator: np.random.Generator) -> list[int]:
    """`times` numbers below `count`: whole shuffled passes, then a part of one."""
    numbers: list[int] = []
    while len(numbers) < times:
        numbers += generator.permutation(count).tolist()
    return numbers[:times]
