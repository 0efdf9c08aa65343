"""Updates that are skipped for a NaN or infinite gradient, and the end of a run that has no other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlrl.errors import NonFiniteError
from mlrl.wording import counted

if TYPE_CHECKING:
    from mlrl.trainers.base import Trainer


class NonFiniteGuard:
    """Counts the skipped updates of one run, and ends it in time.

    Attributes:
        in_a_row: steps up to now without one good update.
    """

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.in_a_row = 0

    def count(self, *finite: bool) -> None:
        """Takes note of which updates of a step had a finite gradient."""
        trainer = self.trainer
        for one in finite:
            trainer.averager.add("nonfinite_fraction", 0.0 if one else 1.0, 1.0)
        if not all(finite):
            skipped = f"{finite.count(False)} of {counted(len(finite), 'update')}"
            trainer.console.warn(f"step {trainer.step_number + 1}: {skipped} skipped, for a NaN or infinite gradient")
        self.in_a_row = 0 if any(finite) else self.in_a_row + 1

    def stop_if_too_many(self) -> None:
        """Ends the run after `max_nonfinite_steps` such steps; metrics and the weights of the last good update stay.

        Raises:
            NonFiniteError: it does.
        """
        trainer, most = self.trainer, self.trainer.args.max_nonfinite_steps
        if self.in_a_row < most:
            return
        saved = trainer.save_what_was_learned()["agents"]
        raise NonFiniteError(
            f"max_nonfinite_steps={most}: that many steps in a row had a NaN or infinite gradient, up to step "
            f"{trainer.step_number}. The weights of the last good update are in {saved}. Lower the learning rate, or "
            "use dtype float32"
        )
