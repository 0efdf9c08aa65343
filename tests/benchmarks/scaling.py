"""The same work on 1, 2 … processes of this machine: tokens a second, and the share of time spent in communication.

    python -m tests.benchmarks.scaling --processes 1 2

On CPU every process has one thread, so that the processes are what is added. The share holds the waiting for slower
ranks too.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from mlrl.embedded import embedded_model_path

ROOT = Path(__file__).resolve().parents[2]


def measure(processes: int, flags: list[str]) -> dict:
    """Runs the workload on so many processes and reads the line that the first of them prints."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
        probe.close()
        launch = ["--num_processes", str(processes), "--main_process_port", port]
        launch += ["--config_file", str(ROOT / "accelerate_configs/cpu.yaml"), *(["--cpu"] if processes == 1 else [])]
        command = [sys.executable, "-m", "accelerate.commands.launch", *launch, "tests/benchmarks/ours.py", *flags]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "BENCHMARK_FOLDER": folder}
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--model", default=None, help="model folder; default: the embedded one")
    parser.add_argument("--items", default="4")
    args = parser.parse_args()
    flags = ["--model", args.model or embedded_model_path(), "--items", args.items, "--threads", "1"]
    results = [measure(count, flags) for count in args.processes]
    for result in results:
        speedup = results[0]["wall_s"] / result["wall_s"]
        print(
            f"{result['processes']} processes: {result['wall_s']} s ({speedup:.2f} × as fast), sampling "
            f"{result['sampling_tokens_per_s']} tokens/s, update {result['update_tokens_per_s']} tokens/s, "
            f"communication {100 * result['communication_share']:.0f} %, {result['peak_gb']} GB a rank"
        )


if __name__ == "__main__":
    main()
