"""The helpers that launch: what they return, and that they leave nothing running."""

import sys
import time

import pytest

from tests.distributed.launching import CPU, ROOT, Job, launch, start

# no library in these: they are about processes
PLACE = """
import os, sys
words = ["rank", *(os.environ[name] for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "MINE")), str(sys.argv[1:])]
os.write(1, (" ".join(words) + "\\n").encode())  # in one piece, since ranks share the pipe
"""
FAIL = """
import os, time
if os.environ["RANK"] == "1":
    print(time.time(), flush=True)
    {how}
time.sleep(60)
"""
DAEMON = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print("child", child.pid)
"""


def write(folder, text: str):
    (folder / "probe.py").write_text(text)
    return folder / "probe.py"


def test_ranks_get_their_place_flags_and_variables(tmp_path):
    finished = launch(write(tmp_path, PLACE), ["--seed", "two words"], processes=2, env={"MINE": "7"}, timeout=120)
    assert finished.returncode == 0, finished
    assert sorted(finished.stdout.splitlines()) == [f"rank {rank} 2 1 7 ['--seed', 'two words']" for rank in (0, 1)]
    assert 0 < finished.seconds < 60


@pytest.mark.parametrize(
    "how", ["raise ValueError('on purpose')", pytest.param("os.kill(os.getpid(), 9)", marks=pytest.mark.slow)]
)
def test_rank_that_dies_ends_the_job(tmp_path, how):
    finished = launch(write(tmp_path, FAIL.format(how=how)), processes=2, timeout=120)
    assert finished.returncode != 0
    assert time.time() - float(finished.stdout) < 15  # seconds since it died; the other rank would sleep for 60
    assert ("on purpose" in finished.stderr) == ("raise" in how)


OURS = "mlrl.parallel.launcher"
KILLED = "rank 1 was ended by SIGKILL, as by a system that runs out of memory\n"
ZERO = ROOT / "accelerate_configs/cpu_zero2.yaml"


@pytest.mark.parametrize(
    ("how", "code", "said", "config"),
    [
        ("os._exit(75)", 75, "", CPU),
        ("os.kill(os.getpid(), 9)", 137, KILLED, CPU),
        pytest.param("raise ValueError('on purpose')", 1, None, CPU, marks=pytest.mark.slow),
        pytest.param("os._exit(75)", 75, "", ZERO, marks=pytest.mark.slow),
        pytest.param("os.kill(os.getpid(), 9)", 137, KILLED, ZERO, marks=pytest.mark.slow),
    ],
)
def test_the_launcher_of_launch_sh_adds_nothing_to_what_a_process_said(tmp_path, how, code, said, config):
    finished = launch(write(tmp_path, FAIL.format(how=how)), config_file=config, launcher=OURS, timeout=120)
    assert finished.returncode == code, finished
    assert time.time() - float(finished.stdout.split()[-1]) < 15
    if said is None:  # the traceback of Python itself, once
        assert finished.stderr.count("Traceback") == 1, finished
        assert finished.stderr.endswith("ValueError: on purpose\n"), finished
    else:
        assert finished.stderr == said, finished


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "said"), [("os._exit(2)", 2, ""), ("os.kill(os.getpid(), 9)", 137, KILLED.replace("1", "0"))]
)
def test_the_launcher_of_launch_sh_with_one_process(tmp_path, how, code, said):
    probe = write(tmp_path, f"import os\n{how}\n")
    finished = launch(probe, processes=1, options=["--cpu"], launcher=OURS)
    assert (finished.returncode, finished.stderr) == (code, said), finished


@pytest.mark.slow
def test_interrupt_ends_the_job(tmp_path):
    job = start(write(tmp_path, "import time\nprint('here', flush=True)\ntime.sleep(60)"), processes=2)
    try:
        while job.stdout.count("here") < 2:
            assert job.processes(), job.finish(0)
            time.sleep(0.1)
        job.interrupt()
        assert job.finish(20).returncode != 0
    finally:
        job.kill()


def test_process_left_behind_is_reported_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.distributed.launching.GRACE", 0.5)
    job = Job([sys.executable, write(tmp_path, DAEMON)])
    with pytest.raises(AssertionError, match=r"processes left behind: \['\d+ .*time.sleep"):
        job.finish(20)
    assert job.processes() == []


def test_hanging_job_is_reported_and_ended(tmp_path):
    job = Job([sys.executable, "-c", "import time; print('so far', flush=True); time.sleep(60)"])
    while "so far" not in job.stdout:
        time.sleep(0.05)
    with pytest.raises(AssertionError, match="still running after 0.1 s\n(.|\n)*so far"):
        job.finish(0.1)
    assert job.processes() == []
