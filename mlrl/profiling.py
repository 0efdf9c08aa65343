"""Where the time of a run goes: seconds of every phase of a step, and what of them went into waiting for others.

A phase (sampling, update, evaluation …) lasts until the next one begins. Inside it `span` takes out what is of another
kind: calls of the task, messages between ranks, drawing on vLLM servers and weights on their way there, files, and
DeepSpeed's optimizer step with the gathering of weights that ends it (what it sends during forward and backward runs
beside them and counts as theirs). Every second is counted once, of the thread that made the profile; what others do
meanwhile takes none of it. Nothing is measured, and nothing is waited for, unless a profile is open.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from mlrl.run_folder import append_jsonl

BETWEEN = "between steps"
_open: Profile | None = None


class Profile:
    """Seconds by `phase` and by `phase/span` of this process, a line a step in a JSONL file.

    Args:
        path: the file; lines are appended.
        on_gpu: waits for the GPU at every border, so that work counts where it was asked for.
    """

    def __init__(self, path: Path, on_gpu: bool = False):
        self.path, self.on_gpu = path, on_gpu
        self.totals: dict[str, float] = {}
        self._step: dict[str, float] = {}
        self._phase, self._spans = BETWEEN, []
        self._thread = threading.get_ident()
        self._since = self._now()

    @property
    def is_own_thread(self) -> bool:
        """Whether the calling thread is the one that is measured."""
        return threading.get_ident() == self._thread

    def phase(self, name: str) -> None:
        """From now on time belongs to this phase."""
        self._count()
        self._phase = name

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time in here belongs to `phase/name`; the innermost of several has it."""
        self._count()
        self._spans.append(name)
        try:
            yield
        finally:
            self._count()
            self._spans.pop()

    def end_step(self, step: int | None) -> None:
        """Writes the line of a step: all time since the line before it. None: what came after the last step."""
        self.phase(BETWEEN)
        seconds = {name: round(value, 6) for name, value in sorted(self._step.items())}
        append_jsonl(self.path, [{"step": step, "wall_s": round(sum(self._step.values()), 6), "seconds": seconds}])
        for name, value in self._step.items():
            self.totals[name] = self.totals.get(name, 0.0) + value
        self._step = {}

    def shares(self) -> str:
        """The largest parts of this process's lines so far, in words: `sampling 61 %, update 30 %`."""
        whole = sum(self.totals.values()) or 1.0
        parts = sorted(self.totals.items(), key=lambda part: -part[1])
        return ", ".join(f"{name} {100 * value / whole:.0f} %" for name, value in parts if value >= 0.005 * whole)

    def _count(self) -> None:
        now = self._now()
        key = f"{self._phase}/{self._spans[-1]}" if self._spans else self._phase
        self._step[key] = self._step.get(key, 0.0) + now - self._since
        self._since = now

    def _now(self) -> float:
        if self.on_gpu:
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()


@contextlib.contextmanager
def profiling(profile: Profile | None) -> Iterator[Profile | None]:
    """`profile` is the open one in here; None leaves everything unmeasured."""
    global _open
    before, _open = _open, profile
    try:
        yield profile
    finally:
        _open = before


def phase(name: str) -> None:
    """Tells the open profile, if any, of a new phase."""
    if _open is not None:
        _open.phase(name)


def span(name: str) -> contextlib.AbstractContextManager[None]:
    """Takes what is done in here out of its phase, in the open profile, if any."""
    return _open.span(name) if _open is not None and _open.is_own_thread else contextlib.nullcontext()
