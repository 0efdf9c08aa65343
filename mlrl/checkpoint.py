"""Checkpoints on disk: folders `checkpoint-N` that are complete or absent, what they hold, and how they are read.

A checkpoint holds, in plain JSON and safetensors (nothing is unpickled):

    state.json            counters, place in the data, settings, fingerprints, and size and checksum of every other file
    agent_i/master.safetensors, step …, exp_avg …, exp_avg_sq …      weights in float32 and AdamW's state, by name
    agent_i/reference.safetensors                                    a starting adapter that is the reference policy

Weights in another type are the float32 ones rounded. Nothing in it depends on the number of ranks, on the placement or
on ZeRO's stage, so a run may go on under another layout. `mlrl.checkpoint_writing` writes them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlrl.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from mlrl.parallel.engine import Engine
    from mlrl.parallel.group import Group
    from mlrl.parallel.zero import ZeroEngine

FORMAT = 1
STATE = "state.json"
# What a folder's name begins with while it is being written, makes way for another or goes away.
WRITING = ".writing-"
_NAME = re.compile(r"checkpoint-(\d+)")


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


def recover(folder: Path) -> None:
    """Gives a checkpoint its name back that made way for another, where the run was killed between the two."""
    for old in folder.glob(f"{WRITING}old-*") if folder.is_dir() else ():
        final = folder / old.name.removeprefix(f"{WRITING}old-")
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
        head, _, body = (checkpoint / STATE).read_text(encoding="utf-8").partition("\n")
        body = body.removesuffix("\n")
        if json.loads(head)["checksum"] != zlib.crc32(body.encode()):
            return f"{STATE} is damaged (its checksum is another)", {}
        state = json.loads(body)
        if state["format"] != FORMAT:
            return f"has format {state['format']}, and this version of mlrl reads {FORMAT}", {}
        return None, state
    except FileNotFoundError:
        return f"holds no {STATE}", {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{STATE} cannot be read ({type(error).__name__}: {error})", {}


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
            if checksum_of(path) != checksum:
                return f"{name} is damaged (its checksum is another)"
        except OSError as error:
            return f"{name} cannot be read ({error})"
    return None


def is_half_written(checkpoint: Path) -> bool:
    """Whether a folder never became a checkpoint: it lacks what is written last."""
    return not (checkpoint / STATE).exists()


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


def checksum_of(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value
