"""Learning from preferences in rounds: collect pairs, write them, replay, learn. And MADPO, which learns them directly.

MADPO follows L = −log σ(β Σ_i Δ_i), Δ_i being log π_i(winner) − log π_i(loser) less the same of the initial policy.
Each agent's gradient flows through its own Δ_i, all of them taken at the same weights. With several turns Δ_i sums over
the turns of two trajectories of one item, which is exact where the transition is deterministic.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch

from mlrl.config import TrainerConfig
from mlrl.config_preference import num_comparator_candidates
from mlrl.config_preference_trainers import MADPOConfig, MADPOIterConfig
from mlrl.errors import ConfigError
from mlrl.losses.preference import PreferenceLossSettings
from mlrl.preference.collection import Collected, CollectionSettings, collect_pairs
from mlrl.preference.drift import drift_metrics, pair_digest, reward_histograms
from mlrl.preference.dropout import quiet_adapter
from mlrl.preference.pairs import PreferencePair, require_pairs
from mlrl.preference.replay import replay
from mlrl.preference.rounds import FOLDER, Round, check_pairs, earlier_rounds, find_rounds, read_pairs, write_round
from mlrl.preference.setup import check_comparator, make_comparator
from mlrl.rollout.streams import derive_seed
from mlrl.run_folder import append_jsonl
from mlrl.trainers.base import Trainer
from mlrl.trainers.data import Batch
from mlrl.trainers.pair_update import PairUpdate, team_margins


class PreferenceTrainer(Trainer):
    """Rounds of collecting and learning; a subclass says how pairs are learned (`learn`). See `Trainer` for arguments.

    Without iterations there is one round, whose pairs are made among the policy's own candidates.
    """

    iterative: ClassVar[bool] = False

    def _run_steps(self) -> None:
        self._begin()
        for round in self.rounds:
            collected = self.collect_round(round)
            pairs = self.replayed(round, collected)
            self.learn(round, pairs)
            self._log_training()
            if self.args.eval_interval:
                self._evaluate_and_log()

    def learn(self, round: int, pairs: list[PreferencePair]) -> None:
        """Learns from the pairs of a round."""
        raise NotImplementedError

    @property
    def rounds(self) -> range:
        """Numbers of the rounds, from 1; only 0 without iterations."""
        return range(1, self.args.num_iterations + 1) if self.iterative else range(1)

    def collect_round(self, round: int) -> Collected:
        """Plays the train set and makes the round's pairs, against the comparator where there are iterations."""
        self.console.phase("collecting pairs")
        args = self.args
        if self.comparator is not None:
            self.comparator.begin_round(round)
        settings = CollectionSettings(
            num_candidates=args.preference_num_candidates,
            comparator_num_candidates=num_comparator_candidates(args),
            pair_selection=args.pair_selection,
            pairs_per_sample=args.preference_pairs_per_sample,
            batch_size=max(1, args.max_rollout_rows // (args.preference_num_candidates * self.num_agents)),
        )
        items = self.world.from_first(lambda: [(n, dict(row)) for n, row in enumerate(self.task.train_dataset)])
        collected = collect_pairs(
            self.collector, items, self.growth(), settings, comparator=self.comparator, round=round
        )
        self.env_step += collected.cost.joint_evaluations
        self.generated_tokens += collected.cost.generated_tokens
        self.last_reward = statistics.fmean(collected.policy_rewards) if collected.policy_rewards else 0.0
        self._report(round, collected)
        return collected

    def replayed(self, round: int, collected: Collected) -> list[PreferencePair]:
        """Writes the round, and draws the pairs to learn from. Raises TaskError where there are none."""
        args, folder = self.args, self.run_folder.path / FOLDER
        mode = args.preference_replay_mode if self.iterative else "current"

        def write_and_draw() -> list[PreferencePair]:
            write_round(folder, max(round, 1), collected.pairs)
            return replay(
                [*self.earlier, *find_rounds(folder)],
                mode=mode,
                k=args.preference_replay_k,
                decay=args.preference_replay_lambda,
                sample_size=args.preference_replay_sample_size,
                seed=args.seed,
            )

        pairs = self.world.from_first(write_and_draw)
        require_pairs(pairs, collected.num_items, collected.lost)
        self.averager.add_value("preference/num_learned_pairs", len(pairs))
        self._log_training()
        return pairs

    # Set-up ----------------------------------------------------------------------------------------------------------

    def _check_extras(self) -> None:
        if (self.args.num_iterations > 0) != self.iterative:
            right = "num_iterations of 1 or more" if self.iterative else "0, or use the iterative trainer"
            raise ConfigError(
                f"num_iterations={self.args.num_iterations!r}: {type(self).__name__} cannot have that. Give {right}"
            )
        if self.iterative and self.args.comparator_policy != "current" and self.launch.zero_stage == 3:
            raise ConfigError(
                f"comparator_policy={self.args.comparator_policy!r}: under ZeRO-3 there are no frozen copies and other "
                "models yet. Use comparator_policy current, or a lower ZeRO stage"
            )
        if self.iterative:
            check_comparator(self.args)
        self.earlier: list[Round] = []
        if self.iterative and self.args.preference_replay_from is not None:
            self.earlier = earlier_rounds(self.args.preference_replay_from)

    def _load_extras(self) -> None:
        for policy in (p for agent in self.team.agents for p in (agent.policy, agent.reference) if p is not None):
            quiet_adapter(policy)
        for round in self.earlier:
            some = read_pairs(round, list(range(min(3, round.num_pairs))))
            check_pairs(some, [agent.decode for agent in self.team.agents], str(self.args.preference_replay_from))

    def _begin(self) -> None:
        """What needs the run folder, and the evaluation before anything is learned."""
        self.console.start(None, None)
        self.comparator = None
        if self.iterative:
            cache = self.run_folder.path / FOLDER / "answers.jsonl"
            self.comparator = make_comparator(self.args, self.collector, self.growth().sampling, cache=cache)
        self._previous_rewards: list[float] = []
        self._seen: set[str] = set()
        if self.args.eval_interval:
            self._evaluate_and_log()

    def _total_steps(self) -> int | None:
        dataset = self.task.train_dataset
        if dataset is not None and not hasattr(dataset, "__len__"):
            raise ConfigError(
                "train_dataset: does not tell its length, and pairs are collected over all of it. Give one"
            )
        return 0 if dataset is None else None

    def _describe(self) -> dict[str, Any]:
        size = f"{len(self.task.train_dataset)} items × {self.args.preference_num_candidates} candidates"
        return super()._describe() | {"steps": f"{len(self.rounds)} rounds, {size} each"}

    def _report(self, round: int, collected: Collected) -> None:
        """Metrics of a collection, and the histograms in the run folder."""
        metrics = {
            "preference/num_pairs": len(collected.pairs),
            "preference/lost_candidates": collected.num_lost,
            "preference/round": round,
            "time/rollout_s": collected.cost.rollout_s,
            "time/reward_s": collected.cost.reward_s,
        }
        if collected.pairs:
            metrics["preference/gap_mean"] = statistics.fmean(pair.gap for pair in collected.pairs)
        if collected.comparator_rewards:
            metrics["preference/comparator_reward_mean"] = statistics.fmean(collected.comparator_rewards)
        metrics |= drift_metrics(collected.policy_rewards, self._previous_rewards, collected.pairs, self._seen)
        self._previous_rewards = collected.policy_rewards
        self._seen |= {pair_digest(pair) for pair in collected.pairs}
        for name, value in metrics.items():
            self.averager.add_value(name, value)
        if self.launch.is_main:
            histograms = {"policy": collected.policy_rewards, "comparator": collected.comparator_rewards}
            record = {"round": round, "env_step": self.env_step, **reward_histograms(histograms)}
            append_jsonl(self.run_folder.path / FOLDER / "histograms.jsonl", [record])


class MADPOTrainer(PreferenceTrainer):
    """Direct preference optimization of the joint margin, on pairs collected once."""

    config_class: ClassVar[type[TrainerConfig]] = MADPOConfig
    algorithm = "MADPO"

    def learn(self, round: int, pairs: list[PreferencePair]) -> None:
        """`num_train_epochs` passes over the pairs."""
        self.reference_NP = self._reference_margins(pairs)
        self._schedule(round, len(pairs))
        for batch in self._minibatches(round, pairs):
            if self.args.eval_interval and self._pairs_crossed(batch):
                self._evaluate_and_log()
            self._run_step(batch)
            self._log_training()

    def step(self, batch: Batch) -> None:
        """One update of every agent; the items of the batch are (place among the round's pairs, pair)."""
        self.console.phase("update")
        args, places = self.args, [place for place, _ in batch.items]
        update = PairUpdate(
            self.team,
            self.engines,
            PreferenceLossSettings(args.dpo_beta, args.label_smoothing),
            temperature=args.temperature,
            micro_batch_tokens=args.micro_batch_tokens,
            max_grad_norm=args.max_grad_norm,
            dropout=args.lora_dropout > 0,
        )
        outcome = update.run([pair for _, pair in batch.items], self.reference_NP[:, places])
        self.averager.update(outcome.metrics)
        self.guard_nonfinite(outcome.finite)

    def _load_extras(self) -> None:
        if self.args.dpo_reference:
            self.team.add_references()
        super()._load_extras()

    def _reference_margins(self, pairs: list[PreferencePair]) -> torch.Tensor:
        """Margins of the initial policies, once a round; zeros without a reference."""
        if not self.args.dpo_reference:
            return torch.zeros(self.num_agents, len(pairs))
        references = [agent.reference for agent in self.team.agents]
        return team_margins(references, self.team, pairs, self.args.temperature, self.args.micro_batch_tokens)

    def _minibatches(self, round: int, pairs: list[PreferencePair]) -> Iterator[Batch]:
        """Every pair once a pass, in a new order each, at most `max_steps` minibatches."""
        args, size = self.args, self.args.train_batch_size or len(pairs)
        left = args.max_steps if args.max_steps is not None else 10**18
        first = max(round - 1, 0) * args.num_train_epochs
        for epoch in range(args.num_train_epochs):
            order = np.random.default_rng(derive_seed(args.seed, "pairs", round, epoch)).permutation(len(pairs))
            for start in range(0, len(pairs), size):
                if left == 0:
                    return
                left -= 1
                chosen = [(place, pairs[place]) for place in order[start : start + size].tolist()]
                yield Batch(chosen, first + epoch, start, len(pairs))

    def _pairs_crossed(self, batch: Batch) -> bool:
        """Whether the pairs of this pass before the batch went past a multiple of `eval_interval` in the last one."""
        interval, size = self.args.eval_interval, self.args.train_batch_size or batch.length
        return batch.position // interval > max(0, batch.position - size) // interval

    def _schedule(self, round: int, num_pairs: int) -> None:
        """Tells the schedules how many updates there will be, as far as this round's pairs say."""
        updates = self.args.num_train_epochs * -(-num_pairs // (self.args.train_batch_size or num_pairs))
        updates = updates if self.args.max_steps is None else min(updates, self.args.max_steps)
        for engine in self.engines:
            total = engine.updates + updates * (self.rounds.stop - round)
            engine.settings = dataclasses.replace(engine.settings, total_updates=total)


class MADPOIterTrainer(MADPOTrainer):
    """MADPO in rounds: each collects against a comparator, and learns from its own and replayed pairs."""

    config_class: ClassVar[type[TrainerConfig]] = MADPOIterConfig
    algorithm = "MADPOIter"
    iterative = True
