import subprocess
import sys
import threading
import time
from concurrent.futures import wait

import pytest

from mlrl.daemon_threads import DaemonThreads

HANGING = """
import time
from mlrl.daemon_threads import DaemonThreads

with DaemonThreads(2, "calls") as threads:
    threads.submit(time.sleep, 60)
    raise SystemExit(3)
"""


def test_results_and_errors_come_back_and_the_threads_end():
    with DaemonThreads(3, "own-name") as threads:
        results = [threads.submit(lambda n: 12 // n, n) for n in (1, 2, 0, 3)]
        assert [results[n].result() for n in (0, 1, 3)] == [12, 6, 4]
        with pytest.raises(ZeroDivisionError):
            results[2].result()
    ends = time.monotonic() + 5
    while any(thread.name == "own-name" for thread in threading.enumerate()):
        assert time.monotonic() < ends


def test_one_thread_takes_one_call_after_another_and_drops_those_that_have_not_begun():
    begun, go_on, seen = threading.Event(), threading.Event(), []

    def first():
        begun.set()
        go_on.wait(10)
        seen.append(threading.get_ident())

    with DaemonThreads(1, "one") as threads:
        running, waiting = threads.submit(first), threads.submit(seen.append, "never")
        begun.wait(10)
    assert wait([waiting], 10).done and waiting.cancelled() and not running.done()
    go_on.set()
    running.result(10)
    assert len(seen) == 1 and seen[0] != threading.get_ident()


def test_the_end_of_the_process_waits_for_no_call():
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=50)
    assert done.returncode == 3 and time.monotonic() - started < 30, done.stderr
