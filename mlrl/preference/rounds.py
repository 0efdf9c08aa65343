"""Rounds of preference pairs on disk: one JSON object a pair, `iteration_0001.jsonl` and so on.

A file reads as text (prompts, responses, rewards) and holds every token id, so that a later run can learn from it
without tokenizing anything again; `datasets.load_dataset("json", data_files=…)` loads it. All lines have one form.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlrl.errors import ConfigError
from mlrl.preference.pairs import PreferencePair, Sampling, Trajectory, Turn
from mlrl.rollout.tree import Response, TokenizedPrompt
from mlrl.run_folder import to_jsonable
from mlrl.storage import writing

FOLDER = "preferences"  # in the run folder
_NAME = re.compile(r"iteration_(\d{4,})\.jsonl")
_TEXT = "text"  # the role under which a prompt that is no chat is written


@dataclass(frozen=True)
class Round:
    """One file: its number and how many pairs it holds."""

    path: Path
    number: int
    num_pairs: int


def write_round(folder: str | Path, number: int, pairs: Iterable[PreferencePair]) -> Round:
    """Writes folder/iteration_<number>.jsonl, whole or not at all; no pair makes an empty file."""
    path = Path(folder) / f"iteration_{number:04d}.jsonl"
    unfinished = path.with_suffix(".tmp")
    count = 0
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # A lone surrogate, which a prompt may hold, has no UTF-8 form, and Arrow refuses its JSON escape: "?".
        with unfinished.open("w", encoding="utf-8", errors="replace") as file:
            for pair in pairs:
                file.write(json.dumps(to_record(pair), ensure_ascii=False, allow_nan=False) + "\n")
                count += 1
            file.flush()
            os.fsync(file.fileno())  # checkpoints lean on it
        os.replace(unfinished, path)
    return Round(path, number, count)


def find_rounds(folder: str | Path) -> list[Round]:
    """The rounds in a folder, oldest first; [] where there are none."""
    found = []
    for path in Path(folder).glob("iteration_*.jsonl") if Path(folder).is_dir() else []:
        match = _NAME.fullmatch(path.name)
        if match:
            with path.open("rb") as file:
                found.append(Round(path, int(match[1]), sum(1 for line in file if line.strip())))
    return sorted(found, key=lambda round: round.number)


def earlier_rounds(folder: str | Path) -> list[Round]:
    """The rounds of another run: the folder is a run folder or the one in it that holds them.

    Raises:
        ConfigError: there are none, or none with a pair.
    """
    rounds = find_rounds(folder) or find_rounds(Path(folder) / FOLDER)
    if not any(round.num_pairs for round in rounds):
        raise ConfigError(
            f"preference_replay_from={str(folder)!r}: holds no pairs (no iteration_0001.jsonl with a line in it, here "
            f"or in {FOLDER}). Give the run folder of a run that collected preferences."
        )
    return rounds


def read_pairs(round: Round, chosen: Sequence[int] | None = None) -> list[PreferencePair]:
    """The pairs of a round, or those of the given numbers, in that order (a number may come again).

    Raises:
        ConfigError: a line that is no pair.
    """
    wanted = None if chosen is None else set(chosen)
    pairs: dict[int, PreferencePair] = {}
    number = 0
    with round.path.open(encoding="utf-8") as file:
        for place, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if wanted is None or number in wanted:
                try:
                    pairs[number] = from_record(json.loads(line))
                except (ValueError, KeyError, TypeError) as error:
                    raise ConfigError(
                        f"preference_replay_from={str(round.path)!r}: line {place} is no preference pair ({error!r}). "
                        "Give files that a run wrote."
                    ) from error
            number += 1
    return [pairs[number] for number in (pairs if chosen is None else chosen)]


def check_pairs(pairs: Sequence[PreferencePair], decoders: Sequence[Callable[[list[int]], str]], where: str) -> None:
    """Raises ConfigError where pairs are of another team: as many agents, and tokens that read as the same text.

    Args:
        decoders: token ids → text without special tokens, one an agent.
        where: the folder they came from.
    """
    for pair in pairs:
        for side in (pair.winner, pair.loser):
            for turn in side.turns:
                if len(turn.responses) != len(decoders):
                    raise ConfigError(
                        f"preference_replay_from={where!r}: its pairs are of {len(turn.responses)} agents, this team "
                        f"has {len(decoders)}. Give a run of the same team."
                    )
                for agent, (response, decode) in enumerate(zip(turn.responses, decoders, strict=True)):
                    if _decoded(decode, response.token_ids) != response.text:
                        raise ConfigError(
                            f"preference_replay_from={where!r}: the tokens of agent {agent} do not read as its text, "
                            f"{response.text[:60]!r}. Give a run whose agents have the same tokenizers."
                        )


def to_record(pair: PreferencePair) -> dict[str, Any]:
    """One line of a round."""
    return {
        "round": pair.round,
        "item": pair.item,
        "item_key": pair.item_key,
        "gap": pair.gap,
        "winner": _side(pair.winner),
        "loser": _side(pair.loser),
    }


def from_record(record: dict[str, Any]) -> PreferencePair:
    """The pair of a line. Raises KeyError, TypeError or ValueError where it is none."""
    return PreferencePair(
        round=int(record["round"]),
        item=int(record["item"]),
        item_key=str(record["item_key"]),
        winner=_trajectory(record["winner"]),
        loser=_trajectory(record["loser"]),
    )


def _side(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "writer": trajectory.writer,
        "candidate": trajectory.candidate,
        "reward": float(trajectory.reward),
        "raw_reward": float(trajectory.raw_reward),
        "turns": [
            [_agent(prompt, response) for prompt, response in zip(turn.prompts, turn.responses, strict=True)]
            for turn in trajectory.turns
        ],
        "sampling": asdict(trajectory.sampling),
    }


def _agent(prompt: TokenizedPrompt, response: Response) -> dict[str, Any]:
    chat = prompt.content if isinstance(prompt.content, list) else [{"role": _TEXT, "content": prompt.content}]
    return {
        "prompt": [{"role": message["role"], "content": message["content"]} for message in to_jsonable(chat)],
        "response": response.text,
        "truncated": response.truncated,
        "token_ids": response.token_ids,
        "logprobs": [round(float(logprob), 6) for logprob in response.logprobs],
        "prompt_token_ids": prompt.token_ids,
        "prompt_reused": prompt.reused,
        "prompt_truncated": prompt.truncated,
    }


def _trajectory(side: dict[str, Any]) -> Trajectory:
    turns = []
    for agents in side["turns"]:
        prompts, responses = [], []
        for entry in agents:
            chat = [dict(message) for message in entry["prompt"]]
            plain = len(chat) == 1 and chat[0]["role"] == _TEXT
            content = chat[0]["content"] if plain else chat
            ids = [int(token) for token in entry["prompt_token_ids"]]
            prompts.append(TokenizedPrompt(content, ids, int(entry["prompt_reused"]), int(entry["prompt_truncated"])))
            ids = [int(token) for token in entry["token_ids"]]
            responses.append(Response(ids, list(entry["logprobs"]), str(entry["response"]), bool(entry["truncated"])))
        turns.append(Turn(tuple(prompts), tuple(responses)))
    if not turns or not all(len(turn.responses) == len(turns[0].responses) > 0 for turn in turns):
        raise ValueError("its turns are not all of the same agents")
    return Trajectory(
        turns=tuple(turns),
        reward=float(side["reward"]),
        raw_reward=float(side["raw_reward"]),
        writer=str(side["writer"]),
        candidate=int(side["candidate"]),
        sampling=Sampling(**side["sampling"]),
    )


def _decoded(decode: Callable[[list[int]], str], token_ids: list[int]) -> str | None:
    try:
        return decode(token_ids)
    except (IndexError, OverflowError, TypeError, ValueError):
        return None  # ids that the tokenizer does not have
