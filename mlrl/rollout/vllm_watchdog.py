"""Runs a command until it ends, or until the process that asked for it does, however that one ended.

    python vllm_watchdog.py PARENT_PID command ...

The command has a session of its own, so that all of its processes can be ended together: asked first, killed later.
A script of its own with nothing but the standard library, since it must outlive the one that started it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

_LOOK_EVERY_S = 0.2
_GRACE_S = 10.0


def main() -> int:
    """The exit code of the command; 0 where it was ended from here."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    asked = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: asked.append(number))
    server = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)
    try:
        while not asked and os.getppid() == parent:
            if (code := server.poll()) is not None:
                return code
            time.sleep(_LOOK_EVERY_S)
        return 0
    finally:
        _end(server)


def _end(server: subprocess.Popen) -> None:
    """Ends the session of the command, of which parts may be left when the command itself has ended."""
    _signal(server.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(_GRACE_S)
    deadline = time.monotonic() + 0.5
    while _signal(server.pid, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal(server.pid, signal.SIGKILL)


def _signal(group: int, number: int) -> bool:
    """Whether there was anybody to hear it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
