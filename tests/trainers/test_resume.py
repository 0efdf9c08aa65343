"""A run that was stopped goes on as if it had not been: same log lines, same samples, same weights, bit for bit."""

from __future__ import annotations

import pytest

from mlrl.parallel.signals import STOPPED, Stopped
from mlrl.trainers import IACTrainer, MAACTrainer, MAGRPOTrainer, MAREINFORCETrainer, MAReMaxTrainer, MARLOOTrainer
from tests.trainers.resuming import Crash, StopAt, assert_same, crash, make, result, terminate

TRAINERS = {
    "mareinforce": (MAREINFORCETrainer, {"tuning": "full", "agent_learning_rate": 1e-4}),
    "magrpo": (MAGRPOTrainer, {"reference_kl_coef": 0.05, "num_updates_per_rollout": 2, "clip_range": 0.2}),
    "marloo": (MARLOOTrainer, {"share_parameters": True, "joint_mode": "cross"}),
    "maremax": (MAReMaxTrainer, {"dtype": "bfloat16"}),
    "iac": (IACTrainer, {"use_separate_critic": False}),
    "maac": (MAACTrainer, {"critic_type": "q", "critic_warmup_rollouts": 1, "critic_learning_rate": 1e-3}),
}


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
