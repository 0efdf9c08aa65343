"""What critics are worth: MAGRPO, IAC and MAAC on a team game whose optimum and values are known.

    python -m tests.benchmarks.actor_critic                        # five seeds each, some minutes on a CPU
    python -m tests.benchmarks.actor_critic --draw_only            # the plot again, from the numbers beside it

Two agents say one word of four at each of three turns, seeing their own words alone; after the last turn they earn the
share of the turns at which they said the pair that a pattern asks for. All algorithms have the same networks, trees
(K = 3), passes, learning rates and seeds. What is printed and plotted is no sample: the reward of the policies as they
are is summed over all episodes, and so is the value of every node, against which critics are measured.
"""

import argparse
import contextlib
import io
import json
import statistics
import tempfile
from pathlib import Path

import torch

from tests.trainers.pattern_game import OPTIMUM, STEPS, Record, make_team, run

FOLDER = Path(__file__).parent / "figures"
COLORS = {"MAGRPO": "#0b62c4", "IAC": "#d4590a", "MAAC": "#14804a"}


def measure(algorithm: str, seed: int, steps: int) -> Record:
    """One run, without its output."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        return run(make_team(algorithm, Path(folder), seed, max_steps=steps))


def describe(algorithm: str, records: list[Record]) -> str:
    """A row of the table: how many runs come to 0.95 of the optimum, and how far values are off in the second half."""
    last = [record.expected[-1] for record in records]
    reached = sum(value >= 0.95 * OPTIMUM for value in last)
    half = f"{statistics.fmean(record.expected[len(record.expected) // 2] for record in records):.2f}"
    values = "-"
    if records[0].errors:
        error, spread = (_late(records, name) for name in ("errors", "spreads"))
        values = f"{error:.3f} (a constant: {spread:.3f})"
    each = " ".join(f"{value:.2f}" for value in last)
    return f"{algorithm:7} {reached} of {len(records)} runs   half-way {half}   end {each}   RMS of V {values}"


def _late(records: list[Record], name: str) -> float:
    """Root mean square over the second halves of all runs."""
    values = [x for record in records for x in getattr(record, name)[len(record.errors) // 2 :]]
    return statistics.fmean(x * x for x in values) ** 0.5


def draw(results: dict[str, list[Record]], path: Path) -> None:
    """Two panels over env_step: the expected reward with a band of one standard deviation, and the error of V."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 2.7), layout="constrained")
    left, right = figure.subplots(1, 2)
    for algorithm, records in results.items():
        color = COLORS[algorithm]
        _curve(left, records, "expected", color, algorithm)
        if records[0].errors:
            _curve(right, records, "errors", color, f"{algorithm}: V")
            _curve(right, records, "spreads", color, "the best constant", dash=":")
    left.axhline(OPTIMUM, color="#888888", linewidth=0.8)
    left.set(title="expected reward (optimum 1)", xlabel="env_step", ylim=(0, 1.05))
    right.axhline(0.1, color="#888888", linewidth=0.8)
    right.set(title="RMS of value - enumerated value", xlabel="env_step", ylim=(0, None))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _curve(axes, records: list[Record], name: str, color: str, label: str, dash: str = "-") -> None:
    rows = torch.tensor([getattr(record, name) for record in records])
    places, mean = records[0].env_steps[: rows.shape[1]], rows.mean(0)
    axes.plot(places, mean, dash, color=color, linewidth=1.2, label=label)
    if dash == "-":
        spread = rows.std(0, correction=0)
        axes.fill_between(places, mean - spread, mean + spread, color=color, alpha=0.15, linewidth=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the plot and its numbers")
    parser.add_argument("--draw_only", action="store_true")
    args = parser.parse_args()
    numbers = args.output / "actor_critic.json"
    if args.draw_only:
        results = {name: [Record(**row) for row in rows] for name, rows in json.loads(numbers.read_text()).items()}
    else:
        results = {}
        for algorithm in COLORS:
            results[algorithm] = [measure(algorithm, seed, args.steps) for seed in args.seeds]
            print(describe(algorithm, results[algorithm]), flush=True)
        args.output.mkdir(parents=True, exist_ok=True)
        numbers.write_text(json.dumps({n: [_rounded(r) for r in rows] for n, rows in results.items()}) + "\n")
    draw(results, args.output / "actor_critic.png")


def _rounded(record: Record) -> dict[str, list[float]]:
    return {name: [round(value, 4) for value in values] for name, values in vars(record).items()}


if __name__ == "__main__":
    main()
