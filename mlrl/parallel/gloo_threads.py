"""Waiting for gloo's own threads at the end of a process.

A thread of gloo completes a collective, which lets the caller go on, and only then gives back its tensors, for which it
takes Python's lock. If the interpreter has begun to end meanwhile, Python before 3.14 ends that thread instead, in the
middle of C++ code that may not be left: the process aborts ("terminate called without an active exception"), and a run
that has finished counts as failed. `destroy_process_group` joins the threads only of groups that nobody refers to.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

_NAME = "pt_gloo_runloop"  # by which PyTorch calls them
_PAUSE_S = 0.005  # in which Python's lock is free
_LONGEST_S = 10.0
_ABOUT = ("State:", "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")


def let_gloo_threads_rest() -> None:
    """Returns once they all sleep with nothing left to do, a few milliseconds as a rule and 10 s at most.

    One that waits for Python's lock gets it in the pause between two looks, and runs then, or waits for a processor.
    """
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():  # not Linux
        time.sleep(20 * _PAUSE_S)
        return
    end = time.monotonic() + _LONGEST_S
    before = _look(tasks)
    while time.monotonic() < end:
        time.sleep(_PAUSE_S)
        now = _look(tasks)
        if now == before and all("State:\tS" in status for status in now.values()):
            return
        before = now


def _look(tasks: Path) -> dict[str, str]:
    """By thread what the kernel says of it: its state, and how often it has gone to sleep or been put to it."""
    threads = {}
    for task in tasks.iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if (task / "comm").read_text().strip() == _NAME:
                status = (task / "status").read_text().splitlines()
                threads[task.name] = "\n".join(line for line in status if line.startswith(_ABOUT))
    return threads
