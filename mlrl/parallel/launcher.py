"""`accelerate launch` as launch.sh starts it: a process that fails has said why, and no pages are added to that.

    python -m mlrl.parallel.launcher [OPTIONS OF accelerate launch] SCRIPT [FLAGS]

It ends with the exit code of the process that failed. One that a signal ended could say nothing: then this says which,
and the exit code is 128 + the signal's number, as a shell has it.
"""

import logging
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

from accelerate.commands import launch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

# what torch logs of each process when one has failed
_OF_EVERY_FAILURE = ("failed (exitcode", "Sending process")


def main() -> None:
    """Runs accelerate's own command on this process's arguments."""
    elastic = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    elastic.addFilter(lambda record: not str(record.msg).startswith(_OF_EVERY_FAILURE))
    parser = launch.launch_command_parser()
    parser.error = _refuse  # argparse's own prints some two hundred lines of usage first
    args = parser.parse_args()
    try:
        launch.launch_command(args)
    except ChildFailedError as error:
        sys.exit(report([(failure.timestamp, rank, failure.exitcode) for rank, failure in error.failures.items()]))
    except subprocess.CalledProcessError as error:  # where there is one process
        if not isinstance(error.cmd, list) or error.cmd[:1] != [sys.executable]:
            raise
        sys.exit(report([(0, 0, error.returncode)]))


def _refuse(message: str) -> NoReturn:
    print(
        f"accelerate launch: {message}. Before the script stand options of accelerate launch, behind it those of the "
        "script: train/magrpo.py --max_steps 3",
        file=sys.stderr,
    )
    sys.exit(2)


def report(ends: Sequence[tuple[int, int, int]]) -> int:
    """The exit code of all; names the rank that failed first on stderr, if a signal ended it.

    Args:
        ends: of each rank that failed the time in seconds, the rank, and exit code or negative signal number. Those
            that were still running then got a SIGTERM from the launcher, which is no failure of theirs. In the same
            second an abort is what libraries do when a peer has failed.
    """
    order = {-signal.SIGABRT: 2}  # of those in one second; other signals 0, exit codes 1
    _, rank, code = min(
        ends, key=lambda end: (end[2] == -signal.SIGTERM, end[0], order.get(end[2], int(end[2] >= 0)), end[1])
    )
    if code >= 0:
        return code
    hint = ", as by a system that runs out of memory" if code == -signal.SIGKILL else ""
    print(f"rank {rank} was ended by {_name(-code)}{hint}", file=sys.stderr)
    return 128 - code


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals
        return f"signal {number}"


if __name__ == "__main__":
    main()
