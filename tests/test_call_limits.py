"""Calls that come too late, die or cannot be sent: from a thread and from processes."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from mlrl.call_limits import CallFailed, LimitedCalls
from mlrl.calling import bind_call


def bound(func):
    return bind_call(func, field="reward_func", num_values=1, values_are="one value")


def limited(func, timeout=None, processes=0):
    function = bound(func)
    return LimitedCalls([function], timeout, processes).limited(function)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


PLACES = pytest.mark.parametrize("processes", [0, 2], ids=["thread", "processes"])


@PLACES
def test_results_and_errors_come_back_as_they_are(processes):
    call = limited(lambda value: [value, 10 / value], timeout=60, processes=processes)
    assert call([4], {}) == [4, 2.5]
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        call([0], {})
    assert call([5], {}) == [5, 2.0]  # an error is no failure of the place


@PLACES
def test_a_late_call_fails_in_time_and_the_next_one_works(processes):
    call = limited(lambda value: time.sleep(value) or value, timeout=0.3, processes=processes)
    assert call([0], {}) == 0
    started = time.monotonic()
    with pytest.raises(CallFailed, match="has not returned after 0.3 s") as caught:
        call([30], {})
    assert time.monotonic() - started < 5
    assert caught.value.setting == "reward_timeout=0.3" and "raise reward_timeout" in caught.value.remedy
    assert call([0], {}) == 0


@PLACES
def test_limits_hold_outside_of_the_main_thread(processes):
    seen = []

    def other() -> None:
        try:
            limited(lambda value: time.sleep(value), timeout=0.2, processes=processes)([30], {})
        except CallFailed as failure:
            seen.append(failure)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(10)
    assert len(seen) == 1


def test_calls_in_a_thread_are_made_by_one_thread():
    call = limited(lambda value: threading.get_ident(), timeout=60)
    assert call([0], {}) == call([1], {}) != threading.get_ident()


def test_without_limits_a_call_is_made_right_here():
    assert limited(lambda value: threading.get_ident())([0], {}) == threading.get_ident()


def test_a_process_that_never_lets_go_is_killed():
    # the regex tries 2^40 ways and holds the interpreter's lock meanwhile
    call = limited(lambda value: bool(re.match(r"(a+)+$", value)), timeout=0.3, processes=1)
    assert call(["aaa"], {}) is True
    with pytest.raises(CallFailed, match="has not returned after 0.3 s"):
        call(["a" * 40 + "b"], {})
    assert call(["ab"], {}) is False


def test_a_killed_process_takes_along_what_it_started(tmp_path):
    def starts_a_child(value):
        child = subprocess.Popen(["sleep", "60"])
        (tmp_path / "pid").write_text(str(child.pid))
        time.sleep(60)

    with pytest.raises(CallFailed):
        limited(starts_a_child, timeout=0.5, processes=1)([0], {})
    wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())))


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "its process was killed by SIGKILL, maybe for lack of memory"),
        (lambda: os.kill(os.getpid(), signal.SIGXCPU), "its process was killed by SIGXCPU"),
        (lambda: os._exit(3), "its process ended by itself with code 3"),
    ],
    ids=["killed", "over its limit", "left"],
)
def test_a_dead_process_is_named_and_replaced(end, how):
    call = limited(lambda value: end() if value else os.getpid(), processes=1)
    first = call([0], {})
    started = time.monotonic()
    with pytest.raises(CallFailed, match=how) as caught:
        call([1], {})
    assert time.monotonic() - started < 5 and caught.value.setting == "reward_processes=1"
    assert call([0], {}) != first


def test_a_process_killed_from_outside_during_its_call(tmp_path):
    def writes_and_waits(value):
        (tmp_path / "pid").write_text(str(os.getpid()))
        os.replace(tmp_path / "pid", tmp_path / "ready")
        time.sleep(60)

    def kill() -> None:
        wait_until((tmp_path / "ready").exists)
        os.kill(int((tmp_path / "ready").read_text()), signal.SIGKILL)

    threading.Thread(target=kill).start()
    with pytest.raises(CallFailed, match="killed by SIGKILL"):
        limited(writes_and_waits, processes=1)([0], {})


def test_a_process_killed_between_calls_loses_nothing():
    call = limited(lambda value: os.getpid(), processes=1)
    first = call([0], {})
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not is_alive(first))
    assert call([0], {}) not in (first, os.getpid())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_for_the_run_end_no_call(number):
    """A scheduler tells all processes that time is up; the run then finishes its step, rewards included."""
    call = limited(lambda value: (os.kill(os.getppid(), number), os.kill(os.getpid(), number), value)[-1], processes=1)
    assert [call([value], {}) for value in (1, 2)] == [1, 2]


def test_processes_of_a_function_can_be_terminated():
    def starts_and_stops(value):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        child.terminate()
        child.join(10)
        return child.exitcode

    assert limited(starts_and_stops, processes=1)([0], {}) == -signal.SIGTERM


def test_what_cannot_be_sent_is_said():
    call = limited(lambda value: value and (lambda: 0), processes=1)
    with pytest.raises(CallFailed, match="is given something that cannot be sent") as caught:
        call([threading.Lock()], {})
    assert not caught.value.by_chance and "set reward_processes to 0" in caught.value.remedy
    with pytest.raises(CallFailed, match="returned something that cannot be sent"):
        call([1], {})
    assert call([0], {}) == 0


def test_an_error_from_a_process_shows_the_users_lines():
    class Own(Exception):
        def __init__(self, a, b):  # cannot be made again from its arguments
            super().__init__(f"{a} and {b}")

    def fails(value):
        raise Own("this", "that") if value else KeyError("missing")

    call = limited(fails, processes=1)
    with pytest.raises(KeyError, match="missing") as caught:
        call([0], {})
    assert "in fails" in str(caught.value.__cause__) and __file__ in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match="Own: this and that"):
        call([1], {})


def test_processes_work_side_by_side_and_an_error_stops_them(tmp_path):
    function = bound(lambda value: time.sleep(value) or os.getpid())
    calls = LimitedCalls([function], processes=3)
    call = calls.limited(function)
    calls.map(lambda value: call([value], {}), [0, 0, 0])  # started by now
    started = time.monotonic()
    pids = calls.map(lambda value: call([value], {}), [0.4] * 3)
    assert time.monotonic() - started < 1.0 and len(set(pids)) == 3  # three times 0.4 s one by one

    def fails_or_waits(value):
        return call([60], {}) if value else 1 / 0

    started = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        calls.map(fails_or_waits, [1, 1, 0])
    assert time.monotonic() - started < 5
    assert calls.map(lambda value: call([value], {}), [0, 0]) != []


def test_nothing_is_left_when_the_run_is_killed(tmp_path):
    code = f"""
import os, sys, time
sys.path.insert(0, {os.getcwd()!r})
from tests.test_call_limits import limited
call = limited(lambda value: time.sleep(value) or print(os.getpid(), os.getppid(), flush=True), timeout=60, processes=1)
call([0], {{}})
call([60], {{}})
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2 and all(map(is_alive, pids))
    process.kill()
    process.wait()
    process.stdout.close()
    wait_until(lambda: not any(map(is_alive, pids)))


def test_nothing_is_left_when_the_calls_are_no_longer_needed():
    call = limited(lambda value: (os.getpid(), os.getppid()), processes=1)
    pids = call([0], {})
    del call
    wait_until(lambda: not any(map(is_alive, pids)))
