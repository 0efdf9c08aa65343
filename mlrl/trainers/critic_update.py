"""Optimizer updates of critics, one a minibatch of joint samples, each before that of the actors.

A separate critic has an optimizer of its own: like the agents, all critics step or none does. The gradients of a head
on an actor are added to those of its actor, which then make one step together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from mlrl.agents import Team
from mlrl.config import TrainerConfig
from mlrl.critic_inputs import rank_critic_batches
from mlrl.critic_samples import CriticEstimate, ValueSample, critic_loss
from mlrl.critics import Critic
from mlrl.losses.policy import PolicyLossSettings
from mlrl.losses.value import ValueLossOutputs, ValueLossSettings
from mlrl.parallel.engine import Engine
from mlrl.parallel.group import Group
from mlrl.parallel.headed import HeadedEngine
from mlrl.parallel.zero import ZeroEngine
from mlrl.trainers.policy_update import PolicyUpdate, UpdateOutcome, merge
from mlrl.trainers.samples import Sample


@dataclass
class CriticTraining:
    """One critic that lives here, in one step.

    Attributes:
        engine: its own, or that of its actor; group: the ranks that hold it; coef: weight of the value loss.
    """

    critic: Critic
    estimate: CriticEstimate
    engine: Engine | ZeroEngine | HeadedEngine
    group: Group
    coef: float = 1.0


class ActorCriticUpdate(PolicyUpdate):
    """The updates of one step; see `PolicyUpdate` for the other arguments.

    Args:
        critics: those that live here.
        on_actors: whether they are heads on their actors.
        warming_up: critics alone are trained. A head on an actor then learns on weights that stay as they are.
    """

    def __init__(
        self,
        team: Team,
        engines: Sequence[Engine | ZeroEngine | HeadedEngine],
        args: TrainerConfig,
        step: int,
        critics: Sequence[CriticTraining],
        *,
        on_actors: bool,
        warming_up: bool,
        sampling_is_exact: bool = False,
    ):
        super().__init__(team, engines, args, step, sampling_is_exact)
        self.critics, self.on_actors, self.warming_up = critics, on_actors, warming_up

    def _update(
        self, minibatch: Sequence[Sequence[Sample]], totals: Sequence[int], settings: Sequence[PolicyLossSettings]
    ) -> UpdateOutcome:
        started = time.perf_counter()
        of_critics = UpdateOutcome(finite=True)
        nodes = {id(sample.node) for sample in minibatch[0]}
        for training in self.critics:
            self._backward_critic(training, nodes, of_critics)
        if not self.on_actors or self.warming_up:
            self._step_critics(of_critics)
        of_critics = merge(self.team.mesh.world.gather(of_critics))
        of_critics.add("time/critic_update_s", time.perf_counter() - started)
        if self.warming_up:
            return of_critics
        both = [of_critics, super()._update(minibatch, totals, settings)]
        outcome = merge(both)
        outcome.finite = all(one.finite for one in both)
        return outcome

    def _backward_critic(self, training: CriticTraining, nodes: set[int], outcome: UpdateOutcome) -> None:
        """Gradients of a critic on the samples of these nodes, this rank's share of them."""
        chosen = [sample for sample in training.estimate.samples if id(sample.node) in nodes]
        critic, engine = training.critic, training.engine
        scale = len(training.estimate.values_MA) / len(nodes)
        settings = ValueLossSettings(self.args.value_clip_range)
        batches = rank_critic_batches(
            [sample.input for sample in chosen],
            training.group,
            self.args.micro_batch_tokens,
            lockstep=engine.lockstep or critic.policy.base.shard is not None,
        )
        head_only = self.on_actors and self.warming_up
        with critic.policy.use():
            for number, batch in enumerate(batches, start=1):
                if batch.numbers:
                    own = [chosen[place] for place in batch.numbers]
                    outputs = critic_loss(critic, batch, own, settings, scale, head_only)
                    loss = training.coef * outputs.loss
                    _record_loss(outcome, critic.index, own, outputs)
                else:
                    loss = 0.0 * critic.forward(batch.tree, head_only).sum()
                # the actor's own gradients follow those of a head on it
                engine.backward(loss, last=number == len(batches) and not self.on_actors)

    def _step_critics(self, outcome: UpdateOutcome) -> None:
        """A step of every engine that trains critics; of none where a gradient anywhere is not finite."""
        engines = {id(training.engine): training for training in self.critics}.values()
        norms = [training.engine.grad_norm() for training in engines]
        outcome.finite = all(self.team.mesh.world.gather(all(math.isfinite(norm) for norm in norms)))
        for training, norm in zip(engines, norms, strict=True):
            if not outcome.finite:
                training.engine.zero_grad()
                continue
            if training.group.is_first:
                name = f"critic/critic_{training.critic.index}"
                outcome.add(f"{name}/grad_norm", norm)
                outcome.add(f"{name}/grad_clipped_fraction", float(norm > (self.args.max_grad_norm or math.inf)))
                outcome.add(f"{name}/learning_rate", training.engine.learning_rate)
            training.engine.step(norm)


def _record_loss(
    outcome: UpdateOutcome, critic: int, samples: Sequence[ValueSample], outputs: ValueLossOutputs
) -> None:
    """Adds a micro-batch's metrics by turn: the loss is a sum over the batch, the clipped share a mean over targets."""
    losses = iter(outputs.loss_S.tolist())
    clipped = iter([] if outputs.clipped_S is None else outputs.clipped_S.tolist())
    for sample in samples:
        name = f"critic/turn_{sample.node.turn + 1}/critic_{critic}"
        total = sum(next(losses) for _ in sample.targets)
        outcome.metrics[f"{name}/value_loss"] = (outcome.metrics.get(f"{name}/value_loss", (0.0, 1.0))[0] + total, 1.0)
        if outputs.clipped_S is not None:
            outcome.add(f"{name}/clip_fraction", sum(next(clipped) for _ in sample.targets), len(sample.targets))
