"""pass@k: the chance that at least one of k answers to a problem passes every test."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

KS = (1, 2, 5, 10, 20, 50, 100)


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The unbiased estimate 1 − C(n−c, k)/C(n, k) from n samples of which c passed (Chen et al. 2021, equation 1).

    Raises:
        ValueError: not 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= num_samples and 0 <= num_passed <= num_samples):
        raise ValueError(f"pass@{k} of {num_passed} passed among {num_samples}")
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def mean_pass_at_k(results: Iterable[tuple[str, bool]]) -> dict[str, float]:
    """The mean over problems, for every usual k that each problem has samples for; from (problem, passed) pairs."""
    samples: dict[str, list[bool]] = defaultdict(list)
    for problem, passed in results:
        samples[problem].append(passed)
    fewest = min(map(len, samples.values()), default=0)
    return {
        f"pass@{k}": math.fsum(pass_at_k(len(own), sum(own), k) for own in samples.values()) / len(samples)
        for k in KS
        if k <= fewest
    }


def turn_means(
    rows: Sequence[Mapping[str, Any]], num_turns: int, final: Sequence[str] | None = None
) -> dict[str, float]:
    """Means of what rows hold under ``turns`` (a dict of numbers a turn), by turn over the episodes that reached it.

    With several turns the numbers named in `final` (None: all) stand also under ``final/``, where an episode that ended
    early counts with its last turn.
    """
    means = {}
    for turn in range(num_turns):
        reached = [row["turns"][turn] for row in rows if len(row["turns"]) > turn]
        means |= {f"turn_{turn + 1}/{key}": value for key, value in _means(reached).items()}
    if num_turns > 1:
        last = _means([row["turns"][-1] for row in rows])
        means |= {f"final/{key}": value for key, value in last.items() if final is None or key in final}
    return means


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: math.fsum(row[key] for row in rows) / len(rows) for key in rows[0]} if rows else {}
