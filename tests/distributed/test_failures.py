"""What fails on one rank ends the job on all, soon, with its reason once and nothing left running."""

import os
import signal
import time

import pytest

from tests.distributed.launching import launch, start

TASK = """
import os, time
from mlrl import Task

RANK = int(os.environ.get("RANK", "0"))

def reward(first, second):
    {body}
    return [float(len(a)) for a in first]

task = Task(train_dataset=[{{"prompt": p}} for p in "abcdefghij"], reward_func=reward)
"""
SMALL = ["--max_new_tokens", "4", "--num_generations", "2", "--rollout_batch_size", "2", "--eval_interval", "0"]
SOON = 15  # seconds


def flags(tmp_path, model: str, body: str, *more: str) -> list[str]:
    (tmp_path / "task.py").write_text(TASK.format(body=body))
    return [
        "--task",
        str(tmp_path / "task.py"),
        "--agent_model",
        model,
        "--output_dir",
        str(tmp_path / "runs"),
        *SMALL,
        *more,
    ]


def test_an_exception_of_one_rank_ends_all_with_one_traceback(tiny_llama, tmp_path):
    body = "if RANK == 1: 1 / 0"
    done = launch("train/magrpo.py", flags(tmp_path, tiny_llama, body), processes=2)
    assert done.returncode != 0
    assert done.stderr.count("ZeroDivisionError: division by zero") == 1, done
    assert "rank 1 of 2 failed; all stop" in done.stderr


@pytest.mark.slow
def test_a_message_of_all_ranks_is_printed_once(tiny_llama, tmp_path):
    done = launch("train/magrpo.py", flags(tmp_path, tiny_llama, "return [None] * len(first)"), processes=3)
    assert done.returncode != 0
    assert done.stderr.count("magrpo.py: error: reward_func returned") == 1, done
    assert 'Traceback (most recent call last):\n  File "' not in done.stderr.split("torch/distributed/elastic")[0]


@pytest.mark.slow
def test_a_wrong_flag_is_one_line_of_all_ranks(tiny_llama, tmp_path):
    done = launch("train/magrpo.py", flags(tmp_path, tiny_llama, "pass", "--placement", "split"), processes=3)
    assert done.returncode != 0
    assert done.stderr.count("3 ranks do not divide among 2 agents") == 1, done


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank_ends_the_job(tiny_llama, tmp_path, victim):
    body = f'open("{tmp_path}/pid_%d" % RANK, "w").write(str(os.getpid())); time.sleep(0.3)'
    job = start("train/magrpo.py", flags(tmp_path, tiny_llama, body, "--num_train_epochs", "1000"), processes=2)
    wait_for(job, tmp_path / "runs", lambda folder: any(folder.glob("*/metrics.jsonl")))
    pids = [int((tmp_path / f"pid_{rank}").read_text()) for rank in range(2)]
    os.kill(pids[victim], signal.SIGKILL)
    killed = time.monotonic()
    done = job.finish(60)
    assert time.monotonic() - killed < SOON
    assert done.returncode != 0


@pytest.mark.slow
def test_ctrl_c_leaves_a_usable_run_folder(tiny_llama, tmp_path):
    job = start(
        "train/magrpo.py", flags(tmp_path, tiny_llama, "time.sleep(0.1)", "--num_train_epochs", "1000"), processes=2
    )
    wait_for(job, tmp_path / "runs", lambda folder: any(folder.glob("*/metrics.jsonl")))
    job.interrupt()
    interrupted = time.monotonic()
    done = job.finish(60)
    assert time.monotonic() - interrupted < SOON
    assert done.returncode != 0
    [run] = (tmp_path / "runs").iterdir()
    assert (run / "config.yaml").is_file() and (run / "metrics.jsonl").read_text().endswith("}\n")


def wait_for(job, folder, ready, timeout: float = 90) -> None:
    ends = time.monotonic() + timeout
    while not (folder.is_dir() and ready(folder)):
        if time.monotonic() > ends:
            job.kill()
            raise AssertionError(f"nothing in {folder} after {timeout} s\n{job.stdout}")
        time.sleep(0.1)


ENDING = """
import time

import torch
import torch.distributed as dist

from mlrl.parallel.launch import Launch
from mlrl.parallel.lifeline import Lifeline
from mlrl.parallel.mesh import Mesh


def busy(_):
    end = time.monotonic() + 1
    while time.monotonic() < end:
        pass


launch = Launch.detect()
mesh = Mesh.create(launch.rank, launch.world_size, [range(2)], {})
Lifeline.start(mesh.world)
work = dist.all_reduce(torch.ones(2), group=mesh.world.objects, async_op=True)
after = work.get_future().then(busy)  # in a thread of gloo, as is what it does at the end of every collective
time.sleep(0.1)
print("finished", flush=True)
"""


def test_a_run_that_finished_does_not_abort_at_its_end(tmp_path):
    """While a thread of gloo is still at work, the interpreter must not end under it."""
    (tmp_path / "ending.py").write_text(ENDING)
    done = launch(tmp_path / "ending.py", processes=2)
    assert done.returncode == 0, str(done)
    assert done.stdout.count("finished") == 2, str(done)
