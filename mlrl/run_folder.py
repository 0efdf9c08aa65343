"""The run folder: where one run keeps its configuration, metrics, completions and trained agents.

Everything written here is plain text that later tools can read without mlrl: ``metrics.jsonl`` and
``completions/*.jsonl`` hold one JSON object a line.
"""

import contextlib
import json
import math
import os
import re
import shutil
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlrl.errors import ConfigError
from mlrl.storage import write_whole, writing


def default_run_name(script: str, task: str, now: float | None = None) -> str:
    """``<script>-<task>-<time>``, e.g. ``magrpo-length_ratio-20260314-153000``.

    Args:
        script: Name or path of the training script; its suffix and folders are dropped.
        task: Task name or ``path/to/file.py[:ATTR]``; folders, suffix and attribute are dropped.
        now: Seconds since the epoch (default: the current time), written as local time.
    """
    parts = (Path(script).stem, Path(task.split(":")[0]).stem)
    words = [re.sub(r"[^\w.-]+", "_", part) for part in parts if part]
    return "-".join([*words, time.strftime("%Y%m%d-%H%M%S", time.localtime(now))])


def to_jsonable(value: Any) -> Any:
    """``value`` as what JSON can hold: NaN and infinities become null, tensors and arrays become (nested) lists.

    An object JSON has no form for becomes its ``str``, so that an unusual data row never ends a run.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_jsonable(entry) for entry in value]
    if isinstance(value, (set, frozenset)):  # in an order that is the same in every process
        return sorted((to_jsonable(entry) for entry in value), key=str)
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        return to_jsonable(value.tolist())
    return str(value)


def append_jsonl(path: str | Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append one JSON object a line to ``path`` and leave the file closed, so that a crash loses no written line.

    Raises:
        StorageError: it cannot be written, or not all of it (full disk); the file then is as it was before.
    """
    path = Path(path)
    objects = [json.dumps(to_jsonable(record), ensure_ascii=False, allow_nan=False) for record in records]
    lines = [_one_line(text) + "\n" for text in objects]
    # A lone surrogate has no UTF-8 form; backslashreplace writes it as \udXXX, which is its JSON escape.
    left = memoryview("".join(lines).encode("utf-8", errors="backslashreplace"))
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:  # unbuffered, or a failed write would be tried again by close
            before = file.seek(0, os.SEEK_END)
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(before)
                raise


def in_one_line(error: BaseException) -> str:
    """Kind and message of an exception, whatever its message is."""
    try:
        message = str(error)
    except Exception:  # of a class of the user's
        message = "(has no message that could be shown)"
    return " ".join(f"{type(error).__name__}: {message}".split())


def _one_line(text: str) -> str:
    """Escapes the line ends of Unicode, which JSON allows inside a string and line-wise readers take for ends."""
    return text.replace("\x85", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def keep_config(folder: "RunFolder", step: int) -> None:
    """Keeps config.yaml as config_until_<step>.yaml, where a run goes on with settings of its own."""
    kept = folder.path / f"config_until_{step}.yaml"
    if folder.config.exists() and not kept.exists():  # a second try from there changes nothing
        shutil.copyfile(folder.config, kept)


class RunFolder:
    """The paths of one run; making the object touches no disk, so every rank may hold one.

    Args:
        path: The folder, e.g. ``runs/magrpo-length_ratio-20260314-153000``. Its last part is the run's name.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @classmethod
    def create(cls, output_dir: str | Path, run_name: str | None = None, default_name: str = "run") -> "RunFolder":
        """Make ``output_dir/run_name`` on disk. Call it on the main process only.

        Args:
            output_dir: Parent folder, made if absent.
            run_name: The run's name. None takes ``default_name``, with ``-2``, ``-3`` … after it if that is taken.
            default_name: Name for a run that the user left unnamed; see `default_run_name`.

        Raises:
            ConfigError: the named folder exists already, the name is no single folder name, or the parent
                cannot be written.
        """
        name = default_name if run_name is None else run_name
        if name in ("", ".", "..") or "/" in name or "\\" in name:
            raise ConfigError(
                f"run_name={run_name!r}: not the name of one folder. Give a name without slashes, "
                "and put the parent folder into output_dir."
            )
        number = 1
        while True:
            path = Path(output_dir) / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                if run_name is None:
                    number += 1
                    continue
                raise ConfigError(
                    f"run_name={run_name!r}: {path} exists already. Give another run_name or output_dir."
                ) from None
            except OSError as error:
                raise ConfigError(
                    f"output_dir={str(output_dir)!r}: cannot make {path} ({error}). Give a folder that can be written."
                ) from error
            return cls(path)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved configuration, ``config.yaml``."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """``metrics.jsonl``: one object a logged step."""
        return self.path / "metrics.jsonl"

    @property
    def error(self) -> Path:
        """``error.txt``: what ended the run before its last step, with its traceback; gone once the run goes on."""
        return self.path / "error.txt"

    @contextlib.contextmanager
    def keeping_error(self) -> Iterator[None]:
        """Keeps an exception that comes out of the block in `error` too; where that cannot be written, it is let be."""
        try:
            yield
        except Exception as error:
            with contextlib.suppress(OSError):
                write_whole(self.error, f"{in_one_line(error)}\n\n{traceback.format_exc()}")
            raise

    @property
    def completions(self) -> Path:
        """Folder of the sampled rollout trees, one JSON object a node."""
        return self.path / "completions"

    @property
    def profile(self) -> Path:
        """Folder of where time went, ``rank_0.jsonl`` and so on."""
        return self.path / "profile"

    @property
    def preferences(self) -> Path:
        """Folder of the rounds of preference pairs."""
        return self.path / "preferences"

    @property
    def histograms(self) -> Path:
        """Distributions of rewards, one object a round."""
        return self.preferences / "histograms.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of ``checkpoint-N``, N the step."""
        return self.path / "checkpoints"

    @property
    def sampling(self) -> Path:
        """Folder of what sampling servers read and print."""
        return self.path / "sampling"

    @property
    def agents(self) -> Path:
        """Folder of the trained agents: ``agents/agent_0``, ``agents/agent_1`` …"""
        return self.path / "agents"

    @property
    def critics(self) -> Path:
        """Folder of trained critics: ``critics/critic_0`` …"""
        return self.path / "critics"

    def write_completions(self, records: Iterable[Mapping[str, Any]], split: str, step: int) -> Path:
        """Append rollout nodes to ``completions/<split>-<step>.jsonl``, one JSON object a node; returns that file.

        Args:
            records: A mapping a node with ``step, env_step, split, item, path, turn, prompts[N], responses[N][K],
                token_counts[N][K], truncated[N][K], joints[J][N], rewards[J], returns[J], advantages[N][K]``;
                tensors and arrays are fine.
            split: "train" or "eval".
            step: The training step, written with six digits so that files sort by it.
        """
        path = self.completions / f"{split}-{step:06d}.jsonl"
        append_jsonl(path, records)
        return path
