"""When a run plays its evaluation set, and where what comes of it goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlrl.rollout.tree import RolloutTree
from mlrl.trainers.data import Batch, first_items
from mlrl.trainers.evaluation import evaluate, evaluation_growth
from mlrl.trainers.records import write_nodes

if TYPE_CHECKING:
    from mlrl.trainers.base import Trainer


class Evaluations:
    """The evaluations of one run, each between two steps.

    Attributes:
        done_at: the step after which the latest was; weights are not played twice.
    """

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.done_at: int | None = None

    def play(self, num_samples: int | None = None) -> tuple[dict[str, float], list[RolloutTree]]:
        """Metrics and trees of the first `num_samples` items (default: the setting); empty without any."""
        trainer = self.trainer
        count = trainer.args.eval_num_samples if num_samples is None else num_samples
        if trainer.task.eval_dataset is None or count == 0:
            return {}, []
        growth = evaluation_growth(trainer.args, trainer.prompt_limits)
        items = trainer.world.from_first(lambda: first_items(trainer.task.eval_dataset, count))
        return evaluate(trainer.collector, items, growth, trainer.args.eval_batch_size)

    def run(self) -> None:
        """Plays and logs, unless `eval_interval` leaves that to the user or these weights have been played."""
        trainer = self.trainer
        if not trainer.args.eval_interval or self.done_at == trainer.step_number:
            return
        self.done_at = trainer.step_number
        trainer.settle()
        trainer.phase("evaluation")
        metrics, trees = self.play()
        if metrics:
            trainer.log(metrics)
            trainer.console.evaluation(metrics, trainer.step_number)
        if trees and trainer.args.completions_steps and trainer.launch.is_main:
            write_nodes(trainer.tracking, trees, trainer.step_number, trainer.env_step, "eval", trainer.args.discount)

    def due(self, batch: Batch, size: int) -> bool:
        """Whether the batch before this one, of `size` items, went past a multiple of `eval_interval` in its epoch."""
        interval = self.trainer.args.eval_interval
        return interval > 0 and batch.position // interval > max(0, batch.position - size) // interval
