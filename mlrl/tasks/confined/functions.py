"""Checking functions: the program only answers calls, the tests run in a process that it cannot reach."""

import builtins
import random
import reprlib

import wire
from programs import Ended


def serve(read, write):
    """The program's side: executes the code, then answers calls of what it defines."""
    code = wire.receive(read)["code"]
    random.seed(0)
    namespace = {"__name__": "program"}
    try:
        exec(compile(code, "<program>", "exec"), namespace)
    except BaseException as error:
        wire.send(write, {"error": wire.described(error)})
        return
    wire.send(write, {"names": [name for name, value in namespace.items() if callable(value) and name[:2] != "__"]})
    values = wire.Values()
    while True:
        request = wire.receive(read)
        try:
            args, kwargs = values.unpack(request["args"]), values.unpack(request["kwargs"])
            answer = {"value": values.pack(namespace[request["name"]](*args, **kwargs))}
            wire.send(write, answer)
        except BaseException as error:
            wire.send(write, {"raised": type(error).__name__, "message": wire.described(error)})


_shortener = reprlib.Repr()
_shortener.maxstring = _shortener.maxother = 80
short = _shortener.repr


class ProgramError(Exception):
    """The program raised something that is no built-in exception."""


class Calls:
    """The program's functions as the tests see them."""

    def __init__(self, program):
        self.program = program
        self.values = wire.Values()
        self.last = ""

    def function(self, name):
        """A stand-in for the program's function of that name."""

        def call(*args, **kwargs):
            shown = ", ".join([*map(short, args), *(f"{key}={short(value)}" for key, value in kwargs.items())])
            request = {"name": name, "args": self.values.pack(args), "kwargs": self.values.pack(kwargs)}
            answer = self.program.ask(request)
            try:
                if "value" in answer:
                    value = self.values.unpack(answer["value"])
                    self.last = f"{name}({shown}) returned {short(value)}"
                    return value
                kind, message = str(answer["raised"]), str(answer["message"])
            except (wire.Broken, TypeError, KeyError):
                self.program.end("died")
            self.last = f"{name}({shown}) raised {message[:200]}"
            error = getattr(builtins, kind, None)
            if not (isinstance(error, type) and issubclass(error, Exception)):
                error = ProgramError
            try:
                raised = error(message)
            except TypeError:  # such as UnicodeDecodeError, which takes five arguments
                raised = ProgramError(message)
            raise raised

        return call


def check(program, job):
    """Loads the program and runs the job's tests, until it is over; returns the report.

    A job has `code`, `setup` (source that the tests need), `entry_point` and `tests` (sources).
    """
    report = {"loaded": False, "message": "", "outcomes": []}
    try:
        answer = program.ask({"code": job["code"]})
        names = answer.get("names")
        if names is None:
            return report | {"message": str(answer.get("error"))}
    except Ended as end:
        return report | {"message": end.reason, "ended": end.reason}
    report["loaded"] = True
    calls = Calls(program)
    namespace = {"__name__": "tests"}
    exec(compile(job["setup"], "<setup>", "exec"), namespace)
    for name in filter(lambda name: isinstance(name, str) and name not in namespace, names):
        namespace[name] = calls.function(name)
    if job["entry_point"] in names:
        namespace["candidate"] = namespace[job["entry_point"]] = calls.function(job["entry_point"])
    for test in job["tests"]:
        program.begin_test()
        calls.last = ""
        outcome = _run(test, namespace)
        if program.ended:
            report["outcomes"].append([program.ended if program.ended == "timeout" else "failed", program.ended])
            report["ended"] = program.ended
            break
        report["outcomes"].append([outcome, "" if outcome == "passed" else calls.last])
    return report


def _run(test, namespace):
    try:
        exec(compile(test, "<test>", "exec"), dict(namespace))
    except BaseException:
        return "failed"
    return "passed"
