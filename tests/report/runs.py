"""Run folders as a trainer writes them, made in a moment."""

from pathlib import Path
from typing import Any

import yaml

from mlrl.run_folder import RunFolder, append_jsonl


def write_run(
    path: Path, rows: list[dict[str, Any]], record: dict[str, Any] | None = None, **settings: Any
) -> RunFolder:
    """A run with these settings and metric rows; without env_step, a step counts ten."""
    folder = RunFolder(path)
    path.mkdir(parents=True)
    settings = {"seed": 0, "run_name": path.name, "num_agents": 2, "num_turns": 1, "num_generations": 2} | settings
    record = {"algorithm": "MAGRPO", "task": "demo"} | (record or {})
    folder.config.write_text(yaml.safe_dump({**settings, "record": record}))
    append_jsonl(folder.metrics, [{"env_step": 10 * row["step"], "epoch": 0.0} | row for row in rows])
    return folder


def node(item: int, path: list[int], rewards: list, texts: list[list[str]], **changes: Any) -> dict[str, Any]:
    """One record of a completions file: aligned joints, one list of texts an agent."""
    count = len(rewards)
    return {
        "step": 1,
        "env_step": 10,
        "split": "train",
        "item": item,
        "path": path,
        "turn": len(path),
        "prompts": [[{"role": "user", "content": f"prompt {item} {path}"}]] * len(texts),
        "responses": texts,
        "token_counts": [[len(text) for text in own] for own in texts],
        "truncated": [[False] * count] * len(texts),
        "joints": [[k] * len(texts) for k in range(count)],
        "rewards": rewards,
        "returns": rewards,
        "advantages": [[0.5, -0.5][:count]] * len(texts),
    } | changes


def two_turns(item: int = 0, first: str = "a") -> list[dict[str, Any]]:
    """A tree of two turns, two joints each; its best branch is [1, 0] and its worst [0, 1]."""
    return [
        node(item, [], [0.0, 1.0], [[first, "b"], ["c", ""]]),
        node(item, [0], [0.5, 0.25], [["d", "e"], ["f", ""]]),
        node(item, [1], [0.5, 0.0], [["g", "h"], ["i", ""]]),
    ]
