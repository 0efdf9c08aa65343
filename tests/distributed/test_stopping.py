"""Asked to stop, a run ends with a checkpoint and an exit code that says so; killed at any instant, it goes on."""

import json
import multiprocessing
import os
import random
import signal
import time

import pytest

from mlrl.checkpoint import checkpoints_in, step_of
from mlrl.parallel.signals import STOPPED
from mlrl.trainers import MAGRPOTrainer
from tests.distributed.launching import ROOT, Job
from tests.distributed.test_failures import flags, wait_for
from tests.trainers.resuming import assert_same, make, result

BODY = "time.sleep(0.05)"


def command(tmp_path, model: str, name: str, *more: str) -> list[str]:
    settings = ["--save_steps", "2", "--run_name", name, *more]
    return [str(ROOT / "launch.sh"), "train/magrpo.py", *flags(tmp_path, model, BODY, *settings)]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_signal_ends_a_run_with_a_checkpoint_to_go_on_from(number, processes, tiny_llama, tmp_path):
    env = {"PROCESSES_PER_MACHINE": str(processes)}
    job = Job(command(tmp_path, tiny_llama, "run", "--num_train_epochs", "1000"), env, ROOT)
    run = tmp_path / "runs" / "run"
    wait_for(job, run, lambda folder: (folder / "metrics.jsonl").exists())
    job.interrupt() if number == signal.SIGINT else os.kill(job._process.pid, number)
    stopped = job.finish(60)
    assert stopped.returncode == (130 if number == signal.SIGINT else STOPPED), stopped
    assert "Traceback" not in stopped.stderr, stopped
    newest = step_of(checkpoints_in(run / "checkpoints")[0])
    assert f"stopped after step {newest}" in stopped.stdout

    more = ("--num_train_epochs", "1000", "--max_steps", str(newest + 2), "--resume_from_checkpoint", "latest")
    alone = {"PROCESSES_PER_MACHINE": "1"}
    done = Job(command(tmp_path, tiny_llama, "run", *more), alone, ROOT).finish(120)
    assert done.returncode == 0, done
    assert f"resumed from {run / 'checkpoints'}/checkpoint-{newest}" in done.stdout
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, newest + 3))


# Killed at any instant ------------------------------------------------------------------------------------------------

KILLS = 40


def train(model: str, folder, name: str) -> None:
    make(MAGRPOTrainer, model, folder, name, save_steps=1, eval_interval=4, resume_from_checkpoint="latest").train()


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_instant_ends_as_one_that_was_not(tiny_llama, tmp_path):
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["mlrl.trainers", "tests.trainers.resuming"])
    chance = random.Random(0)
    make(MAGRPOTrainer, tiny_llama, tmp_path, "whole", save_steps=1, eval_interval=4).train()
    expected, kills, runs = result(tmp_path / "whole"), 0, 0
    while kills < KILLS:
        runs += 1
        name, reached = f"run{runs}", 0
        folder = tmp_path / name / "checkpoints"
        while True:
            one = processes.Process(target=train, args=(tiny_llama, tmp_path, name))
            started = time.monotonic()
            one.start()
            at_folder = chance.random() < 0.5  # half of the kills while a checkpoint is being written
            until = started + chance.uniform(0.2, 12)
            while time.monotonic() < until and one.is_alive():
                if at_folder and any(folder.glob(".writing*")):
                    time.sleep(chance.uniform(0, 0.03))
                    break
                time.sleep(0.001)
            alive = one.is_alive()
            one.kill()
            one.join()
            if not alive:
                assert one.exitcode == 0
                break
            kills += 1
            steps = [step_of(path) for path in checkpoints_in(folder)]
            assert max(steps, default=0) >= reached, "a checkpoint was lost"
            reached = max(steps, default=0)
        assert_same(expected, result(tmp_path / name))
