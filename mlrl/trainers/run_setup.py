"""The run folder of a trainer: a new one, that of the run it goes on with, or one that branches off."""

from __future__ import annotations

from typing import Any

from mlrl.config_file import dump_config
from mlrl.errors import ConfigError
from mlrl.parallel.group import Group
from mlrl.resume import Resume, take_pairs
from mlrl.run_folder import RunFolder, default_run_name, keep_config


def named(args: Any) -> str | None:
    """The run's name where a user chose it; one that the command line made from the time gives way to another run's."""
    return None if args.sources.get("run_name") == "derived" else args.run_name


def make_run_folder(args: Any, algorithm: str, task: str, world: Group, resume: Resume) -> RunFolder:
    """One folder for all ranks, made by the first, with config.yaml in it.

    Raises:
        ConfigError: it cannot be made, or not every rank sees it.
    """

    def create() -> RunFolder:
        extra = {"algorithm": algorithm, "task": task, "processes": world.size}
        if resume.checkpoint is not None:
            extra |= {"resumed_from": str(resume.checkpoint), "branched_from": resume.branched_from}
        if resume.run_folder is not None:
            folder = RunFolder(resume.run_folder)
            keep_config(folder, resume.state.get("step", 0))
        else:
            default = args.run_name or default_run_name(algorithm.lower(), task)
            folder = RunFolder.create(args.output_dir, named(args), default)
            take_pairs(resume, folder)
        dump_config(args, args.sources, folder.config, extra)
        return RunFolder(folder.path.absolute()) if world.size > 1 else folder

    folder = world.from_first(create)
    blind = [rank for rank, sees in enumerate(world.gather(folder.config.is_file())) if not sees]
    if blind:
        raise ConfigError(
            f"output_dir={args.output_dir!r}: rank {blind[0]} of {world.size} does not see {folder.path}, which rank 0 "
            "has made. Give a folder on a disk that all machines share"
        )
    return folder
