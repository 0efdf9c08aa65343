"""Two machines on one: network namespaces joined by a pair of virtual Ethernet devices, `./launch.sh` in each.

Neither sees a network but that pair, so what crosses from one to the other crosses as between two machines.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.launching import ROOT, Finished, Job

INTERFACE = "mlrl0"


@dataclass(frozen=True)
class Machine:
    """A network namespace with an address of its own on `INTERFACE`."""

    namespace: str
    address: str


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two namespaces that reach each other and nothing else, until the block ends.

    Skips the test, with the reason, where they cannot be made.
    """
    if not sys.platform.startswith("linux") or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux and the program ip (package iproute2)")
    if os.geteuid() != 0:
        pytest.skip("making network namespaces needs root")
    run = uuid.uuid4().hex[:8]
    first, second = Machine(f"mlrl-{run}-0", "10.213.0.1"), Machine(f"mlrl-{run}-1", "10.213.0.2")
    try:
        try:
            _make(first, second)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {' '.join(error.cmd)}: {error.stderr.strip()}")
        yield first, second
    finally:
        for machine in (first, second):
            _remove(machine)


def launch_on(
    machines: Sequence[Machine],
    arguments: Sequence[str | Path],
    folder: Path,
    processes: int = 1,
    env: Mapping[str, str] | None = None,
    timeout: float = 300.0,
) -> list[Finished]:
    """`./launch.sh arguments` on every machine at once, until all of them end.

    Args:
        folder: an empty one, where launch.sh gets a `.venv` that is the Python of the tests and installs nothing; it
            is the working folder of all, so relative paths of a run meet there as on a shared disk.
        processes: on each machine, on CPUs.

    Raises:
        AssertionError: one ran longer than `timeout` seconds or left a process behind; names what each printed.
    """
    script = checkout(folder)
    jobs = []
    for rank, machine in enumerate(machines):
        place = {
            "NUM_MACHINES": str(len(machines)),
            "MACHINE_RANK": str(rank),
            "MASTER_ADDR": machines[0].address,
            "PROCESSES_PER_MACHINE": str(processes),
            "CUDA_VISIBLE_DEVICES": "",
        }
        enter = ["ip", "netns", "exec", machine.namespace]
        jobs.append(Job([*enter, script, *arguments], {**place, **(env or {})}, cwd=folder))
    ends = time.monotonic() + timeout
    finished, faults = [], []
    try:
        for rank, job in enumerate(jobs):
            try:
                finished.append(job.finish(max(0.0, ends - time.monotonic())))
            except AssertionError as fault:
                faults.append(f"machine {rank} {fault}")
    finally:
        for job in jobs:
            job.kill()
    assert not faults, "\n".join([*faults, *map(str, finished)])
    return finished


def checkout(folder: Path) -> Path:
    """launch.sh, and what it reads, in `folder`; its Python is the one that runs the tests."""
    shutil.copy(ROOT / "launch.sh", folder)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name in ("accelerate_configs", "train", "mlrl"):
        (folder / name).symlink_to(ROOT / name)
    python = folder / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\n[ "$1 $2" = "-m pip" ] && exit\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return folder / "launch.sh"


def _make(first: Machine, second: Machine) -> None:
    for machine in (first, second):
        _ip("netns", "add", machine.namespace)
    pair = ["type", "veth", "peer", "name", INTERFACE, "netns", second.namespace]
    _ip("link", "add", INTERFACE, "netns", first.namespace, *pair)
    for machine in (first, second):
        _ip("-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", INTERFACE)
        for device in ("lo", INTERFACE):
            _ip("-n", machine.namespace, "link", "set", device, "up")
    _ip("netns", "exec", first.namespace, "true")  # entering one may be refused where making it is not


def _remove(machine: Machine) -> None:
    """The devices go with the namespace; one that was never made is no fault."""
    subprocess.run(["ip", "netns", "delete", machine.namespace], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
