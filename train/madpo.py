"""MADPO: multi-agent direct preference optimization.

Every task item is played several times; two joint responses with different rewards make a pair of winner w and loser l.
With Δ_i = log π_i(w_i|h_i) − log π_i(l_i|h_i), less the same of the initial policy, all agents minimise

    L = −log σ(β Σ_i Δ_i)        averaged over pairs; agent i's gradient flows through its own Δ_i

Without iterations the pairs are collected once, from the initial policy. With --num_iterations each round plays the
policy against a comparator (itself, an earlier self, another model, an API), and learns from new and replayed pairs.

    ./launch.sh train/madpo.py                                              # the demo: two agents, CPU, minutes
    ./launch.sh train/madpo.py --num_iterations 3 --comparator_policy history
    ./launch.sh train/madpo.py --num_iterations 4 --preference_replay_mode lambda_decay --preference_replay_lambda 0.5
    accelerate launch train/madpo.py ...                                    # in an environment of your own
"""

from dataclasses import dataclass

from mlrl.cli import config_errors, parse
from mlrl.config import TaskArguments
from mlrl.config_preference_trainers import MADPOConfig


@dataclass(kw_only=True)
class Arguments(TaskArguments, MADPOConfig):
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
    dpo_beta: float = 0.1
    """Scale of the joint margin in the loss"""
    train_batch_size: int | None = 16
    """Pairs an update; None: all"""


def main() -> None:
    """Reads the command line, trains, and saves the agents in the run folder."""
    run = parse(Arguments, __doc__)
    with config_errors():
        from mlrl.trainers import MADPOIterTrainer, MADPOTrainer  # torch loads only now

        trainer_class = MADPOIterTrainer if run.config.num_iterations > 0 else MADPOTrainer
        trainer = trainer_class(task=run.task, args=run.config)
        trainer.train()


if __name__ == "__main__":
    main()
