"""Checkpoints of a trainer: what of it they hold, when they are written, and going on from one."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

import mlrl
from mlrl.agents import Agent
from mlrl.checkpoint import Entity
from mlrl.checkpoint_writing import CheckpointError, write_checkpoint
from mlrl.config_file import masked
from mlrl.critics import Critic
from mlrl.parallel.engine import Engine
from mlrl.parallel.group import Group
from mlrl.parallel.signals import Stopped, StopRequests
from mlrl.parallel.zero import ZeroEngine
from mlrl.random_state import random_state
from mlrl.resume import (
    Resume,
    file_sizes,
)
from mlrl.run_folder import RunFolder, to_jsonable
from mlrl.trainers.data import Batch, Place

if TYPE_CHECKING:
    from mlrl.trainers.base import Trainer


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Where checkpoints go and how often: every so many steps, or every so many epochs.

    Attributes:
        folder: of checkpoint-N; None: there are none.
        limit: how many are kept; None keeps all.
    """

    folder: Path | None
    steps: int | None = None
    epochs: int | None = None
    limit: int | None = None

    @classmethod
    def of(cls, args: Any, run: RunFolder, checkpoint_dir: str | Path | None, interval: int) -> Schedule:
        """By steps into the run folder, as the settings say, or every `interval` epochs into a folder of its own."""
        if checkpoint_dir is not None:
            return cls(Path(checkpoint_dir), epochs=interval, limit=args.save_total_limit)
        return cls(run.checkpoints if args.save_steps else None, steps=args.save_steps, limit=args.save_total_limit)

    def due(self, step: int, epoch_ends: int | None) -> bool:
        """Whether one falls due after this step, which ends epoch `epoch_ends` if any."""
        if self.steps is not None:
            return step % self.steps == 0
        return epoch_ends is not None and epoch_ends % self.epochs == 0


class Checkpoints:
    """Writes the checkpoints of one run as they fall due, and stops it where it was asked to.

    Args:
        trainer: whose; see `Trainer.entities` and `Trainer.progress`.
        schedule: where and how often.
        fingerprints: what a run that goes on must have in common with this one, beside its settings.
        resume: what this run goes on from.
    """

    def __init__(self, trainer: Trainer, schedule: Schedule, fingerprints: dict[str, Any], resume: Resume):
        self.trainer, self.schedule, self.fingerprints, self.resume = trainer, schedule, fingerprints, resume
        self.place = Place(**resume.state["place"]) if resume.state else Place()
        self.requests = StopRequests(trainer.world, says=trainer.launch.is_main)
        self.seconds: float | None = None  # that the latest one took
        self._sizes: dict[str, int] = {}  # of the run's files as the latest one tells them
        origin = resume.checkpoint.resolve().parent if resume.checkpoint is not None else None
        is_here = origin is not None and schedule.folder is not None and origin == schedule.folder.resolve()
        self._written: int | None = resume.state["step"] if is_here else None

    def after_step(self, batch: Batch) -> None:
        """A step and its log line are done: writes a checkpoint if one is due.

        Raises:
            Stopped: a signal asked for it, and the checkpoint is written.
        """
        self.place = batch.after
        whole = batch.length is not None and batch.position + len(batch.items) >= batch.length
        due = self.schedule.folder is not None and self.schedule.due(
            self.trainer.step_number, batch.epoch + 1 if whole else None
        )
        if due:
            self.write()
        self.stop_if_asked(fresh=due)

    def phase_done(self) -> None:
        """Something long that is no step is done: writes a checkpoint of the latest step anew."""
        if self.schedule.folder is not None:
            self.write()
        self.stop_if_asked(fresh=True)

    def stop_if_asked(self, fresh: bool = False, rewind: Callable[[], None] = lambda: None) -> None:
        """Writes a checkpoint and ends the run where a signal asked for it.

        Args:
            fresh: whether the last checkpoint says all there is.
            rewind: called before the checkpoint of a run that is in the middle of what it will do again.
        """
        if self.schedule.folder is None:
            return
        number = self.requests.asked()
        if number is None:
            return
        if not fresh:
            rewind()
            self.write()
        trainer = self.trainer
        trainer.console.note(
            f"stopped after step {trainer.step_number}; go on with --resume_from_checkpoint {self.schedule.folder}"
        )
        raise Stopped(number)

    def at_end(self) -> None:
        """The last checkpoint, unless the last step has one."""
        if self.schedule.folder is not None and self._written != self.trainer.step_number:
            self.write()

    def write(self) -> None:
        """Writes checkpoint-N. One that fails is a warning: the run goes on with the earlier ones."""
        trainer = self.trainer
        trainer.settle()
        started = time.perf_counter()
        trainer.phase("checkpoint")
        sizes = file_sizes(trainer.run_folder)
        grown = [trainer.run_folder.path / name for name, size in sizes.items() if size != self._sizes.get(name)]
        state = {
            "version": mlrl.__version__,
            "trainer": trainer.algorithm,
            "env_step": trainer.env_step,
            "epoch": trainer.epoch,
            "branched_from": self.resume.branched_from,
            "run_folder": str(trainer.run_folder.path.absolute()),
            "config": config_record(trainer.args),
            "fingerprints": self.fingerprints,
            "sizes": sizes,
            "wandb": trainer.tracking.wandb_identity(),
            "place": dataclasses.asdict(self.place),
            "updates": _updates(trainer.entities(), trainer.world),
            "progress": trainer.progress(),
            "random": random_state(),
        }
        try:
            write_checkpoint(
                self.schedule.folder,
                trainer.step_number,
                state,
                trainer.entities(),
                trainer.world,
                self.schedule.limit,
                trainer.kept(),
                grown,
            )
        except CheckpointError as error:
            trainer.console.warn(f"{error}. Training goes on; earlier checkpoints are as they were")
            return
        self._written, self._sizes, self.seconds = trainer.step_number, sizes, time.perf_counter() - started


def weight_names(parameters: Sequence[nn.Parameter], modules: dict[str, nn.Module]) -> list[str]:
    """Names of parameters, from the modules that own them; those names come with the module's own before them."""
    names = {
        id(parameter): f"{prefix}.{name}" if prefix else name
        for prefix, module in modules.items()
        for name, parameter in module.named_parameters()
    }
    return [names[id(parameter)] for parameter in parameters]


def agent_entity(agents: Sequence[Agent], engine: Engine | ZeroEngine, heads: dict[str, nn.Module]) -> Entity:
    """The weights that these agents train, and the starting adapter that is their reference, if one was copied.

    `heads` are further modules by name, of which this engine may train some.
    """
    agent = agents[0]
    frozen = {}
    if agent.reference is not None and agent.reference.adapter is not None and agent.reference.base is agent.base:
        weights = agent.reference.parameters()
        frozen["reference"] = dict(zip(weight_names(weights, {"": agent.base.model}), weights, strict=True))
    return Entity(
        f"agent_{agent.index}", weight_names(engine.parameters, {"": agent.base.model} | heads), engine, frozen
    )


def critic_entity(critic: Critic, engine: Engine | ZeroEngine) -> Entity:
    """A critic's weights, its value head among them."""
    modules = {"": critic.policy.base.model, "head": critic.head}
    return Entity(f"critic_{critic.index}", weight_names(engine.parameters, modules), engine)


def config_record(config: Any) -> dict[str, Any]:
    """The settings as JSON holds them, without secrets."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
    return json.loads(json.dumps(to_jsonable(masked(values))))


def _updates(entities: Sequence[Entity], world: Group) -> dict[str, int]:
    counts: dict[str, int] = {}
    for part in world.gather({entity.name: entity.engine.updates for entity in entities}):
        counts |= part
    return counts
