"""Processes that call a task's functions: several at a time, and killed where a call is late.

A function need not be picklable, since the processes are forks of this one; what it is given and what it returns is
sent. They are forked by a process of their own, itself forked before any weights are read: that one stays small, has no
threads and no GPU, and can replace a process at any time.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NoReturn

from mlrl.errors import ConfigError

# A scheduler or terminal may send these to every process; the run decides when to stop, and these end with it.
_FOR_THE_RUN = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Late(Exception):
    """A call took longer than allowed."""


class Died(Exception):
    """The process of a call ended before the call did; the text says how."""


class Unsendable(Exception):
    """What a call is given, or what it returned, has no form in which it could be sent; the text says which."""


class CallProcesses:
    """`count` processes with the same functions, each busy with one call at a time.

    What a function changes in memory stays in the process that called it.

    Raises:
        ConfigError: this system cannot fork processes.
    """

    def __init__(self, functions: Sequence[Callable], count: int):
        if not hasattr(os, "fork"):
            raise ConfigError(f"reward_processes={count!r}: {sys.platform} has no fork. Set reward_processes to 0.")
        self._control, theirs = Pipe()
        pid = _fork()
        if pid == 0:
            self._control.close()
            _end_with(lambda: _nursery(theirs, functions))
        theirs.close()
        self._nursery_pid = pid
        self._lock = threading.Lock()
        self._idle: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(count):
            self._idle.put(None)
        self._busy: set[_Process] = set()
        weakref.finalize(self, _dismiss, self._control, pid, os.getpid())

    def call(self, function: int, timeout: float | None, *arguments: Any) -> Any:
        """The result of a function, by its number; an exception of its own is raised here too.

        Raises:
            Late: it takes longer than `timeout` seconds; it is killed, with every process that it started.
            Died: its process ended.
            Unsendable: arguments or result cannot be sent.
        """
        message = _sendable((function, arguments), "is given")
        process = self._idle.get()
        try:
            process = self._start() if process is None else process
            self._busy.add(process)
            try:
                process.connection.send_bytes(message)
            except OSError:  # it died while it had nothing to do, so nothing is lost
                process = self._replace(process)
                process.connection.send_bytes(message)
            if not process.connection.poll(timeout):
                raise Late
            answer = process.connection.recv_bytes()
        except (EOFError, ConnectionError):
            how, process = self._end(process), None
            raise Died(how) from None
        except BaseException:
            if process is not None:
                self._end(process)
            process = None
            raise
        finally:
            self._busy.discard(process)
            self._idle.put(process)
        error, result, trace = pickle.loads(answer)
        if error is not None:
            error.__cause__ = _Trace(trace)
            raise error
        return result

    def stop(self) -> None:
        """Kills what is busy, so that every call under way ends as `Died`."""
        for process in list(self._busy):
            process.kill()

    def _start(self) -> _Process:
        with self._lock:
            ours, theirs = Pipe()
            try:
                self._control.send(None)
                send_handle(self._control, theirs.fileno(), self._nursery_pid)
                return _Process(ours, self._control.recv())
            except (EOFError, OSError):
                raise Died("cannot be started: the process that starts it was ended") from None
            finally:
                theirs.close()

    def _replace(self, process: _Process) -> _Process:
        self._end(process)
        process = self._start()
        self._busy.add(process)
        return process

    def _end(self, process: _Process) -> str:
        """Makes sure that a process is gone; how it ended, in words."""
        self._busy.discard(process)
        process.kill()
        process.connection.close()
        with self._lock:
            try:
                self._control.send(process.pid)
                code = os.waitstatus_to_exitcode(self._control.recv())
            except (EOFError, OSError):
                return "was ended from outside, with the process that starts it"
        if code >= 0:
            return f"ended by itself with code {code}"
        hint = ", maybe for lack of memory" if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"


class _Process:
    """One of the processes, seen from here."""

    def __init__(self, connection: Connection, pid: int):
        self.connection, self.pid = connection, pid

    def kill(self) -> None:
        for kill in (os.kill, os.killpg):  # it leads a group, with whatever it has started
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)


class _Trace(Exception):
    """The traceback of a call, as text: shown above that of its exception."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _fork() -> int:
    for stream in (sys.stdout, sys.stderr):  # or both processes would write what is still in them
        stream.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads here: the child uses nothing that they hold
        return os.fork()


def _end_with(work: Callable[[], None]) -> NoReturn:
    """Does the work of a forked process, which must not run what its parent does at the end."""
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _nursery(control: Connection, functions: Sequence[Callable]) -> None:
    """Forks a process for every None, and waits for the end of every process id, until this side is closed."""
    os.setsid()
    for number in _FOR_THE_RUN:
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs that a function starts would inherit
    alive: set[int] = set()
    with contextlib.suppress(EOFError, OSError):
        while (request := control.recv()) != "end":
            if request is None:
                handle = recv_handle(control)
                pid = _fork()
                if pid == 0:
                    control.close()
                    _end_with(functools.partial(_serve, Connection(handle), functions))
                os.close(handle)
                alive.add(pid)
                control.send(pid)
            else:
                alive.discard(request)
                control.send(os.waitpid(request, 0)[1])
    for pid in alive:
        _Process(control, pid).kill()


def _serve(connection: Connection, functions: Sequence[Callable]) -> None:
    """Answers calls, one after the other."""
    os.setsid()
    os.register_at_fork(before=_wait_to_hear, after_in_parent=_stop_waiting, after_in_child=_hear_again)
    if "torch" in sys.modules:  # its threads are not there after a fork
        sys.modules["torch"].set_num_threads(1)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            number, arguments = pickle.loads(connection.recv_bytes())
            try:
                answer = _sendable((None, functions[number](*arguments), ""), "returned")
            except BaseException as error:
                answer = _sendable_error(error)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            connection.send_bytes(answer)


def _wait_to_hear() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_RUN)


def _stop_waiting() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_THE_RUN)


def _hear_again() -> None:
    """A process that a function forks can be ended as usual, from its first moment on."""
    for number in _FOR_THE_RUN:
        signal.signal(number, signal.SIG_DFL)
    _stop_waiting()


def _sendable(content: Any, what: str) -> bytes:
    try:
        return pickle.dumps(content)
    except Exception as error:  # pickling runs code of any kind of object
        raise Unsendable(f"{what} something that cannot be sent to another process ({error})") from None


def _sendable_error(error: BaseException) -> bytes:
    frames = error.__traceback__.tb_next  # from the call on
    trace = "".join(traceback.format_exception(type(error), error, frames))
    error = error.with_traceback(None)
    try:
        content = pickle.dumps((error, None, trace))
        pickle.loads(content)
        return content
    except Exception:  # an exception of the user's own kind that cannot be made again from its arguments
        return pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), None, trace))


def _dismiss(control: Connection, pid: int, owner: int) -> None:
    """Ends the nursery, which ends the rest."""
    if os.getpid() != owner:
        return  # a fork has the object, and not the say
    with contextlib.suppress(OSError):
        control.send("end")
        control.close()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
