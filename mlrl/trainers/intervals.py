"""Confidence intervals of any metric over the items of an evaluation, by the jackknife.

Episodes of one item are not independent of each other, so what is left out, one at a time, is a whole item.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist

# Names of shares of 1, whose intervals end at 0 and at 1. Of other metrics, such as rewards, no bounds are known.
_RATE = re.compile(r"(.*[/_])?(pass@\d+|solved|in_band|fraction|rate)")
_ROUNDING = 1e-9  # relative; a spread below it is one of sums in floating point


def jackknife_intervals(
    statistic: Callable[[Sequence[int]], Mapping[str, float]],
    num_items: int,
    confidence: float = 0.95,
    max_groups: int = 100,
) -> dict[str, tuple[float, float]]:
    """(low, high) of every metric: its value ± t · standard error, t of Student's distribution with n − 1 degrees.

    Of a rate (`pass@k`, `…_rate`, `…_fraction`, `solved`, `in_band`, where it is one) the part between 0 and 1.

    For a mean over items this is the textbook interval; for a ratio or pass@k the jackknife gives the standard error:
    √((n − 1)/n · Σ (θ_i − θ̄)²), θ_i the value without item i (Efron and Tibshirani 1993, chapter 11).

    Args:
        statistic: the metrics of the items with these numbers.
        num_items: n; {} below 2.
        max_groups: with more items than this, what is left out is one of so many groups of items, and n is their
            number (the delete-a-group jackknife): cost grows in proportion to the items, not to their square.

    Returns:
        Metrics that are finite with all items and without each of them, and differ between these: where all items
        agree, nothing tells how much others would, and a width of 0 would pass for certainty. The others have no
        interval.
    """
    if num_items < 2:
        return {}
    every, groups = range(num_items), min(num_items, max_groups)
    whole = statistic(every)
    without = [statistic([item for item in every if item % groups != left_out]) for left_out in range(groups)]
    factor = student_quantile(groups - 1, confidence)
    intervals = {}
    for name, value in whole.items():
        values = [metrics.get(name, math.nan) for metrics in without]
        if all(map(math.isfinite, [value, *values])):
            mean = math.fsum(values) / groups
            spread = math.fsum((v - mean) ** 2 for v in values)
            half = factor * math.sqrt((groups - 1) / groups * spread)
            if half > _ROUNDING * abs(value):
                is_rate = _RATE.fullmatch(name) and all(0 <= v <= 1 for v in (value, *values))  # and no percentage
                bounds = (0.0, 1.0) if is_rate else (-math.inf, math.inf)
                intervals[name] = (max(value - half, bounds[0]), min(value + half, bounds[1]))
    return intervals


def student_quantile(degrees: int, confidence: float = 0.95) -> float:
    """t such that a Student variable of so many degrees of freedom lies within ±t with this probability."""
    if degrees > 1000:  # from the normal quantile (Abramowitz and Stegun 26.7.5), to 1e-7
        z = NormalDist().inv_cdf((1 + confidence) / 2)
        return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    low, high = 0.0, math.pi / 2  # of the angle θ with tan θ = t/√degrees, whose density is cos^(degrees − 1)
    whole = _area(high, degrees)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _area(middle, degrees) < confidence * whole else (low, middle)
    return math.tan(low) * math.sqrt(degrees)


def _area(angle: float, degrees: int, steps: int = 2000) -> float:
    """∫ cos^(degrees − 1) from 0 to the angle, by the midpoint rule."""
    width = angle / steps
    return width * math.fsum(math.cos((i + 0.5) * width) ** (degrees - 1) for i in range(steps))
