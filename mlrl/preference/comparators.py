"""Whom the current policy's candidates are compared with, each round anew.

| comparator     | who writes                                                                                     |
|----------------|------------------------------------------------------------------------------------------------|
| `current`      | the live policy, from a random stream of its own                                               |
| `current_copy` | a frozen copy of it, made when the round began                                                 |
| `history`      | the policy as it was when the round k before this one began (the first one until there is one) |
| `model`        | other models in this process                                                                   |
| `api`          | a model over HTTP                                                                              |

A candidate is one whole episode of its own: C responses at the first turn, one at every later turn, ended early by its
own reward only.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from mlrl.models.base import Base
from mlrl.preference.pairs import Sampling, Trajectory, dropped_failures, trajectories
from mlrl.preference.snapshots import FrozenTwin, PolicyHistory, team_weights
from mlrl.preference.writers import Writer, WrittenCollector
from mlrl.rollout.collect import CollectionCost, Collector, Growth
from mlrl.rollout.sampler import Sampler

SNAPSHOTS = ("current", "current_copy", "history")


@dataclass
class Candidates:
    """Trajectories of every item, None for those that were lost.

    Attributes:
        lost: how many responses could not be had, by reason. cost: of playing.
        counts: what the environment counts of responses, as (sum, count).
    """

    by_item: list[list[Trajectory | None]]
    lost: Counter = field(default_factory=Counter)
    cost: CollectionCost = field(default_factory=CollectionCost)
    counts: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def num_lost(self) -> int:
        """Candidates that are None."""
        return sum(candidate is None for own in self.by_item for candidate in own)


def play(
    collector: Collector,
    items: Sequence[tuple[int, dict]],
    growth: Growth,
    *,
    num_candidates: int,
    round: int,
    stream: str,
    writer: str,
    policy: str,
) -> Candidates:
    """Candidates of every (ordinal, item), drawn from streams of their own.

    Args:
        growth: of the trainer; its horizon, sampling, discount and threshold count.
        stream: `candidate` or `comparator`; the round becomes a part of its name, so that no round repeats another's.
        writer, policy: see `Trajectory` and `Sampling`.
    """
    own = dataclasses.replace(
        growth,
        generations=(num_candidates, *(1 for _ in growth.generations[1:])),
        joint_mode="aligned",
        scope="joint",
        stream=f"{stream}_{round}",
        reseed=round,
        greedy_baseline=False,
    )
    s = own.sampling
    sampling = Sampling(s.temperature, s.top_p, s.top_k, s.max_new_tokens, policy)
    trees = collector.collect(items, own)
    by_item = [
        dropped_failures(trajectories(tree, discount=growth.discount, writer=writer, sampling=sampling))
        for tree in trees
    ]
    return Candidates(by_item, cost=collector.cost, counts=collector.environment.response_metrics(trees))


class PolicyComparator:
    """`current`, `current_copy` or `history`; `requests` to a server are none.

    Args:
        word: which of the three.
        collector: of the live team; made before its optimizers (see `FrozenTwin`).
        k: rounds back, for `history`.
    """

    requests = 0

    def __init__(self, word: str, collector: Collector, k: int = 1):
        if word not in SNAPSHOTS:
            raise ValueError(
                f"comparator_policy={word!r}: not a policy of this run. Use one of {', '.join(SNAPSHOTS)}."
            )
        self.word, self.live, self.collector = word, collector, collector
        self.history = PolicyHistory(k) if word == "history" else None
        self.twin: FrozenTwin | None = None
        if word != "current":
            self.twin = FrozenTwin(collector.team)
            sampler = Sampler(self.twin.team, collector.sampler.max_rows)
            self.collector = dataclasses.replace(collector, team=self.twin.team, sampler=sampler)
        self._policy = ""

    @property
    def bases(self) -> list[Base]:
        """The networks here that it plays with."""
        return self.collector.team.bases

    def begin_round(self, round: int) -> None:
        """Says that a round (counted from 1) begins: call it before anything of that round is learned."""
        self._policy = f"agents at round {round}"
        if self.twin is None:
            return
        weights = team_weights(self.live.team)
        if self.history is not None:
            self.history.record(round, weights)
            earlier, weights = self.history.before(round)
            self._policy = f"agents at round {earlier}"
        self.twin.set(weights)

    def candidates(
        self, items: Sequence[tuple[int, dict]], growth: Growth, *, num_candidates: int, round: int
    ) -> Candidates:
        """The comparator's candidates of these items."""
        return play(
            self.collector, items, growth, num_candidates=num_candidates, round=round, stream="comparator",
            writer=self.word, policy=self._policy,
        )  # fmt: skip


class WrittenComparator:
    """`model` or `api`: episodes that someone else writes.

    Args:
        name: of the model, for the record.
        live: collector of the live team, whose tokenizers and environment are used.
    """

    def __init__(self, word: str, name: str, live: Collector, writer: Writer):
        self.word, self.name, self.writer = word, name, writer
        self.collector = WrittenCollector(live.team, live.sampler, live.environment, writer=writer)

    @property
    def requests(self) -> int:
        """Requests to a server so far, on the rank that sends them."""
        return self.writer.requests

    @property
    def bases(self) -> list[Base]:
        """The networks here that it plays with."""
        return self.writer.bases

    def begin_round(self, round: int) -> None:
        """Nothing changes from round to round."""

    def candidates(
        self, items: Sequence[tuple[int, dict]], growth: Growth, *, num_candidates: int, round: int
    ) -> Candidates:
        """The comparator's candidates of these items, None for those that could not be had."""
        before = Counter(self.writer.lost)
        played = play(
            self.collector, items, growth, num_candidates=num_candidates, round=round, stream="comparator",
            writer=self.word, policy=self.name,
        )  # fmt: skip
        played.lost = Counter(self.writer.lost) - before
        return played
