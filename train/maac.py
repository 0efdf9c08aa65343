"""MAAC: multi-agent actor-critic, one centralized critic for all agents.

The critic reads the joint history, every prompt and response of every agent under a tag of its role, and learns its
value. With V(h) of a node and Y_g the target of its joint response g (its reward, plus what follows: the next value and
the targets below it, mixed by gae_lambda),

    A_k = mean of (Y_g − V(h)) over the joints of a_k      and agent i follows      Σ w · A_k · ∇ log π_i(a_k | h_i)

with A divided by its standard deviation over the batch. Siblings are not needed: one response a node will do. With
critic_type q the critic values joint responses, and A_k is the value of a_k less that of the agent's other responses,
in joint_mode cross with the partners' same ones (counterfactual, as in COMA). Agents act alone; the critic only trains.

    ./launch.sh train/maac.py                                               # the demo: two agents, CPU, minutes
    ./launch.sh train/maac.py --num_turns 2 --num_generations 1 --rollout_batch_size 16
    ./launch.sh train/maac.py --critic_type q --joint_mode cross
    accelerate launch train/maac.py ...                                     # in an environment of your own
"""

from dataclasses import dataclass
from typing import Literal

from mlrl.cli import config_errors, parse
from mlrl.config import MAACConfig, TaskArguments


@dataclass(kw_only=True)
class Arguments(TaskArguments, MAACConfig):
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
    critic_type: Literal["v", "q"] = "v"
    """v: value of a history; q: value of a history and a response"""
    critic_learning_rate: float | None = None
    """AdamW learning rate of separate critics; None: 1e-4 (lora), 1e-5 (full)"""
    gae_lambda: float = 0.95
    """0: one-step TD targets; 1: Monte-Carlo returns"""
    reference_kl_coef: float = 0.0
    """Weight of the KL to the reference policy; 0 is off and loads nothing"""


def main() -> None:
    """Reads the command line, trains, and saves the agents in the run folder."""
    run = parse(Arguments, __doc__)
    with config_errors():
        from mlrl.trainers import MAACTrainer  # torch loads only now

        trainer = MAACTrainer(task=run.task, args=run.config)
        trainer.train()


if __name__ == "__main__":
    main()
