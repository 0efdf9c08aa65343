"""Follows a page as a reader does: writes its files, runs its commands, one after the other in one folder.

Models of the hub and the demo's become a tiny one, and every run is one step. What needs several machines, a GPU, a
server or a network is read only (`tests.docs.reading`). What there is no way to run or to read is an error.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

from tests.docs.blocks import ROOT, Block, Command, blocks_of, commands_of, hidden_commands, is_script
from tests.docs.reading import (
    Training,
    Unreadable,
    check_benchmarks,
    check_flags,
    check_launch,
    check_pip,
    check_task_args,
    check_tests,
    values_after,
)

# What is said last on a command line, and so wins. A `1` of the page stays where generations are few already.
SMALL = {"max_new_tokens": "6", "eval_num_samples": "1", "eval_num_generations": "1"}
STEP = {"max_steps": "1", "num_generations": "2", "rollout_batch_size": "1"}
ROUND = {"max_steps": "1", "preference_num_candidates": "2", "train_batch_size": "none"}
CHANGES = {
    "evaluate": {},
    "madpo": ROUND,
    "marlhf": ROUND | {"num_generations": "2", "rollout_batch_size": "2", "reward_num_train_epochs": "1"},
    "iac": STEP | {"critic_warmup_rollouts": "0"},
    "maac": STEP | {"critic_warmup_rollouts": "0"},
}
ROWS_ELSEWHERE = re.compile(r"(data_path|dataset|split|levels|path)=(.*)")
KNOWN_ELSEWHERE = (("git", "clone"), ("cd", "mlrl"), ("wandb", "login"), ("wandb", "sync"), ("tensorboard", "--logdir"))


class Follower:
    """In the present folder, with a tiny model in the place of every other."""

    def __init__(self, model: str, monkeypatch):
        self.model, self.monkeypatch = model, monkeypatch
        self.executed: list[str] = []
        """What was really run, for the tests of this."""
        for page in ("README.md", "mlrl/tasks/own_task.md"):  # other pages speak of their files too
            for block in blocks_of(ROOT / page):
                if block.file_name:
                    Path(block.file_name).write_text(block.text)

    def follow(self, blocks: list[Block], run: bool) -> None:
        """All blocks in order; without `run` commands and programs are only read."""
        for block in blocks:
            if block.language == "python":
                self._python(block, run)
            elif block.language == "bash":
                if is_script(block):
                    checked = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
                    assert checked.returncode == 0, f"{block.where}: {checked.stderr}"
                for command in commands_of(block):
                    self._command(command, run and not is_script(block))
            else:
                assert not block.language, f"{block.where}: there is no way to run a block of {block.language}"
                assert hidden_commands(block) == [], f"{block.where}: commands belong into a bash block"

    def _python(self, block: Block, run: bool) -> None:
        assert block.file_name, f"{block.where}: a Python block opens with the name of its file, `# name.py`"
        compile(block.text, block.where, "exec")
        text = re.sub(r"max_new_tokens=\d+", "max_new_tokens=6", block.text)
        text = re.sub(r"num_train_epochs=\d+", "max_steps=1, eval_num_samples=1", text)
        Path(block.file_name).write_text(text.replace('"embedded"', repr(self.model)))
        if run:
            self._script(block.file_name)

    def _script(self, name: str, *words: str) -> None:
        self.executed.append(" ".join([Path(name).name, *words]))
        self.monkeypatch.setattr(sys, "argv", [name, *words])
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            runpy.run_path(name, run_name="__main__")

    def _command(self, command: Command, run: bool) -> None:
        words, program = command.words, Path(command.words[0]).name
        if words[:2] == ("./launch.sh", "test"):
            check_tests(command)
        elif program in ("launch.sh", "accelerate"):
            self._training(Training(command), run)
        elif program == "python" and words[1:3] == ("-m", "mlrl.report"):
            self._report(list(words[3:]), run)
        elif program == "python" and words[1] == "-m" and words[2].startswith("tests."):
            check_benchmarks(command)
        elif program == "python" and words[1].endswith(".py"):
            assert Path(words[1]).is_file(), f"{command}: the page does not show this file"
        elif words[:2] == ("pip", "install"):
            check_pip(command)
        elif program.startswith("python3") and words[1:3] == ("-m", "venv"):
            assert len(words) == 4, command
        elif program == "pip" and "/" in words[0]:  # of another environment, where nothing of ours is
            assert words[1] == "install", command
        elif program == "cp":
            shutil.copyfile(ROOT / words[1], words[2])
        elif program == "echo" and command.output:
            json.loads(words[1])
            Path(command.output).write_text(words[1] + "\n")
        elif program == "ruff":
            assert words[1] in ("check", "format"), command
        elif program != "export" and words[:2] not in KNOWN_ELSEWHERE:
            raise Unreadable(f"{command}: there is no way to run this")

    def _report(self, words: list[str], run: bool) -> None:
        from mlrl.report.__main__ import main

        for number, word in enumerate(words if run else []):
            if word == "runs/<run>":
                words[number] = str(self._newest_run())
            elif word.startswith("runs/") and not Path(word).exists():
                shutil.copytree(self._newest_run(), word)
        if run:
            self.executed.append(f"mlrl.report {' '.join(words)}")
            with contextlib.redirect_stdout(io.StringIO()):
                main(words)
        else:
            assert all(not word.startswith("--") or word in ("--report", "--output", "--max_mb") for word in words)

    def _newest_run(self) -> Path:
        if not any(Path("runs").glob("*/config.yaml")):
            small = [word for name, value in (SMALL | STEP).items() for word in (f"--{name}", value)]
            self._script(str(ROOT / "train/magrpo.py"), "--agent_model", self.model, *small)
        return max(Path("runs").glob("*/config.yaml"), key=lambda path: path.stat().st_mtime_ns).parent

    def _training(self, training: Training, run: bool) -> None:
        flags = [self._filled(word) for word in training.flags]
        for key in re.findall(r"\w*key_env[= ](\w+)", " ".join(flags)):
            self.monkeypatch.setenv(key, "a key")
        check_launch(training)
        check_task_args(training, flags)
        flags = _without_rows_elsewhere(flags)
        if "--run_name" in flags and "--resume_from_checkpoint" not in flags:
            shutil.rmtree(Path("runs", *values_after(flags, flags.index("--run_name"))), ignore_errors=True)
        check_flags(training, flags)
        if run and not training.needs_more:
            with self.monkeypatch.context() as patch:
                for name, value in training.command.environment.items():
                    patch.setenv(name, value)
                self._script(str(training.script), *flags, *self._changes(training.script.stem, flags))

    def _changes(self, script: str, flags: list[str]) -> list[str]:
        given = {word[2:]: values_after(flags, n) for n, word in enumerate(flags) if word.startswith("--")}
        changes = {name: [value] for name, value in (SMALL | CHANGES.get(script, STEP)).items()}
        if given.get("num_generations") == ["1"]:
            changes["num_generations"] = ["1"]
        if "num_iterations" in given:
            changes["num_iterations"] = ["1"]
        if "resume_from_checkpoint" in given:
            changes["max_steps"] = ["2"]
        for name in {"agent_model", "comparator_model_name"} & set(given):
            changes[name] = [self.model]
        if "agents" in given:
            changes["agents"] = [word if Path(word).is_dir() else self.model for word in given["agents"]]
        elif "agents_dir" not in given:
            changes["agent_model"] = [self.model]
        return [word for name, values in changes.items() for word in (f"--{name}", *values)]

    def _filled(self, word: str) -> str:
        """Placeholders as what this folder has."""
        if "/checkpoint-" in word:
            return str(max(Path(word).parent.glob("checkpoint-*"), default=word))
        for place in ("runs/<run>", "runs/RUN", "runs/first"):
            if word.startswith(f"{place}/") and not Path(word).exists():
                return word.replace(place, str(self._newest_run()), 1)
        if word.startswith("~/") and word.endswith("/python"):
            return sys.executable
        return self.model if word in ("MODEL", "…") else word


def _without_rows_elsewhere(flags: list[str]) -> list[str]:
    """Without what names files and hubs that are not here: the task then has its own sample."""
    kept = []
    for word in flags:
        named = ROWS_ELSEWHERE.fullmatch(word)
        if not named or Path(named[2]).exists():
            kept.append(word)
    return [w for n, w in enumerate(kept) if w != "--task_args" or values_after(kept, n)]
