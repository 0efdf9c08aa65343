"""Optimizer updates of all agents from one set of samples.

All agents update from the same trees at the same old weights. For each minibatch the gradients of every agent are
formed first and checked, then all step or none does, on all ranks. A rank updates the agents that it holds, each from
its share of that agent's samples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from mlrl.agents import Agent, Team
from mlrl.config import TrainerConfig
from mlrl.losses.policy import PolicyLossInputs, PolicyLossOutputs, PolicyLossSettings, policy_loss
from mlrl.parallel.engine import Engine
from mlrl.parallel.zero import ZeroEngine
from mlrl.rollout.streams import derive_seed
from mlrl.trainers.estimate import known_logprobs, score
from mlrl.trainers.samples import MicroBatch, Sample, rank_micro_batches, stand_in


@dataclass
class UpdateOutcome:
    """One optimizer update: metrics as (sum, count), and whether every gradient was finite (else no agent stepped)."""

    finite: bool
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        """Adds to a metric's sum and count."""
        before, number = self.metrics.get(name, (0.0, 0.0))
        self.metrics[name] = (before + total, number + count)


class PolicyUpdate:
    """The updates of one step.

    Args:
        engines: one a group of agents here that train the same weights (`Team.trainable`).
        step: number of the step; decides the order of minibatches.
        sampling_is_exact: old log-probabilities are those that sampling kept; else the training forward makes them.
    """

    def __init__(
        self,
        team: Team,
        engines: Sequence[Engine | ZeroEngine],
        args: TrainerConfig,
        step: int,
        sampling_is_exact: bool = False,
    ):
        self.team, self.engines, self.args, self.step = team, engines, args, step
        self.sampling_is_exact = sampling_is_exact

    def run(self, samples: Sequence[Sequence[Sample]]) -> Iterator[UpdateOutcome]:
        """Updates from the samples of every agent, minibatch after minibatch; samples[agent] are in node order."""
        plans = list(self._minibatches(samples))
        scored = samples[0][0].old_logprobs is not None  # already, as of responses that a server drew
        if self.args.clip_range is not None and len(plans) > 1 and not scored:
            self._score_old(samples)
        settings = [self._settings(own) for own in samples]
        for minibatch in plans:
            outcome = self._update(minibatch, [len(own) for own in samples], settings)
            yield outcome
            if self.args.target_kl is not None and _worst_kl(outcome) > self.args.target_kl:
                return

    def _minibatches(self, samples: Sequence[Sequence[Sample]]) -> Iterator[list[list[Sample]]]:
        """Samples of `train_batch_size` nodes each, the same nodes for every agent, each node once a pass."""
        nodes = list(dict.fromkeys(id(sample.node) for sample in samples[0]))
        size = self.args.train_batch_size or len(nodes)
        for number in range(self.args.num_updates_per_rollout):
            order = list(nodes)
            if size < len(nodes):
                np.random.default_rng(derive_seed(self.args.seed, "minibatches", self.step, number)).shuffle(order)
            for start in range(0, len(order), size):
                chosen = set(order[start : start + size])
                yield [[sample for sample in own if id(sample.node) in chosen] for own in samples]

    def _score_old(self, samples: Sequence[Sequence[Sample]]) -> None:
        """Log-probabilities at the weights that sampled."""
        mesh = self.team.mesh
        work = [(a.policy, mesh.agents[a.index], own) for a, own in zip(self.team.agents, samples, strict=True)]
        known = known_logprobs(samples, self.sampling_is_exact)
        for own, scores in zip(samples, known or score(work, mesh.world, self.args), strict=True):
            for sample, logprobs in zip(own, scores, strict=True):
                sample.old_logprobs = logprobs

    def _settings(self, samples: Sequence[Sample]) -> PolicyLossSettings:
        args = self.args
        weight = sum(s.weight for s in samples)
        return PolicyLossSettings(
            clip_range=args.clip_range,
            clip_range_high=args.clip_range_high,
            dual_clip=args.dual_clip,
            importance_level=args.importance_level,
            loss_aggregation=args.loss_aggregation,
            entropy_coef=args.entropy_coef,
            mean_length=sum(s.weight * s.length for s in samples) / weight if weight else 1.0,
            max_new_tokens=args.max_new_tokens,
        )

    def _update(
        self, minibatch: Sequence[Sequence[Sample]], totals: Sequence[int], settings: Sequence[PolicyLossSettings]
    ) -> UpdateOutcome:
        outcome = UpdateOutcome(finite=True)
        started = time.perf_counter()
        for group, engine in zip(self.team.trainable, self.engines, strict=True):
            self._backward(group, engine, minibatch, totals, settings, outcome)
        step_all(self.team, self.engines, self.args.max_grad_norm, outcome)
        merged = merge(self.team.mesh.world.gather(outcome))
        seconds = time.perf_counter() - started
        merged.add("time/update_s", seconds)
        merged.add("throughput/trained_tokens_per_s", sum(s.length for own in minibatch for s in own), seconds)
        return merged

    def _backward(
        self,
        group: Sequence[Agent],
        engine: Engine | ZeroEngine,
        minibatch: Sequence[Sequence[Sample]],
        totals: Sequence[int],
        settings: Sequence[PolicyLossSettings],
        outcome: UpdateOutcome,
    ) -> None:
        """Gradients of the agents that train the same weights."""
        policy, ranks = group[0].policy, self.team.mesh.agents[group[0].index]
        lockstep = engine.lockstep or policy.base.shard is not None
        micros = rank_micro_batches(
            [minibatch[agent.index] for agent in group], ranks, self.args.micro_batch_tokens, lockstep
        )
        work = [(agent, micro) for agent, own in zip(group, micros, strict=True) for micro in own]
        with policy.use():
            for number, (agent, micro) in enumerate(work, start=1):
                if micro is None:
                    scored, _ = policy.logprobs(stand_in(), self.args.temperature)
                    loss = 0.0 * scored.logprobs_L.sum()
                else:
                    scale = totals[agent.index] / len(minibatch[agent.index])
                    loss = self._loss(agent, micro, scale, settings[agent.index], outcome)
                engine.backward(loss, last=number == len(work))

    def _loss(
        self, agent: Agent, micro: MicroBatch, scale: float, settings: PolicyLossSettings, outcome: UpdateOutcome
    ) -> torch.Tensor:
        """Loss of one micro-batch; `scale` is M/n."""
        entropy = "grad" if self.args.entropy_coef else "value"
        scored, lengths = agent.policy.logprobs(micro.tree, self.args.temperature, entropy)
        device = scored.logprobs_L.device
        old = [sample.old_logprobs for sample in micro.samples]
        fixed = [sample.token_weights for sample in micro.samples]
        outputs = policy_loss(
            PolicyLossInputs(
                logprobs_T=scored.logprobs_L,
                lengths_S=torch.tensor(lengths, device=device),
                advantages_S=torch.tensor([s.advantage for s in micro.samples], device=device),
                weights_S=torch.tensor([s.weight * scale for s in micro.samples], device=device),
                old_logprobs_T=None if old[0] is None else torch.cat(old).to(device),
                entropy_T=scored.entropy_L,
                token_weights_T=None if fixed[0] is None else torch.cat(fixed).to(device),
            ),
            settings,
        )
        _record_loss(outcome, agent.index, micro.samples, outputs)
        return outputs.loss


def step_all(
    team: Team, engines: Sequence[Engine | ZeroEngine], max_grad_norm: float | None, outcome: UpdateOutcome
) -> None:
    """Steps all agents on all ranks, or none where a gradient is not finite; adds norms and rates to the outcome."""
    norms = [engine.grad_norm() for engine in engines]
    outcome.finite = all(team.mesh.world.gather(all(math.isfinite(norm) for norm in norms)))
    for group, engine, norm in zip(team.trainable, engines, norms, strict=True):
        if not outcome.finite:
            engine.zero_grad()
            continue
        for agent in group:
            if team.mesh.agents[agent.index].is_first:
                limit = max_grad_norm or math.inf
                outcome.add(f"agent_{agent.index}/grad_norm", norm)
                outcome.add(f"agent_{agent.index}/grad_clipped_fraction", float(norm > limit))
                outcome.add(f"agent_{agent.index}/learning_rate", engine.learning_rate)
        engine.step(norm)


def merge(outcomes: Sequence[UpdateOutcome]) -> UpdateOutcome:
    """One update as all ranks saw it: sums and counts add up, except that a largest value stays the largest."""
    merged = UpdateOutcome(outcomes[0].finite)
    for outcome in outcomes:
        for name, (total, count) in outcome.metrics.items():
            if name.endswith("/ratio_max"):
                merged.metrics[name] = (max(total, merged.metrics.get(name, (0.0, 1.0))[0]), 1.0)
            elif name.endswith(("/loss", "/value_loss")) and not name.startswith("preference/"):
                merged.metrics[name] = (merged.metrics.get(name, (0.0, 1.0))[0] + total, 1.0)
            else:
                merged.add(name, total, count)
    return merged


def _record_loss(outcome: UpdateOutcome, agent: int, samples: Sequence[Sample], outputs: PolicyLossOutputs) -> None:
    """Adds a micro-batch's metrics, by turn: the loss is a sum over the batch, the others are means over tokens."""
    by_token = {"entropy": outputs.entropy_S, "approx_kl": outputs.kl_S, "clip_fraction": outputs.clipped_S}
    for sample, loss in zip(samples, outputs.loss_S.tolist(), strict=True):
        name = f"turn_{sample.node.turn + 1}/agent_{agent}/loss"
        outcome.metrics[name] = (outcome.metrics.get(name, (0.0, 1.0))[0] + loss, 1.0)
    for metric, sums in by_token.items():
        for sample, total in zip(samples, [] if sums is None else sums.tolist(), strict=sums is not None):
            outcome.add(f"turn_{sample.node.turn + 1}/agent_{agent}/{metric}", total, sample.length)
    if outputs.ratio_max is not None:
        name = f"agent_{agent}/ratio_max"
        outcome.metrics[name] = (max(outputs.ratio_max, outcome.metrics.get(name, (0.0, 1.0))[0]), 1.0)


def _worst_kl(outcome: UpdateOutcome) -> float:
    """Largest approximate KL of any agent and turn in this update."""
    pairs = [pair for name, pair in outcome.metrics.items() if name.endswith("/approx_kl")]
    return max((total / count for total, count in pairs if count), default=0.0)
