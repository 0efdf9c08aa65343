"""Checks of commands that start nothing: does every flag exist, is every value of the right kind."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import runpy
from pathlib import Path

import tomllib

from tests.docs.blocks import ROOT, Command

ENVIRONMENT = {  # of launch.sh, and of programs that it starts
    *("PROCESSES_PER_MACHINE", "NUM_MACHINES", "MACHINE_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHON", "MLRL_DRY_RUN"),
    *("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "WANDB_MODE", "VLLM_PYTHON"),
}


class Unreadable(Exception):
    """A command that these tests have no way to check."""


class Training:
    """A command that starts a script: what stands before the script, the script, its flags."""

    def __init__(self, command: Command):
        words = list(command.words)
        start = {"./launch.sh": 1, "accelerate": 2}[words[0]]
        scripts = [number for number, word in enumerate(words) if word.endswith(".py")][:1]
        place = next((n for n in scripts if words[n].startswith("train/")), None)
        if place is None and len(words) > start:
            raise Unreadable(f"{command}: starts no script of train/")
        self.command = command
        self.options = words[start:place]
        self.script = ROOT / ("train/magrpo.py" if place is None else words[place])
        self.flags = [] if place is None else _without_ellipses(words[place + 1 :])

    @classmethod
    def of_script(cls, script: Path) -> Training:
        """As started without any flag."""
        return cls(Command("", ("./launch.sh", str(script.relative_to(ROOT)))))

    @property
    def needs_more(self) -> str | None:
        """Why it cannot run in one process without network, or None."""
        words, text = self.flags, " ".join(self.flags)
        if self.options or set(self.command.environment) - {"WANDB_MODE"}:
            return "several processes or machines"
        if "split" in words or "_ranks " in text or "--ranks_per_agent" in words:
            return "several ranks"
        if "--comparator_generation_mode" in words:
            return "a model that keeps to a form"
        return "a server" if {"api", "vllm"} & set(words) or "_url=" in text else None

    @property
    def arguments(self) -> type:
        return runpy.run_path(str(self.script), run_name="read")["Arguments"]


def _without_ellipses(words: list[str]) -> list[str]:
    """Without each … that stands for further flags; behind a flag it stands for a value."""
    before = ["", *words]
    return [word for previous, word in zip(before, words, strict=False) if word != "…" or previous.startswith("--")]


def check_launch(training: Training) -> None:
    """Options in front of the script are accelerate's, variables are known, files are there."""
    from accelerate.commands.launch import launch_command_parser

    unknown = set(training.command.environment) - ENVIRONMENT
    assert not unknown, f"{training.command}: unknown variables {unknown}"
    for number, option in enumerate(training.options):
        if option == "--config_file" and training.options[number + 1] != "…":
            assert (ROOT / training.options[number + 1]).is_file(), f"{training.command}: no such configuration"
    if training.options:
        with contextlib.redirect_stderr(io.StringIO()) as complaint:
            try:
                launch_command_parser().parse_args([*training.options, str(training.script)])
            except SystemExit:
                raise AssertionError(f"{training.command}: {complaint.getvalue()[-300:]}") from None


def check_flags(training: Training, flags: list[str]) -> None:
    """The script's own parser takes these flags, and its checks the settings."""
    from mlrl.cli import parse

    with contextlib.redirect_stderr(io.StringIO()) as complaint:
        try:
            parse(training.arguments, "", flags)
        except SystemExit as stop:
            raise AssertionError(f"{training.command}: {complaint.getvalue() or stop}") from None


def check_task_args(training: Training, flags: list[str]) -> None:
    """What is given as --task_args are arguments of the task's function."""
    from mlrl.config import TaskArguments
    from mlrl.config_checks import setting_types
    from mlrl.flags import read_flags
    from mlrl.task_file import find_task, fit_task_args

    hints = setting_types(TaskArguments)
    at = [n for n, word in enumerate(flags) if word in ("--task", "--task_args")]
    own = [word for n in at for word in [flags[n], *values_after(flags, n)]]
    given = read_flags(own, hints)
    if "task_args" in given:
        task = given.get("task", TaskArguments.task)
        module, attribute, _ = find_task(task)
        fit_task_args(getattr(module, attribute), task, given["task_args"])


def values_after(words: list[str], place: int) -> list[str]:
    """The words that belong to the flag at this place."""
    rest = words[place + 1 :]
    return rest[: next((n for n, word in enumerate(rest) if word.startswith("--")), len(rest))]


def check_pip(command: Command) -> None:
    """Extras are those of pyproject.toml, and a version is the one that launch.sh installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in command.words[2:]:
        if extras := re.fullmatch(r"\.\[(.*)\]", word):
            assert set(extras[1].split(",")) <= set(project["optional-dependencies"]), command
        elif "==" in word:
            assert word in (ROOT / "launch.sh").read_text(), command


def check_tests(command: Command) -> None:
    """Files of tests that are named exist, and pytest knows the options."""
    known = {"-m": 1, "-n": 1, "-k": 1, "-x": 0, "-q": 0, "-s": 0}
    words = list(command.words[2:])
    while words:
        word = words.pop(0)
        if word in known:
            del words[: known[word]]
        elif not (ROOT / word).exists():
            raise Unreadable(f"{command}: {word} is neither a file nor an option that is known here")


def check_benchmarks(command: Command) -> None:
    """The module is there and knows the options."""
    module = command.words[2]
    spec = importlib.util.find_spec(module)
    assert spec is not None, command
    source = Path(spec.origin).read_text()
    if Path(spec.origin).name == "__init__.py":
        source = (Path(spec.origin).parent / "__main__.py").read_text()
    for word in command.words[3:]:
        assert not word.startswith("--") or f'"{word}"' in source, f"{command}: {word}"
