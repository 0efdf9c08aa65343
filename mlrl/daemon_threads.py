"""Threads that nothing waits for at the end of the process, unlike those of `concurrent.futures`.

A call that hangs, in a server or in a user's function, must not keep a run alive that an error or Ctrl-C has ended.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class DaemonThreads:
    """`count` threads called `name` for one call after another. Leaving it as a context manager ends them."""

    def __init__(self, count: int, name: str):
        self.count = count
        self._calls: queue.SimpleQueue[tuple[Future, Callable[..., Any], tuple] | None] = queue.SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def __enter__(self) -> DaemonThreads:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def submit(self, function: Callable[..., Any], *values: Any) -> Future:
        """The result to come, or the exception."""
        result: Future = Future()
        self._calls.put((result, function, values))
        return result

    def end(self) -> None:
        """Cancels calls that have not begun; a thread ends after the call that it is in, which is not waited for."""
        while not self._calls.empty():
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                break
            if call is not None and call[0].cancel():
                call[0].set_running_or_notify_cancel()  # for who waits for it
        for _ in range(self.count):
            self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            result, function, values = call
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(function(*values))
                except BaseException as error:
                    result.set_exception(error)
            del call, result, function, values  # what they hold may be large
