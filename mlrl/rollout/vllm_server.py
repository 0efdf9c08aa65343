"""vLLM servers that a run starts for itself: on given devices, with a log each, ended with the run whatever ends it."""

from __future__ import annotations

import atexit
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from mlrl.errors import ConfigError

_WATCHDOG = Path(__file__).with_name("vllm_watchdog.py")
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM can be told
# of a launcher of several processes, which a server is not one of; and of this run's own Python
_NOT_INHERITED = re.compile(
    r"((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|ACCELERATE_.*|PYTHON(PATH|HOME)|VIRTUAL_ENV"
)


@dataclass(frozen=True)
class ServerSettings:
    """What one server runs.

    Attributes:
        model: hub id or folder of the base. dtype: as vLLM names it.
        device: GPU numbers with commas between, or `cpu`.
        adapters: LoRA adapters at once, of rank `rank` at most; 0: the base itself is what is trained.
        arguments: further ones, with underscores; they win.
        python: interpreter that has vLLM.
    """

    model: str
    dtype: str
    device: str
    adapters: int = 0
    rank: int = 16
    arguments: Mapping[str, Any] = field(default_factory=dict)
    python: str = sys.executable

    def command(self, port: int) -> list[str]:
        """The command line."""
        flags: dict[str, Any] = {
            "model": self.model,
            "served_model_name": "base",
            "host": "127.0.0.1",
            "port": port,
            "dtype": self.dtype,
            "logprobs_mode": "processed_logprobs",  # at the sampling temperature
        }
        if self.device == "cpu":
            flags["enforce_eager"] = True  # compiling takes longer than it saves
        else:
            flags["tensor_parallel_size"] = len(self.device.split(","))
        if self.adapters:
            rank = next((allowed for allowed in _LORA_RANKS if allowed >= self.rank), self.rank)
            flags |= {"enable_lora": True, "max_loras": self.adapters, "max_lora_rank": rank}
            flags["max_cpu_loras"] = 2 * self.adapters  # the version before stays until the next one is there
        words = [self.python, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in (flags | dict(self.arguments)).items():
            flag = f"--{name.replace('_', '-')}"
            if value is True:
                words.append(flag)
            elif value is not False and value is not None:
                words += [flag, str(value)]
        return words

    def environment(self) -> dict[str, str]:
        """Variables of the server's process."""
        kept = {name: value for name, value in os.environ.items() if not _NOT_INHERITED.fullmatch(name)}
        kept |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_SERVER_DEV_MODE": "1"}
        if self.device == "cpu":
            kept.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        else:
            kept["CUDA_VISIBLE_DEVICES"] = self.device
        return kept


class SpawnedServer:
    """A server under its watchdog.

    Args:
        log: file for what it prints.
    """

    def __init__(self, settings: ServerSettings, log: Path):
        self.settings, self.log = settings, log
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-I", str(_WATCHDOG), str(os.getpid()), *settings.command(port)],
                env=settings.environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for the run, which ends its servers last
            )
        atexit.register(self.close)

    def ended(self) -> str | None:
        """What became of it; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        return f"vllm_spawn=True: the server at {self.url} ended with code {code} ({_last_line(self.log)}; {self.log})"

    def is_ready(self) -> bool:
        """Whether it answers."""
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).is_success
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        """Ends it, with all processes that it has started."""
        atexit.unregister(self.close)
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()


def start_servers(settings: Sequence[ServerSettings], folder: Path, timeout_s: float) -> list[SpawnedServer]:
    """Starts servers side by side and waits until all are ready; logs are `folder/server_0.log` …

    Raises:
        ConfigError: one ended, or was not ready in time; then all are ended.
    """
    servers = []
    try:
        servers += [SpawnedServer(one, folder / f"server_{number}.log") for number, one in enumerate(settings)]
        deadline = time.monotonic() + timeout_s
        for server in servers:
            while not server.is_ready():
                fate = server.ended()
                if fate is not None:
                    raise ConfigError(f"{fate}. Mend what its log says; vllm_args has further arguments for it")
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"vllm_start_timeout={timeout_s!r}: the server at {server.url} was not ready in time "
                        f"({_last_line(server.log)}; {server.log}). Give it longer, or mend what its log says"
                    )
                time.sleep(0.25)
    except BaseException:
        for server in servers:
            server.close()
        raise
    return servers


def check_interpreter(python: str) -> None:
    """Raises ConfigError where a Python has no vLLM."""
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    done = subprocess.run([python, "-c", look], capture_output=True, env={**os.environ, "PYTHONPATH": ""}, check=False)
    if done.returncode:
        raise ConfigError(
            f"vllm_python={python!r}: has no vLLM. Install it in an environment of its own (pip install vllm), and "
            "give the python of that"
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _last_line(log: Path) -> str:
    """The last line of a log that says something, or a line that names an error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b\w*Error\b", line)]
    return ([*lines, *errors[-1:]] or ["an empty log"])[-1][-300:]
