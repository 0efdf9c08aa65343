"""Runs programs that a model wrote against tests, cut off from this machine and bounded in time and memory.

Every program gets processes of its own: new user, process, network and mount namespaces, an unprivileged user, no
inherited environment, a file system with Python to read and an empty folder to write, and limits on processor time,
memory, files and processes. Where the machine refuses namespaces, one warning says what is not protected.

Limits of time count the program's own processor seconds, so that a busy machine or more workers change no verdict. A
program that waits, using less than a tenth of a core, is stopped after three times as many seconds of the clock.

    sandbox = Sandbox(workers=2)
    job = FunctionJob(code="def double(x):\\n    return 2 * x", entry_point="double", tests=("assert double(2) == 4",))
    sandbox.run([job])[0].passed        # 1
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from mlrl import ConfigError

_SCRIPT = Path(__file__).parent / "confined"
_SLOWEST = 10  # a program that gets a tenth of a core still has its time
_START_S = 60  # for starting Python on a busy machine
_warned: set[str] = set()


@dataclass(frozen=True)
class FunctionJob:
    """Functions under test. The program only answers calls; tests run where it cannot reach them.

    Each test is a source text that names the functions, or `candidate` for `entry_point`; `setup` is source that all
    tests need. What is passed and returned crosses as plain data.
    """

    kind: ClassVar[str] = "functions"
    code: str
    entry_point: str
    tests: tuple[str, ...]
    setup: str = ""


@dataclass(frozen=True)
class UnittestJob:
    """A class under test: `test` is a source with unittest cases, `tests` names such as ``TestAdd.test_zero``."""

    kind: ClassVar[str] = "unittests"
    code: str
    test: str
    tests: tuple[str, ...]


Job = FunctionJob | UnittestJob


@dataclass(frozen=True)
class Outcome:
    """What became of a test: `status` is passed, failed, timeout or skipped (after too many time-outs)."""

    status: str
    message: str = ""


@dataclass(frozen=True)
class Verdict:
    """What became of a program: whether it could be loaded at all, and one outcome a test."""

    loaded: bool
    outcomes: tuple[Outcome, ...]
    message: str = ""

    @property
    def passed(self) -> int:
        """Number of tests passed."""
        return self.count("passed")

    @property
    def total(self) -> int:
        """Number of tests, those not run included."""
        return len(self.outcomes)

    def count(self, status: str) -> int:
        """Number of tests of that status."""
        return sum(outcome.status == status for outcome in self.outcomes)


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    Attributes:
        test_s, total_s: processor seconds of one test (loading counts as one) and of all.
        timeouts: after so many tests out of time the rest is skipped.
        memory_mb: address space of a process; processes: and threads at once, the one that checks counted, so that 2
            allow none besides the program itself.
        file_mb: a file; tmpfs_mb: all files; files: open at once.
    """

    test_s: float = 10.0
    total_s: float = 60.0
    timeouts: int = 3
    memory_mb: int = 1024
    processes: int = 2
    file_mb: int = 16
    tmpfs_mb: int = 64
    files: int = 64

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ConfigError(f"{name}={value!r}: no limit. Give a number above 0.")


class Sandbox:
    """Runs jobs, several at a time, and remembers their verdicts.

    Args:
        workers: programs that run at once, those of forks of this process counted; None: one a processor core that
            this process may use.
        cache_size: verdicts remembered.

    Raises:
        ConfigError: fewer than one worker, or a system without what programs are held by (Linux).
    """

    def __init__(self, limits: Limits | None = None, workers: int | None = None, cache_size: int = 4096):
        if workers is not None and workers < 1:
            raise ConfigError(f"reward_workers={workers!r}: no worker. Give 1 or more, or None for one a core.")
        if sys.platform != "linux":
            raise ConfigError(f"sandbox: code written by a model is run only on Linux, and this is {sys.platform}.")
        self.limits = limits or Limits()
        self.workers = workers or len(os.sched_getaffinity(0))
        from mlrl.tasks.slots import Slots  # of file locks, which Linux has

        self._slots = Slots(self.workers)
        self.cache_size = cache_size
        self._cache: OrderedDict[Job, Verdict] = OrderedDict()
        self._lock = threading.Lock()

    def run(self, jobs: Sequence[Job]) -> list[Verdict]:
        """A verdict a job, in their order; equal jobs run once."""
        with self._lock:
            known = {job: self._cache[job] for job in jobs if job in self._cache}
        fresh = [job for job in dict.fromkeys(jobs) if job not in known]
        if fresh:
            with ThreadPoolExecutor(min(self.workers, len(fresh)), thread_name_prefix="sandbox") as pool:
                known |= zip(fresh, pool.map(self._judge, fresh), strict=True)
        with self._lock:
            for job in jobs:
                self._cache[job] = known[job]
                self._cache.move_to_end(job)
            while len(self._cache) > self.cache_size:
                self._cache.popitem(last=False)
        return [known[job] for job in jobs]

    def _judge(self, job: Job) -> Verdict:
        """Runs a program, and again for the tests after one that ended it, until none is left."""
        limits, outcomes, used, loaded, message = self.limits, [], 0.0, False, ""
        while len(outcomes) < len(job.tests):
            with self._slots.taken():
                report = _start(job, len(outcomes), limits, max(limits.total_s - used, 0.01))
            used += report["cpu_s"]
            if not report["loaded"]:
                if not outcomes:
                    message = report["message"]
                    status = "timeout" if report.get("ended") == "timeout" else "failed"
                    outcomes = [Outcome(status, message)] + [Outcome("skipped")] * (len(job.tests) - 1)
                break
            loaded = True
            outcomes += [Outcome(status, text) for status, text in report["outcomes"]]
            strikes = sum(outcome.status == "timeout" for outcome in outcomes)
            if "ended" not in report or strikes >= limits.timeouts or used >= limits.total_s:
                break
        outcomes += [Outcome("skipped")] * (len(job.tests) - len(outcomes))
        return Verdict(loaded, tuple(outcomes), message)


@dataclass
class _Folder:
    """A new folder that every user may enter; gone at the end, whatever was mounted in it went with the program."""

    path: str = field(default_factory=lambda: tempfile.mkdtemp(prefix="mlrl-sandbox-"))

    def __enter__(self) -> str:
        os.chmod(self.path, 0o777)
        return self.path

    def __exit__(self, *error: Any) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _start(job: Job, first: int, limits: Limits, total_s: float) -> dict[str, Any]:
    """Runs the tests from number `first` on in one new sandbox, and returns its report."""
    settings = {
        "kind": job.kind,
        "import_paths": [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))],
        "limits": asdict(limits) | {"cpu_s": int(total_s) + 2},
    }
    content = asdict(job) | {"tests": job.tests[first:], "test_s": limits.test_s, "total_s": total_s}
    command = [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(_SCRIPT), json.dumps(settings)]
    with _Folder() as folder:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=_environment(),
            start_new_session=True,
        )
        try:
            out, complaints = process.communicate(json.dumps(content).encode(), _SLOWEST * total_s + _START_S)
        except subprocess.TimeoutExpired:
            out, complaints = b"", b"out of time"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    try:
        report = json.loads(out)
    except ValueError:
        # The checking process itself is gone: the machine ran out of something, and no verdict is a fair one.
        message = f"the sandbox failed: {complaints.decode(errors='replace')[-300:].strip()}"
        warnings.warn(f"sandbox: a program was judged as failed, since {message}", stacklevel=2)
        return {"loaded": False, "cpu_s": 0.0, "message": message}
    _warn_once(report["missing"])
    return report


def _environment() -> dict[str, str]:
    """The whole environment of a program: nothing of ours but where the interpreter finds its libraries."""
    fixed = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "TZ": "UTC"}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    inherited = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return fixed | threads | inherited


def _warn_once(missing: Sequence[str]) -> None:
    for text in [", ".join(missing)] if missing else []:
        if text not in _warned:
            _warned.add(text)
            warnings.warn(
                f"sandbox: this machine refuses namespaces, so programs written by a model run without their own "
                f"{text}. Limits of time, memory and files hold.",
                stacklevel=2,
            )


def missing_protection() -> list[str]:
    """What this machine cannot protect from programs in a sandbox, in words; [] where everything holds.

    Raises:
        ConfigError: not even the sandbox itself can run here.
    """
    report = _start(FunctionJob("def f():\n    return 1", "f", ("assert f() == 1",)), 0, Limits(), 10.0)
    if not report["loaded"]:
        raise ConfigError(f"sandbox: it cannot run here ({report['message']}).")
    return report["missing"]
