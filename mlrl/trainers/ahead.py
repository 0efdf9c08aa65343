"""Sampling one step ahead: while a step learns, servers draw the next batch with the weights that the step began with.

Step t, which begins with weights θ_t:

    take    the trees of batch t, which servers drew with θ_{t−1} during step t − 1; the first batch now, with θ_0
    start   θ_t goes to the servers, and a second thread grows the trees of batch t + 1 from θ_t and nothing else
    learn   θ_t → θ_{t+1} from batch t, every token weighted by π(θ_t) / μ(θ_{t−1}) (`mlrl.trainers.mismatch`)

Weights are sent when nothing is being drawn, so servers hold those of one step, and of two only while they are sent.
In training, formatters, rewards and transitions run in the second thread from the first batch on, one call after
another as ever. Evaluations, which run in the main thread, and checkpoints wait for it, and a checkpoint holds the
trees. With several ranks each has such a thread, and these speak to one another over connections of their own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from mlrl.config import TrainerConfig
from mlrl.daemon_threads import DaemonThreads
from mlrl.rollout.collect import CollectionCost, Collector, Growth
from mlrl.rollout.stored import stored_tree, tree_record
from mlrl.rollout.tree import RolloutTree
from mlrl.rollout.vllm import FrozenSampler
from mlrl.trainers.data import Batch
from mlrl.trainers.mismatch import check_sampler, has_limit
from mlrl.trainers.samples import Sample

_LAST_CALL_S = 10.0  # that a call of the task or of a server may take to end when the run ends with an error
_CHECKED_RESPONSES = 8  # an agent, held against the weights that should have drawn them


@dataclass
class _Pending:
    """A batch whose trees grow: with the weights of which step, and copies of these; None where nothing is checked."""

    step: int
    sampler: FrozenSampler
    grown: Future
    weights: list[torch.Tensor] | None


class RolloutsAhead:
    """Gives the trees of one batch after another, and has the next one's grown meanwhile.

    Use as a context manager around the steps.

    Args:
        collector: of the main thread, on a sampler that can freeze weights.
        growth: how trees are grown; `reseed` is the step that they are for.
    """

    def __init__(self, collector: Collector, growth: Callable[..., Growth], args: TrainerConfig):
        self.collector, self.growth, self.args = collector, growth, args
        self.metrics: dict[str, tuple[float, float]] = {}  # of the latest batch
        self._group = collector.world.apart()
        self._following: Batch | None = None
        self._pending: _Pending | None = None
        self._ready: tuple[list[RolloutTree], CollectionCost] | None = None
        self._thread: DaemonThreads | None = None  # one: what a task keeps by thread stays usable

    def __enter__(self) -> RolloutsAhead:
        self._thread = DaemonThreads(1, "mlrl-rollouts")
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends what is being drawn, where an error ends the run."""
        if self._pending is not None:
            self._pending.sampler.stop.set()
            if self.collector.world.size == 1:  # else it may wait for a rank that has failed
                wait([self._pending.grown], _LAST_CALL_S)
        self._thread.end()
        self._pending = self._ready = self._following = self._thread = None

    def watched(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches, each given when the one after it is known."""
        batch = next(batches, None)
        while batch is not None:
            self._following = next(batches, None)
            yield batch
            batch = self._following

    def take(self, batch: Batch, step: int) -> list[RolloutTree]:
        """The trees of a batch, for this step; from here on those of the next one grow. Sets the collector's cost.

        Raises:
            Whatever growing them raised.
        """
        started = time.perf_counter()
        self.settle()
        ready, self._ready = self._ready, None
        if ready is None or [tree.ordinal for tree in ready[0]] != [ordinal for ordinal, _ in batch.items]:
            growth = self.growth(reseed=step)
            trees = self._thread.submit(self.collector.collect, batch.items, growth).result()
            ready = _drawn_at(step, trees), self.collector.cost
        trees, self.collector.cost = ready
        behind = staleness(trees, step)
        if not 0 <= behind <= 1:
            raise AssertionError(f"the rollouts of step {step} are of weights {behind} steps older")
        for tree, (_, item) in zip(trees, batch.items, strict=True):
            tree.item = item
        waited = time.perf_counter() - started
        self.metrics = {"rollout_staleness": (behind, 1), "time/rollout_wait_s": (waited, 1)}
        if self._following is not None:
            self._start(self._following, step)
        return trees

    def settle(self) -> None:
        """Waits for the trees that grow, if any do, and holds them against the weights that they were drawn with."""
        if self._pending is None:
            return
        try:
            trees, cost = self._pending.grown.result()
        finally:
            if self._pending.grown.done():
                pending, self._pending = self._pending, None
        if pending.weights is not None:
            with _weights(self._parameters(), pending.weights):
                check_sampler(self.collector.team, _first_samples(trees), self.args)
        self._ready = _drawn_at(pending.step, trees), cost

    def state(self) -> str | None:
        """The trees of the next batch as JSON, for a checkpoint; None where there are none."""
        self.settle()
        if self._ready is None:
            return None
        trees, cost = self._ready
        return json.dumps({"trees": list(map(tree_record, trees)), "cost": asdict(cost)}, default=str)

    def restore(self, state: str | None) -> None:
        """Takes over what `state` gave; `take` gives the trees their items."""
        if state is not None:
            record = json.loads(state)
            self._ready = [stored_tree(tree, {}) for tree in record["trees"]], CollectionCost(**record["cost"])

    def _start(self, batch: Batch, step: int) -> None:
        """Sends the present weights, and has the trees of the next step's batch grown from them."""
        sampler = self.collector.sampler.frozen()
        collector = Collector(self.collector.team, sampler, self.collector.environment, group=self._group)
        growth = self.growth(reseed=step + 1)
        grown = self._thread.submit(lambda: (collector.collect(batch.items, growth), collector.cost))
        is_checked = self.args.tuning == "lora" and has_limit(self.args)  # copies of whole networks would be large
        weights = [parameter.detach().clone() for parameter in self._parameters()] if is_checked else None
        self._pending = _Pending(step, sampler, grown, weights)

    def _parameters(self) -> list[torch.nn.Parameter]:
        """What makes up the policies here, once each."""
        return [p for agents in self.collector.team.trainable for p in agents[0].policy.parameters()]


def staleness(trees: Sequence[RolloutTree], step: int) -> int:
    """How many steps older than this one's the weights are that drew the oldest of the trees."""
    return max(0 if tree.drawn_at is None else step - tree.drawn_at for tree in trees)


def _first_samples(trees: Sequence[RolloutTree]) -> list[list[Sample]]:
    """Of every agent the responses to its first prompts, of as many trees as have enough of them to be held against."""
    samples: list[list[Sample]] = [[] for _ in trees[0].root.responses]
    for tree in trees:
        if all(len(own) >= _CHECKED_RESPONSES for own in samples):
            break
        for agent, own in enumerate(tree.root.responses):
            samples[agent] += [Sample(tree.root, agent, k, 0.0) for k in range(len(own))]
    return samples


def _drawn_at(step: int, trees: list[RolloutTree]) -> list[RolloutTree]:
    for tree in trees:
        tree.drawn_at = step
    return trees


@contextmanager
@torch.no_grad()
def _weights(parameters: Sequence[torch.nn.Parameter], weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """Other weights in the place of these, bit for bit back afterwards."""
    present = [parameter.detach().clone() for parameter in parameters]
    for parameter, other in zip(parameters, weights, strict=True):
        parameter.copy_(other)
    try:
        yield
    finally:
        for parameter, own in zip(parameters, present, strict=True):
            parameter.copy_(own)
