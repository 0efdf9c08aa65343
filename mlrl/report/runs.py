"""Reading run folders: configuration and metrics, whatever state a run left them in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mlrl.errors import ConfigError
from mlrl.run_folder import RunFolder

ROW_KEYS = ("env_step", "step", "epoch")
# Settings that make no other experiment of a run: runs that differ in nothing else are seeds of one.
_NOT_COMPARED = re.compile(r"seed|run_name|output_dir|report_to|wandb_.*")


@dataclass
class Series:
    """One metric of one run: its values [rows], NaN where the run wrote null, and where each was logged."""

    step: np.ndarray
    env_step: np.ndarray
    value: np.ndarray

    @property
    def finite(self) -> Series:
        """The rows that hold a number."""
        keep = np.isfinite(self.value)
        return Series(self.step[keep], self.env_step[keep], self.value[keep])


@dataclass
class Run:
    """What a run folder says.

    Attributes:
        name: the folder's name, with its parents' where two runs share it.
        settings: config.yaml without its record of how the run was started; {} where there is none.
        record: that record.
        metrics: by name.
        last_step, last_env_step: of the last row; 0 without rows.
        finished: whether the trained agents were saved.
        error: what ended it before that, in a line; empty where nothing is known to have.
        notes: what could not be read.
    """

    name: str
    folder: RunFolder
    settings: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Series] = field(default_factory=dict)
    last_step: int = 0
    last_env_step: int = 0
    finished: bool = False
    error: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def experiment(self) -> dict[str, Any]:
        """The settings that say which experiment this is."""
        compared = {key: value for key, value in self.settings.items() if not _NOT_COMPARED.fullmatch(key)}
        return compared | {key: self.record[key] for key in ("algorithm", "task") if key in self.record}


@dataclass
class Group:
    """Runs of one experiment, which differ in their seed."""

    label: str
    runs: list[Run]


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs of these folders, in their order, each folder once.

    Raises:
        ConfigError: a path is no run folder.
    """
    folders = list(dict.fromkeys(Path(path).resolve() for path in paths))
    return [read_run(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def read_run(path: str | Path, name: str | None = None) -> Run:
    """The run of one folder; a missing, empty or half-written file becomes a note.

    Raises:
        ConfigError: the path is no run folder.
    """
    folder = RunFolder(path)
    if not (folder.config.is_file() or folder.metrics.is_file() or folder.completions.is_dir()):
        raise ConfigError(f"runs={str(path)!r}: {_why_no_run(folder.path)}")
    run = Run(name or folder.name, folder, finished=folder.agents.is_dir())
    _read_config(run)
    run.error = _first_line(folder.error)
    rows = _without_replaced([row for row in read_jsonl(folder.metrics, run.notes) if _is_row(row)])
    if rows:
        run.last_step, run.last_env_step = int(rows[-1]["step"]), int(rows[-1]["env_step"])
    else:
        run.notes.append("no metrics yet")
    run.metrics = _columns(rows)
    return run


def _first_line(path: Path) -> str:
    """The first line of a text file; "" without the file."""
    if not path.is_file():
        return ""
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline().strip()


def read_jsonl(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file. A line that is none is left out and becomes a note; so does a missing file."""
    if not path.is_file():
        notes.append(f"{path.name} is missing")
        return
    bad: list[int] = []
    ended = True
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            ended = line.endswith("\n")
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict):
                yield record
            else:
                bad.append(number)
    if bad and not ended and bad[-1] == number:
        notes.append(f"{path.name}: the last line is only half written")
        bad.pop()
    if bad:
        more = " …" if len(bad) > 5 else ""
        notes.append(f"{path.name}: unreadable and left out: line {', '.join(map(str, bad[:5]))}{more}")


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs whose settings agree but for the seed, together; a run without config.yaml is on its own."""
    by_settings: dict[str, list[Run]] = {}
    for number, run in enumerate(runs):
        key = json.dumps(run.experiment, sort_keys=True, default=str) if run.settings else f"run {number}"
        by_settings.setdefault(key, []).append(run)
    groups: list[Group] = []
    for own in by_settings.values():
        label = own[0].name if len(own) == 1 else f"{_common_name(own)} ({len(own)} runs)"
        taken = [group.label for group in groups]
        groups.append(Group(label if label not in taken else f"{label} #{len(groups) + 1}", own))
    return groups


def differing_settings(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """The settings in which groups differ: a value a group, None where it has no such setting."""
    experiments = [group.runs[0].experiment for group in groups]
    names = dict.fromkeys(name for experiment in experiments for name in experiment)
    table = {name: [experiment.get(name) for experiment in experiments] for name in names}
    return {name: values for name, values in table.items() if any(value != values[0] for value in values)}


def _names(folders: Sequence[Path]) -> list[str]:
    parts = 1
    while True:
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
        parts += 1


def _common_name(runs: Sequence[Run]) -> str:
    """The words that the names of these runs begin with; else their algorithm."""
    words = [re.split(r"(?<=[-_. ])", run.name) for run in runs]
    common = takewhile(lambda same: len(set(same)) == 1, zip(*words, strict=False))
    return "".join(same[0] for same in common).rstrip("-_. ") or str(runs[0].record.get("algorithm", "runs"))


def _why_no_run(path: Path) -> str:
    if not path.exists():
        return "there is no such folder. Give a run folder, e.g. runs/<run_name>"
    inside = (
        sorted(child.name for child in path.iterdir() if (child / "config.yaml").is_file()) if path.is_dir() else []
    )
    hint = f"Give its runs, e.g. {path / inside[0]}, or {path}/*" if inside else "Give a folder that a trainer wrote"
    return f"not a run folder (no config.yaml, metrics.jsonl or completions in it). {hint}"


def _read_config(run: Run) -> None:
    try:
        content = yaml.safe_load(run.folder.config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        run.notes.append("config.yaml is missing")
        return
    except (yaml.YAMLError, UnicodeDecodeError):
        run.notes.append("config.yaml cannot be read")
        return
    settings = content if isinstance(content, dict) else {}
    record = settings.pop("record", None)
    run.settings, run.record = settings, record if isinstance(record, dict) else {}


def _is_row(row: dict[str, Any]) -> bool:
    return all(isinstance(row.get(key), (int, float)) for key in ("env_step", "step"))


def _without_replaced(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without those that a resumed run logged again: where env_step falls, what lay beyond is replaced."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        while kept and kept[-1]["env_step"] > row["env_step"]:
            kept.pop()
        kept.append(row)
    return kept


def _columns(rows: Sequence[dict[str, Any]]) -> dict[str, Series]:
    places: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in ROW_KEYS and (value is None or isinstance(value, (int, float))):
                number = float("nan") if value is None else float(value)
                places.setdefault(name, []).append((row["step"], row["env_step"], number))
    return {name: Series(*np.array(own, dtype=float).T) for name, own in sorted(places.items())}
