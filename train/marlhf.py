"""MARLHF: a joint reward model learned from preferences, and a policy gradient that follows it.

Every task item is played several times; two joint responses with different rewards make a pair of winner w and loser l.
A reward model R̃ reads all prompts and responses as one text and minimises −log σ(R̃(w) − R̃(l)).
Frozen, it rewards with (R̃ − mean)/s, and the trainer of --rl_algorithm follows it, with a KL
to the initial policy that keeps it where the pairs came from. Evaluation and ending early go by the task's own reward.

    ./launch.sh train/marlhf.py                                             # the demo: two agents, CPU, minutes
    ./launch.sh train/marlhf.py --num_iterations 2 --comparator_policy current_copy
    ./launch.sh train/marlhf.py --rl_algorithm maac --reward_model_name Qwen/Qwen2.5-0.5B-Instruct
    accelerate launch train/marlhf.py ...                                   # in an environment of your own
"""

from dataclasses import dataclass

from mlrl.cli import config_errors, parse
from mlrl.config import TaskArguments
from mlrl.config_preference_trainers import MARLHFConfig


@dataclass(kw_only=True)
class Arguments(TaskArguments, MARLHFConfig):
    """What people edit; every other setting is in --help."""

    task: str = "length_ratio"
    """A shipped task, or file.py[:ATTR] with a Task or a function for one"""
    agent_model: str | None = "embedded"
    """Model of every agent: hub id, local folder, or embedded (no download)"""
    num_agents: int | None = None
    """Team size; None: 2, or the number of models that are given"""
    num_turns: int = 1
    """Turns of an episode; more than 1 needs the task's external_transition"""
    num_iterations: int = 0
    """Rounds of collecting and learning; 0: pairs are collected once, at the start"""
    preference_num_candidates: int = 4
    """Joint responses an item, of which pairs are made"""
    preference_pairs_per_sample: int | None = 4
    """Most pairs an item; None: all there are"""
    max_new_tokens: int = 128
    """Longest response, in tokens"""
    agent_learning_rate: float | list[float] | None = None
    """AdamW learning rate, one or one an agent; None: 1e-4 (lora), 1e-5 (full)"""
    rl_algorithm: str = "magrpo"
    """Policy algorithm that follows the learned reward"""
    reference_kl_coef: float = 0.05
    """Weight of the KL to the reference policy; 0 is off and loads nothing"""
    reward_num_train_epochs: int = 2
    """Passes over the pairs; the weights of the best validation are kept"""


def main() -> None:
    """Reads the command line, trains, and saves the agents in the run folder."""
    run = parse(Arguments, __doc__)
    with config_errors():
        from mlrl.trainers import MARLHFIterTrainer, MARLHFTrainer  # torch loads only now

        trainer_class = MARLHFIterTrainer if run.config.num_iterations > 0 else MARLHFTrainer
        trainer = trainer_class(task=run.task, args=run.config)
        trainer.train()


if __name__ == "__main__":
    main()
