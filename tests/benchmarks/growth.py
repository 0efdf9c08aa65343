"""How wall time and peak memory grow where one size of the work is doubled again and again.

    python -m tests.benchmarks.growth                     # 1×, 2×, 4×, 8×; turns from 1 to 3
    python -m tests.benchmarks.growth --sizes items       # one of: items tokens agents generations turns steps

Time beside 1× is shown with what growth in proportion to the sampled tokens would give. `steps` repeats the same step,
so its memory must stay where it is.
"""

import argparse

from mlrl.embedded import embedded_model_path
from tests.benchmarks.__main__ import measure_ours

BASE = {"items": 2, "generations": 2, "tokens": 16, "agents": 1, "turns": 1, "items_per_update": 2}
SIZES = {
    "items": [{"items": 2 * n, "items_per_update": 2 * n} for n in (1, 2, 4, 8)],
    "tokens": [{"tokens": 16 * n} for n in (1, 2, 4, 8)],
    "agents": [{"agents": n} for n in (1, 2, 4, 8)],
    "generations": [{"generations": 2 * n} for n in (1, 2, 4, 8)],
    "turns": [{"turns": n} for n in (1, 2, 3)],
    "steps": [{"items": 2 * n} for n in (1, 2, 4, 8)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="model folder; default: the embedded one")
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    args = parser.parse_args()
    model = str(args.model or embedded_model_path())
    for name in args.sizes:
        first = None
        for change in SIZES[name]:
            work = BASE | change
            result = measure_ours(["--model", model, *(word for k, v in work.items() for word in (f"--{k}", str(v)))])
            tokens = result["sequences"] * work["tokens"]
            first = first or (result["wall_s"], tokens)
            wall, more = result["wall_s"] / first[0], tokens / first[1]
            size = next(iter(change.values()))
            print(
                f"{name:12} {size:3}: {result['wall_s']:6.1f} s = {wall:5.2f} × the first for {more:5.2f} × the "
                f"tokens, peak memory {result['peak_gb']:.2f} GB",
                flush=True,
            )


if __name__ == "__main__":
    main()
