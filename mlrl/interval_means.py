"""Exact means over a logging interval, and when the next one is due."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

SumCount = tuple[float, float]


class MetricAverager:
    """Means over a logging interval, kept as sums and counts so that they are exact however the parts were split."""

    def __init__(self) -> None:
        self._pairs: dict[str, SumCount] = {}

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        """Add a sum over ``count`` samples. For a rate, pass amount and seconds: the mean is amount per second."""
        old_total, old_count = self._pairs.get(name, (0.0, 0.0))
        # Plain numbers: an attached tensor would keep its whole graph alive until the flush.
        self._pairs[name] = (old_total + _float(total), old_count + _float(count))

    def add_value(self, name: str, value: float, count: float = 1.0) -> None:
        """Add a mean over ``count`` samples (one value, with the default count)."""
        self.add(name, _float(value) * _float(count), count)

    def update(self, pairs: Mapping[str, tuple[Any, Any]]) -> None:
        """Add many ``name: (sum, count)`` pairs, as losses return them."""
        for name, (total, count) in pairs.items():
            self.add(name, total, count)

    def state(self) -> dict[str, list[float]]:
        """What a checkpoint has to hold: name → [sum, count]."""
        return {name: list(pair) for name, pair in self._pairs.items()}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Goes on with what `state` gave."""
        self._pairs = {name: (total, count) for name, (total, count) in state.items()}

    def flush(self, reduce: Callable[[dict[str, SumCount]], Mapping[str, SumCount]] | None = None) -> dict[str, float]:
        """Means of everything added since the last flush, sorted by name; a metric with count 0 is left out.

        Args:
            reduce: Sums the pairs over processes before they are divided. It is called even when this process has
                added nothing, because the others may be waiting in it.
        """
        pairs, self._pairs = self._pairs, {}
        pairs = pairs if reduce is None else reduce(pairs)
        return {name: total / count for name, (total, count) in sorted(pairs.items()) if count != 0}


class LoggingInterval:
    """Says when the next log line is due: `interval` is the smallest ``env_step`` gap between two of them."""

    def __init__(self, interval: int, env_step: int = 0):
        self.interval = interval
        self.last = env_step

    def due(self, env_step: int) -> bool:
        """Whether a line is due at ``env_step``. Answering yes starts the next interval there."""
        if env_step - self.last < self.interval:
            return False
        self.last = env_step
        return True


def _float(value: Any) -> float:
    return float(value.item() if hasattr(value, "item") else value)
