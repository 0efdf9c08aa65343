"""MAGRPO: multi-agent group-relative policy optimization.

For every task item each agent draws K responses; joint response g gets one shared reward, and R_g is that reward plus
the discounted mean return of what follows it. With the K returns credited to agent i's responses of a node,

    A_k = (R_k − mean R) / std R        and agent i follows        Σ w · A_k · ∇ log π_i(a_k | h_i)

Dividing by std R makes every node count alike, whatever its scale of rewards; without it (advantage_normalization none)
this is the policy gradient × (K − 1)/K.

    ./launch.sh train/magrpo.py                                             # the demo: two agents, CPU, minutes
    ./launch.sh train/magrpo.py --task my_task.py --agent_model Qwen/Qwen2.5-0.5B-Instruct
    ./launch.sh train/magrpo.py --num_turns 2 --num_generations 3           # trees of two turns
    accelerate launch train/magrpo.py ...                                   # in an environment of your own
"""

from dataclasses import dataclass

from mlrl.cli import config_errors, parse
from mlrl.config import MAGRPOConfig, TaskArguments


@dataclass(kw_only=True)
class Arguments(TaskArguments, MAGRPOConfig):
    """What people edit; every other setting is in --help."""

    task: str = "length_ratio"
    """A shipped task, or file.py[:ATTR] with a Task or a function for one"""
    agent_model: str | None = "embedded"
    """Model of every agent: hub id, local folder, or embedded (no download)"""
    num_agents: int | None = None
    """Team size; None: 2, or the number of models that are given"""
    num_turns: int = 1
    """Turns of an episode; more than 1 needs the task's external_transition"""
    num_generations: int = 4
    """Responses an agent draws at every node (K)"""
    rollout_batch_size: int = 4
    """Task items a step, over all processes"""
    max_new_tokens: int = 128
    """Longest response, in tokens"""
    agent_learning_rate: float | list[float] | None = None
    """AdamW learning rate, one or one an agent; None: 1e-4 (lora), 1e-5 (full)"""
    advantage_normalization: str | bool = "node"
    """Advantages divided by the std of: none, node, batch; True is node"""
    reference_kl_coef: float = 0.0
    """Weight of the KL to the reference policy; 0 is off and loads nothing"""


def main() -> None:
    """Reads the command line, trains, and saves the agents in the run folder."""
    run = parse(Arguments, __doc__)
    with config_errors():
        from mlrl.trainers import MAGRPOTrainer  # torch loads only now

        trainer = MAGRPOTrainer(task=run.task, args=run.config)
        trainer.train()


if __name__ == "__main__":
    main()
