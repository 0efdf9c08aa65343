"""Checkpoints: folders `checkpoint-N` that are complete or absent, whatever instant a run is killed at.

A checkpoint is written into a folder of another name, every file flushed to the disk, and renamed last. It holds, in
plain JSON and safetensors (nothing is unpickled):

    state.json            counters, place in the data, settings, fingerprints, and size and checksum of every other file
    agent_i/master.safetensors, step …, exp_avg …, exp_avg_sq …      weights in float32 and AdamW's state, by name
    agent_i/reference.safetensors                                    a starting adapter that is the reference policy

Weights in another type are the float32 ones rounded. Nothing in it depends on the number of ranks, on the placement or
on ZeRO's stage, so a run may go on under another layout.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlrl.errors import ConfigError, StorageError

if TYPE_CHECKING:
    import torch

    from mlrl.parallel.engine import Engine
    from mlrl.parallel.group import Group
    from mlrl.parallel.zero import ZeroEngine

FORMAT = 1
_STATE = "state.json"
_WRITING = ".writing-"
_NAME = re.compile(r"checkpoint-(\d+)")


class CheckpointError(StorageError):
    """A checkpoint could not be written; earlier ones are as they were."""


@dataclass(frozen=True)
class Entity:
    """What is trained together.

    Attributes:
        name: its folder in a checkpoint; names: of its parameters, in the engine's order.
        frozen: further tensors to be kept, by file and name, on the ranks that hold them.
    """

    name: str
    names: Sequence[str]
    engine: Engine | ZeroEngine
    frozen: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Kept:
    """Tensors that nothing trains at the moment, but that a run needs to go on.

    Attributes:
        file: its path in a checkpoint, without suffix; group: the ranks that hold it, of which the first writes.
        get: gives them by name, called by all of the group together; put: takes them back, on every rank of the group.
    """

    file: str
    group: Group
    get: Callable[[], dict[str, torch.Tensor]]
    put: Callable[[dict[str, torch.Tensor]], None]


# Writing --------------------------------------------------------------------------------------------------------------


def write_checkpoint(
    folder: Path,
    step: int,
    state: dict[str, Any],
    entities: Sequence[Entity],
    world: Group,
    limit: int | None = None,
    kept: Sequence[Kept] = (),
) -> Path:
    """Writes `folder/checkpoint-<step>` and removes all but the newest `limit` (None: keeps all). All ranks call it.

    Args:
        state: what JSON can hold; `step` and the manifest are added.
        entities, kept: those that live on this rank.

    Raises:
        CheckpointError: on every rank, where one of them could not write. What was there before still is.
    """
    final = folder / f"checkpoint-{step}"
    writing = folder / f"{_WRITING}{final.name}"

    def finish() -> None:
        _write_state(writing / _STATE, {"format": FORMAT, **state, "step": step, "files": manifest})
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
    for stale in folder.parent.glob(f"{_WRITING}*") if folder.parent.is_dir() else []:
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
    manifest[name] = [path.stat().st_size, _checksum(path)]


def _write_state(path: Path, state: dict[str, Any]) -> None:
    body = json.dumps(state, indent=1)
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"checksum": zlib.crc32(body.encode())}) + "\n" + body + "\n")
        file.flush()
        os.fsync(file.fileno())


def _put(writing: Path, final: Path) -> None:
    """Gives the finished folder its name; one that has it already, from a run that was cut back, makes way."""
    old = final.parent / f"{_WRITING}old-{final.name}"
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
    temporary = folder / f"{_WRITING}latest"
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
    gone = checkpoint.parent / f"{_WRITING}gone-{checkpoint.name}"
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


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


# Reading --------------------------------------------------------------------------------------------------------------


def recover(folder: Path) -> None:
    """Gives a checkpoint its name back that made way for another, where the run was killed between the two."""
    for old in folder.glob(f"{_WRITING}old-*") if folder.is_dir() else ():
        final = folder / old.name.removeprefix(f"{_WRITING}old-")
        if not final.exists():
            os.rename(old, final)


def checkpoints_in(folder: Path) -> list[Path]:
    """The folders named checkpoint-N, newest first, complete or not."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """N of checkpoint-N."""
    return int(_NAME.fullmatch(checkpoint.name).group(1))


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder's name is checkpoint-N."""
    return _NAME.fullmatch(name) is not None


def read_checkpoint_metadata(directory: str | Path) -> dict[str, Any]:
    """What a checkpoint says about itself: step, env_step, epoch, settings, fingerprints …, without its tensors.

    Raises:
        ConfigError: not a checkpoint, or one that was damaged.
    """
    problem, state = _read_state(Path(directory))
    if problem is not None:
        raise ConfigError(f"checkpoint={str(directory)!r}: {problem}. Give a folder checkpoint-N of a run")
    return state


def _read_state(checkpoint: Path) -> tuple[str | None, dict[str, Any]]:
    try:
        head, _, body = (checkpoint / _STATE).read_text(encoding="utf-8").partition("\n")
        body = body.removesuffix("\n")
        if json.loads(head)["checksum"] != zlib.crc32(body.encode()):
            return f"{_STATE} is damaged (its checksum is another)", {}
        state = json.loads(body)
        if state["format"] != FORMAT:
            return f"has format {state['format']}, and this version of mlrl reads {FORMAT}", {}
        return None, state
    except FileNotFoundError:
        return f"holds no {_STATE}", {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{_STATE} cannot be read ({type(error).__name__}: {error})", {}


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, None if it is whole; reads every byte of it."""
    problem, state = _read_state(checkpoint)
    if problem is not None:
        return problem
    for name, (size, checksum) in state["files"].items():
        path = checkpoint / name
        try:
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes of {size}"
            if _checksum(path) != checksum:
                return f"{name} is damaged (its checksum is another)"
        except OSError as error:
            return f"{name} cannot be read ({error})"
    return None


def is_half_written(checkpoint: Path) -> bool:
    """Whether a folder never became a checkpoint: it lacks what is written last."""
    return not (checkpoint / _STATE).exists()


def load_entity(checkpoint: Path, entity: Entity) -> None:
    """Puts an entity's weights and optimizer state back, on every rank that holds it.

    Raises:
        ConfigError: the checkpoint is of other parameters.
    """
    from mlrl.parallel.engine import STATE_KINDS

    for kind in STATE_KINDS:
        wanted = dict(zip(entity.names, entity.engine.parameters, strict=True)) if kind != "step" else {}
        with _opened(checkpoint, entity, kind) as file:
            _check_names(checkpoint, entity.name, wanted, file)
            entity.engine.load_state(kind, (file.get_tensor(name) for name in entity.names))
    for kind, tensors in entity.frozen.items():
        if (checkpoint / entity.name / f"{kind}.safetensors").exists():
            with _opened(checkpoint, entity, kind) as file:
                _check_names(checkpoint, entity.name, tensors, file)
                for name, tensor in tensors.items():
                    tensor.data.copy_(file.get_tensor(name))


def load_kept(checkpoint: Path, kept: Kept) -> None:
    """Puts tensors back, where the checkpoint has them."""
    from safetensors.torch import load_file

    path = checkpoint / f"{kept.file}.safetensors"
    if path.exists():
        kept.put(load_file(path))


@contextlib.contextmanager
def _opened(checkpoint: Path, entity: Entity, kind: str) -> Iterator[Any]:
    from safetensors import safe_open

    path = checkpoint / entity.name / f"{kind}.safetensors"
    if not path.exists():
        raise ConfigError(
            f"resume_from_checkpoint={str(checkpoint)!r}: holds nothing of {entity.name}. Resume with the same team"
        )
    with safe_open(path, framework="pt", device="cpu") as file:
        yield file


def _check_names(checkpoint: Path, entity: str, wanted: dict[str, Any], file: Any) -> None:
    here = set(file.keys())
    for name, parameter in wanted.items():
        shape = list(getattr(parameter, "ds_shape", parameter.shape))
        found = list(file.get_slice(name).get_shape()) if name in here else None
        if found != shape:
            holds = "no such weight" if found is None else f"one of {found}"
            raise ConfigError(
                f"resume_from_checkpoint={str(checkpoint)!r}: {entity} has a weight {name} of {shape}, and the "
                f"checkpoint {holds}. Resume with the same model and adapter shape"
            )
