"""The helpers that launch: what they return, and that they leave nothing running."""

import sys
import time

import pytest

from tests.distributed.launching import Job, launch, start

SUM = """
import sys, torch
from accelerate import PartialState
state = PartialState(cpu=True)
total = torch.tensor(float(state.process_index + 1))
torch.distributed.all_reduce(total)
print(f"rank {state.process_index} of {state.num_processes} total {total.item()} flags {sys.argv[1:]}", flush=True)
state.destroy_process_group()
"""
# no library: these tests are about processes
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


def test_ranks_reach_each_other(tmp_path):
    finished = launch(write(tmp_path, SUM), ["--seed", "two words"], processes=2, timeout=60)
    assert finished.returncode == 0, finished
    lines = sorted(line for line in finished.stdout.splitlines() if line.startswith("rank"))
    # 1 + 2
    assert lines == [f"rank {rank} of 2 total 3.0 flags ['--seed', 'two words']" for rank in (0, 1)]
    assert 0 < finished.seconds < 60


@pytest.mark.parametrize("how", ["raise ValueError('on purpose')", "os.kill(os.getpid(), 9)"])
def test_rank_that_dies_ends_the_job(tmp_path, how):
    finished = launch(write(tmp_path, FAIL.format(how=how)), processes=2, timeout=50)
    assert finished.returncode != 0
    assert time.time() - float(finished.stdout) < 15  # seconds since it died; the other rank would sleep for 60
    assert ("on purpose" in finished.stderr) == ("raise" in how)


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


def test_process_left_behind_is_reported_and_ended(tmp_path):
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
