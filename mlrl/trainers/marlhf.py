"""MARLHF: a joint reward model learned from preference pairs, and a policy gradient that follows it.

Each round collects pairs, fits R̃ to them (Bradley–Terry) and freezes it; then the trainer of `rl_algorithm` takes its
steps with (R̃ − mean)/s as the reward. Ending early and evaluation go by the task's own reward.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

from mlrl.checkpoint import Kept
from mlrl.config import TrainingConfig
from mlrl.config_preference import reward_learning_rate
from mlrl.config_preference_trainers import MARLHFConfig, MARLHFIterConfig
from mlrl.parallel.engine import Engine
from mlrl.parallel.headed import HeadedEngine
from mlrl.preference.pairs import PreferencePair
from mlrl.preference.reward_model import RewardModel, learned_rewards, make_reward_model
from mlrl.preference.reward_training import FitReport, FitSettings, fit
from mlrl.rollout.tree import RolloutTree
from mlrl.sources import check_source, resolve_source
from mlrl.trainers.actor_critic import IACTrainer, MAACTrainer
from mlrl.trainers.data import Batch, batches
from mlrl.trainers.engines import headed_engine
from mlrl.trainers.metrics import mean_return, reward_correlation, reward_sums
from mlrl.trainers.preference import PreferenceTrainer
from mlrl.trainers.reinforce import ReinforceTrainer
from mlrl.wording import counted

_HARDLY_LEARNED = 0.68  # of a loss that starts at ln 2, without a preference
# The trainer of the policy phase; those of the MAREINFORCE family differ by the baseline that the config names.
_POLICY_TRAINERS: dict[str, type[ReinforceTrainer]] = {"iac": IACTrainer, "maac": MAACTrainer}


class MARLHFTrainer(PreferenceTrainer):
    """A reward model from pairs collected once, and the policy gradient of `rl_algorithm` on it.

    See `Trainer` for the arguments, and `ActorCriticTrainer` for those of critics. What is made is an instance of this
    class and of the trainer of `rl_algorithm`, whose steps are the policy phase.
    """

    config_class: ClassVar[type[TrainingConfig]] = MARLHFConfig
    algorithm = "MARLHF"
    takes_own_rewards = False  # a pair has one winner for all
    first_phase = "fit"
    reward_model: RewardModel | None = None
    """On the ranks that hold it."""
    reward_engine: HeadedEngine | None = None
    """Of weights that lie sharded from the start; else there is one during a fit."""

    def __new__(cls, *arguments: Any, args: TrainingConfig | None = None, **named: Any):
        given = [args, *(one for one in arguments if isinstance(one, TrainingConfig))]
        words = [one.rl_algorithm for one in given if isinstance(one, MARLHFConfig)]
        policy_trainer = _POLICY_TRAINERS.get(words[0] if words else "", ReinforceTrainer)
        kind = cls if issubclass(cls, policy_trainer) else type(cls.__name__, (cls, policy_trainer), {})
        return super().__new__(kind)

    def learn(self, round: int, pairs: list[PreferencePair]) -> None:
        """Fits the reward model, then trains the policy on it."""
        with self.reward_network.use():
            if self.round_state.phase == "fit":
                self._fit(round, pairs)
                self.round_state.enter("policy")
                self.checkpoints.phase_done()
            with self.reference_networks.use():
                self.take_steps(self._policy_batches(round))

    def collect(self, batch: Batch) -> list[RolloutTree]:
        """Trees whose rewards are the learned ones; the task's are logged beside them."""
        trees = super().collect(batch)
        self.last_reward = self._task_return
        return trees

    def grow(self, batch: Batch) -> list[RolloutTree]:
        """Trees grown by the task's reward, in whose place comes the learned one."""
        trees = super().grow(batch)
        self._task_return = mean_return(trees, self.args.discount)
        self.averager.update(reward_sums(trees, "task_reward_mean"))
        nodes = [node for tree in trees for node in tree.nodes()]
        started = time.perf_counter()
        rewards = learned_rewards(
            self.reward_model, nodes, self.mesh.reward_model, self.world, self.args.micro_batch_tokens
        )
        self.averager.add_value("time/reward_model_s", time.perf_counter() - started)
        self.averager.update(reward_correlation(nodes, rewards))
        for node, own in zip(nodes, rewards, strict=True):
            node.rewards = own
        return trees

    def _reward_name(self) -> str:
        return f"task {super()._reward_name()}"  # that of a step's metrics is the learned one

    def save_model(self, directory: str | Path) -> None:
        """Writes agents, critics and reward_model, each with its head, into the directory. Ends nothing."""
        super().save_model(directory)
        self._save_reward_model(Path(directory) / "reward_model")

    def _save_run(self) -> dict[str, Path]:
        place = self.run_folder.path / "reward_model"
        saved = super()._save_run() | {"reward model": place}
        self._save_reward_model(place)
        return saved

    def _save_reward_model(self, folder: Path) -> None:
        if self.reward_model is not None:
            self.reward_model.save(folder)
        self.world.barrier()

    def kept(self) -> list[Kept]:
        model = self.reward_model
        return super().kept() + (
            [] if model is None else [Kept("reward_model", model.group, model.kept, model.put_back)]
        )

    def _fit(self, round: int, pairs: list[PreferencePair]) -> None:
        """Refits the reward model on the ranks that hold it."""
        self.phase("reward model")
        epochs = counted(self.args.reward_num_train_epochs, "epoch")
        self.console.note(f"fitting the reward model to {counted(len(pairs), 'pair')}, {epochs}")
        args, reports = self.args, {}
        if self.reward_model is not None:
            self.reward_model.reader.inputs = self.reward_model.reader.inputs_cut = 0  # of this fit
            settings = FitSettings(
                num_epochs=args.reward_num_train_epochs,
                batch_size=args.reward_train_batch_size,
                micro_batch_tokens=args.micro_batch_tokens,
                validation_fraction=args.reward_validation_fraction,
                label_smoothing=args.label_smoothing,
                seed=args.seed,
            )
            report = fit(self.reward_model, self.reward_engine or self._make_reward_engine(), pairs, settings)
            if self.mesh.reward_model.is_first:
                reader = self.reward_model.reader
                reports = {0: (report, reader.inputs_cut / max(1, reader.inputs))}
        [(report, cut)] = self.world.collect(reports, 1)
        self._report_fit(round, report, cut)

    def _report_fit(self, round: int, report: FitReport, cut_fraction: float) -> None:
        metrics = {
            "best_epoch": report.best_epoch,
            "scale": report.normalization.scale,
            "skipped_updates": report.skipped,
            "cut_fraction": cut_fraction,
        }
        for name, scores in (("train", report.train), ("validation", report.validation)):
            metrics |= {f"{name}_{key}": value for key, value in asdict(scores).items() if value is not None}
        for name, value in metrics.items():
            self.averager.add_value(f"preference/reward_model/{name}", value)
        pairs, held = counted(report.train.num_pairs, "pair"), report.validation
        text = f"reward model{self._of_round(round)}: accuracy {report.train.accuracy:.3f} on {pairs}"
        if held.accuracy is not None:
            text += f", {held.accuracy:.3f} on {counted(held.num_pairs, 'pair')} of held-out items"
        self.console.note(text)
        if report.train.loss > _HARDLY_LEARNED:
            chance = math.log(2)
            advice = "a lower" if report.train.loss > 1.01 * chance else "more pairs, smaller batches or a higher"
            self.console.warn(
                f"the reward model does not know its own pairs (loss {report.train.loss:.4f}, by chance {chance:.4f}), "
                f"and rewards are its scores at unit size, so maybe noise. Try {advice} --reward_learning_rate"
            )
        self._log_training()

    def _policy_batches(self, round: int) -> Iterator[Batch]:
        """Passes over the train set with ordinals that no other round has, so that no random stream repeats."""
        args, dataset = self.args, self.task.train_dataset
        before = max(round - 1, 0) * args.num_train_epochs
        rows = batches(dataset, args.rollout_batch_size, args.num_train_epochs, None)
        while (batch := self.world.from_first(lambda: next(rows, None))) is not None:
            items = [(ordinal + before * len(dataset), row) for ordinal, row in batch.items]
            yield replace(batch, items=items, epoch=batch.epoch + before)

    def _check_extras(self) -> None:
        super()._check_extras()
        if self.args.reward_model_name is not None:
            check_source(resolve_source(self.args.reward_model_name, "reward_model_name"))

    def _load_extras(self) -> None:
        super()._load_extras()
        if self.mesh.reward_model.member:
            self.reward_model = make_reward_model(
                self.team,
                name=self.args.reward_model_name,
                max_length=self.args.reward_max_length,
                discount=self.args.discount,
                pooling=self.args.reward_pooling,
                seed=self.args.seed,
            )
            if self.launch.zero is not None and self.reward_model.policy.adapter is None:
                self.reward_engine = self._make_reward_engine()
        # DeepSpeed holds on to the place of weights
        movable = self.reward_model is not None and self.reward_engine is None
        self.reward_network = self._parking([self.reward_model.policy.base] if movable else [])

    def _make_reward_engine(self) -> Engine | HeadedEngine:
        model, settings = self.reward_model, self._optimizer_settings(reward_learning_rate(self.args))
        settings = replace(settings, scheduler="constant", warmup_steps=0)
        heads = list(model.head.parameters())
        zero = self.launch.zero if model.policy.adapter is None else None  # an adapter is whole on every rank
        return headed_engine(model.policy, model.backbone, heads, model.group, settings, zero)

    def _total_steps(self) -> int | None:
        super()._total_steps()
        dataset, args = self.task.train_dataset, self.args
        if dataset is None:
            return 0
        steps = len(self.rounds) * args.num_train_epochs * -(-len(dataset) // args.rollout_batch_size)
        return steps if args.max_steps is None else min(steps, args.max_steps)


class MARLHFIterTrainer(MARLHFTrainer):
    """MARLHF in rounds: each collects against a comparator, refits the reward model, and trains the policy on it."""

    config_class: ClassVar[type[TrainingConfig]] = MARLHFIterConfig
    algorithm = "MARLHFIter"
    iterative = True
