"""Checking a class by its unittest cases, which handle its objects and so run in its own process.

What the program could reach to make a test pass is kept from it: the tests have a copy of unittest and of the built-ins
of their own, outcomes are signed with a number that the program is never given, and values equal to anything fail.
"""

import builtins
import importlib
import os
import random
import secrets
import sys
import unittest

import wire
from programs import Ended

_LOOKING_AROUND = ("gc.", "ctypes.", "sys._getframe", "sys._current_frames", "sys.settrace", "sys.setprofile")
_LOOKING_FILES = ("<program>", "inspect.py", "traceback.py")


def check(program, job):
    """Runs the job's tests, until the program is over; returns the report.

    A job has `code`, `test` (source with unittest cases) and `tests` (names such as ``TestAdd.test_zero``).
    """
    report = {"loaded": False, "message": "", "outcomes": []}
    nonce = secrets.token_hex(16)
    try:
        answer = program.ask({"nonce": nonce, "code": job["code"], "test": job["test"], "names": job["tests"]})
        if answer != {"nonce": nonce, "loaded": True}:
            return report | {"message": str(answer.get("error") if isinstance(answer, dict) else answer)}
        report["loaded"] = True
        for index in range(len(job["tests"])):
            program.begin_test()
            answer = program.listen()
            if not isinstance(answer, dict) or (answer.get("nonce"), answer.get("test")) != (nonce, index):
                program.end("died")
            outcome = "passed" if answer["passed"] is True else "failed"
            report["outcomes"].append([outcome, str(answer["message"])])
    except Ended as end:
        if not report["loaded"]:
            return report | {"message": end.reason, "ended": end.reason}
        report["outcomes"].append([end.reason if end.reason == "timeout" else "failed", end.reason])
        report["ended"] = end.reason
    return report


def serve(read, write):
    """The program's side: executes class and tests, and runs one test after another."""
    job = wire.receive(read)
    random.seed(0)
    if "mock" in job["test"]:
        importlib.import_module("unittest.mock")
    own = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "unittest"}
    for name in own:
        del sys.modules[name]  # whoever imports it gets another copy
    private = dict(vars(builtins), __import__=_import_with(own))
    case_class = _strict(unittest.TestCase)
    namespace = {"__name__": "program", "__file__": os.path.abspath("program.py")}
    sys.addaudithook(_guard)
    try:
        exec(compile(job["code"], "<program>", "exec"), namespace)
        tests = {**namespace, "__name__": "tests", "__builtins__": private}
        exec(compile(job["test"], "<test>", "exec"), tests)
    except BaseException as error:
        wire.send(write, {"error": wire.described(error)})
        return
    wire.send(write, {"nonce": job["nonce"], "loaded": True})
    untouched = dict(vars(case_class)), dict(private)
    for index, name in enumerate(job["names"]):
        message = _run(tests, name)
        if (dict(vars(case_class)), private) != untouched:
            message = "the test framework was changed"
        wire.send(write, {"nonce": job["nonce"], "test": index, "passed": message is None, "message": message or ""})


def _run(tests, name):
    """None if the test passes, else why not."""
    try:
        class_name, method = name.split(".")
        result = unittest.TestResult()
        unittest.TestSuite([tests[class_name](method)]).run(result)
    except BaseException as error:
        return wire.described(error)
    if result.wasSuccessful() and result.testsRun == 1 and not result.skipped and not result.expectedFailures:
        return None
    problems = [text for _, text in [*result.errors, *result.failures, *result.skipped]]
    return " ".join(problems[0].strip().splitlines()[-1:])[:300] if problems else "not run"


def _import_with(modules):
    """`__import__` that gives the tests their own copy of unittest."""
    original = builtins.__import__

    def import_module(name, globals=None, locals=None, fromlist=(), level=0):
        if level == 0 and name in modules:
            return modules[name] if fromlist else modules[name.split(".")[0]]
        return original(name, globals, locals, fromlist, level)

    return import_module


def _strict(case_class):
    """Makes assertEqual and its kin fail on a value that equals anything."""

    def wrapped(original):
        def assertion(self, first, second, *args, **kwargs):
            if _equals_anything(first) or _equals_anything(second):
                raise self.failureException("a value that equals anything")
            return original(self, first, second, *args, **kwargs)

        return assertion

    for name in ("assertEqual", "assertAlmostEqual", "assertIn", "assertListEqual", "assertTupleEqual"):
        setattr(case_class, name, wrapped(getattr(case_class, name)))
    return case_class


class _Nothing:
    """Equal to nothing but itself."""


def _equals_anything(value, depth=3):
    if value is None or type(value) in (bool, int, float, str, bytes):
        return False
    if type(value) in (list, tuple, set, frozenset, dict):
        entries = [*value, *value.values()] if type(value) is dict else value
        return depth > 0 and any(_equals_anything(entry, depth - 1) for entry in entries)
    try:
        return (value == _Nothing()) is True
    except BaseException:
        return False


def _guard(event, args, _exit=os._exit, _frame=sys._getframe, _busy=[False]):  # noqa: B006
    """Ends the process where the program itself looks into frames or memory, as only a cheat needs to."""
    if _busy[0] or not event.startswith(_LOOKING_AROUND):
        return
    _busy[0] = True
    caller = _frame(1).f_code.co_filename
    _busy[0] = False
    if caller.endswith(_LOOKING_FILES):
        _exit(1)
