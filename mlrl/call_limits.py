"""Time limits for a task's functions: in a thread, or in processes (`mlrl.call_processes`).

A thread cannot be stopped: a late call there goes on in the background, and one that never lets other threads run
(a regex that backtracks without end) is not noticed. Processes are killed, whatever they do.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from typing import Any, TypeVar

from mlrl.call_processes import CallProcesses, Died, Late, Unsendable
from mlrl.calling import BoundCall
from mlrl.daemon_threads import DaemonThreads

P, R = TypeVar("P"), TypeVar("R")


class CallFailed(Exception):
    """A call has no result; the text says what happened to the function.

    Attributes:
        setting: the field and value that it broke.
        remedy: what would be right, as the start of a sentence.
        by_chance: whether the next call may succeed, so that a score may stand for this one.
    """

    def __init__(self, setting: str, problem: str, remedy: str, by_chance: bool = True):
        super().__init__(problem)
        self.setting, self.remedy, self.by_chance = setting, remedy, by_chance


class _Stopped(Exception):
    """A call was ended because another one has failed."""


class LimitedCalls:
    """Calls of some functions, each within `timeout` seconds (None: no limit), in `processes` processes (0: here)."""

    def __init__(self, functions: Sequence[BoundCall], timeout: float | None = None, processes: int = 0):
        self.functions, self.timeout, self.processes = list(functions), timeout, processes
        self._pool = CallProcesses(self.functions, processes) if processes else None
        self._thread: _CallThread | None = None
        self._stopping = False

    def limited(self, function: BoundCall) -> Callable[[Sequence[Any], Mapping[str, Any]], Any]:
        """One of the functions, to be called as before; raises `CallFailed` beside what it raises itself."""
        number = self.functions.index(function)
        return lambda values, named: self._call(number, values, named)

    def map(self, function: Callable[[P], R], pieces: Sequence[P]) -> list[R]:
        """`function` of every piece, as many at a time as there are processes; the first error stops the rest."""
        if self._pool is None or len(pieces) < 2:
            return [function(piece) for piece in pieces]
        self._stopping = False
        with DaemonThreads(min(self.processes, len(pieces)), "mlrl-calls") as threads:
            results = [threads.submit(function, piece) for piece in pieces]
            try:
                done, waiting = wait(results, return_when=FIRST_EXCEPTION)
                return [result.result() for result in (results if not waiting else done)]
            except BaseException:
                self._stopping = True
                threads.end()
                self._pool.stop()
                wait(results)  # which is soon, with their processes killed
                raise

    def _call(self, number: int, values: Sequence[Any], named: Mapping[str, Any]) -> Any:
        try:
            if self._pool is not None:
                return self._pool.call(number, self.timeout, values, dict(named))
            if self.timeout is None:
                return self.functions[number](values, named)
            return self._call_in_thread(lambda: self.functions[number](values, named))
        except Late:
            problem, remedy = f"has not returned after {self.timeout:g} s", "Make it faster, raise reward_timeout"
            raise CallFailed(f"reward_timeout={self.timeout!r}", problem, remedy) from None
        except Died as death:
            if self._stopping:
                raise _Stopped from None
            setting, problem = f"reward_processes={self.processes!r}", f"has no result, because its process {death}"
            raise CallFailed(setting, problem, "See what ended it, set fewer processes") from None
        except Unsendable as problem:
            setting, remedy = f"reward_processes={self.processes!r}", "Use plain data, set reward_processes to 0"
            raise CallFailed(setting, str(problem), remedy, by_chance=False) from None

    def _call_in_thread(self, call: Callable[[], Any]) -> Any:
        thread, self._thread = self._thread or _CallThread(), None
        error, result = thread.call(call, self.timeout)
        self._thread = thread  # one that is late is never used again
        if error is not None:
            raise error
        return result


class _CallThread:
    """A thread for one call after another, so that what a user keeps by thread (a database connection) stays usable."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[tuple[BaseException | None, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="mlrl-limited-call", daemon=True).start()

    def call(self, call: Callable[[], Any], timeout: float | None) -> tuple[BaseException | None, Any]:
        self.calls.put(call)
        try:
            return self.answers.get(timeout=timeout)
        except queue.Empty:
            raise Late from None

    def _run(self) -> None:
        while True:
            call = self.calls.get()
            try:
                self.answers.put((None, call()))
            except BaseException as error:
                self.answers.put((error, None))
