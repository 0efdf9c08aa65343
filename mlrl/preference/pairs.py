"""Pairs of joint trajectories of one task item, a winner and a loser by the task's reward, and which are learned from.

A trajectory is one joint response a turn. Its reward is the discounted sum of its processed rewards, Σ_t γ^t r_t, the
return that policy gradients would optimise; with one turn that is the reward. Equal rewards make no pair.

Pairs carry what was sampled, token for token, so that a loss scores exactly the tokens that a policy drew.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlrl.errors import TaskError
from mlrl.rollout.streams import derive_seed
from mlrl.rollout.tree import Node, Response, RolloutTree, TokenizedPrompt
from mlrl.run_folder import to_jsonable

SELECTIONS = ("reward_gap", "random", "all", "comparator_reward")
_TIE = 1e-9  # of the larger reward: what sums of floats differ by


@dataclass(frozen=True)
class Turn:
    """What each of the N agents saw and wrote at one turn."""

    prompts: tuple[TokenizedPrompt, ...]
    responses: tuple[Response, ...]


@dataclass(frozen=True)
class Sampling:
    """How a trajectory was drawn; `policy` says in words from which weights or model."""

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    policy: str = ""


@dataclass(frozen=True)
class Trajectory:
    """One joint response a turn, from an item's first prompts on.

    Attributes:
        reward: discounted sum of the processed rewards. raw_reward: the same before the reward processor.
        writer: `current` for the policy that learns, else the comparator's word (`history`, `api` …).
        candidate: its number among the candidates of its writer for this item.
    """

    turns: tuple[Turn, ...]
    reward: float
    raw_reward: float
    writer: str
    candidate: int
    sampling: Sampling


@dataclass(frozen=True)
class PreferencePair:
    """Two trajectories of one item, the first preferred.

    Attributes:
        round: iteration in which it was collected, from 1; 0 where there are no iterations.
        item: place of the item in the train set. item_key: a digest of the row itself, the same in every run.
    """

    round: int
    item: int
    item_key: str
    winner: Trajectory
    loser: Trajectory

    @property
    def gap(self) -> float:
        """By how much the winner's reward is larger."""
        return self.winner.reward - self.loser.reward


def item_key(item: Mapping[str, Any]) -> str:
    """A digest of a dataset row."""
    text = json.dumps(to_jsonable(item), sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def trajectories(tree: RolloutTree, *, discount: float, writer: str, sampling: Sampling) -> list[Trajectory]:
    """Every path from the root of a rollout tree to an end, in path order.

    Candidates are grown with `generations=(C, 1, 1, …)` and aligned joints, so that a tree holds C of them.
    """
    return [
        Trajectory(
            turns=tuple(_turn(node, joint) for node, joint in path),
            reward=_discounted([node.rewards[joint] for node, joint in path], discount),
            raw_reward=_discounted([node.raw_rewards[joint] for node, joint in path], discount),
            writer=writer,
            candidate=number,
            sampling=sampling,
        )
        for number, path in enumerate(_paths(tree.root))
    ]


def dropped_failures(candidates: Sequence[Trajectory]) -> list[Trajectory | None]:
    """The candidates, None for each in which some response could not be had (it has no token, not even an end)."""
    return [
        None if any(not r.token_ids for turn in candidate.turns for r in turn.responses) else candidate
        for candidate in candidates
    ]


def candidate_pairs(
    item: Mapping[str, Any],
    ordinal: int,
    candidates: Sequence[Trajectory | None],
    *,
    selection: str,
    limit: int | None,
    seed: int,
    round: int = 0,
) -> list[PreferencePair]:
    """Pairs among the candidates of one policy for one item: any two with different rewards.

    Args:
        selection: `reward_gap` (largest gaps first), `random`, or `all` (in candidate order).
        limit: most pairs of the item, None for no limit.
        seed: of the run, for `random`.
    """
    if selection == "comparator_reward":
        raise ValueError("pair_selection='comparator_reward': there is no comparator. Use reward_gap, random or all.")
    known = [candidate for candidate in candidates if candidate is not None]
    sides = list(itertools.combinations(known, 2))
    return _selected(item, ordinal, sides, selection, limit, seed, round)


def compared_pairs(
    item: Mapping[str, Any],
    ordinal: int,
    current: Sequence[Trajectory | None],
    comparator: Sequence[Trajectory | None],
    *,
    selection: str,
    limit: int | None,
    seed: int,
    round: int,
) -> list[PreferencePair]:
    """Pairs of the current policy's candidate c with the comparator's candidate c; either may win.

    Where one side has more candidates, or lacks one (None), that index makes no pair.

    Args:
        selection: as in `candidate_pairs`, or `comparator_reward` (higher comparator reward first, then larger gap).
    """
    sides = [
        (ours, theirs)
        for ours, theirs in zip(current, comparator, strict=False)
        if ours is not None and theirs is not None
    ]
    return _selected(item, ordinal, sides, selection, limit, seed, round)


def is_tie(first: float, second: float) -> bool:
    """Whether two rewards are equal up to the rounding of float sums."""
    return abs(first - second) <= _TIE * max(abs(first), abs(second))


def require_pairs(
    pairs: Sequence[PreferencePair],
    num_items: int,
    reasons: Mapping[str, int] | None = None,
    comparator: str | None = None,
) -> None:
    """Raises TaskError where there is nothing to learn from, with what may be wrong.

    Args:
        num_items: items that were played. reasons: why candidates were lost, and how many.
        comparator: which one the team's candidates were set against; None: they were set against each other.
    """
    if pairs:
        return
    lost = ", ".join(f"{reason} ({count})" for reason, count in (reasons or {}).items())
    tied = "no two candidates of any of"
    if comparator is not None:
        tied = f"no candidate and the comparator's ({comparator}) of the same number, of any of"
    raise TaskError(
        f"preference pairs=0: {tied} the {num_items} items have different rewards. "
        + (f"Candidates were lost: {lost}. " if lost else "")
        + "Use more candidates (preference_num_candidates), a higher temperature, or a reward that tells answers apart"
    )


def _selected(item, ordinal, sides, selection, limit, seed, round) -> list[PreferencePair]:
    """Pairs without ties, in the order of the selection, at most `limit`."""
    if selection not in SELECTIONS:
        raise ValueError(f"pair_selection={selection!r}: unknown word. Use one of {', '.join(SELECTIONS)}.")
    sides = [pair for pair in sides if not is_tie(pair[0].reward, pair[1].reward)]
    order: Callable[[tuple[Trajectory, Trajectory]], Any]
    if selection == "random":
        generator = np.random.default_rng(derive_seed(seed, "pairs", round, ordinal))
        sides = [sides[place] for place in generator.permutation(len(sides))]
    elif selection != "all":

        def order(pair):
            gap = abs(pair[0].reward - pair[1].reward)
            return -gap if selection == "reward_gap" else (-pair[1].reward, -gap)

        sides = sorted(sides, key=order)  # stable: equal ones stay in candidate order
    key = item_key(item)
    ranked = [sorted(pair, key=lambda side: -side.reward) for pair in sides[:limit]]
    return [PreferencePair(round, ordinal, key, winner, loser) for winner, loser in ranked]


def _paths(node: Node) -> list[list[tuple[Node, int]]]:
    paths = []
    for joint in range(len(node.joints)):
        below = _paths(node.children[joint]) if joint in node.children else [[]]
        paths += [[(node, joint), *rest] for rest in below]
    return paths


def _turn(node: Node, joint: int) -> Turn:
    responses = (node.responses[agent][k] for agent, k in enumerate(node.joints[joint]))
    return Turn(tuple(node.prompts), tuple(responses))


def _discounted(rewards: Sequence[Any], discount: float) -> float:
    return math.fsum(discount**turn * float(reward) for turn, reward in enumerate(rewards))
