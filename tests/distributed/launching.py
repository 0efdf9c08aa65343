"""Runs commands that start many processes, as a user would, and looks afterwards that none of them is left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
CPU = ROOT / "accelerate_configs/cpu.yaml"
GRACE = 3.0  # seconds in which helpers of a process (trackers, semaphores) may follow it
_MARK = "TEST_JOB"  # every process of a job inherits it, also one that its parent left behind
# A launch within a launch, or a test run under a scheduler: what these say must not reach the job.
_FROM_OUTSIDE = (
    *("ACCELERATE_", "DEEPSPEED_", "GLOO_", "MACHINE_RANK", "MASTER_", "MLRL_", "NCCL_", "NUM_MACHINES", "OMP_"),
    *("PROCESSES_PER_MACHINE", "SLURM_", "TORCHELASTIC_", "RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_"),
)


@dataclass(frozen=True)
class Finished:
    """What a job left: exit code (negative: the signal that ended it), both outputs, wall time in seconds."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float

    def __str__(self) -> str:
        return f"exit {self.returncode} after {self.seconds:.1f} s\n-- stdout\n{self.stdout}\n-- stderr\n{self.stderr}"


class Job:
    """A command that is running, with all the processes it starts.

    Args:
        command: words of the command.
        env: variables on top of those of the tests; OMP_NUM_THREADS is 1 where they do not say.
        cwd: folder it runs in, default that of the tests.
    """

    def __init__(self, command: Sequence[str | Path], env: Mapping[str, str] | None = None, cwd: Path | None = None):
        self._mark = uuid.uuid4().hex
        # files: a full pipe would stop the job, and one held open would hide its end
        self._stdout, self._stderr = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115
        self._started = time.perf_counter()
        self._process = subprocess.Popen(
            list(map(str, command)),
            env={**_environment(), **(env or {}), _MARK: self._mark},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=self._stdout,
            stderr=self._stderr,
            start_new_session=True,
        )

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return _text(self._stdout)

    def processes(self) -> list[psutil.Process]:
        """Those of the job that run now."""
        return [p for p in psutil.process_iter() if _variable(p, _MARK) == self._mark]

    def interrupt(self) -> None:
        """Ctrl-C in the terminal of the job."""
        os.killpg(self._process.pid, signal.SIGINT)

    def finish(self, timeout: float) -> Finished:
        """Waits for the command's end, ends what it left behind, and returns what it printed.

        Raises:
            AssertionError: it ran longer than `timeout` seconds, or a process of it ran on after its end.
        """
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout} s\n{self._finished()}") from None
        finished = self._finished()
        left = self.processes()
        psutil.wait_procs(left, GRACE)
        names = [f"{p.pid} {' '.join(_command(p))}" for p in self.processes()]
        self.kill()
        assert not names, f"processes left behind: {names}\n{finished}"
        return finished

    def kill(self) -> None:
        """Ends every process of the job at once."""
        while left := self.processes():  # again: one may have started another meanwhile
            for process in left:
                _kill(process)
            psutil.wait_procs(left, GRACE)
        self._process.wait()

    def _finished(self) -> Finished:
        seconds = time.perf_counter() - self._started
        return Finished(self._process.returncode, _text(self._stdout), _text(self._stderr), seconds)


def launch(
    script: str | Path,
    flags: Sequence[str] = (),
    processes: int = 2,
    config_file: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    options: Sequence[str] = (),
    cwd: Path | None = None,
    launcher: str = "accelerate.commands.launch",
) -> Finished:
    """`accelerate launch … script flags` on one machine, until it ends.

    Args:
        config_file: a launch configuration, default accelerate_configs/cpu.yaml; `processes` and the port, a free one,
            win over it.
        options: further options of `accelerate launch`.
        launcher: the module that does it, such as the one that launch.sh starts.
        timeout: seconds after which it counts as hanging.

    Raises:
        AssertionError: see `Job.finish`.
    """
    return start(script, flags, processes, config_file, env, options, cwd, launcher).finish(timeout)


def start(
    script: str | Path,
    flags: Sequence[str] = (),
    processes: int = 2,
    config_file: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    cwd: Path | None = None,
    launcher: str = "accelerate.commands.launch",
) -> Job:
    """As `launch`, without waiting: for a test that disturbs the job. The caller calls `finish` or `kill`."""
    command = [sys.executable, "-m", launcher, "--config_file", config_file or CPU]
    command += ["--num_processes", processes, "--num_machines", 1, "--main_process_port", free_port()]
    return Job([*command, *options, script, *flags], env, cwd)


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FROM_OUTSIDE)}
    paths = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def _text(file) -> str:
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def _variable(process: psutil.Process, name: str) -> str | None:
    try:
        return process.environ().get(name)
    except (psutil.Error, OSError):  # ended meanwhile, or another user's
        return None


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
