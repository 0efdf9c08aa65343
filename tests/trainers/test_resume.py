"""A run that was stopped goes on as if it had not been: same log lines, same samples, same weights, bit for bit."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys

import pytest

from mlrl.checkpoint import read_checkpoint_metadata
from mlrl.errors import ConfigError
from mlrl.parallel.signals import STOPPED, Stopped
from mlrl.resume import source_fingerprint
from mlrl.trainers import (
    IACTrainer,
    MAACTrainer,
    MADPOIterTrainer,
    MADPOTrainer,
    MAGRPOTrainer,
    MAREINFORCETrainer,
    MAReMaxTrainer,
    MARLHFIterTrainer,
    MARLHFTrainer,
    MARLOOTrainer,
)
from tests.http_server import FakeServer, Reply
from tests.trainers.loops import reward
from tests.trainers.resuming import Crash, StopAt, assert_same, crash, make, result, terminate

TRAINERS = {
    "mareinforce": (MAREINFORCETrainer, {"tuning": "full", "agent_learning_rate": 1e-4}),
    "magrpo": (MAGRPOTrainer, {"reference_kl_coef": 0.05, "num_updates_per_rollout": 2, "clip_range": 0.2}),
    "marloo": (MARLOOTrainer, {"share_parameters": True, "joint_mode": "cross"}),
    "maremax": (MAReMaxTrainer, {"dtype": "bfloat16"}),
    "iac": (IACTrainer, {"use_separate_critic": False}),
    "maac": (MAACTrainer, {"critic_type": "q", "critic_warmup_rollouts": 1, "critic_learning_rate": 1e-3}),
}

PAIRS = {"preference_num_candidates": 3, "max_new_tokens": 4, "eval_interval": 4, "save_steps": 2}
PREFERENCES = {
    "madpo": (MADPOTrainer, {"num_train_epochs": 2, "train_batch_size": 2, "lora_dropout": 0.2}),
    "madpo_iter": (
        MADPOIterTrainer,
        {
            **{"num_iterations": 3, "comparator_policy": "history", "preference_replay_mode": "all_history"},
            **{"train_batch_size": 2, "lr_scheduler": "linear"},
        },
    ),
    "marlhf": (MARLHFTrainer, {"rl_algorithm": "maac", "num_generations": 2, "rollout_batch_size": 2}),
    "marlhf_iter": (
        MARLHFIterTrainer,
        {
            **{"num_iterations": 2, "num_generations": 2, "rollout_batch_size": 2, "comparator_policy": "current_copy"},
            **{"tuning": "full", "agent_learning_rate": 1e-4},
        },
    ),
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences_go_on_to_the_same_end(name, tiny_llama, tmp_path):
    trainer, settings = PREFERENCES[name]
    counted = StopAt(None, crash)
    make(trainer, tiny_llama, tmp_path, "whole", counted, base=PAIRS, **settings).train()
    for number, act, error in ((0.4, crash, Crash), (0.3, terminate, Stopped), (0.2, crash, Crash)):
        stop = StopAt(int(number * counted.seen), act)
        run = make(
            trainer, tiny_llama, tmp_path, "stopped", stop, base=PAIRS, resume_from_checkpoint="latest", **settings
        )
        with pytest.raises(error):
            run.train()
    make(trainer, tiny_llama, tmp_path, "stopped", base=PAIRS, resume_from_checkpoint="latest", **settings).train()
    one, other = result(tmp_path / "whole"), result(tmp_path / "stopped")
    assert_same(one, other)
    rounds = [sorted((tmp_path / run / "preferences").glob("*.jsonl")) for run in ("whole", "stopped")]
    assert [path.name for path in rounds[0]] == [path.name for path in rounds[1]] and rounds[0]
    for path, again in zip(*rounds, strict=True):
        assert path.read_text() == again.read_text()


class NoisyStopAt(StopAt):
    """A reward that draws from a global generator, as tasks should not and do."""

    def __call__(self, first: list[str], second: list[str]) -> list[float]:
        return [value + random.random() for value in super().__call__(first, second)]


@pytest.mark.parametrize("name", ["madpo", "madpo_iter", "marlhf_iter"])
def test_a_signal_ends_a_collection_between_items(name, tiny_llama, tmp_path):
    trainer, settings = PREFERENCES[name]
    again = {"base": PAIRS, "resume_from_checkpoint": "latest", "max_rollout_rows": 6, **settings}  # an item at once
    random.seed(3)
    make(trainer, tiny_llama, tmp_path, "whole", NoisyStopAt(None, terminate), **again).train()
    random.seed(3)
    stop = NoisyStopAt(4, terminate)  # after two items of the evaluation, in the second item or its comparator's
    with pytest.raises(Stopped):
        make(trainer, tiny_llama, tmp_path, "stopped", stop, **again).train()
    assert 4 <= stop.seen <= 6 and not list((tmp_path / "stopped/preferences").glob("iteration*"))
    random.seed(4)
    make(trainer, tiny_llama, tmp_path, "stopped", NoisyStopAt(None, terminate), **again).train()
    assert_same(result(tmp_path / "whole"), result(tmp_path / "stopped"))


def test_the_budget_of_an_api_is_that_of_the_whole_run(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    server = FakeServer(lambda number, body: Reply({"completions": [f"{number} {'ab' * n}" for n in range(3)]}))
    settings = {
        **PAIRS,
        **{"num_iterations": 2, "comparator_policy": "api", "comparator_api_url": server.url, "eval_interval": 0},
        **{"comparator_api_max_concurrency": 1, "comparator_api_max_requests": 14, "max_steps": None},
    }
    with pytest.raises(Stopped):  # in the first round, which asks for 5 items × 2 agents
        make(MADPOIterTrainer, tiny_llama, tmp_path, "run", StopAt(1, terminate), num_turns=1, base=settings).train()
    assert len(server.asked) == 10
    again = {"num_turns": 1, "resume_from_checkpoint": "latest"}
    make(MADPOIterTrainer, tiny_llama, tmp_path, "run", base=settings, **again).train()
    server.close()
    assert len(server.asked) == 14  # the second round has 4 left, so that 3 of its items are lost
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    lost = [row["preference/lost_candidates"] for row in rows if "preference/lost_candidates" in row]
    assert lost == [0, 9]


def test_evaluations_are_shown_beside_the_first_of_the_whole_run(tiny_llama, tmp_path, capsys):
    with pytest.raises(Crash):
        make(MAGRPOTrainer, tiny_llama, tmp_path, "run", StopAt(30, crash)).train()
    table = capsys.readouterr().out.partition("evaluation at step 0\n")[2]
    first = table.split("eval/turn_1/reward_mean")[1].split()[0]
    make(MAGRPOTrainer, tiny_llama, tmp_path, "run", resume_from_checkpoint="latest").train()
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "eval/turn_1/reward_mean" in line]
    assert lines and all(line[2:4] == ["(first", first + ","] for line in lines)


def test_a_run_at_its_end_says_that_nothing_is_left(tiny_llama, tmp_path, capsys):
    make(MAGRPOTrainer, tiny_llama, tmp_path, "run").train()
    [whole] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("trained ")][1:]
    make(MAGRPOTrainer, tiny_llama, tmp_path, "run", resume_from_checkpoint="latest").train()
    again = capsys.readouterr().out
    assert "the run that goes on was at its end, step 6: nothing was trained" in again
    [line] = [line for line in again.splitlines() if line.startswith("trained ")][1:]
    counts = whole.rpartition(" in ")[0]
    assert "6 steps, 10 items" in counts and line.startswith(f"{counts}, 0 of the steps in ")


@pytest.mark.parametrize("name", TRAINERS)
def test_a_stopped_run_goes_on_to_the_same_end(name, tiny_llama, tmp_path):
    trainer, settings = TRAINERS[name]
    make(trainer, tiny_llama, tmp_path, "whole", **settings).train()

    stopped = make(trainer, tiny_llama, tmp_path, "stopped", StopAt(30, crash), **settings)
    with pytest.raises(Crash):
        stopped.train()
    again = make(
        trainer, tiny_llama, tmp_path, "stopped", StopAt(5, terminate), resume_from_checkpoint="latest", **settings
    )
    with pytest.raises(Stopped) as caught:
        again.train()
    assert caught.value.code == STOPPED
    make(trainer, tiny_llama, tmp_path, "stopped", resume_from_checkpoint="latest", **settings).train()
    assert_same(result(tmp_path / "whole"), result(tmp_path / "stopped"))


def test_the_wandb_run_is_the_same_one(tiny_llama, tmp_path):
    settings = {"num_turns": 1, "num_train_epochs": 1, "eval_interval": 0, "save_steps": 1, "report_to": ["wandb"]}
    with pytest.raises(Crash):
        make(MAGRPOTrainer, tiny_llama, tmp_path, "run", StopAt(5, crash), **settings).train()
    told = read_checkpoint_metadata(tmp_path / "run/checkpoints/checkpoint-2")
    assert told["trainer"] == "MAGRPO" and told["version"] and told["wandb"]["project"] == "mlrl"
    make(MAGRPOTrainer, tiny_llama, tmp_path, "run", resume_from_checkpoint="latest", **settings).train()
    branch = str(tmp_path / "run/checkpoints/checkpoint-3")
    settings |= {"num_train_epochs": 2, "resume_from_checkpoint": branch}
    make(MAGRPOTrainer, tiny_llama, tmp_path, "branch", **settings).train()

    def ids(name):  # by the record inside: runs that start in one second have a number after the folder's id
        records = (tmp_path / name / "wandb").glob("offline-run-*/run-*.wandb")
        return [record.stem.removeprefix("run-") for record in records]

    assert ids("run") and set(ids("run")) == {told["wandb"]["id"]}
    [other] = ids("branch")
    assert other != told["wandb"]["id"]


def test_a_starting_adapter_stays_the_reference(tiny_llama, tmp_path):
    make(MAGRPOTrainer, tiny_llama, tmp_path, "first", num_turns=1, num_train_epochs=1, eval_interval=0).train()
    settings = {"reference_kl_coef": 0.1, "num_turns": 1, "eval_interval": 0, "save_steps": 1}
    settings["agents"] = [str(tmp_path / f"first/agents/agent_{agent}") for agent in range(2)]
    make(MAGRPOTrainer, None, tmp_path, "whole", **settings).train()
    with pytest.raises(Crash):
        make(MAGRPOTrainer, None, tmp_path, "stopped", StopAt(6, crash), **settings).train()
    kept = tmp_path / "stopped/checkpoints/checkpoint-2/agent_1"
    assert (kept / "reference.safetensors").is_file()
    make(MAGRPOTrainer, None, tmp_path, "stopped", resume_from_checkpoint="latest", **settings).train()
    assert_same(result(tmp_path / "whole"), result(tmp_path / "stopped"))


def test_a_longer_run_of_pairs_goes_on_in_its_round(tiny_llama, tmp_path):
    settings = {**PAIRS, "eval_interval": 0, "train_batch_size": 2, "num_train_epochs": 2}

    def run(name, **changes):
        made = make(MADPOTrainer, tiny_llama, tmp_path, name, base=settings, **changes)
        made.train()
        return made.step_number

    steps = run("whole")
    assert run("short", max_steps=3) == 3
    assert run("short", max_steps=None, resume_from_checkpoint="latest") == steps
    assert result(tmp_path / "whole")["metrics"] == result(tmp_path / "short")["metrics"]
    origin = str(tmp_path / "short/checkpoints" / f"checkpoint-{steps}")
    assert run("branch", num_train_epochs=3, resume_from_checkpoint=origin) == steps // 2 * 3
    # the same line once more, as a batch system has it: the branch goes on from its own end
    assert run("branch", num_train_epochs=4, resume_from_checkpoint=origin) == steps * 2
    logged = [row["step"] for row in result(tmp_path / "branch")["metrics"]]
    assert sorted(set(logged)) == list(range(steps + 1, 2 * steps + 1))


def test_two_kills_before_the_first_line_of_the_log(tiny_llama, tmp_path):
    settings = {"logging_steps": 1000, "eval_interval": 0, "save_steps": 1, "completions_steps": 0}
    make(MAGRPOTrainer, tiny_llama, tmp_path, "whole", **settings).train()
    for calls in (12, 8, 8):
        with pytest.raises(Crash):
            again = {"resume_from_checkpoint": "latest", **settings}
            make(MAGRPOTrainer, tiny_llama, tmp_path, "run", StopAt(calls, crash), **again).train()
    make(MAGRPOTrainer, tiny_llama, tmp_path, "run", resume_from_checkpoint="latest", **settings).train()
    assert_same(result(tmp_path / "whole"), result(tmp_path / "run"))


def test_by_arguments_of_train(tiny_llama, tmp_path):
    settings = {"num_turns": 1, "num_train_epochs": 3, "eval_interval": 0, "logging_steps": 1}
    kept = tmp_path / "kept"
    with pytest.raises(Crash):
        make(MAGRPOTrainer, tiny_llama, tmp_path, "run", StopAt(14, crash), **settings).train(checkpoint_dir=kept)
    run = make(MAGRPOTrainer, tiny_llama, tmp_path, "run", resume_from_checkpoint="latest", **settings)
    run.train(checkpoint_dir=kept)
    assert [row["step"] for row in result(tmp_path / "run")["metrics"]] == list(range(1, 10))
    make(MAGRPOTrainer, tiny_llama, tmp_path, "by_steps", **settings | {"max_steps": 4}).train()
    more = make(MAGRPOTrainer, tiny_llama, tmp_path, "by_steps", **settings)
    more.train(resume_from_checkpoint="latest")
    assert [row["step"] for row in result(tmp_path / "by_steps")["metrics"]] == list(range(1, 10))
    with pytest.raises(ConfigError, match="checkpoint_interval=0"):
        more.train(checkpoint_interval=0)


def test_a_fingerprint_is_the_same_in_every_process():
    def judge(text):
        return len(text)

    def other(text):
        return -len(text)

    partial = functools.partial(reward, judge=judge, words=["b", "a"])
    assert " at 0x" not in str(source_fingerprint(partial))
    assert source_fingerprint(partial) != source_fingerprint(functools.partial(reward, judge=other, words=["b", "a"]))
    code = "from mlrl.resume import data_fingerprint as f; print(f([{'x': {'sea', 'town', 'river', 'ship'}}]))"
    prints = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
        ).stdout
        for seed in range(3)
    }
    assert len(prints) == 1 and "1 rows" in prints.pop()
