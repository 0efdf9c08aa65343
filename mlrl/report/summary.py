"""What a run came to, in a table: settings, evaluation before and after, where the time went, what deserves a look."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlrl.report.runs import Group, Run
from mlrl.report.trees import AgentWriting, Block
from mlrl.wording import counted

EXAMPLE_LENGTH = 160  # characters
MUCH_EMPTY = 0.1  # share of an agent's responses without text that deserves a look


@dataclass
class Overview:
    """One run in the overview table.

    Attributes:
        rewards: (label, first, last, standard error of the last or None), of the evaluation or else of training.
        times: (label, seconds a step, share of the step).
        warnings: what deserves a look, one sentence each.
    """

    run: Run
    facts: list[tuple[str, str]]
    rewards: list[tuple[str, float, float, float | None]]
    times: list[tuple[str, float, float]]
    warnings: list[str]


@dataclass
class WritingRow:
    """What one agent of one run wrote at one step."""

    run: str
    agent: int
    step: int
    tokens: float
    empty: float
    truncated: float
    distinct: float
    example: str


def overview(run: Run, blocks: Sequence[Block]) -> Overview:
    """The row of one run."""
    return Overview(run, _facts(run), _rewards(run), step_times(run), [*_warnings(run, blocks), *run.notes])


@dataclass
class Result:
    """One reward of a group: means over its runs, and the standard deviation (n - 1) of the last one over them."""

    group: int
    label: str
    runs: int
    first: float
    last: float
    spread: float | None


def results(groups: Sequence[Group], overviews: Sequence[Overview]) -> list[Result]:
    """What each group came to: the rewards that its runs have in common."""
    found = []
    for number, group in enumerate(groups):
        own = [entry for entry in overviews if any(entry.run is run for run in group.runs) and entry.rewards]
        for label in dict.fromkeys(row[0] for entry in own for row in entry.rewards):
            rows = [row for entry in own for row in entry.rewards if row[0] == label]
            first, last = np.array([row[1] for row in rows]), np.array([row[2] for row in rows])
            spread = float(last.std(ddof=1)) if len(rows) > 1 else None
            found.append(Result(number, label, len(rows), float(first.mean()), float(last.mean()), spread))
    return found


def in_rounds(run: Run) -> bool:
    """Whether it learns from pairs: it plays before its steps, which share the env_step of their round."""
    return "preference/num_pairs" in run.metrics


def step_times(run: Run) -> list[tuple[str, float, float]]:
    """Seconds a step, over all logged steps: sampling, rewards, and the rest, which is the update.

    Where a batch was drawn during the step before: what the step still waited for it, and the rest. Nothing of a run in
    rounds, most of whose time is spent between steps.
    """
    if in_rounds(run):
        return []
    names = ("time/step_s", "time/rollout_s", "time/reward_s", "time/rollout_wait_s")
    step, sampling, reward, waited = (_mean(run, name) for name in names)
    if step and not math.isnan(waited):
        parts = [("waiting for rollouts", waited), ("update and other", max(step - waited, 0.0))]
        return [(label, seconds, seconds / step) for label, seconds in parts]
    if not step or math.isnan(sampling + reward):
        return []
    parts = [("sampling", sampling), ("rewards", reward), ("update and other", max(step - sampling - reward, 0.0))]
    return [(label, seconds, seconds / step) for label, seconds in parts]


def writing_rows(run: Run, blocks: Sequence[Block]) -> list[WritingRow]:
    """Every agent at the first and at the last kept training step (of evaluations, where training kept none)."""
    kept = [block for block in blocks if block.writing]
    kept = [block for block in kept if block.split == "train"] or kept
    ends = kept[:1] if len(kept) == 1 else [kept[0], kept[-1]] if kept else []
    agents = max((len(block.writing) for block in ends), default=0)
    return [
        _writing_row(run.name, agent, block.step, block.writing[agent])
        for agent in range(agents)
        for block in ends
        if agent < len(block.writing)
    ]


def _writing_row(run: str, agent: int, step: int, own: AgentWriting) -> WritingRow:
    count = max(own.responses, 1)
    shares = (own.tokens / count, own.empty / count, own.truncated / count, len(own.texts) / count)
    example = "" if 2 * own.empty >= own.responses else own.example.strip()  # what it mostly writes
    example = example if len(example) <= EXAMPLE_LENGTH else f"{example[:EXAMPLE_LENGTH].rstrip()} …"
    return WritingRow(run, agent, step, *shares, example)


def _facts(run: Run) -> list[tuple[str, str]]:
    settings, record = run.settings, run.record
    models = settings.get("agents") or settings.get("agent_model")
    models = ", ".join(map(str, models)) if isinstance(models, list) else models
    agents, turns = settings.get("num_agents") or _count_agents(run), settings.get("num_turns")
    candidates = settings.get("preference_num_candidates")
    rollout = [
        counted(turns, "turn") if turns else "",
        f"K = {settings['num_generations']}" if settings.get("num_generations") else "",
        str(settings.get("joint_mode") or ""),
        counted(candidates, "candidate") + " an item" if candidates else "",
    ]
    facts = {
        "algorithm": record.get("algorithm"),
        "task": record.get("task") or settings.get("task"),
        "agents": " × ".join(str(part) for part in (agents, models) if part is not None),
        "rollouts": ", ".join(filter(None, rollout)) if settings else None,
        "seed": settings.get("seed"),
        "steps": f"{run.last_step:,}, env_step {run.last_env_step:,}" if run.last_env_step else None,
        "memory": f"{_last(run, 'memory/peak_gb'):.2f} GB" if "memory/peak_gb" in run.metrics else None,
        "state": "ended by an error" if run.error else "finished" if run.finished else "not finished, or still running",
    }
    return [(name, str(value)) for name, value in facts.items() if value not in (None, "")]


def _count_agents(run: Run) -> int | None:
    return len({match[0] for name in run.metrics if (match := re.search(r"agent_\d+", name))}) or None


def _rewards(run: Run) -> list[tuple[str, float, float, float | None]]:
    """Every turn's return in the first and last evaluation; without evaluations, in the first and last rows."""
    for prefix, label in (("eval/", "evaluation"), ("", "training")):
        rows = []
        for name in (n for n in run.metrics if n.startswith(f"{prefix}turn_") and n.endswith("/expected_return")):
            values = run.metrics[name].finite.value
            if len(values) == 0:
                continue
            turn = name.removeprefix(prefix).split("/")[0].removeprefix("turn_")
            error = run.metrics.get(f"{prefix}turn_{turn}/reward_stderr")
            one_turn = f"{prefix}turn_2/expected_return" not in run.metrics  # then the return is the reward
            stderr = float(error.value[-1]) if error is not None and one_turn and len(error.value) else None
            stderr = None if stderr is not None and math.isnan(stderr) else stderr
            what = "reward" if one_turn else f"return from turn {turn} on"
            rows.append((f"{label} {what}", float(values[0]), float(values[-1]), stderr))
        if rows:
            return rows
    return []


def _silent_agents(blocks: Sequence[Block]) -> dict[int, str]:
    """The agents that answer with nothing at the last kept step or evaluation: how often, and since when."""
    kept = [block for block in blocks if block.writing]
    kept.sort(key=lambda block: (block.step, block.split == "eval"))  # an evaluation comes after the step of its number
    last = [[block for block in kept if block.split == split][-1:] for split in ("train", "eval")]
    found = {}
    for agent in range(max((len(block.writing) for block in kept), default=0)):

        def empty(block: Block, agent: int = agent) -> float:
            own = block.writing[agent] if agent < len(block.writing) else AgentWriting()
            return own.empty / max(own.responses, 1)

        now = [block for own in last for block in own if empty(block) >= MUCH_EMPTY]
        if now:
            first = next(block for block in kept if empty(block) >= MUCH_EMPTY)
            shares = " and ".join(f"{empty(block):.0%} of its responses {_when(block)}" for block in now)
            since = "" if first in now else f"; first seen {_when(first)} ({empty(first):.0%})"
            found[agent] = f"agent {agent} answers with nothing: {shares}{since}"
    return found


def _when(block: Block) -> str:
    return f"in the evaluation at step {block.step}" if block.split == "eval" else f"at step {block.step}"


def _warnings(run: Run, blocks: Sequence[Block]) -> list[str]:
    silent = _silent_agents(blocks)
    found = [f"the run ended by an error: {run.error}"] if run.error else []
    found += silent.values()
    rows = writing_rows(run, blocks)
    for row in (row for row in rows if row.step == rows[-1].step):
        who = f"agent {row.agent}"
        if row.agent not in silent and row.tokens <= 0.1 * max(
            other.tokens for other in rows if other.step == row.step
        ):
            found.append(
                f"{who} writes {row.tokens:.1f} tokens a response, a tenth or less of another (step {row.step})"
            )
        if row.distinct <= 0.25 and row.empty < 0.5:
            found.append(f"{who} gives the same answers again: {row.distinct:.0%} distinct (step {row.step})")
    for ending, least, text in (
        ("/zero_std_fraction", 0.8, "nodes whose returns are all equal, so that nothing is learned there"),
        ("/truncated_fraction", 0.5, "responses cut off at max_new_tokens"),
    ):
        shares = {name: _recent(own.finite.value) for name, own in run.metrics.items() if name.endswith(ending)}
        places = [f"{_place(name)} {share:.0%}" for name, share in shares.items() if share >= least]
        if places:
            found.append(f"{text}, over the last quarter of the run: {'; '.join(places)}")
    for name, text in (
        ("nonfinite_fraction", "updates were skipped for NaN or infinite gradients"),
        ("truncated_prompt_fraction", "prompts were cut to fit"),
        ("reward_failure_fraction", "reward calls had no result and got reward_fallback"),
    ):
        if name in run.metrics and np.any(run.metrics[name].finite.value > 0):
            found.append(text)
    nans = sorted(name for name, series in run.metrics.items() if np.isnan(series.value).any())
    nans = [name for name in nans if not name.endswith("_stderr")]
    if nans:
        found.append(f"NaN or infinite in {', '.join(nans[:4])}{' …' if len(nans) > 4 else ''}")
    return found


def _place(name: str) -> str:
    """`turn_1/agent_0/x` as "turn 1, agent 0"."""
    return ", ".join(part.replace("_", " ") for part in name.split("/")[:-1])


def _recent(values: np.ndarray) -> float:
    """Mean of the last quarter."""
    return float(values[-max(1, len(values) // 4) :].mean()) if len(values) else math.nan


def _mean(run: Run, name: str) -> float:
    values = run.metrics[name].finite.value if name in run.metrics else np.array([])
    return float(values.mean()) if len(values) else math.nan


def _last(run: Run, name: str) -> Any:
    values = run.metrics[name].finite.value
    return float(values[-1]) if len(values) else math.nan
