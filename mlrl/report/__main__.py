"""One page of one or several runs: learning curves, what the agents wrote, and the rollout trees.

python -m mlrl.report runs/A                       # writes runs/A/report.html, which opens without a network
python -m mlrl.report runs/A runs/B                # runs overlaid; those that differ in the seed alone are averaged
python -m mlrl.report runs/A runs/B --report png   # the curves as images, for papers (pdf: the same as PDF)
"""

import argparse
import os
from pathlib import Path

from mlrl.cli import config_errors
from mlrl.report.page import render
from mlrl.report.runs import Run, read_runs

FORMATS = ("html", "png", "pdf")


def main(argv: list[str] | None = None) -> None:
    """Reads the command line, writes the report and says where it is."""
    parser = argparse.ArgumentParser(
        prog="python -m mlrl.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--report", nargs="+", choices=FORMATS, default=["html"], help="what to write (default: html)")
    parser.add_argument(
        "--output",
        type=Path,
        help="folder for report.html and figures/ (default: the run's folder; of several runs, the folder they lie in)",
    )
    parser.add_argument(
        "--max_mb", type=float, default=15.0, help="most megabytes of the page; fewer trees are shown (default: 15)"
    )
    args = parser.parse_args(argv)
    with config_errors("mlrl.report"):
        runs = read_runs(args.runs)
        folder = args.output or default_folder(runs)
        folder.mkdir(parents=True, exist_ok=True)
        for name in dict.fromkeys(args.report):
            print(f"written to {write(runs, name, folder, args.max_mb)}")


def write(runs: list[Run], name: str, folder: Path, max_mb: float) -> Path:
    """Writes one format into `folder`; returns the file or, for images, their folder."""
    if name == "html":
        path = folder / "report.html"
        # a lone surrogate has no UTF-8 form; its JSON escape has
        path.write_text(render(runs, max_mb), encoding="utf-8", errors="backslashreplace")
        return path
    from mlrl.report.figures import draw_figures

    return draw_figures(runs, folder / "figures", name)


def default_folder(runs: list[Run]) -> Path:
    """The run's folder; of several runs, the folder that holds them all."""
    if len(runs) == 1:
        return runs[0].folder.path
    return Path(os.path.commonpath([run.folder.path.parent for run in runs]))


if __name__ == "__main__":
    main()
