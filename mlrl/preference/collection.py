"""Collecting the pairs of one round: play the items with the policy, and with the comparator where there is one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from mlrl.preference.comparators import Candidates, PolicyComparator, WrittenComparator, play
from mlrl.preference.pairs import PreferencePair, candidate_pairs, compared_pairs
from mlrl.rollout.collect import CollectionCost, Collector, Growth


@dataclass(frozen=True)
class CollectionSettings:
    """How many candidates are played and which pairs are made of them; the fields of `PairArguments`."""

    num_candidates: int
    comparator_num_candidates: int
    pair_selection: str
    pairs_per_sample: int | None
    batch_size: int
    """Items played at once."""


@dataclass
class Collected:
    """A round's pairs, in item order, and what they were made of.

    Attributes:
        policy_rewards, comparator_rewards: of all candidates. lost: responses that could not be had, by reason.
        num_items: items played. num_lost: candidates lost.
        counts: what the environment counts of the policy's responses, as (sum, count).
    """

    pairs: list[PreferencePair] = field(default_factory=list)
    policy_rewards: list[float] = field(default_factory=list)
    comparator_rewards: list[float] = field(default_factory=list)
    lost: Counter = field(default_factory=Counter)
    cost: CollectionCost = field(default_factory=CollectionCost)
    num_items: int = 0
    num_lost: int = 0
    counts: dict[str, tuple[float, float]] = field(default_factory=dict)


def collect_pairs(
    collector: Collector,
    items: Sequence[tuple[int, dict]],
    growth: Growth,
    settings: CollectionSettings,
    *,
    comparator: PolicyComparator | WrittenComparator | None = None,
    round: int = 0,
    between: Callable[[], None] = lambda: None,
) -> Collected:
    """Plays (ordinal, item)s and makes their pairs: among the policy's candidates, or against the comparator's.

    Args:
        between: called before each batch but the first; what it raises gives the collection up.
    """
    collected = Collected()
    for start in range(0, len(items), settings.batch_size):
        if start:
            between()
        batch = items[start : start + settings.batch_size]
        ours = play(
            collector, batch, growth, num_candidates=settings.num_candidates, round=round, stream="candidate",
            writer="current", policy=f"agents at round {round}",
        )  # fmt: skip
        collected.policy_rewards += _account(collected, ours)
        for name, (total, count) in ours.counts.items():
            before, number = collected.counts.get(name, (0.0, 0.0))
            collected.counts[name] = (before + total, number + count)
        theirs = None
        if comparator is not None:
            count = settings.comparator_num_candidates
            theirs = comparator.candidates(batch, growth, num_candidates=count, round=round)
            collected.comparator_rewards += _account(collected, theirs)
        for place, (ordinal, item) in enumerate(batch):
            how = {"selection": settings.pair_selection, "limit": settings.pairs_per_sample, "seed": growth.seed}
            sides = [ours.by_item[place]] if theirs is None else [ours.by_item[place], theirs.by_item[place]]
            make = candidate_pairs if theirs is None else compared_pairs
            collected.pairs += make(item, ordinal, *sides, **how, round=round)
        collected.num_items += len(batch)
    return collected


def _account(collected: Collected, played: Candidates) -> list[float]:
    """Adds up costs and losses; returns the candidates' rewards."""
    collected.lost += played.lost
    collected.num_lost += played.num_lost
    for name, value in asdict(played.cost).items():
        setattr(collected.cost, name, getattr(collected.cost, name) + value)
    return [candidate.reward for own in played.by_item for candidate in own if candidate is not None]
