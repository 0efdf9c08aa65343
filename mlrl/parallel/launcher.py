"""`accelerate launch` as launch.sh starts it: a process that fails has said why, and no pages are added to that.

    python -m mlrl.parallel.launcher [OPTIONS OF accelerate launch] SCRIPT [FLAGS]

It ends with the exit code of the process that failed. One that a signal ended could say nothing: then this says which,
and the exit code is 128 + the signal's number, as a shell has it.
"""

import logging
import signal
import subprocess
import sys
from collections.abc import Mapping

from accelerate.commands import launch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

# what torch logs of each process when one has failed
_OF_EVERY_FAILURE = ("failed (exitcode", "Sending process")


def main() -> None:
    """Runs accelerate's own command on this process's arguments."""
    elastic = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    elastic.addFilter(lambda record: not str(record.msg).startswith(_OF_EVERY_FAILURE))
    try:
        launch.main()
    except ChildFailedError as error:
        first, _ = error.get_first_failure()
        ends = {rank: failure.exitcode for rank, failure in error.failures.items()}
        sys.exit(report({first: ends[first], **ends}))
    except subprocess.CalledProcessError as error:  # where there is one process
        if not isinstance(error.cmd, list) or error.cmd[:1] != [sys.executable]:
            raise
        sys.exit(report({0: error.returncode}))


def report(ends: Mapping[int, int]) -> int:
    """Names the ranks that a signal ended, on stderr; the exit code of all.

    Args:
        ends: how the ranks that failed ended, the first of them first: an exit code, or a negative signal number.
    """
    killed = {rank: -code for rank, code in ends.items() if code < 0}
    for rank, number in killed.items():
        hint = ", as by a system that runs out of memory" if number == signal.SIGKILL else ""
        print(f"rank {rank} was ended by {_name(number)}{hint}", file=sys.stderr)
    return 128 + next(iter(killed.values())) if killed else next(iter(ends.values()))


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals
        return f"signal {number}"


if __name__ == "__main__":
    main()
