"""What a run says of itself before its first step."""

import pytest

from mlrl.config import MAGRPOConfig
from mlrl.trainers.reinforce import describe_rollouts

SIZE = "2 items a step, 1 turn, 3 generations (cross) of up to 8 tokens"


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ({"joint_mode": "default", "num_turns": "flag"}, ""),
        ({"joint_mode": "task", "num_turns": "script"}, ", as the task recommends"),
        ({"joint_mode": "task", "max_new_tokens": "flag"}, "; joint_mode as the task recommends"),
        (
            {"num_generations": "task", "joint_mode": "task", "rollout_batch_size": "yaml"},
            "; num_generations, joint_mode as the task recommends",
        ),
    ],
)
def test_only_what_the_task_recommends_is_called_so(sources, words):
    args = MAGRPOConfig(rollout_batch_size=2, num_generations=3, joint_mode="cross", max_new_tokens=8)
    args.sources.update(sources)
    assert describe_rollouts(args) == SIZE + words
