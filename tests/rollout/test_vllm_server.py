"""Servers that a run starts: their command lines, their end whatever ends the run, and a server that is no vLLM."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlrl.errors import ConfigError
from mlrl.rollout import vllm_server
from mlrl.rollout.vllm_server import ServerSettings, SpawnedServer, start_servers

# in place of a Python that has vLLM: serves /health on the port of the command line, from a child of its own
STAND_IN = f"""#!{sys.executable}
import http.server, subprocess, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
print("ready soon", flush=True)
if "--crash" in sys.argv:
    sys.exit("ValueError: no such flag")
sleeper = subprocess.Popen(["sleep", "60"])
open(sys.argv[sys.argv.index("--note") + 1], "w").write(str(sleeper.pid))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def settings(tmp_path):
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)

    def make(**arguments):
        note = {"note": str(tmp_path / "note")}
        return ServerSettings("model", "float32", "cpu", 2, arguments=note | arguments, python=str(python))

    return make


def is_there(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    assert condition()


def test_command_lines():
    lora = ServerSettings("m", "bfloat16", "2,3", 2, 20, {"gpu_memory_utilization": 0.5, "enforce_eager": True}, "py")
    words = " ".join(lora.command(8001))
    assert words.startswith("py -m vllm.entrypoints.openai.api_server --model m --served-model-name base")
    for part in (
        *("--port 8001", "--dtype bfloat16", "--enable-lora --max-loras 2 --max-lora-rank 32 --max-cpu-loras 4"),
        *("--logprobs-mode processed_logprobs", "--tensor-parallel-size 2", "--gpu-memory-utilization 0.5"),
    ):
        assert part in words
    assert words.endswith("--enforce-eager")  # a switch has no value
    full = ServerSettings("m", "float32", "cpu", arguments={"dtype": "bfloat16", "enforce_eager": False}).command(1)
    assert "--enable-lora" not in full and "--enforce-eager" not in full and full.count("--dtype") == 1
    assert full[full.index("--dtype") + 1] == "bfloat16"


def test_environment(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_USE_CPU", "PYTHONPATH", "HF_HOME"):
        monkeypatch.setenv(name, "x")
    found = ServerSettings("m", "float32", "1").environment()
    assert found["CUDA_VISIBLE_DEVICES"] == "1" and found["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_USE_CPU", "PYTHONPATH"} & set(found)
    assert found["HF_HOME"] == "x"


def test_a_server_starts_with_a_log_and_ends_with_its_children(settings, tmp_path):
    [server] = start_servers([settings()], tmp_path / "sampling", 30.0)
    sleeper = int((tmp_path / "note").read_text())
    assert server.is_ready() and server.ended() is None and is_there(sleeper)
    assert (tmp_path / "sampling" / "server_0.log").read_text().startswith("ready soon\n")
    server.close()
    assert not is_there(sleeper) and not server.is_ready()
    assert "ended with code" in server.ended()


def test_a_server_that_does_not_start_is_named_with_its_log_and_takes_the_others_along(settings, tmp_path):
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"vllm_spawn=True: .* code 1 \(ValueError: no such flag; .*server_1.log\)"):
        start_servers([settings(), settings(crash=True)], tmp_path, 30.0)
    assert time.monotonic() - started < 25
    if (tmp_path / "note").exists():
        assert not is_there(int((tmp_path / "note").read_text()))


def test_a_server_that_is_never_ready(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(SpawnedServer, "is_ready", lambda self: False)
    with pytest.raises(ConfigError, match=r"vllm_start_timeout=0.3: .* was not ready in time"):
        start_servers([settings()], tmp_path, 0.3)


def test_a_killed_run_takes_its_server_along(settings, tmp_path):
    given = settings()
    program = (
        f"import sys; sys.path.insert(0, {str(Path(vllm_server.__file__).parents[2])!r})\n"
        "from pathlib import Path\n"
        "from mlrl.rollout.vllm_server import ServerSettings, start_servers\n"
        f"start_servers([ServerSettings('m', 'float32', 'cpu', arguments={dict(given.arguments)!r}, "
        f"python={given.python!r})], Path({str(tmp_path)!r}), 30.0)\n"
        "print('up', flush=True)\n"
        "import time; time.sleep(60)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert run.stdout.readline() == "up\n"
    sleeper = int((tmp_path / "note").read_text())
    assert is_there(sleeper)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    wait_until(lambda: not is_there(sleeper))
