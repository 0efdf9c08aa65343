"""One failure stops all: every process holds a connection to the first, and hears at once when another one ends.

A collective call waits for all of its ranks, so a process that fails leaves the others waiting, on other machines for
as long as the backend's time limit. Here its last words, or the kernel's closing of its connection if it was killed,
reach the first process, which tells the rest to end. Nothing depends on time, so a slow reward is never taken for a
dead rank; and of many processes that fail together, one prints.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

import torch.distributed as dist

from mlrl.parallel.gloo_threads import let_gloo_threads_rest
from mlrl.parallel.group import Group

_ANSWER_S = 5.0  # longest wait for leave to print
_current: Lifeline | None = None


def fail(message: str, code: int) -> None:
    """Ends this process and all others with `message` on stderr, once for all of them."""
    _end(lambda: print(message, file=sys.stderr), code)


class Lifeline:
    """This process's connection, and on the first rank the server for all.

    Made once the process groups exist; from then on an exception that nobody catches ends the whole run.
    """

    def __init__(self, world: Group):
        self.world = world
        self.failing, self.done = False, False
        self._answer = threading.Event()
        self._may_print = True
        self._lock = threading.Lock()
        server = _Server(world.size) if world.is_first else None
        host = os.environ.get("MASTER_ADDR", "localhost")
        port, token = world.from_first(lambda: (server.port, server.token))
        self._socket = socket.create_connection((host, port), timeout=60)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that vanished is noticed too
        self._send(f"{token} {world.rank}")
        self._server = server
        threading.Thread(target=self._listen, name="lifeline", daemon=True).start()

    @classmethod
    def start(cls, world: Group) -> None:
        """Connects this process, and makes uncaught exceptions end all of them. Does nothing a second time."""
        global _current
        if _current is not None or world.size == 1:
            return
        _current = cls(world)
        printing = sys.excepthook

        def ends_all(kind, value, trace) -> None:
            code = 128 + signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1

            def report() -> None:
                print(f"rank {world.rank} of {world.size} failed; all stop", file=sys.stderr)
                printing(kind, value, trace)

            _end(report, code)

        sys.excepthook = ends_all
        atexit.register(_current.close)

    def close(self) -> None:
        """Leaves in peace; the first rank waits for the others, since they would take its end for a failure."""
        self.done = True
        with contextlib.suppress(OSError):
            self._send("bye")
        if self._server is not None:
            self._server.all_left.wait()
        if dist.is_initialized():
            dist.destroy_process_group()
        let_gloo_threads_rest()

    def ask(self) -> bool:
        """Whether this failing process is the one to print."""
        self.failing = True
        try:
            self._send("failed")
        except OSError:
            return False  # the first rank has gone, after printing
        self._answer.wait(_ANSWER_S)
        return self._may_print

    def printed(self) -> None:
        """The message is out: the others may be told."""
        with contextlib.suppress(OSError):
            self._send("printed")

    def _send(self, line: str) -> None:
        with self._lock:
            self._socket.sendall(f"{line}\n".encode())

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            for line in self._socket.makefile():
                word = line.strip()
                if word in ("print", "quiet"):
                    self._may_print = word == "print"
                    self._answer.set()
                elif word == "stop":
                    break
        self._may_print &= self._answer.is_set()
        self._answer.set()
        if not self.done and not self.failing:
            _flush()
            os._exit(1)


class _Server:
    """On the first rank: hears who fails or vanishes, lets one speak, and stops the rest."""

    def __init__(self, size: int):
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self.listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=size)
        self.port = self.listener.getsockname()[1]
        self.token = secrets.token_hex(16)
        self.size = size
        self.members: dict[int, socket.socket] = {}
        self.left: set[int] = set()
        self.all_left = threading.Event()
        self.speaker: int | None = None
        self.lock = threading.Lock()
        threading.Thread(target=self._accept, name="lifeline-server", daemon=True).start()

    def _accept(self) -> None:
        while len(self.members) < self.size:
            connection, _ = self.listener.accept()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        rank = None
        with contextlib.suppress(OSError):
            lines = connection.makefile()
            token, _, number = lines.readline().strip().partition(" ")
            if token != self.token:  # a stranger
                connection.close()
                return
            rank = int(number)
            self.members[rank] = connection
            for line in lines:
                word = line.strip()
                if word == "bye":
                    self._leave(rank)
                elif word == "failed":
                    self._let_speak(rank, connection)
                elif word == "printed":
                    break
        if rank is not None and rank not in self.left:
            self._stop_all(rank)

    def _leave(self, rank: int) -> None:
        with self.lock:
            self.left.add(rank)
            if len(self.left) == self.size:
                self.all_left.set()

    def _let_speak(self, rank: int, connection: socket.socket) -> None:
        with self.lock:
            first = self.speaker is None
            if first:
                self.speaker = rank
        connection.sendall(b"print\n" if first else b"quiet\n")

    def _stop_all(self, rank: int) -> None:
        with self.lock:
            if self.speaker is None:
                self.speaker = rank
                print(f"rank {rank} of {self.size} was killed; all stop", file=sys.stderr, flush=True)
            if self.speaker != rank:
                return  # the one that speaks stops the rest
            for connection in list(self.members.values()):
                with contextlib.suppress(OSError):
                    connection.sendall(b"stop\n")


def _end(report: Callable[[], None], code: int) -> None:
    """Reports, once for all processes, and ends this one without waiting for anybody."""
    line, local_rank = _current, int(os.environ.get("LOCAL_RANK", "0"))
    if line is None and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        report()
        _flush()
        sys.exit(code)
    if line is None:  # not connected yet: the launcher stops the others as soon as one ends, so only it is heard
        time.sleep(3.0 if local_rank else 0.0)
        may_print = True
    else:
        may_print = line.ask()
    try:
        if may_print:
            report()
    except Exception:  # a broken pipe must not keep the others waiting
        traceback.print_exc()
    finally:
        _flush()
        if line is not None:
            if may_print:
                line.printed()
            time.sleep(0.5)  # told before this process's end is seen by the launcher
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
