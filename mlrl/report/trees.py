"""The rollout trees of a run, read from its completions: branches, what each agent wrote, and how many fit the page."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlrl.report.runs import Run, read_jsonl

# Longest prompt or response shown, in characters; the later ones are for a tree that is still too large.
TEXT_LIMITS = (8000, 2000, 500, 100)
_FILE_NAME = re.compile(r"(train|eval)-(\d+)\.jsonl")
_FIELDS = ("path", "prompts", "responses", "token_counts", "truncated", "joints", "rewards", "returns", "advantages")


@dataclass
class Tree:
    """One tree: the records of its nodes, the root first."""

    item: int
    nodes: list[dict[str, Any]]

    def branches(self, discount: float) -> list[tuple[list[int], float]]:
        """Every path of joints from the root to its end, with its discounted reward; a reward of null counts as 0."""
        by_path = {tuple(node["path"]): node for node in self.nodes}
        found: list[tuple[list[int], float]] = []
        stack: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        while stack:
            path, total = stack.pop()
            node = by_path.get(path)
            if node is None or not node["rewards"]:
                found.append((list(path), total))
                continue
            for joint, reward in reversed(list(enumerate(node["rewards"]))):
                stack.append(((*path, joint), total + discount ** len(path) * _mean(reward)))
        return found


@dataclass
class AgentWriting:
    """What one agent wrote in the trees of one file."""

    responses: int = 0
    tokens: int = 0
    empty: int = 0
    truncated: int = 0
    texts: set[int] = field(default_factory=set)  # hashes
    example: str = ""

    def add(self, text: str, tokens: int, truncated: bool) -> None:
        self.example = self.example if self.responses else text
        self.responses += 1
        self.tokens += tokens
        self.empty += not text.strip()
        self.truncated += truncated
        self.texts.add(hash(text))


@dataclass
class Block:
    """The trees of one completions file, as far as they fit.

    Attributes:
        trees: each as JSON.
        total: how many the file has; cut: how many texts of the shown ones are cut.
        writing: what each agent wrote, over all trees of the file.
    """

    split: str
    step: int
    env_step: int = 0
    trees: list[str] = field(default_factory=list)
    total: int = 0
    cut: int = 0
    writing: list[AgentWriting] = field(default_factory=list)


def completion_files(run: Run) -> list[tuple[str, int, Path]]:
    """(split, step, path) of the run's completions, by split and step."""
    folder = run.folder.completions
    paths = folder.iterdir() if folder.is_dir() else ()
    found = [(match[1], int(match[2]), path) for path in paths if (match := _FILE_NAME.fullmatch(path.name))]
    return sorted(found, key=lambda entry: (entry[0] != "train", entry[1]))


def read_blocks(run: Run, limit: int) -> list[Block]:
    """The trees of a run, at most `limit` bytes of them.

    Steps are taken first, last, then halving the gaps; each may use its share of what is left, and at least one tree as
    long as there is room. Texts are cut at the first of `TEXT_LIMITS` at which a tree needs at most a quarter of
    `limit`.
    """
    files = completion_files(run)
    blocks: dict[int, Block] = {}
    left = limit
    discount = run.settings.get("discount")
    discount = float(discount) if isinstance(discount, (int, float)) else 1.0
    for taken, number in enumerate(spread_order(len(files))):
        split, step, path = files[number]
        block = blocks[number] = Block(split, step)
        share = left // (len(files) - taken)
        for tree in read_trees(path, run.notes):
            block.total += 1
            block.env_step = tree.nodes[0].get("env_step") or 0
            _note_writing(block.writing, tree)
            if len(block.trees) < block.total - 1:
                continue  # one did not fit: the trees shown are the first ones
            text, cut = _encode(tree, discount, limit // 4)
            size = len(text.encode("utf-8", "backslashreplace"))
            if size <= (share if block.trees else left):
                block.trees.append(text)
                block.cut += cut
                share, left = share - size, left - size
    return [blocks[number] for number in range(len(files))]


def read_trees(path: Path, notes: list[str]) -> list[Tree]:
    """The trees of a file, in its order; of a tree that stands there twice (a step done again), the later one.

    Nodes without their root, as an interrupted write leaves them, and records that lack fields become a note.
    """
    nodes: dict[Any, dict[tuple[int, ...], dict[str, Any]]] = {}
    lost = 0
    for record in read_jsonl(path, notes):
        if not all(isinstance(record.get(key), list) for key in _FIELDS[:-1]):
            lost += 1
        elif not record["path"]:
            nodes[record.get("item")] = {(): record}
        elif record.get("item") in nodes:
            nodes[record["item"]][tuple(record["path"])] = record
        else:
            lost += 1
    if lost:
        notes.append(f"{path.name}: {lost} records left out, which have no root or lack fields")
    return [Tree(item, list(own.values())) for item, own in nodes.items()]


def spread_order(count: int) -> list[int]:
    """0 … count - 1 as first, last, middle, and so on into the gaps: any beginning of it covers the range evenly."""
    order = list(range(count)) if count < 3 else [0, count - 1]
    gaps = [(0, count - 1)] if count >= 3 else []
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return order


def cut_text(text: str, limit: int) -> str:
    """The text, or its beginning and end with the number of characters left out between them."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[-half:]}"


def _encode(tree: Tree, discount: float, most: int) -> tuple[str, int]:
    """A tree as JSON with its best and worst branch, and the number of texts that were cut."""
    branches = tree.branches(discount)
    best, worst = max(branches, key=lambda b: b[1]), min(branches, key=lambda b: b[1])
    content = {"item": tree.item, "best": best[0], "best_reward": best[1], "worst": worst[0], "worst_reward": worst[1]}
    for limit in TEXT_LIMITS:
        cut = [0]
        nodes = [{key: node.get(key) for key in _FIELDS} for node in tree.nodes]
        for node in nodes:
            node["prompts"] = _shortened(node["prompts"], limit, cut)
            node["responses"] = _shortened(node["responses"], limit, cut)
            node["rewards"], node["returns"], node["advantages"] = (
                _rounded(node[key]) for key in ("rewards", "returns", "advantages")
            )
        text = json.dumps({**content, "nodes": nodes}, ensure_ascii=False, separators=(",", ":"))
        if len(text) <= most:
            break
    return text, cut[0]


def _shortened(value: Any, limit: int, cut: list[int]) -> Any:
    if isinstance(value, str):
        cut[0] += len(value) > limit
        return cut_text(value, limit)
    if isinstance(value, list):
        return [_shortened(entry, limit, cut) for entry in value]
    if isinstance(value, dict):
        return {key: _shortened(entry, limit, cut) for key, entry in value.items()}
    return value


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _mean(reward: Any) -> float:
    """A joint's reward as one number; those of several agents by their mean."""
    own = [r for r in (reward if isinstance(reward, list) else [reward]) if r is not None]
    return sum(own) / len(own) if own else 0.0


def _note_writing(writing: list[AgentWriting], tree: Tree) -> None:
    for node in tree.nodes:
        for agent, texts in enumerate(node["responses"]):
            while len(writing) <= agent:
                writing.append(AgentWriting())
            for text, tokens, truncated in zip(
                texts, node["token_counts"][agent], node["truncated"][agent], strict=False
            ):
                writing[agent].add(str(text), tokens, bool(truncated))
