"""The data files of the Berkeley Function-Calling Leaderboard out of an installed `bfcl-eval` package (Apache 2.0).

Only its files are read, nothing of it is imported: `pip install bfcl-eval --no-deps` is enough.
"""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlrl import ConfigError
from mlrl.tasks.task_data import Row

PARALLEL = ("parallel", "parallel_multiple", "live_parallel", "live_parallel_multiple")
MULTI_TURN = ("base", "miss_func", "miss_param", "long_context")

_TOOL_FILES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}


def data_folder() -> Path | None:
    """The package's data folder; None where the package is not installed."""
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))) / "data"
    return folder if folder.is_dir() else None


def checked_categories(categories: str, known: Sequence[str]) -> list[str]:
    """The categories of a comma-separated text.

    Raises:
        ConfigError: a word that is none.
    """
    words = [word.strip() for word in categories.split(",") if word.strip()]
    if not words or set(words) - set(known):
        raise ConfigError(f"task_args.categories={categories!r}: right is one or more of {', '.join(known)}.")
    return words


def parallel_rows(folder: Path, categories: Sequence[str]) -> list[Row]:
    """The rows of the parallel categories, in turns from each, so that any part of the list has all of them."""
    return _in_turns([_parallel_category(folder, category) for category in categories])


def _parallel_category(folder: Path, category: str) -> list[Row]:
    answers = {row["id"]: row for row in _lines(folder / "possible_answer" / f"BFCL_v4_{category}.json")}
    return [
        {
            "id": row["id"],
            "official_category": category,
            "user_prompt": "\n\n".join(message["content"] for message in row["question"][0]),
            "function": row["function"],
            "ground_truth": answers[row["id"]]["ground_truth"],
        }
        for row in _lines(folder / f"BFCL_v4_{category}.json")
    ]


def multi_turn_rows(folder: Path, categories: Sequence[str]) -> list[Row]:
    """Each step of the conversations with gold calls, as a row; its prompt tells what was asked and called before."""
    tools = {name: _lines(folder / "multi_turn_func_doc" / f"{file}.json") for name, file in _TOOL_FILES.items()}
    conversations = []
    for category in categories:
        answers = {row["id"]: row for row in _lines(folder / "possible_answer" / f"BFCL_v4_multi_turn_{category}.json")}
        conversations.append(
            [
                _steps(row, answers[row["id"]]["ground_truth"], tools, f"multi_turn_{category}")
                for row in _lines(folder / f"BFCL_v4_multi_turn_{category}.json")
            ]
        )
    return [step for steps in _in_turns(conversations) for step in steps]


def _steps(row: Row, answers: list[list[str]], tools: dict[str, list[Row]], category: str) -> list[Row]:
    missing = row.get("missed_function", {})
    steps, before = [], []
    for turn, (messages, calls) in enumerate(zip(row["question"], answers, strict=True)):
        later = {name for start, names in missing.items() if turn < int(start) for name in names}
        hidden = later | set(row.get("excluded_function", []))
        asked = "\n".join(message["content"] for message in messages)
        if not messages:
            asked = "The functions that were missing are there now. Please go on."
        if calls:
            steps.append(
                {
                    "id": f"{row['id']}_{turn}",
                    "official_category": category,
                    "turn_index": turn,
                    "user_prompt": "\n".join([*before, f"User: {asked}"]) if before else asked,
                    "function": [f for name in row["involved_classes"] for f in tools[name] if f["name"] not in hidden],
                    "ground_truth": calls,
                }
            )
        before += [f"User: {asked}", f"Calls: {', '.join(calls) or 'none'}"]
    return steps


def _in_turns(lists: Sequence[Sequence[Any]]) -> list[Any]:
    """One of each list after the other, by their share of what is left, so that all of them end together."""
    placed = [((i + 0.5) / len(rows), k, row) for k, rows in enumerate(lists) for i, row in enumerate(rows)]
    return [row for _, _, row in sorted(placed, key=lambda entry: entry[:2])]


def _lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
