"""MAREINFORCE: the policy gradient of a team on returns as they are, without baseline.

For every task item each agent draws K responses; joint response g gets one shared reward, and R_g is that reward plus
the discounted mean return of what follows it. With the return R_k credited to agent i's response k,

    A_k = R_k        and agent i follows        Σ w · A_k · ∇ log π_i(a_k | h_i)

Unbiased at any K, one response a node included, and the noisiest of the family: rewards that are all positive push
every sampled response up. Rewards around 0 (reward_processor of the task) help; so do larger batches.

    ./launch.sh train/mareinforce.py                                        # the demo: two agents, CPU, minutes
    ./launch.sh train/mareinforce.py --num_generations 1 --rollout_batch_size 16
    ./launch.sh train/mareinforce.py --task my_task.py --agent_model Qwen/Qwen2.5-0.5B-Instruct
    accelerate launch train/mareinforce.py ...                              # in an environment of your own
"""

from dataclasses import dataclass

from mlrl.cli import config_errors, parse
from mlrl.config import MAREINFORCEConfig, TaskArguments


@dataclass(kw_only=True)
class Arguments(TaskArguments, MAREINFORCEConfig):
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
    reference_kl_coef: float = 0.0
    """Weight of the KL to the reference policy; 0 is off and loads nothing"""


def main() -> None:
    """Reads the command line, trains, and saves the agents in the run folder."""
    run = parse(Arguments, __doc__)
    with config_errors():
        from mlrl.trainers import MAREINFORCETrainer  # torch loads only now

        trainer = MAREINFORCETrainer(task=run.task, args=run.config)
        trainer.train()


if __name__ == "__main__":
    main()
