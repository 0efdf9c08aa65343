"""The page: everything inlined, so that it opens from disk; the text of models only ever as data or escaped."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

import mlrl
from mlrl.report.curves import Chart, Line, make_charts
from mlrl.report.panels import SECTIONS, make_panels
from mlrl.report.runs import Run, differing_settings, group_runs
from mlrl.report.summary import MUCH_EMPTY, in_rounds, overview, results, writing_rows
from mlrl.report.trees import TEXT_LIMITS, Block, completion_files, read_blocks

STATIC = Path(__file__).parent / "static"
SCRIPTS = ("uPlot.iife.min.js", "charts.js", "explorer.js")
MEGABYTE = 1_000_000


def render(runs: Sequence[Run], max_mb: float) -> str:
    """The report of these runs as one HTML page.

    Args:
        max_mb: most megabytes of the page. Rollout trees fill what curves and program leave, an equal part for each
            run that has any; what is left out is stated on the page.
    """
    groups = group_runs(runs)
    every = make_charts(make_panels(name for run in runs for name in run.metrics), groups)
    charts = [chart for chart in every if not chart.folded]
    curves = _json(_curves(charts, [group.label for group in groups]))
    script = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in SCRIPTS)
    style = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in ("uPlot.min.css", "page.css"))
    room = int(max_mb * MEGABYTE) - sum(map(_size, (curves, script, style))) - 100_000
    having = sum(bool(completion_files(run)) for run in runs)
    blocks = [read_blocks(run, max(room, 0) // max(having, 1)) for run in runs]
    names = [run.name for run in runs]
    overviews = [overview(run, own) for run, own in zip(runs, blocks, strict=True)]
    writing = [row for run, own in zip(runs, blocks, strict=True) for row in writing_rows(run, own)]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number}
    template = environment.from_string((STATIC / "page.html").read_text(encoding="utf-8"))
    return template.render(
        title=", ".join(group.label for group in groups[:4]) + (" …" if len(groups) > 4 else ""),
        version=mlrl.__version__,
        overviews=overviews,
        results=results(groups, overviews) if len(runs) > 1 else [],
        groups=groups,
        by_step=all(map(in_rounds, runs)),
        differences=differing_settings(groups) if len(groups) > 1 else {},
        sections=[
            {
                "name": section,
                "charts": [(i, chart) for i, chart in enumerate(charts) if chart.panel.section == section],
                "zero": [chart.panel.title for chart in every if chart.folded and chart.panel.section == section],
            }
            for section in SECTIONS
        ],
        writing=writing,
        shown=[
            (name, sum(len(block.trees) for block in own), sum(block.total for block in own))
            for name, own in zip(names, blocks, strict=True)
        ],
        cut=sum(block.cut for own in blocks for block in own),
        text_limit=TEXT_LIMITS[0],
        max_mb=max_mb,
        writing_steps=len({(row.run, row.step) for row in writing}) if len(runs) == 1 else 2,
        much_empty=MUCH_EMPTY,
        data={"curves": curves, "index": _json(_index(names, blocks)), **_tree_data(blocks)},
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode(),
        style=style,
    )


def number(value: float) -> str:
    """A number to read: four significant digits, thousands separated."""
    if value is None or not np.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _curves(charts: Sequence[Chart], labels: Sequence[str]) -> dict[str, Any]:
    """Charts for the page; lines that are logged at the same places share their axes."""
    axes: dict[tuple[bytes, bytes], int] = {}
    stored: list[list[list[float | None]]] = []

    def axis(line: Line) -> int:
        key = (line.step.tobytes(), line.env_step.tobytes())
        if key not in axes:
            axes[key] = len(stored)
            stored.append([_numbers(line.step, 8), _numbers(line.env_step, 12)])
        return axes[key]

    content = [
        {
            "title": chart.panel.title,
            "lines": [
                {
                    "group": line.group,
                    "variant": line.variant,
                    "run": line.run,
                    "main": line.main,
                    "axis": axis(line),
                    "y": _numbers(line.value),
                    **({} if line.low is None else {"low": _numbers(line.low), "high": _numbers(line.high)}),
                }
                for line in chart.lines
            ],
        }
        for chart in charts
    ]
    return {"groups": list(labels), "axes": stored, "charts": content}


def _index(names: Sequence[str], blocks: Sequence[Sequence[Block]]) -> list[dict[str, Any]]:
    """What the explorer can choose from: runs and their steps that have trees here."""
    return [
        {
            "run": name,
            "steps": [
                {
                    "split": block.split,
                    "step": block.step,
                    "env_step": block.env_step,
                    "trees": len(block.trees),
                    "total": block.total,
                    "data": f"trees-{number}-{place}",
                }
                for place, block in enumerate(own)
                if block.trees
            ],
        }
        for number, (name, own) in enumerate(zip(names, blocks, strict=True))
    ]


def _tree_data(blocks: Sequence[Sequence[Block]]) -> dict[str, str]:
    return {
        f"trees-{number}-{place}": _safe("[" + ",".join(block.trees) + "]")
        for number, own in enumerate(blocks)
        for place, block in enumerate(own)
        if block.trees
    }


def _numbers(values: np.ndarray, digits: int = 5) -> list[float | None]:
    """Rounded for size; NaN as null. Whole numbers lose their `.0`."""
    rounded = [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values.tolist()]
    return [int(value) if value is not None and value.is_integer() else value for value in rounded]


def _json(content: Any) -> str:
    return _safe(json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False))


def _safe(text: str) -> str:
    r"""JSON that cannot end the script element it stands in: `<` only ever occurs inside strings, as \u003c there."""
    return text.replace("<", "\\u003c")


def _size(text: str) -> int:
    return len(text.encode("utf-8", "backslashreplace"))
