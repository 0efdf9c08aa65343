"""Where a run goes on: which checkpoint, in which run folder, and what may have changed since. Imports no torch."""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mlrl.checkpoint import (
    checkpoints_in,
    damage,
    is_checkpoint_name,
    is_half_written,
    read_checkpoint_metadata,
    recover,
    step_of,
)
from mlrl.errors import ConfigError
from mlrl.rows import read_row
from mlrl.run_folder import RunFolder, to_jsonable

LATEST = "latest"

# Settings that a resumed run may change: how long, how fast, what is written, and where and in which pieces it runs.
MAY_CHANGE = {
    *("num_train_epochs", "max_steps", "agent_learning_rate", "critic_learning_rate", "lr_scheduler", "warmup_steps"),
    *("logging_steps", "report_to", "output_dir", "run_name", "completions_steps", "profile", "max_nonfinite_steps"),
    *("wandb_project", "wandb_entity", "wandb_tags", "wandb_dir"),
    *("eval_interval", "eval_num_samples", "eval_num_generations", "eval_batch_size", "eval_temperature"),
    *("save_steps", "save_total_limit", "resume_from_checkpoint", "allow_changed"),
    *("reward_timeout", "reward_processes"),
    *("placement", "ranks_per_agent", "reference_ranks", "critic_ranks", "reward_model_ranks", "comparator_ranks"),
    *("vllm_url", "vllm_spawn", "vllm_devices", "vllm_python", "vllm_args", "vllm_start_timeout", "vllm_timeout"),
    *("vllm_max_retries", "vllm_max_concurrency", "rollout_kl_limit"),
    *("micro_batch_tokens", "max_rollout_rows", "gradient_checkpointing", "attn_implementation"),
}
# Settings that say the same as an entry of the fingerprints, or how to find what has one.
_ELSEWHERE = {"agent_model", "agents", "num_agents", "dtype", "task"}
_FUNCTIONS = {"reward_func", "formatters", "reward_processor", "external_transition"}
_ROWS_READ = 16  # of a data set, for its fingerprint


@dataclass(frozen=True)
class Resume:
    """What a run goes on from.

    Attributes:
        checkpoint: None starts from step 0; state: its metadata.
        run_folder: the existing folder to go on in; None makes a new one.
        notes: lines for the user.
    """

    checkpoint: Path | None = None
    run_folder: Path | None = None
    state: dict[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def branched_from(self) -> str | None:
        """The checkpoint of another run with which this one began."""
        if self.checkpoint is not None and self.run_folder is None:
            return str(self.checkpoint)
        return self.state.get("branched_from")

    @property
    def wandb_identity(self) -> dict[str, str] | None:
        """The W&B run that the run of this folder was logged to."""
        return self.state.get("wandb") if self.run_folder is not None else None


def check_resume_request(where: str, output_dir: str, run_name: str | None) -> None:
    """What can be known without looking into checkpoints; `run_name` is the user's own, else None.

    Raises:
        ConfigError: `latest` of no named run, a folder that does not exist, or one with nothing to go on from.
    """
    if where == LATEST:
        if run_name is None:
            raise ConfigError(
                "resume_from_checkpoint='latest': of which run? Give run_name too (no --config sets it), or the "
                "folder of a checkpoint"
            )
        run = Path(output_dir) / run_name
        if run.is_dir() and not RunFolder(run).config.is_file() and not _is_empty(run):
            raise ConfigError(f"run_name={run_name!r}: {run} is not the folder of a run. Give another run_name")
        return
    recover(Path(where).parent)
    if not Path(where).is_dir():
        raise ConfigError(
            f"resume_from_checkpoint={where!r}: there is no such folder. Give a folder checkpoint-N, a run folder, or "
            "latest with a run_name"
        )
    if not is_checkpoint_name(Path(where).resolve().name) and not _may_hold_checkpoints(Path(where)):
        raise ConfigError(
            f"resume_from_checkpoint={where!r}: that is neither a run's folder nor one of checkpoints. Give a folder "
            "checkpoint-N (under that name), a run folder, or latest with a run_name"
        )


def _may_hold_checkpoints(folder: Path) -> bool:
    """Whether it has some, or is one in which a run that was killed early had not written any."""
    of_a_run = RunFolder(folder).config.is_file() or RunFolder(folder).checkpoints.is_dir()
    return of_a_run or bool(checkpoints_in(folder)) or _is_empty(folder)


def _is_empty(run: Path) -> bool:
    """Whether a folder holds nothing but what a run leaves that was killed as soon as it had made it."""
    return all(path.name.startswith(".") for path in run.iterdir())


def find_resume(where: str, output_dir: str, run_name: str | None, checkpoint_dir: str | Path | None = None) -> Resume:
    """The newest whole checkpoint of a run (`latest`, a run folder) or up to a given one (checkpoint-N).

    Args:
        run_name: the user's own, else None.
        checkpoint_dir: where `latest` is looked for, in place of the run folder.

    Raises:
        ConfigError: see `check_resume_request`; every checkpoint is damaged; a newer one of the same run exists; a
            finished run that kept none.
    """
    named = Path(output_dir) / run_name if run_name is not None else None
    newest = None
    if where == LATEST and checkpoint_dir is not None:
        folder, run = Path(checkpoint_dir), named
    elif where == LATEST:
        check_resume_request(where, output_dir, run_name)
        folder, run = RunFolder(named).checkpoints, named
    else:
        check_resume_request(where, output_dir, run_name)
        given = Path(where).resolve()
        if is_checkpoint_name(given.name):
            folder, newest = given.parent, given
        else:
            folder = given / "checkpoints" if (given / "checkpoints").is_dir() else given
        run = folder if folder == given else folder.parent
    notes: list[str] = []
    checkpoint = _newest_whole(folder, newest, notes)
    state = {} if checkpoint is None else read_checkpoint_metadata(checkpoint)
    if named is not None and run == named and run.is_dir() and _is_empty(run):
        pass  # made by a run that was killed before it could write anything
    elif run is None or not RunFolder(run).config.is_file():
        run = Path(state["run_folder"]) if state and RunFolder(state["run_folder"]).config.is_file() else None
    if named is not None and run is not None and named.resolve() != run.resolve():
        if RunFolder(named).config.is_file():  # which was begun before
            return _branch_begun(where, named, checkpoint)
        run = None  # a new run that branches off
    if checkpoint is None:
        if run is not None and RunFolder(run).agents.exists():
            raise ConfigError(
                f"resume_from_checkpoint={where!r}: {run} has trained agents and no checkpoint to go on from. "
                "Give another run_name, or --agents to train those further"
            )
        notes.append(f"no checkpoint in {folder}: the run starts from step 0")
    else:
        _check_newest(checkpoint, newest, run, where)
        notes.append(f"resumed from {checkpoint}")
    return Resume(checkpoint, run, state, notes)


def _branch_begun(where: str, named: Path, origin: Path | None) -> Resume:
    """A run that branched off from a checkpoint and was stopped goes on from its own ones."""
    config = yaml.safe_load(RunFolder(named).config.read_text(encoding="utf-8"))
    begun_from = config.get("record", {}).get("branched_from")
    if origin is None or begun_from != str(origin):
        raise ConfigError(
            f"run_name={named.name!r}: {named} exists already and did not branch off from {where}. Give another "
            "run_name, or resume_from_checkpoint latest to go on with it"
        )
    notes: list[str] = []
    own = _newest_whole(RunFolder(named).checkpoints, None, notes)
    checkpoint = own or origin
    state = read_checkpoint_metadata(checkpoint) | {"branched_from": begun_from}
    if own is None:  # nothing of it counts yet
        state |= {"sizes": {}, "wandb": None}
    return Resume(checkpoint, named, state, [*notes, f"{named} goes on from {checkpoint}"])


def take_pairs(resume: Resume, folder: RunFolder) -> None:
    """Copies the rounds of pairs that a run which branches off needs, with answers that were paid for.

    Raises:
        ConfigError: there are none any more.
    """
    if resume.checkpoint is None or "round" not in resume.state["progress"]:
        return
    earlier = RunFolder(resume.state["run_folder"]).preferences
    if not earlier.is_dir():
        raise ConfigError(
            f"resume_from_checkpoint={str(resume.checkpoint)!r}: its pairs were in {earlier}, which is no more. Put "
            "that folder back"
        )
    folder.preferences.mkdir(parents=True, exist_ok=True)
    for path in [*earlier.glob("iteration_*.jsonl"), *earlier.glob("answers.jsonl")]:
        if not (folder.preferences / path.name).exists():
            shutil.copyfile(path, folder.preferences / path.name)


def _check_newest(checkpoint: Path, newest: Path | None, run: Path | None, where: str) -> None:
    """A run does not go back behind a checkpoint that it has: what came after would be written over."""
    if newest is None or run is None:
        return
    later = [path for path in checkpoints_in(checkpoint.parent) if step_of(path) > step_of(checkpoint)]
    for path in later:
        if path != newest and damage(path) is None:
            raise ConfigError(
                f"resume_from_checkpoint={where!r}: {path} of the same run is newer. Resume from that, or give another "
                "run_name to branch off"
            )


def _newest_whole(folder: Path, newest: Path | None, notes: list[str]) -> Path | None:
    """The newest checkpoint without fault, up to `newest`; every other is named."""
    damaged = []
    recover(folder)
    found = checkpoints_in(folder)
    if newest is not None and newest in found:
        found = found[found.index(newest) :]
    for checkpoint in found:
        if is_half_written(checkpoint):
            notes.append(f"{checkpoint} was never finished: not used")
        elif (problem := damage(checkpoint)) is not None:
            damaged.append(f"{checkpoint}: {problem}")
            notes.append(f"{checkpoint} is damaged ({problem}): the one before it is used")
        else:
            return checkpoint
    if damaged:
        raise ConfigError(
            f"resume_from_checkpoint={str(folder)!r}: no whole checkpoint. {'; '.join(damaged)}. "
            "Restore one, or start a new run"
        )
    return None


# What must be the same -----------------------------------------------------------------------------------------------


def check_unchanged(resume: Resume, config: dict[str, Any], fingerprints: dict[str, Any], allowed: Sequence[str]):
    """A run goes on as what it was.

    Args:
        config: settings as JSON holds them; fingerprints: of what settings do not tell.
        allowed: names that may differ all the same.

    Raises:
        ConfigError: the first name that differs and matters, old → new; a name in `allowed` that there is none of.
    """
    known = {*config, *fingerprints} - _ELSEWHERE
    for name in allowed:
        if name not in known:
            raise ConfigError(f"allow_changed={name!r}: there is no such name. Known: {', '.join(sorted(known))}")
    before = resume.state["fingerprints"], resume.state["config"]
    for old, new in zip(before, (fingerprints, config), strict=True):
        for name in new:
            if name in MAY_CHANGE | _ELSEWHERE | set(allowed) or name not in old or old[name] == new[name]:
                continue
            if name in _FUNCTIONS:
                raise ConfigError(
                    f"{name}={new[name]!r}: it was {old[name]!r} in {resume.checkpoint}; the number is of its code. If "
                    f"the change is meant, as of a mistake that is mended, say --allow_changed {name}"
                )
            raise ConfigError(
                f"{name}={new[name]!r}: it was {old[name]!r} in {resume.checkpoint} ({old[name]!r} → {new[name]!r}). "
                f"Set it back ({resume.run_folder or 'the run folder'}/config.yaml has all settings), or say "
                f"--allow_changed {name}"
            )


def data_fingerprint(dataset: Any) -> str | None:
    """Length and content of a data set, told from some of its rows; of a stream only from its first."""
    if dataset is None:
        return None
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        count = len(dataset)
        numbers = sorted({round(i * (count - 1) / (_ROWS_READ - 1)) for i in range(_ROWS_READ)})
        rows, label = [read_row(dataset, "train_dataset", n) for n in numbers], f"{count} rows"
    else:
        rows, label = [dict(row) for row in itertools.islice(iter(dataset), 1)], "stream"
    text = json.dumps(to_jsonable(rows), sort_keys=True, ensure_ascii=True)
    return f"{label}, {_digest(text)}"


def source_fingerprint(function: Callable | Sequence[Callable] | None) -> str | list[str] | None:
    """Name and source text of a callable, as far as it has them."""
    if function is None:
        return None
    if isinstance(function, list | tuple):
        return [source_fingerprint(one) for one in function]
    inner = function
    settings = []
    while hasattr(inner, "func") and callable(inner.func):  # functools.partial
        settings += map(_value_text, (*inner.args, *(part for item in sorted(inner.keywords.items()) for part in item)))
        inner = inner.func
    if not hasattr(inner, "__qualname__"):
        settings.append(_value_text(inner))
        inner = type(inner)
    try:
        text = inspect.getsource(inner)
    except (OSError, TypeError):
        text = ""
    return f"{inner.__qualname__} {_digest(text + ''.join(settings))}"


def _value_text(value: Any) -> str:
    """A value in words that are the same in every process: without addresses."""
    if inspect.isroutine(value) or isinstance(value, functools.partial):
        return str(source_fingerprint(value))
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=6).hexdigest()


# Files of the run folder ---------------------------------------------------------------------------------------------


def file_sizes(folder: RunFolder) -> dict[str, int]:
    """Bytes of every file that a run only appends to."""
    files = [folder.metrics, folder.histograms, *sorted(folder.completions.glob("*.jsonl"))]
    files += sorted(folder.profile.glob("*.jsonl"))
    return {str(file.relative_to(folder.path)): file.stat().st_size for file in files if file.exists()}


def cut_files(folder: RunFolder, sizes: dict[str, int]) -> list[str]:
    """Takes back what was appended after these sizes were taken; returns notes on what was there no more."""
    notes = []
    for name, size in file_sizes(folder).items():
        path = folder.path / name
        if name not in sizes and path != folder.metrics:
            path.unlink()
        elif size > sizes.get(name, 0):
            with path.open("r+b") as file:
                file.truncate(sizes.get(name, 0))
        elif size < sizes.get(name, 0):
            notes.append(f"{path} has lost its end: {size} bytes of {sizes[name]}")
    return notes


def put_aside(folder: RunFolder) -> None:
    """Moves what a run wrote before it had a checkpoint into a folder `before_restart`, `before_restart-2` …"""
    written = [
        path for path in (folder.metrics, folder.histograms, folder.completions, folder.profile) if path.exists()
    ]
    if not written:
        return
    name = "before_restart"
    for number in itertools.count(2):
        if not (folder.path / name).exists():
            break
        name = f"before_restart-{number}"
    (folder.path / name).mkdir()
    for path in written:
        path.rename(folder.path / name / path.name)
