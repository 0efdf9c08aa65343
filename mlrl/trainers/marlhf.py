"""MARLHF: a joint reward model learned from preference pairs, and a policy gradient that follows it.

Each round collects pairs, fits R̃ to them (Bradley–Terry) and freezes it; then a trainer of the MAREINFORCE family takes
its steps with (R̃ − mean)/s as the reward. Ending early and evaluation go by the task's own reward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from mlrl.config import TrainerConfig
from mlrl.config_preference import reward_learning_rate
from mlrl.config_preference_trainers import MARLHFConfig, MARLHFIterConfig
from mlrl.errors import ConfigError
from mlrl.parallel.engine import Engine
from mlrl.preference.pairs import PreferencePair
from mlrl.preference.reward_model import LearnedReward, RewardModel, make_reward_model
from mlrl.preference.reward_training import FitReport, FitSettings, fit
from mlrl.rollout.collect import Collector, Growth
from mlrl.rollout.tree import RolloutTree
from mlrl.sources import resolve_source
from mlrl.tracking import LoggingInterval
from mlrl.trainers.data import Batch, batches
from mlrl.trainers.metrics import flat, mean_reward
from mlrl.trainers.preference import PreferenceTrainer
from mlrl.trainers.reinforce import ReinforceTrainer


@dataclass
class LearnedCollector(Collector):
    """Grows trees by the task's reward, and then puts the learned one in its place.

    Attributes:
        task_reward: mean processed task reward of the first turn of the latest trees.
        task_metrics: task rewards of the latest trees by turn, as (sum, count).
    """

    learned: LearnedReward = field(kw_only=True)
    task_reward: float = field(default=0.0, init=False)
    task_metrics: dict[str, tuple[float, float]] = field(default_factory=dict, init=False)

    def collect(self, items: Sequence[tuple[int, dict]], growth: Growth) -> list[RolloutTree]:
        """As `Collector.collect`."""
        trees = super().collect(items, growth)
        nodes = [node for tree in trees for node in tree.nodes()]
        self.task_reward, self.task_metrics = mean_reward(trees), {}
        for node in nodes:
            name, rewards = f"turn_{node.turn + 1}/task_reward_mean", flat(node.rewards)
            total, count = self.task_metrics.get(name, (0.0, 0.0))
            self.task_metrics[name] = (total + sum(rewards), count + len(rewards))
        for node, rewards in zip(nodes, self.world.map(self._learned_rewards, nodes), strict=True):
            node.rewards = rewards
        return trees

    def _learned_rewards(self, node) -> list[float]:
        completions = [[node.responses[a][joint[a]].text for joint in node.joints] for a in range(len(node.prompts))]
        return self.learned(*completions, prompts=[prompt.content for prompt in node.prompts])


class MARLHFTrainer(PreferenceTrainer, ReinforceTrainer):
    """A reward model from pairs collected once, and the policy gradient of `rl_algorithm` on it."""

    config_class: ClassVar[type[TrainerConfig]] = MARLHFConfig
    algorithm = "MARLHF"

    def learn(self, round: int, pairs: list[PreferencePair]) -> None:
        """Fits the reward model, then trains the policy on it."""
        self._fit(round, pairs)
        collector = self.collector
        self.collector = self._on_learned_reward()
        interval = LoggingInterval(self.args.logging_steps, self.env_step)
        for batch in self._policy_batches(round):
            if self.args.eval_interval and self._crossed(batch):
                self.collector, learned = collector, self.collector  # evaluation is by the task's reward
                self._evaluate_and_log()
                self.collector = learned
            self._run_step(batch)
            if interval.due(self.env_step):
                self._log_training()
        self.collector = collector

    def collect(self, batch: Batch) -> list[RolloutTree]:
        """Trees whose rewards are the learned ones; both rewards are logged."""
        trees = super().collect(batch)
        self.averager.update(self.collector.task_metrics)
        self.last_reward = self.collector.task_reward
        return trees

    def save_model(self, directory: str | Path) -> None:
        """The agents, and beside their folder the reward model."""
        super().save_model(directory)
        if self.launch.is_main and self.reward_model is not None:
            self.reward_model.save(Path(directory).parent / "reward_model")

    reward_model: RewardModel | None = None

    def _fit(self, round: int, pairs: list[PreferencePair]) -> None:
        """Refits the reward model on the first rank, and gives its weights to the others."""
        self.console.phase("reward model")
        args = self.args
        settings = FitSettings(
            num_epochs=args.reward_num_train_epochs,
            batch_size=args.reward_train_batch_size,
            micro_batch_tokens=args.micro_batch_tokens,
            validation_fraction=args.reward_validation_fraction,
            seed=args.seed,
        )
        optimizer = replace(self._optimizer_settings(reward_learning_rate(args)), scheduler="constant", warmup_steps=0)

        def fit_here() -> tuple[FitReport, list]:
            engine = Engine(self.reward_model.parameters, optimizer)
            report = fit(self.reward_model, engine, pairs, settings)
            return report, self.reward_model.state() if self.world.size > 1 else []

        report, weights = self.world.from_first(fit_here)
        if weights:
            self.reward_model.load_state(weights)
        self.reward_model.normalization = report.normalization
        self._report_fit(round, report)

    def _report_fit(self, round: int, report: FitReport) -> None:
        metrics = {"preference/reward_model/best_epoch": report.best_epoch}
        for name, scores in (("train", report.train), ("validation", report.validation)):
            values = {key: value for key, value in asdict(scores).items() if value is not None}
            metrics |= {f"preference/reward_model/{name}_{key}": value for key, value in values.items()}
        metrics["preference/reward_model/scale"] = report.normalization.scale
        metrics["preference/reward_model/skipped_updates"] = report.skipped
        reader = self.reward_model.reader
        metrics["preference/reward_model/cut_fraction"] = reader.inputs_cut / max(1, reader.inputs)
        for name, value in metrics.items():
            self.averager.add_value(name, value)
        held = report.validation.accuracy
        self.console.note(
            f"reward model of round {round}: accuracy {report.train.accuracy:.3f} on {report.train.num_pairs} pairs"
            + ("" if held is None else f", {held:.3f} on {report.validation.num_pairs} of items held out")
        )
        self._log_training()

    def _on_learned_reward(self) -> LearnedCollector:
        c = self.collector
        learned = LearnedReward(self.reward_model, self.args.micro_batch_tokens)
        return LearnedCollector(c.team, c.sampler, c.environment, c.on_tokens, learned=learned)

    def _policy_batches(self, round: int) -> Iterator[Batch]:
        """Passes over the train set with ordinals that no other round has, so that no random stream repeats."""
        args, dataset = self.args, self.task.train_dataset
        before = max(round - 1, 0)
        rows = batches(dataset, args.rollout_batch_size, args.num_train_epochs, args.max_steps)
        while (batch := self.world.from_first(lambda: next(rows, None))) is not None:
            shift = before * args.num_train_epochs * len(dataset)
            items = [(ordinal + shift, row) for ordinal, row in batch.items]
            yield replace(batch, items=items, epoch=batch.epoch + before * args.num_train_epochs)

    def _check_extras(self) -> None:
        super()._check_extras()
        if self.launch.zero_stage == 3:
            raise ConfigError(
                "distributed_type='DEEPSPEED', zero_stage=3: MARLHF does not shard its reward model yet. "
                "Use ZeRO-2 or less, or train/madpo.py"
            )
        if self.args.reward_model_name is not None:
            resolve_source(self.args.reward_model_name)

    def _load_extras(self) -> None:
        ReinforceTrainer._load_extras(self)
        PreferenceTrainer._load_extras(self)
        self.reward_model = make_reward_model(
            self.team,
            name=self.args.reward_model_name,
            max_length=self.args.reward_max_length,
            discount=self.args.discount,
            seed=self.args.seed,
        )

    def _total_steps(self) -> int | None:
        super()._total_steps()
        dataset = self.task.train_dataset
        if dataset is None:
            return 0
        steps = self.args.num_train_epochs * -(-len(dataset) // self.args.rollout_batch_size)
        return len(self.rounds) * (steps if self.args.max_steps is None else min(steps, self.args.max_steps))


class MARLHFIterTrainer(MARLHFTrainer):
    """MARLHF in rounds: each collects against a comparator, refits the reward model, and trains the policy on it."""

    config_class: ClassVar[type[TrainerConfig]] = MARLHFIterConfig
    algorithm = "MARLHFIter"
    iterative = True
