"""A number of places that a process and its forks share; what holds one and dies gives it back."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator


class Slots:
    """`count` places, each the lock of a file: the system frees it with the process that holds it."""

    def __init__(self, count: int):
        self.count = count
        self._folder = tempfile.mkdtemp(prefix="mlrl-slots-")
        weakref.finalize(self, _remove, self._folder, os.getpid())

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Waits for a free place, and holds it."""
        while (place := self._take()) is None:
            time.sleep(0.01)
        try:
            yield
        finally:
            os.close(place)

    def _take(self) -> int | None:
        """The open file of a place that was free; None where none is."""
        for number in range(self.count):
            file = os.open(os.path.join(self._folder, str(number)), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except BlockingIOError:
                os.close(file)
        return None


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a fork has the object, and not the say
        shutil.rmtree(folder, ignore_errors=True)
