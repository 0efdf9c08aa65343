"""Being asked to stop: SIGTERM and SIGUSR1 (batch systems), SIGINT (Ctrl-C), and the end of the launcher."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from types import FrameType

from mlrl.parallel.group import Group

LAUNCHED = "MLRL_LAUNCHED"  # set by launch.sh
STOPPED = 75
"""Exit code of a run that was asked to stop and can be resumed: EX_TEMPFAIL of sysexits.h"""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_ONE_PRESS_S = 1.0  # a terminal and a launcher may both deliver the same Ctrl-C
_PR_SET_PDEATHSIG = 1


class Stopped(SystemExit):
    """The run was asked to stop, has written a checkpoint and ends; exit code 75, 130 after Ctrl-C.

    Under launch.sh, which gives these codes itself, it is 0: launchers print pages about any other.
    """

    def __init__(self, number: int):
        code = 128 + number if number == signal.SIGINT else STOPPED
        super().__init__(0 if os.environ.get(LAUNCHED) else code)


class StopRequests:
    """Hears signals that ask a run to stop; use as a context manager around what may be stopped between steps.

    The first one is noted and answered when the run asks; a later Ctrl-C stops it at once, as without this. Does
    nothing outside of the main thread, where Python lets nobody listen to signals.

    Args:
        world: all ranks, which agree on what was heard.
        says: whether this process tells the user.
    """

    def __init__(self, world: Group, says: bool):
        self.world, self.says = world, says
        self._heard: int | None = None
        self._since = 0.0
        self._at_once = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._hear) for number in _SIGNALS}
            _hear_of_parent()
        return self

    def __exit__(self, *exception: object) -> None:
        ends = self._heard is not None and os.environ.get(LAUNCHED)  # launch.sh repeats SIGTERM until the end
        for number, handler in self._before.items():
            if (ends and number != signal.SIGINT) or self._at_once:
                handler = signal.SIG_IGN
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def asked(self) -> int | None:
        """The signal by which some rank was asked to stop, on all ranks; None where none was."""
        heard = [number for number in self.world.gather(self._heard) if number is not None]
        return heard[0] if heard else None

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._heard is None:
            self._heard, self._since = number, now
            if self.says:
                name = signal.Signals(number).name
                again = "; again: at once" if number == signal.SIGINT else ""
                text = f"\n{name}: the run stops with a checkpoint as soon as it can go on from there{again}\n"
                with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream without a file, or closed
                    os.write(sys.stderr.fileno(), text.encode())
        elif number == signal.SIGINT and now - self._since > _ONE_PRESS_S:
            self._at_once = True  # what still comes of this press must not disturb the end
            for repeated in _SIGNALS:
                signal.signal(repeated, signal.SIG_IGN)
            raise KeyboardInterrupt


def _hear_of_parent() -> None:
    """Asks Linux for a SIGTERM when the launcher ends, so that no process stays behind without it."""
    if sys.platform == "linux" and "ACCELERATE_MIXED_PRECISION" in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
