"""The process that runs a program, seen from the process that checks it."""

import os
import signal
import time

import isolate
import wire

WAITING = 3  # a program that waits gets so many seconds of the clock for each of processor time,
SLOWEST = 10  # and so does one that gets less than this part of a core


class Ended(BaseException):
    """The program is over; no `except Exception` of a test may hold it. `reason` is timeout or died."""

    def __init__(self, reason):
        super().__init__(reason)
        self.reason = reason


class Program:
    """A child process that runs `serve(read_fd, write_fd)` under `limits`, with nothing else open."""

    def __init__(self, serve, limits):
        ours, theirs = os.pipe(), os.pipe()  # to the program, from the program
        self.ended = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setpgid(0, 0)
                null = os.open(os.devnull, os.O_RDWR)
                for fd in range(3):
                    os.dup2(null, fd)
                os.dup2(ours[0], 3)
                os.dup2(theirs[1], 4)
                os.closerange(5, 1 << 16)
                isolate.restrict(limits)
                serve(3, 4)
            finally:
                os._exit(1)
        os.close(ours[0])
        os.close(theirs[1])
        self._to, self._from = ours[1], theirs[0]
        os.set_blocking(self._to, False)
        self._test_limit = self._limit = 0.0
        self._start = self._test_start = (0.0, time.monotonic())

    def set_limits(self, test_s, total_s):
        """Starts the clock of the whole program: processor seconds a test and in all."""
        self._test_limit, self._limit = test_s, total_s
        self._start = (0.0, time.monotonic())
        self.begin_test()

    def begin_test(self):
        """Starts the clock of a test."""
        self._test_start = self._now()

    def used(self):
        """Processor seconds so far."""
        return self._now()[0]

    def ask(self, message):
        """Sends a message and returns the answer.

        Raises:
            Ended: out of time, or the program's process is gone; from then on always.
        """
        if self.ended:
            raise Ended(self.ended)
        try:
            wire.send(self._to, message, self._wait)
        except OSError:
            self.end("died")
        return self.listen()

    def listen(self):
        """The next message of the program; raises like `ask`."""
        try:
            return wire.receive(self._from, self._wait)
        except (wire.Broken, OSError):
            self.end("died")

    def end(self, reason):
        """Kills the program and raises `Ended`."""
        self.ended = reason
        self.kill()
        raise Ended(reason)

    def kill(self):
        """Kills the program's process group."""
        for kill in (os.killpg, os.kill):
            try:
                kill(self.pid, signal.SIGKILL)
            except OSError:
                continue

    def _now(self):
        try:
            return isolate.cpu_seconds(self.pid), time.monotonic()
        except OSError:
            return self._test_start[0], time.monotonic()

    def _wait(self, fd):
        pause = 0.02
        while not wire.ready(fd, pause, to_write=fd == self._to):
            cpu, clock = self._now()
            for (cpu_start, start), limit in ((self._test_start, self._test_limit), (self._start, self._limit)):
                used = cpu - cpu_start
                if used > limit or clock - start > max(WAITING * limit, SLOWEST * used):
                    self.end("timeout")
            pause = min(0.2, 2 * pause)
