"""MAGRPO: multi-agent group-relative policy optimization.

For every task item each agent draws K responses; joint response g gets one shared reward R_g (plus the discounted mean
return of what follows, in several turns). The advantage of agent i's response k is (R_k − mean R) / std R over the K
credited returns of its node, and each agent follows Σ w · A_k · ∇ log π_i(a_i^k | h_i).

    ./launch.sh train/magrpo.py                                                  # demo on CPU, minutes
    ./launch.sh train/magrpo.py --task my_task.py --agent_model Qwen/Qwen2.5-0.5B-Instruct
    ./launch.sh train/magrpo.py --num_turns 2 --num_generations 3                # a tree of two turns
    accelerate launch train/magrpo.py …                                          # in an environment of your own
"""

from dataclasses import dataclass

from mlrl.cli import config_errors, parse
from mlrl.config import MAGRPOConfig, TaskArguments


@dataclass(kw_only=True)
class Arguments(TaskArguments, MAGRPOConfig):
    """What people edit; every other setting is in --help."""

    task: str = "length_ratio"
    """A task that comes with mlrl, or file.py[:ATTR] with a Task or a function that makes one"""
    agent_model: str | None = "embedded"
    """Model of every agent: hub id, local folder, or 'embedded' (no download)"""
    num_agents: int | None = 2
    """Team size with agent_model; otherwise the number of agents given"""
    num_turns: int = 1
    """Turns of an episode (horizon); more than 1 needs the task's external_transition"""
    num_generations: int = 4
    """Responses an agent draws at every node (K)"""
    rollout_batch_size: int = 4
    """Task items a step, over all processes"""
    advantage_normalization: str | bool = "node"
    """Divide by the std of: none, node (K returns of a node), batch; True is node"""
    reference_kl_coef: float = 0.0
    """Weight of the KL to the reference policy; 0 is off and loads nothing"""


def main() -> None:
    run = parse(Arguments, __doc__)
    with config_errors():
        from mlrl.trainers import MAGRPOTrainer  # torch loads only now

        trainer = MAGRPOTrainer(task=run.task, args=run.config)
        trainer.train()


if __name__ == "__main__":
    main()
