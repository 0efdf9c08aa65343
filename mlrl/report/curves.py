"""From metrics of runs to the lines of a chart: seeds of one experiment averaged, long runs thinned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mlrl.report.panels import Panel
from mlrl.report.runs import Group, Series

MOST_POINTS = 1000


@dataclass
class Line:
    """One line of a chart.

    Attributes:
        group: index of the group; variant: which agent or part it shows, "" where a chart has one kind only.
        run: name of the run behind it; "" for a mean over runs.
        main: whether it is drawn in full strength (a mean, or the only run); otherwise it stands behind its mean.
        step, env_step, value: [points]; value is NaN where the run wrote null.
        low, high: [points] edges of the band, None without one.
    """

    group: int
    variant: str
    run: str
    main: bool
    step: np.ndarray
    env_step: np.ndarray
    value: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


@dataclass
class Chart:
    """A panel with its lines; `notes` say what a reader could miss (numbers that are NaN, points that are means).

    `folded`: it is a share that is 0 in every run at every step, and needs a word in place of a chart.
    """

    panel: Panel
    lines: list[Line]
    notes: list[str]
    folded: bool = False


def make_charts(panels: Sequence[Panel], groups: Sequence[Group]) -> list[Chart]:
    """The charts of all panels, each with one or more lines a group."""
    return [_chart(panel, groups) for panel in panels]


def group_lines(group: Group, number: int, metric: str, variant: str, stderr: str | None = None) -> list[Line]:
    """The lines of one metric of a group.

    One run: its line, with a band of one standard error where the run logged one under the name `stderr`. Several: a
    thin line each, and their mean with a band of one standard deviation over runs.
    """
    having = [(run, run.metrics[metric]) for run in group.runs if metric in run.metrics]
    lines = [
        Line(number, variant, run.name, len(having) == 1, series.step, series.env_step, series.value)
        for run, series in having
    ]
    if len(having) == 1:
        errors = having[0][0].metrics.get(stderr or "")
        if errors is not None and len(errors.value) == len(lines[0].value):
            lines[0] = replace(lines[0], low=lines[0].value - errors.value, high=lines[0].value + errors.value)
        return lines
    mean = mean_over_runs([series for _, series in having])
    if mean is None:
        return [replace(line, main=True) for line in lines]
    step, env_step, value, spread = mean
    return [*lines, Line(number, variant, "", True, step, env_step, value, value - spread, value + spread)]


def mean_over_runs(series: Sequence[Series]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """Step, env_step, mean and standard deviation (n - 1) over runs, at every step that all of them have reached.

    A run that logged no number at one of these steps counts there by the straight line between its neighbours. None
    where the runs have no step in common.
    """
    finite = [own.finite for own in series]
    if not finite or any(len(own.step) == 0 for own in finite):
        return None
    first, last = max(own.step[0] for own in finite), min(own.step[-1] for own in finite)
    steps = np.unique(np.concatenate([own.step for own in finite]))
    steps = steps[(steps >= first) & (steps <= last)]
    if len(steps) == 0:
        return None
    values = np.stack([np.interp(steps, own.step, own.value) for own in finite])
    env_steps = np.stack([np.interp(steps, own.step, own.env_step) for own in finite])
    return steps, env_steps.mean(0), values.mean(0), values.std(0, ddof=1)


def thin(line: Line, most: int = MOST_POINTS) -> tuple[Line, int]:
    """The line with at most `most` points, each the mean of equally many consecutive ones; and how many that is.

    NaN is left out of a mean of several points.
    """
    size = -(-len(line.value) // most)
    if size <= 1:
        return line, 1
    names = ("step", "env_step", "value", "low", "high")
    means = {name: _bucket_means(getattr(line, name), size) for name in names if getattr(line, name) is not None}
    return replace(line, **means), size


def _bucket_means(values: np.ndarray, size: int) -> np.ndarray:
    padded = np.concatenate([values, np.full(-len(values) % size, np.nan)]).reshape(-1, size)
    present = np.isfinite(padded)
    counts = present.sum(1)
    sums = np.where(present, padded, 0.0).sum(1)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _chart(panel: Panel, groups: Sequence[Group]) -> Chart:
    lines: list[Line] = []
    largest = 1
    missing: list[str] = []
    folded = panel.counts_trouble
    for number, group in enumerate(groups):
        for metric, variant in panel.metrics:
            for line in group_lines(group, number, metric, variant, panel.stderr.get(metric)):
                bad = int(np.isnan(line.value).sum())
                if bad:
                    where = " · ".join(filter(None, [line.run, variant]))
                    missing.append(f"{where}: {bad} of {len(line.value)} values are NaN or infinite")
                folded = folded and not line.value.any()  # NaN is no 0
                thinned, size = thin(line)
                lines.append(thinned)
                largest = max(largest, size)
    notes = [f"Each point is the mean of up to {largest} logged rows."] if largest > 1 else []
    return Chart(panel, lines, notes + missing, folded)
