"""Going on with a run: whether it may, from where, and what it takes back and puts in place for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlrl.checkpoint import load_entity, load_kept
from mlrl.errors import ConfigError
from mlrl.parallel.group import Group
from mlrl.random_state import set_random_state
from mlrl.resume import (
    Resume,
    check_unchanged,
    cut_files,
    data_fingerprint,
    find_resume,
    put_aside,
    source_fingerprint,
)
from mlrl.run_folder import RunFolder
from mlrl.sources import Source, weights_fingerprint
from mlrl.task import Task
from mlrl.trainers.checkpointing import config_record
from mlrl.trainers.run_setup import named

if TYPE_CHECKING:
    from mlrl.trainers.base import Trainer


def fingerprints(algorithm: str, task: Task, sources: Sequence[Source], dtype: Any) -> dict[str, Any]:
    """What a run that goes on must have in common with the one before, as far as settings do not tell it."""
    return {
        "algorithm": algorithm,
        "models": [weights_fingerprint(source) for source in sources],
        "weights_dtype": str(dtype).removeprefix("torch."),
        "train_dataset": data_fingerprint(task.train_dataset),
        "reward_func": source_fingerprint(task.reward_func),
        "reward_processor": source_fingerprint(task.reward_processor),
        "formatters": source_fingerprint(task.formatters),
        "external_transition": source_fingerprint(task.external_transition),
    }


def resolve_resume(
    where: str | None,
    args: Any,
    world: Group,
    make_fingerprints: Callable[[], dict[str, Any]],
    checkpoint_dir: str | Path | None = None,
) -> Resume:
    """What a run goes on from, the same on all ranks; nothing where `where` is None.

    Raises:
        ConfigError: see `mlrl.resume.find_resume` and `check_unchanged`.
    """
    if where is None:
        return Resume()

    def find() -> Resume:
        resume = find_resume(str(where), args.output_dir, named(args), checkpoint_dir)
        if resume.checkpoint is not None:
            check_unchanged(resume, config_record(args), make_fingerprints(), args.allow_changed or ())
        return resume

    return world.from_first(find)


def restore(trainer: Trainer, resume: Resume) -> None:
    """Puts weights, optimizers and counters of a checkpoint into a trainer; the files of its run folder are cut back.

    Raises:
        ConfigError: the checkpoint is of other models.
    """
    if resume.checkpoint is None:
        return
    trainer.phase("resuming")
    for entity in trainer.entities():
        load_entity(resume.checkpoint, entity)
        if entity.name not in resume.state["updates"]:
            raise ConfigError(f"resume_from_checkpoint={str(resume.checkpoint)!r}: holds nothing of {entity.name}")
        entity.engine.updates = resume.state["updates"][entity.name]
    for kept in trainer.kept():
        load_kept(resume.checkpoint, kept)
    trainer.step_number = resume.state["step"]
    trainer.env_step, trainer.epoch = resume.state["env_step"], resume.state["epoch"]
    trainer.restore_progress(resume.state["progress"])
    set_random_state(resume.state["random"])


def go_on(trainer: Trainer, resume: Resume) -> None:
    """Says where the run goes on from, and takes back what it will write again."""
    for note in [*resume.notes, *trainer.world.from_first(lambda: _cut_back(trainer.run_folder, resume))]:
        trainer.console.note(note)


def may_go_on(args: Any) -> bool:
    """Whether `train` may be asked to go on with the run of this name."""
    name = named(args)
    return name is not None and (Path(args.output_dir) / name / "checkpoints").is_dir()


def _cut_back(folder: RunFolder, resume: Resume) -> list[str]:
    """Takes out of the run folder what the run writes again; notes on what was there no more. First rank only."""
    if resume.run_folder is None:
        return []
    folder.error.unlink(missing_ok=True)
    if resume.checkpoint is None:
        put_aside(folder)
        return []
    return cut_files(folder, resume.state["sizes"])
