"""Writing checkpoints, so that they are complete or absent whatever instant a run is killed at.

A checkpoint is written into a folder of another name, every file flushed to the disk, and renamed last.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlrl.checkpoint import FORMAT, STATE, WRITING, Entity, Kept, checkpoints_in, checksum_of, step_of
from mlrl.errors import StorageError

if TYPE_CHECKING:
    import torch

    from mlrl.parallel.group import Group


class CheckpointError(StorageError):
    """A checkpoint could not be written; earlier ones are as they were."""


def write_checkpoint(
    folder: Path,
    step: int,
    state: dict[str, Any],
    entities: Sequence[Entity],
    world: Group,
    limit: int | None = None,
    kept: Sequence[Kept] = (),
    beside: Sequence[Path] = (),
) -> Path:
    """Writes `folder/checkpoint-<step>` and removes all but the newest `limit` (None: keeps all). All ranks call it.

    Args:
        state: what JSON can hold; `step` and the manifest are added.
        entities, kept: those that live on this rank.
        beside: files elsewhere whose length `state` tells; they reach the disk before it does.

    Raises:
        CheckpointError: on every rank, where one of them could not write. What was there before still is.
    """
    final = folder / f"checkpoint-{step}"
    writing = folder / f"{WRITING}{final.name}"

    def finish() -> None:
        for path in beside:
            _flush(path)
        _write_state(writing / STATE, {"format": FORMAT, **state, "step": step, "files": manifest})
        for place in sorted({path.parent for path in writing.rglob("*")} | {writing}):
            _flush(place)
        _put(writing, final)

    def tidy() -> None:
        write_latest(folder, final.name)
        prune(folder, step, limit)

    together = functools.partial(_together, world, f"no checkpoint in {folder}", writing)
    together(lambda: _empty_folder(writing) if world.is_first else None)
    written = together(lambda: _write_entities(writing, entities, kept))
    manifest = {name: facts for part in written for name, facts in part.items()}
    together(lambda: finish() if world.is_first else None)
    message = f"{final} is whole, but what is beside it could not be put in order"
    _together(world, message, None, lambda: tidy() if world.is_first else None)
    return final


def _together(world: Group, message: str, writing: Path | None, act: Callable[[], Any]) -> list[Any]:
    """Every rank acts, then all learn whether one failed; `writing` is removed then."""
    from safetensors import SafetensorError

    result, problem = None, None
    try:
        result = act()
    except (OSError, SafetensorError) as error:
        problem = f"{type(error).__name__}: {error}"
    outcomes = world.gather((result, problem))
    problems = [text for _, text in outcomes if text is not None]
    if problems:
        if world.is_first and writing is not None:
            shutil.rmtree(writing, ignore_errors=True)
        raise CheckpointError(f"{message}: {problems[0]}")
    return [result for result, _ in outcomes]


def _empty_folder(folder: Path) -> None:
    for stale in folder.parent.glob(f"{WRITING}*") if folder.parent.is_dir() else []:
        if stale.is_dir():
            shutil.rmtree(stale)
        else:
            stale.unlink()
    folder.mkdir(parents=True)


def _write_entities(folder: Path, entities: Sequence[Entity], kept: Sequence[Kept]) -> dict[str, list[int]]:
    """Files of this rank: the first of an entity's writes, the others take part in putting it together."""
    from mlrl.parallel.engine import STATE_KINDS

    manifest: dict[str, list[int]] = {}
    problem: Exception | None = None
    for entity in entities:
        writes = entity.engine.group.is_first
        for kind in STATE_KINDS:
            tensors = {}
            for name, tensor in zip(entity.names, entity.engine.state(kind), strict=True):
                if writes:
                    tensors[name] = tensor.detach().cpu()
            if writes and problem is None:
                try:
                    _write_tensors(folder, f"{entity.name}/{kind}.safetensors", tensors, manifest)
                except Exception as error:  # the other ranks still need this one for what follows
                    problem = error
        for file, frozen in entity.frozen.items():
            if writes and problem is None:
                try:
                    copies = {name: tensor.detach().cpu() for name, tensor in frozen.items()}
                    _write_tensors(folder, f"{entity.name}/{file}.safetensors", copies, manifest)
                except Exception as error:  # as above
                    problem = error
    for one in kept:
        tensors = one.get()
        if tensors and one.group.is_first and problem is None:
            try:
                _write_tensors(folder, f"{one.file}.safetensors", tensors, manifest)
            except Exception as error:  # as above
                problem = error
    if problem is not None:
        raise problem
    return manifest


def _write_tensors(folder: Path, name: str, tensors: dict[str, torch.Tensor], manifest: dict[str, list[int]]) -> None:
    from safetensors.torch import save_file

    path = folder / name
    path.parent.mkdir(exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
    _flush(path)
    manifest[name] = [path.stat().st_size, checksum_of(path)]


def _write_state(path: Path, state: dict[str, Any]) -> None:
    body = json.dumps(state, indent=1)
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"checksum": zlib.crc32(body.encode())}) + "\n" + body + "\n")
        file.flush()
        os.fsync(file.fileno())


def _put(writing: Path, final: Path) -> None:
    """Gives the finished folder its name; one that has it already, from a run that was cut back, makes way."""
    old = final.parent / f"{WRITING}old-{final.name}"
    if final.exists():
        os.rename(final, old)
    try:
        os.rename(writing, final)
    except OSError:
        if old.exists():
            os.rename(old, final)
        raise
    _flush(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_latest(folder: Path, name: str) -> None:
    """Points `latest` to a checkpoint."""
    temporary = folder / f"{WRITING}latest"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(f"{name}\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / "latest")
    _flush(folder)


def prune(folder: Path, step: int, limit: int | None) -> None:
    """Removes all checkpoints up to a step but the newest `limit` of them (None: removes none)."""
    before = [checkpoint for checkpoint in checkpoints_in(folder) if step_of(checkpoint) <= step]
    for old in before[limit:] if limit is not None else []:
        remove(old)


def remove(checkpoint: Path) -> None:
    """Removes a checkpoint, so that no half of it is ever seen under its name."""
    gone = checkpoint.parent / f"{WRITING}gone-{checkpoint.name}"
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(checkpoint, gone)
    shutil.rmtree(gone)


def _flush(path: Path) -> None:
    """What was written to a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
