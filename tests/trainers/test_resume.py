"""A run that was stopped goes on as if it had not been: same log lines, same samples, same weights, bit for bit."""

from __future__ import annotations

import pytest

from mlrl.checkpoint import read_checkpoint_metadata
from mlrl.parallel.signals import STOPPED, Stopped
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
    "madpo": (MADPOTrainer, {"num_train_epochs": 2, "train_batch_size": 2, "lora_dropout": 0.0}),
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
    ids = [path.name.rpartition("-")[2] for path in sorted((tmp_path / "run/wandb").glob("offline-run-*"))]
    assert ids == [told["wandb"]["id"]] * 2
    [other] = (tmp_path / "branch/wandb").glob("offline-run-*")
    assert other.name.rpartition("-")[2] != told["wandb"]["id"]
