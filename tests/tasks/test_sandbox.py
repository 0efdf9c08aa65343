import os
import time
import warnings
from pathlib import Path

import pytest

from mlrl.errors import ConfigError
from mlrl.tasks import sandbox as module
from mlrl.tasks.sandbox import FunctionJob, Limits, Outcome, Sandbox, UnittestJob, missing_protection

MISSING = missing_protection()
LIMITS = Limits(test_s=0.25, total_s=4, processes=6)
needs_files = pytest.mark.skipif("file system" in MISSING, reason="no mount namespaces here")
needs_processes = pytest.mark.skipif("processes" in MISSING, reason="no process namespaces here")
needs_network = pytest.mark.skipif("network" in MISSING, reason="no network namespaces here")


def job(code, *tests, setup=""):
    return FunctionJob(code, "f", tests or ("assert f(2) == 4",), setup)


def run(code, *tests, setup="", limits=LIMITS):
    return Sandbox(limits, 1).run([job(code, *tests, setup=setup)])[0]


# ----------------------------------------------------------------------------------------------- programs of good will


def test_each_test_has_its_outcome():
    verdict = run("def f(x):\n    return x * x", "assert f(2) == 4", "assert candidate(3) == 8", "assert f(-1) == 1")
    assert [outcome.status for outcome in verdict.outcomes] == ["passed", "failed", "passed"]
    assert verdict.outcomes[1].message == "f(3) returned 9"
    assert (verdict.loaded, verdict.passed, verdict.total) == (True, 2, 3)


def test_plain_values_cross_unchanged_both_ways():
    values = [
        "None", "True", "0", "-(10**30)", "0.1", "float('inf')", "'\\ud800 é \\x00'", "b'ab'", "(1, [2, {3}])",
        "{(1, 2): {'a': None}}", "frozenset({1})", "1 + 2j", "range(2, 9, 3)", "[]", "{}", "set()", "2**53",
    ]  # fmt: skip
    tests = [f"assert f({value}) == {value} and type(f({value})) is type({value})" for value in values]
    assert [o.status for o in run("def f(x):\n    return x", *tests).outcomes] == ["passed"] * len(values)


def test_other_values_cross_as_what_they_hold():
    code = """
from collections import Counter
class P:
    def __init__(self, v): self.v = v
def f(p): return p.v
def counted(x): return Counter(x)
def mapped(x): return map(str, x)
def generated(x): yield from x
def keys(x): return x.keys()
def named(a, *, b=1): return a + b
def raises(x): raise KeyError(x)
"""
    tests = [
        "assert counted('aab') == {'a': 2, 'b': 1}",
        "assert list(mapped([1, 2])) == ['1', '2']",
        "assert list(generated('ab')) == ['a', 'b']",
        "assert list(keys({'a': 1})) == ['a']",
        "assert f(P(3)) == 3",
        "assert named(1, b=3) == 4 and named(1) == 2",
        "try:\n    raises(1)\nexcept KeyError:\n    pass\nelse:\n    assert False",
    ]
    assert [o.status for o in run(code, *tests).outcomes] == ["passed"] * len(tests)


def test_what_tests_need_is_set_up():
    assert (
        run("def f(x):\n    return x", "assert f(2) == twice(1)", setup="def twice(x):\n    return 2 * x").passed == 1
    )


def test_a_program_that_cannot_be_loaded():
    verdict = run("import no_such_module\ndef f(x):\n    return 1", "assert f(1) == 1", "assert f(2) == 1")
    assert not verdict.loaded
    assert verdict.message == "ModuleNotFoundError: No module named 'no_such_module'"
    assert [outcome.status for outcome in verdict.outcomes] == ["failed", "skipped"]


# ------------------------------------------------------------------------------------------------------ limits of time


def test_three_strikes_and_the_rest_is_skipped():
    verdict = run("def f(x):\n    while x: pass\n    return 0", *[f"assert f({x}) == 0" for x in (0, 1, 0, 1, 1, 0)])
    assert [o.status for o in verdict.outcomes] == ["passed", "timeout", "passed", "timeout", "timeout", "skipped"]


def test_a_test_after_one_that_killed_the_program_still_counts():
    verdict = run("import os\ndef f(x):\n    return os._exit(0) if x else 1", "assert f(1) == 1", "assert f(0) == 1")
    assert [outcome.status for outcome in verdict.outcomes] == ["failed", "passed"]


def test_all_tests_together_have_a_limit():
    code = "def f(x):\n    for _ in range(10**8): pass"
    verdict = run(code, *["f(1)"] * 5, limits=Limits(test_s=0.5, total_s=0.6, timeouts=9))
    statuses = [outcome.status for outcome in verdict.outcomes]
    # the second has 0.1 s left at most; on a machine with other work to do the first may use that up
    assert statuses in (["timeout"] * 2 + ["skipped"] * 3, ["timeout"] + ["skipped"] * 4)


def test_waiting_is_stopped_by_the_clock():
    start = time.monotonic()
    verdict = run("import time\ndef f(x):\n    time.sleep(60)", limits=Limits(test_s=0.2, total_s=1))
    assert verdict.outcomes[0].status == "timeout"
    assert time.monotonic() - start < 10


# ------------------------------------------------------------------------------------------ what programs may try

HOSTILE = {
    "endless loop": "def f(x):\n    while True: pass",
    "endless loop while loading": "while True: pass",
    "fork bomb": "import os\ndef f(x):\n    while True:\n        try: os.fork()\n        except OSError: pass",
    "memory bomb": "def f(x):\n    a = []\n    while True: a.append(bytearray(10**8))",
    "huge answer": "def f(x):\n    return 'x' * 10**8",
    "endless print": "def f(x):\n    while True: print('x' * 10**6)",
    "exit while loading": "import os\nos._exit(0)",
    "SystemExit": "def f(x):\n    raise SystemExit(0)",
    "KeyboardInterrupt": "def f(x):\n    raise KeyboardInterrupt",
    "sys.exit while loading": "import sys\nsys.exit(0)",
    "equal to anything": "class E(int):\n    def __eq__(s, o): return True\ndef f(x):\n    return E(5)",
    "object equal to anything": "class E:\n    def __eq__(s, o): return True\ndef f(x):\n    return E()",
    "other built-ins": "import builtins\nbuiltins.AssertionError = None\nbuiltins.int = str\ndef f(x):\n    return 5",
    "writes into every descriptor": "import os\ndef f(x):\n    for i in range(64):\n"
    '        try: os.write(i, b\'[["passed", ""]]\' * 9)\n        except OSError: pass',
    "other messages": "import sys\nsys.modules['wire'].send = lambda *a: None\ndef f(x):\n    return 4",
    "kills its parents": "import os\ndef f(x):\n    os.kill(os.getppid(), 9)\n    os.kill(1, 9)\n    os.kill(-1, 9)",
    "no function": "f = 4",
    "nothing": "",
    "deep answer": "def f(x):\n    a = []\n    for i in range(10**5): a = [a]\n    return a",
}


SLOW = {"huge answer", "deep answer", "endless print", "endless loop while loading", "sys.exit while loading"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in HOSTILE])
def test_hostile_programs_pass_nothing_and_end(name):
    if name == "kills its parents" and "processes" in MISSING:
        pytest.skip("no process namespaces here")
    start = time.monotonic()
    verdict = run(HOSTILE[name], "assert f(2) == 4")
    assert (verdict.passed, verdict.total) == (0, 1)
    assert time.monotonic() - start < 20
    assert children_of_this_process() == []


def children_of_this_process():
    """Command lines of child processes that are a sandbox or dead."""
    lines = []
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in path.read_text().split():
            try:
                line = Path(f"/proc/{pid}/cmdline").read_text()
            except OSError:
                continue
            lines += [line or "zombie"] if "confined" in line or not line else []
    return lines


def told(code):
    """What a program's function returns, from the message of a test that fails."""
    return run(code, "assert f(0) == 'never'").outcomes[0].message


@needs_files
def test_files_outside_are_out_of_reach():
    answers = {
        f"open({str(Path(__file__))!r}).read()": "FileNotFoundError",
        "open('/etc/passwd').read()": "FileNotFoundError",
        "open('/proc/1/environ').read()": "FileNotFoundError",
        "open('/usr/mlrl', 'w')": "OSError",
        "__import__('os').listdir('.')": "returned []",
        "open('/tmp/big', 'wb').write(b'0' * 10**8)": "OSError",
        "open('own', 'w').write('abc')": "returned 3",
    }
    verdict = run("def f(x):\n    return eval(x)", *[f"assert f({expression!r}) == 'never'" for expression in answers])
    for outcome, answer in zip(verdict.outcomes, answers.values(), strict=True):
        assert answer in outcome.message


def test_no_secret_of_the_environment_is_inherited(monkeypatch):
    monkeypatch.setenv("PLANTED_API_KEY", "sk-planted")
    code = "import os\ndef f(x):\n    return 'planted' in str(dict(os.environ)).lower(), 'PATH' in os.environ"
    assert told(code).endswith("returned (False, True)")


@needs_network
def test_no_network():
    code = "import socket\ndef f(x):\n    return socket.create_connection(('127.0.0.1', 9), 1)"
    assert "Network is unreachable" in told(code)


def test_no_privilege_can_be_had():
    code = "import ctypes\nc = ctypes.CDLL(None)\ndef f(x):\n"
    code += "    return c.setuid(0), c.unshare(0x20000), c.ptrace(16, 1, 0, 0)"
    assert told(code).endswith("returned (-1, -1, -1)")


@needs_processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives each program a user of its own")
def test_what_a_program_leaves_running_is_killed():
    code = (
        "import os, time\ndef f(x):\n    if os.fork() == 0:\n        os.setsid()\n        time.sleep(60)\n"
        "    return os.getuid()"
    )
    user = int(told(code).rpartition(" ")[2])
    owners = {path.stat().st_uid for path in Path("/proc").iterdir() if path.name.isdigit() and path.exists()}
    assert user > 0x6FFFFFFF
    assert user not in owners


def test_by_default_a_program_starts_no_other():
    code = "import os, threading\ndef f(x):\n    threading.Thread(target=print).start() if x else os.fork()"
    verdict = run(code, "f(0)", "f(1)", limits=Limits(test_s=1, total_s=4))
    assert "BlockingIOError" in verdict.outcomes[0].message
    assert "RuntimeError: can't start new thread" in verdict.outcomes[1].message


def test_the_program_never_holds_the_tests():
    code = (
        "import gc, sys\ndef f(x):\n    frame, seen = sys._getframe(), ''\n    while frame:\n"
        "        seen += str(frame.f_locals) + str(frame.f_globals)\n        frame = frame.f_back\n"
        "    seen += str([o for o in gc.get_objects() if isinstance(o, (dict, list, tuple))])\n"
        "    return ''.join(['sec', 'ret-7421']) in seen"
    )
    assert run(code, "assert f(0) is False  # secret-7421").passed == 1


# --------------------------------------------------------------------------------------------------------- class cases

CASES = """
import unittest
from unittest.mock import patch
class TestC(unittest.TestCase):
    def test_two(self):
        self.assertEqual(C().two(), 2)
    def test_list(self):
        self.assertEqual([C().two()], [2])
class TestMore(unittest.TestCase):
    def test_patch(self):
        with patch('builtins.input', return_value='7'):
            self.assertEqual(C().asked(), '7')
    @unittest.skip("not now")
    def test_skipped(self):
        pass
"""
NAMES = ("TestC.test_two", "TestC.test_list", "TestMore.test_patch", "TestMore.test_skipped")


def run_class(methods, limits=LIMITS):
    code = "class C:\n    def asked(self): return input()\n    " + methods
    return Sandbox(limits, 1).run([UnittestJob(code, CASES, NAMES)])[0]


def test_unittest_cases_one_by_one():
    good = run_class("def two(self): return 2")
    assert [outcome.status for outcome in good.outcomes] == ["passed", "passed", "passed", "failed"]
    wrong = run_class("def two(self): return 3")
    assert wrong.outcomes[0] == Outcome("failed", "AssertionError: 3 != 2")
    assert [outcome.status for outcome in wrong.outcomes] == ["failed", "failed", "passed", "failed"]


def test_strikes_of_a_class():
    verdict = run_class("def two(self):\n        while True: pass", Limits(test_s=0.3, total_s=5, timeouts=2))
    assert [outcome.status for outcome in verdict.outcomes] == ["timeout", "timeout", "skipped", "skipped"]


TRICKS = [
    "import os; os._exit(0)",
    "raise KeyboardInterrupt",
    "import unittest; unittest.TestCase.assertEqual = lambda *a: None; return 3",
    "import builtins; builtins.AssertionError = ValueError; return 3",
    "from unittest.mock import ANY; return ANY",
    "import inspect; return inspect.currentframe().f_back and 2",
    "import os; [os.write(i, b'x' * 99) for i in (3, 4)]; return 2",
]
MORE_TRICKS = [
    "raise SystemExit(0)",
    "import unittest; raise unittest.SkipTest('no')",
    "return type('E', (), {'__eq__': lambda s, o: True})()",
    "return type('E', (list,), {'__eq__': lambda s, o: True, '__ne__': lambda s, o: False})()",
    "import sys; return sys._getframe(1).f_locals.setdefault('second', 3) and 3",
    "import gc; gc.get_objects(); return 2",
    "import sys; sys.modules['__main__'].os._exit(0)",
]


@pytest.mark.parametrize("body", [*TRICKS, *(pytest.param(body, marks=pytest.mark.slow) for body in MORE_TRICKS)])
def test_no_trick_passes_a_class(body):
    verdict = run_class(f"def two(self):\n        {body}")
    assert [outcome.status for outcome in verdict.outcomes[:2]] == ["failed", "failed"]


# ---------------------------------------------------------------------------------------------- workers, cache, errors


def test_the_number_of_workers_changes_nothing():
    programs = [f"def f(x):\n    return x * {k}" for k in range(4)] + [HOSTILE["exit while loading"], "f = 1"]
    programs += ["def f(x):\n    while x: pass"]
    jobs = [job(code, "assert f(2) == 4", "assert f(0) == 0") for code in programs]
    alone, four = Sandbox(LIMITS, 1).run(jobs), Sandbox(LIMITS, 4).run(jobs)
    assert alone == four
    assert [verdict.passed for verdict in alone] == [1, 1, 2, 1, 0, 0, 0]


@pytest.mark.slow
def test_two_hundred_programs_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    kinds = [*HOSTILE.values(), *["def f(x):\n    return x * x"] * (len(HOSTILE) + 2)]
    jobs = [job(f"{kinds[k % len(kinds)]}\n# {k}") for k in range(200)]
    verdicts = Sandbox(LIMITS, 8).run(jobs)
    assert [v.passed for v in verdicts] == [int("x * x" in j.code) for j in jobs]
    assert children_of_this_process() == []
    assert list(tmp_path.iterdir()) == []


def test_equal_jobs_run_once_and_are_remembered(monkeypatch):
    started = []
    original = module._start
    monkeypatch.setattr(module, "_start", lambda *args: started.append(args) or original(*args))
    own = Sandbox(LIMITS, 2, cache_size=1)
    first, second = job("def f(x):\n    return 4"), job("def f(x):\n    return 5")
    assert [v.passed for v in own.run([first, first])] == [1, 1]
    assert [v.passed for v in own.run([first])] == [1]
    assert len(started) == 1
    own.run([second])  # pushes the first one out
    own.run([first])
    assert len(started) == 3


def test_what_is_not_protected_is_said_once(monkeypatch):
    monkeypatch.setattr(module, "_warned", set())
    with pytest.warns(UserWarning, match="without their own network, file system. Limits"):
        module._warn_once(["network", "file system"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module._warn_once(["network", "file system"])
        module._warn_once([])


@pytest.mark.parametrize(("name", "value"), [("test_s", 0), ("timeouts", -1), ("memory_mb", 0)])
def test_limits_that_are_none(name, value):
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        Limits(**{name: value})


def test_no_worker():
    with pytest.raises(ConfigError, match="reward_workers=0"):
        Sandbox(workers=0)
