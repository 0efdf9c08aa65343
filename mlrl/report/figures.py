"""The curves as images for papers, one file a chart, through matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlrl.errors import ConfigError
from mlrl.report.curves import Chart, make_charts
from mlrl.report.panels import make_panels
from mlrl.report.runs import Group, Run, group_runs

COLORS = ("#0b62c4", "#d4590a", "#14804a", "#b0329a", "#8a6a00", "#0c8296", "#c22f3d", "#6a51c9")
DASHES = ("-", "--", ":", "-.")


def draw_figures(runs: Sequence[Run], folder: Path, kind: str) -> Path:
    """Writes `folder/<chart>.<kind>` for every chart of the page, over env_step; returns the folder.

    As on the page, shares that are 0 throughout have none.

    Args:
        kind: "png" or "pdf".

    Raises:
        ConfigError: matplotlib is not installed, or the runs have no metrics.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(
            f"report={kind!r}: matplotlib is not installed. Install it with: pip install 'mlrl[report]'"
        ) from None
    groups = group_runs(runs)
    charts = make_charts(make_panels(name for run in runs for name in run.metrics), groups)
    if not charts:
        raise ConfigError(f"report={kind!r}: the runs have no metrics yet, so there is nothing to draw. Train first")
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        for chart in (chart for chart in charts if not chart.folded):
            figure = _figure(chart, groups)
            figure.savefig(folder / f"{chart.panel.key}.{kind}", dpi=200)
    return folder


def _figure(chart: Chart, groups: Sequence[Group]):
    from matplotlib.figure import Figure  # no pyplot: needs no display and keeps no state

    figure = Figure(figsize=(4.2, 2.8), layout="constrained")
    axes = figure.add_subplot()
    variants = list(dict.fromkeys(line.variant for line in chart.lines))
    for line in chart.lines:
        variant = variants.index(line.variant)
        several = len(groups) > 1
        color = COLORS[(line.group if several else variant) % len(COLORS)]
        dash = DASHES[variant % len(DASHES)] if several else "-"
        names = [groups[line.group].label if several else "", line.variant if len(variants) > 1 else ""]
        axes.plot(
            line.env_step,
            line.value,
            dash,
            color=color,
            linewidth=1.6 if line.main else 0.7,
            alpha=1.0 if line.main else 0.35,
            marker="o" if line.main and len(line.value) < 25 else None,
            markersize=2.5,
            label=" · ".join(filter(None, names)) if line.main else "",
        )
        if line.low is not None:
            axes.fill_between(line.env_step, line.low, line.high, color=color, alpha=0.18, linewidth=0)
    axes.set_title(chart.panel.title, fontsize=9)
    axes.set_xlabel("env_step")
    if any(text for text in axes.get_legend_handles_labels()[1]):
        axes.legend(frameon=False, fontsize=7, handlelength=3.5)
    return figure
