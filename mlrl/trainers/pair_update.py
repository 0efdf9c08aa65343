"""Margins and updates of a team on preference pairs, spread over its ranks.

All margins of a minibatch are measured at the same weights; then every agent forms its gradient, with the others'
margins as constants; then all step, or none does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from mlrl.agents import Agent, Team
from mlrl.losses.preference import PreferenceLossOutputs, PreferenceLossSettings, preference_loss
from mlrl.models.base import Policy
from mlrl.parallel.engine import Engine
from mlrl.parallel.group import Group
from mlrl.parallel.zero import ZeroEngine
from mlrl.preference.dropout import adapter_dropout
from mlrl.preference.pairs import PreferencePair, Trajectory
from mlrl.preference.scoring import PairBatch, batch_margins, batch_scores, pair_batches
from mlrl.preference.spreading import rank_batches
from mlrl.trainers.policy_update import UpdateOutcome, merge, step_all
from mlrl.trainers.samples import stand_in

_TIE = 1e-4  # nats: margins below it, as all are before the first update, are rounding


@torch.no_grad()
def team_margins(
    policies: Sequence[Policy | None],
    groups: Sequence[Group],
    world: Group,
    pairs: Sequence[PreferencePair],
    temperature: float,
    max_tokens: int,
) -> Tensor:
    """log π(winner) − log π(loser) of every agent's policy and pair, margins_NP, on the CPU of every rank.

    Args:
        policies: one an agent, on the ranks that hold it (`groups`); None elsewhere.
    """
    mine: dict[int, float] = {}
    for agent, policy in enumerate(policies):
        if policy is None:
            continue
        lockstep = policy.base.shard is not None
        with policy.use():
            for batch in _rank_batches(pairs, agent, groups[agent], max_tokens, lockstep):
                if batch is None:
                    policy.logprobs(stand_in(), temperature)
                    continue
                margins_P = batch_margins(policy, batch, temperature).tolist()
                mine |= {agent * len(pairs) + p: m for p, m in zip(batch.places, margins_P, strict=True)}
    values = world.collect(mine, len(policies) * len(pairs))
    return torch.tensor(values, dtype=torch.float32).view(len(policies), len(pairs))


class PairUpdate:
    """The update of one minibatch of pairs.

    Args:
        engines: one a group of agents here that train the same weights (`Team.trainable`).
        dropout_seed: where the loss is formed with dropout of the adapters: what that is drawn from, on this rank.
    """

    def __init__(
        self,
        team: Team,
        engines: Sequence[Engine | ZeroEngine],
        settings: PreferenceLossSettings,
        *,
        temperature: float,
        micro_batch_tokens: int,
        max_grad_norm: float | None,
        dropout_seed: int | None = None,
    ):
        self.team, self.engines, self.settings = team, engines, settings
        self.temperature, self.max_tokens = temperature, micro_batch_tokens
        self.max_grad_norm, self.dropout_seed = max_grad_norm, dropout_seed

    def run(self, pairs: Sequence[PreferencePair], reference_NP: Tensor) -> UpdateOutcome:
        """Steps every agent once.

        Args:
            reference_NP: margins of the reference; zeros without one.
        """
        outcome, started = UpdateOutcome(finite=True), time.perf_counter()
        policies, mesh = [agent.policy for agent in self.team.agents], self.team.mesh
        now_NP = team_margins(policies, mesh.agents, mesh.world, pairs, self.temperature, self.max_tokens)
        relative_NP = now_NP - reference_NP
        for group, engine in zip(self.team.trainable, self.engines, strict=True):
            self._backward(group, engine, pairs, relative_NP, reference_NP, outcome)
        step_all(self.team, self.engines, self.max_grad_norm, outcome)
        merged = merge(self.team.mesh.world.gather(outcome))
        for agent, own_P in enumerate(relative_NP):
            merged.add(f"preference/agent_{agent}/margin", float(own_P.sum()), len(pairs))
        seconds = time.perf_counter() - started
        tokens = sum(sum(_lengths(side)) for pair in pairs for side in (pair.winner, pair.loser))
        merged.add("time/update_s", seconds)
        merged.add("throughput/trained_tokens_per_s", tokens, seconds)
        for name in ("winner", "loser"):
            for pair in pairs:
                for agent, length in enumerate(_lengths(getattr(pair, name))):
                    merged.add(f"preference/agent_{agent}/{name}_tokens", length)
        return merged

    def _backward(
        self,
        group: Sequence[Agent],
        engine: Engine | ZeroEngine,
        pairs: Sequence[PreferencePair],
        relative_NP: Tensor,
        reference_NP: Tensor,
        outcome: UpdateOutcome,
    ) -> None:
        """Gradients of the agents that train the same weights."""
        policy, ranks = group[0].policy, self.team.mesh.agents[group[0].index]
        lockstep = engine.lockstep or policy.base.shard is not None
        work = [
            (agent.index, batch)
            for agent in group
            for batch in _rank_batches(pairs, agent.index, ranks, self.max_tokens, lockstep)
        ]
        seed = self.dropout_seed
        with policy.use(), nullcontext() if seed is None else adapter_dropout(policy, seed + group[0].index):
            for number, (agent, batch) in enumerate(work, start=1):
                if batch is None:
                    scored, _ = policy.logprobs(stand_in(), self.temperature)
                    loss = 0.0 * scored.logprobs_L.sum()
                else:
                    own_P, nll_P = batch_scores(policy, batch, self.temperature)
                    # Σ_{j≠i} Δ_j, and what the reference takes off the agent's own
                    others_P = relative_NP[:, batch.places].sum(0) - relative_NP[agent, batch.places]
                    others_P = (others_P - reference_NP[agent, batch.places]).to(own_P.device)
                    weights_P = torch.full_like(own_P, 1 / len(pairs)).detach()
                    outputs = preference_loss(own_P, weights_P, self.settings, others_P)
                    if agent == 0:  # the pair's loss is the same for all agents
                        _record(outcome, outputs)
                    outcome.add(f"preference/agent_{agent}/winner_nll", float(nll_P.detach().sum()), len(nll_P))
                    loss = outputs.loss + self.settings.rpo_alpha * (weights_P * nll_P).sum()
                engine.backward(loss, last=number == len(work))


def _rank_batches(
    pairs: Sequence[PreferencePair], agent: int, group: Group, max_tokens: int, lockstep: bool
) -> list[PairBatch | None]:
    """This rank's micro-batches, with places among all pairs; with `lockstep` equally many on every rank, by None."""
    costs = [float(sum(_lengths(side)[agent] for side in (pair.winner, pair.loser))) for pair in pairs]
    return rank_batches(
        costs, lambda places: pair_batches([pairs[place] for place in places], agent, max_tokens), group, lockstep
    )


def _record(outcome: UpdateOutcome, outputs: PreferenceLossOutputs) -> None:
    count = len(outputs.loss_P)
    for name, values_P in (
        ("preference/loss", outputs.loss_P),
        ("preference/margin", outputs.margin_P),
        ("preference/accuracy", (outputs.margin_P > _TIE).float()),
        ("preference/gradient_weight", outputs.gradient_weight_P),
    ):
        outcome.add(name, float(values_P.sum()), count)


def _lengths(trajectory: Trajectory) -> list[int]:
    """Tokens that each agent wrote."""
    return [sum(map(len, own)) for own in zip(*_token_ids(trajectory), strict=True)]


def _token_ids(trajectory: Trajectory) -> list[list[list[int]]]:
    return [[response.token_ids for response in turn.responses] for turn in trajectory.turns]
