"""Prints what our system and its peers cost on the same work, in one run.

    python -m tests.benchmarks                                        # ours alone
    python -m tests.benchmarks --peers PYTHON --drivers FOLDER        # beside comlrl and TRL, in their own environment

FOLDER holds the peers' drivers, bench_comlrl.py and bench_trl.py; PYTHON is an interpreter that has comlrl and trl.
Ratios are ours over theirs, of wall time and of peak memory. Run alone: two busy processes slow each other by far more
than half. `tests.benchmarks.parts` compares sampling and updates by themselves, `tests.benchmarks.growth` shows how
cost grows with the work.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mlrl.embedded import embedded_model_path


@dataclass(frozen=True)
class Workload:
    """A piece of work: flags of our driver, flags of the peer's, and the ways in which the peer may do it."""

    name: str
    flags: list[str]
    driver: str
    peer_flags: list[str]
    peer_ways: tuple[list[str], ...] = ([],)


def beside_comlrl(name: str, *flags: str) -> Workload:
    return Workload(name, list(flags), "bench_comlrl.py", list(flags))


WORKLOADS = [
    beside_comlrl("4 items × K 4 × 64 tokens", "--items", "4"),
    beside_comlrl("2 items × K 4 × 64 tokens, 200-word prompts", "--items", "2", "--prompt_words", "200"),
    beside_comlrl(
        "1 item × K 3 × 48 tokens, 2 turns, 60-word prompts",
        *("--items", "1", "--generations", "3", "--tokens", "48", "--turns", "2", "--prompt_words", "60"),
    ),
    Workload(
        "1 agent, 8 items × K 4 × 64 tokens",
        ["--agents", "1", "--items", "8", "--items_per_update", "8"],
        "bench_trl.py",
        ["--items", "8"],
        (["--lora", "0"], ["--lora", "1"]),
    ),
]


def measure(command: list[str]) -> dict:
    """Runs a driver and reads the JSON line it prints last."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])


def measure_ours(flags: list[str]) -> dict:
    """What a workload costs us, in a process of its own."""
    return measure([sys.executable, "-m", "tests.benchmarks.ours", *flags])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="Python of an environment with comlrl and trl")
    parser.add_argument("--drivers", type=Path, help="folder of the peers' drivers")
    parser.add_argument("--model", default=None, help="model folder; default: the embedded one")
    parser.add_argument("--workloads", type=int, nargs="*", default=[1, 2, 3, 4], help="numbers of workloads, from 1")
    args = parser.parse_args()
    if (args.peers is None) != (args.drivers is None):
        parser.error("--peers and --drivers go together")
    model = ["--model", str(args.model or embedded_model_path())]
    for number in args.workloads:
        workload = WORKLOADS[number - 1]
        print(f"\n{workload.name}", flush=True)
        ours = [measure_ours([*model, *workload.flags, "--tuning", tuning]) for tuning in ("lora", "full")]
        for result in ours:
            print(json.dumps(result), flush=True)
        if not args.peers:
            continue
        driver = [args.peers, str(args.drivers / workload.driver), *model, *workload.peer_flags]
        peers = [measure([*driver, *way]) for way in workload.peer_ways]
        for result in peers:
            print(json.dumps(result), flush=True)
        peer = min(peers, key=lambda result: result["wall_s"])
        assert peer["sequences"] == ours[0]["sequences"], "the workloads must be the same"
        for result in ours:
            wall, memory = result["wall_s"] / peer["wall_s"], result["peak_gb"] / peer["peak_gb"]
            names = f"{result['system']} / {peer['system']}"
            print(f"{names}: wall {wall:.3f} (1/{1 / wall:.1f}), peak memory {memory:.2f}", flush=True)


if __name__ == "__main__":
    main()
