"""MADPO: direct preference optimization of the joint margin.

It follows L = −log σ(β Σ_i Δ_i), Δ_i being log π_i(winner) − log π_i(loser) less the same of the reference policy. Each
agent's gradient flows through its own Δ_i, all of them taken at the same weights. With several turns Δ_i sums over the
turns of two trajectories of one item, which is exact where the transition is deterministic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch

from mlrl.config import TrainingConfig
from mlrl.config_preference_trainers import MADPOConfig, MADPOIterConfig
from mlrl.losses.preference import PreferenceLossSettings
from mlrl.preference.pairs import PreferencePair
from mlrl.rollout.streams import derive_seed
from mlrl.trainers.data import Batch
from mlrl.trainers.pair_update import PairUpdate, team_margins
from mlrl.trainers.preference import PreferenceTrainer


class MADPOTrainer(PreferenceTrainer):
    """Direct preference optimization of the joint margin, on pairs collected once."""

    config_class: ClassVar[type[TrainingConfig]] = MADPOConfig
    algorithm = "MADPO"
    first_phase = "update"

    def learn(self, round: int, pairs: list[PreferencePair]) -> None:
        """`num_train_epochs` passes over the pairs, a minibatch a step."""
        self.reference_NP = self._reference_margins(pairs)
        self._schedule(round, len(pairs))
        self.take_steps(self._minibatches(round, pairs), log_all=True)

    def step(self, batch: Batch) -> None:
        """One update of every agent; the items of the batch are (place among the round's pairs, pair)."""
        self.phase("update")
        args, places = self.args, [place for place, _ in batch.items]
        update = PairUpdate(
            self.team,
            self.engines,
            PreferenceLossSettings(args.dpo_beta, args.label_smoothing, args.rpo_alpha),
            temperature=args.temperature,
            micro_batch_tokens=args.micro_batch_tokens,
            max_grad_norm=args.max_grad_norm,
            dropout_seed=derive_seed(args.seed, "dropout", self.step_number, self.world.rank) % 2**63
            if args.lora_dropout > 0
            else None,
        )
        outcome = update.run([pair for _, pair in batch.items], self.reference_NP[:, places])
        self.averager.update(outcome.metrics)
        self.nonfinite.count(outcome.finite)

    def _load_extras(self) -> None:
        if not self.args.no_reference:
            self.team.add_references(self.args.reference_model)
        super()._load_extras()

    def _reference_margins(self, pairs: list[PreferencePair]) -> torch.Tensor:
        """Margins of the reference policies, once a round; zeros without a reference."""
        if self.args.no_reference:
            return torch.zeros(self.num_agents, len(pairs))
        agents, mesh, args = self.team.agents, self.mesh, self.args
        groups = [mesh.reference(agent.index) for agent in agents]
        references = [agent.reference for agent in agents]
        with self.reference_networks.use():
            return team_margins(references, groups, mesh.world, pairs, args.temperature, args.micro_batch_tokens)

    def _minibatches(self, round: int, pairs: list[PreferencePair]) -> Iterator[Batch]:
        """Every pair once a pass, in a new order each."""
        args, size = self.args, self.args.train_batch_size or len(pairs)
        first = max(round - 1, 0) * args.num_train_epochs
        for epoch in range(args.num_train_epochs):
            order = np.random.default_rng(derive_seed(args.seed, "pairs", round, epoch)).permutation(len(pairs))
            for start in range(0, len(pairs), size):
                chosen = [(place, pairs[place]) for place in order[start : start + size].tolist()]
                yield Batch(chosen, first + epoch, start, len(pairs))

    def batch_size(self, batch: Batch) -> int:
        return self.args.train_batch_size or batch.length

    def _schedule(self, round: int, num_pairs: int) -> None:
        """Tells the schedules and the console how many updates there will be, as far as this round's pairs say."""
        updates = self.args.num_train_epochs * -(-num_pairs // (self.args.train_batch_size or num_pairs))
        done = self.step_number - self.round_state.batches  # before this round
        total = min(done + updates * (self.rounds.stop - round), self.step_number + self.steps_left)
        self.console.expect(total)
        for engine in self.engines:
            engine.settings = dataclasses.replace(engine.settings, total_updates=total)


class MADPOIterTrainer(MADPOTrainer):
    """MADPO in rounds: each collects against a comparator, and learns from its own and replayed pairs."""

    config_class: ClassVar[type[TrainingConfig]] = MADPOIterConfig
    algorithm = "MADPOIter"
    iterative = True
