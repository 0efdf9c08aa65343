"""The memory of a container or a job is what counts, and freed memory goes back to the system."""

import os

import pytest
import torch

from mlrl.models import machine_memory
from mlrl.models.machine_memory import control_group_limits, memory_limit


def folder_of(tmp_path, files: dict[str, str]):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "limits"),
    [
        ({}, []),  # not Linux
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "8000\n"}, [8000]),  # in a container
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, []),
        (
            {
                "proc/self/cgroup": "0::/slurm/job_7/step_0\n",
                "sys/fs/cgroup/slurm/job_7/step_0/memory.max": "max\n",
                "sys/fs/cgroup/slurm/job_7/memory.max": "5000\n",
                "sys/fs/cgroup/slurm/memory.max": "9000\n",
            },
            [5000, 9000],
        ),
        (
            {
                "proc/self/cgroup": "12:cpu,cpuacct:/a\n4:memory:/docker/abc\n0::/docker/abc\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "7000\n",  # as version 1 is mounted in a container
            },
            [7000],
        ),
    ],
)
def test_limits_of_control_groups(files, limits, tmp_path):
    assert control_group_limits(folder_of(tmp_path, files)) == limits


def test_the_least_limit_counts(monkeypatch):
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limits, expected in (([], machine), ([2**62], machine), ([2**62, 12345], 12345)):
        monkeypatch.setattr(machine_memory, "control_group_limits", lambda limits=limits: limits)
        assert memory_limit.__wrapped__() == expected


@pytest.mark.skipif(machine_memory.malloc_trim() is None, reason="not glibc")
def test_freed_memory_is_given_back():
    """Pieces that keep the heap's end in use: the allocator itself gives nothing back of what is freed before them."""
    pieces = [torch.ones(2**14) for _ in range(3000)]  # of 64 kB: larger ones may be mapped by themselves
    kept = pieces[-1]
    full = resident_mb()
    del pieces
    machine_memory.give_back_memory()
    assert full - resident_mb() > 150
    assert kept.sum() == 2**14


def resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
