"""Runs that are stopped and go on, beside runs that are not: what the tests of checkpoints compare."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.trainers.loops import as_messages, extend, reward

ROWS = [{"prompt": text} for text in ("the sea", "a river", "one story", "the old town", "a number")]
SETTINGS = {
    **{"num_generations": 2, "num_turns": 2, "max_new_tokens": 5, "lora_rank": 2, "rollout_batch_size": 2},
    **{"num_train_epochs": 2, "agent_learning_rate": 3e-3, "lr_scheduler": "cosine", "warmup_steps": 2},
    **{"eval_interval": 2, "eval_num_samples": 2, "logging_steps": 7, "completions_steps": 1, "save_steps": 2},
}
CHANGING = ("time/", "throughput/", "memory/")


class StopAt:
    """The task's reward, which in the `calls`-th call does something to the process."""

    def __init__(self, calls: int | None, act: Callable[[], None]):
        self.calls, self.act, self.seen = calls, act, 0

    def __call__(self, first: list[str], second: list[str]) -> list[float]:
        self.seen += 1
        if self.seen == self.calls:
            self.act()
        return reward(first, second)


class Crash(Exception):
    """As a reward may fail in the middle of a step."""


def crash() -> None:
    raise Crash


def terminate() -> None:
    """Asks this process to stop, as a batch system does."""
    os.kill(os.getpid(), signal.SIGTERM)


def make(trainer: type, model: str, folder: Path, name: str, reward_func: Any = None, **changes: Any):
    """A trainer of two tiny agents over five rows; `changes` of the settings, and of the trainer's arguments."""
    arguments = {key: changes.pop(key) for key in ("train_dataset", "formatters") if key in changes}
    transition = {} if changes.get("num_turns") == 1 else {"external_transition": extend}
    base = changes.pop("base", SETTINGS)
    settings = {**base, "lora_rank": 2, "output_dir": str(folder), "run_name": name, **changes}
    agents = settings.pop("agents", None)
    return trainer(
        **({"agent_model": model, "num_agents": 2} if agents is None else {"agents": agents}),
        reward_func=reward_func or StopAt(None, crash),
        **transition,
        **{"formatters": as_messages, "train_dataset": ROWS, "eval_dataset": ROWS[:2]} | arguments,
        args=trainer.config_class(**settings),
    )


def result(run: Path) -> dict[str, Any]:
    """What a run leaves behind, apart from times: log lines, completions, and every weight."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in row.items() if not key.startswith(CHANGING)} for row in rows]
    texts = {path.name: path.read_text() for path in sorted((run / "completions").glob("*.jsonl"))}
    weights = {
        f"{path.relative_to(run)}:{name}": tensor
        for path in sorted(run.glob("*/*/*.safetensors"))
        for name, tensor in load_file(path).items()
        if path.parts[-3] != "checkpoints"
    }
    return {"metrics": kept, "completions": texts, "weights": weights}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Bit for bit."""
    assert one["metrics"] == other["metrics"]
    assert one["completions"] == other["completions"]
    assert one["weights"].keys() == other["weights"].keys() and one["weights"]
    for name, tensor in one["weights"].items():
        assert tensor.equal(other["weights"][name]), name
