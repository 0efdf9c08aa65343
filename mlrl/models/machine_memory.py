"""The memory that this process may use, and giving back what it no longer does."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path, PurePosixPath


@functools.cache
def memory_limit() -> int:
    """Bytes of main memory: the machine's, or less where a container, or a job of a cluster, is held to less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *control_group_limits()])


def control_group_limits(root: Path = Path("/")) -> list[int]:
    """Bytes that the control groups of this process (version 1 or 2), and the groups around them, may use."""
    limits = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        own = PurePosixPath(group.lstrip("/"))  # inside a container it may not be found, but the mount is the group
        texts = [_text(mount / folder / name).strip() for folder in (own, *own.parents)]
        limits += [int(text) for text in texts if text.isdecimal()]  # not "max"
    return limits


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def give_back_memory() -> None:
    """Returns freed memory of the C allocator to the system.

    What an update frees is in pieces between which packed weights do not fit, and the other way round: kept, the peak
    of a process is nearly the sum of both.
    """
    trim = malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def malloc_trim():
    """glibc's function of that name; None elsewhere."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
