"""What every trainer has in common: set-up with its checks, the loop over steps, evaluation, logging, saving."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from mlrl import profiling
from mlrl.agents import Agent
from mlrl.centralized import actors, make_environment
from mlrl.checkpoint import Entity, Kept
from mlrl.config import TrainingConfig
from mlrl.config_checks import check_field
from mlrl.config_file import masked
from mlrl.config_rules import check_run_folder
from mlrl.config_team import agent_learning_rates, models_setting, team_models
from mlrl.console import Console
from mlrl.errors import ConfigError
from mlrl.interval_means import LoggingInterval, MetricAverager
from mlrl.parallel.engine import OptimizerSettings
from mlrl.parallel.launch import Launch
from mlrl.resume import Resume
from mlrl.rollout.collect import Growth
from mlrl.rollout.sampler import SamplingParams
from mlrl.run_folder import RunFolder
from mlrl.task import Task
from mlrl.tracking import Tracking
from mlrl.tracking_settings import check_report_to, check_wandb_config, is_verbose, resumed_wandb, wandb_flags
from mlrl.trainers.checkpointing import Checkpoints, Schedule, agent_entity
from mlrl.trainers.data import Batch, batches
from mlrl.trainers.describe import describe_run, next_commands, peak_memory_gb, summarize_run
from mlrl.trainers.engines import AnyEngine, make_engine, optimizer_settings
from mlrl.trainers.evaluations import Evaluations
from mlrl.trainers.nonfinite import NonFiniteGuard
from mlrl.trainers.resuming import fingerprints, go_on, may_go_on, resolve_resume, restore
from mlrl.trainers.run_length import run_items, run_steps, run_updates
from mlrl.trainers.run_setup import make_run_folder, named
from mlrl.trainers.setup import make_mesh, prepare_team, whole_task


class Trainer:
    """Base of all trainers; a subclass says how a step turns a batch of items into updates (`step`).

    Args:
        agent_model: one model for all agents: a hub id, a folder, `embedded`, or a loaded model.
        agents: one model an agent, in place of `agent_model`.
        num_agents: team size with `agent_model`.
        tokenizer: one for all agents, or a list of one each; default: what lies with the models.
        formatters, reward_func, reward_processor, external_transition, train_dataset, eval_dataset, eval_logger,
            eval_aggregator, metrics_callback: the task, as the fields of `mlrl.Task`.
        task: a whole `mlrl.Task`, in place of those.
        model_config: `dtype` and `attn_implementation`, and `model_kwargs` for `from_pretrained`.
        wandb_config: project, entity, name or run_name, tags, dir, id, resume, config_sections.
        args: the settings; default those of the algorithm.

    Raises:
        ConfigError: for whatever is wrong, before any weights are read where it can be known by then.
    """

    config_class: ClassVar[type[TrainingConfig]]
    algorithm: ClassVar[str]
    takes_own_rewards: ClassVar[bool] = False
    """Whether a reward may be one number an agent."""

    def __init__(
        self,
        agent_model: Any = None,
        agents: Sequence[Any] | None = None,
        num_agents: int | None = None,
        tokenizer: Any = None,
        formatters: Callable | Sequence[Callable] | None = None,
        reward_func: Callable | None = None,
        reward_processor: Callable | None = None,
        external_transition: Callable | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        eval_logger: Callable | None = None,
        eval_aggregator: Callable | None = None,
        metrics_callback: Callable | None = None,
        model_config: dict[str, Any] | None = None,
        wandb_config: dict[str, Any] | None = None,
        args: TrainingConfig | None = None,
        *,
        task: Task | None = None,
    ):
        pieces = {
            "formatters": formatters,
            "reward_func": reward_func,
            "reward_processor": reward_processor,
            "external_transition": external_transition,
            "train_dataset": train_dataset,
            "eval_dataset": eval_dataset,
            "eval_logger": eval_logger,
            "eval_aggregator": eval_aggregator,
            "metrics_callback": metrics_callback,
        }
        self.args = args if args is not None else self.config_class()
        if not isinstance(self.args, TrainingConfig):
            raise ConfigError(f"args={type(self.args).__name__}: not a config. Give a {self.config_class.__name__}")
        self.launch = Launch.detect()
        models = team_models(self.args, agent_model=agent_model, agents=agents, num_agents=num_agents)
        num_roles = len(models)
        self.args.check(num_roles)
        models = actors(models, self.args)
        self.num_agents = len(models)
        self.mesh = make_mesh(self.args, self.launch, self.num_agents)
        self.world = self.mesh.world
        self.task = whole_task(task, pieces)
        self.environment = make_environment(self.task, num_roles, self.args, self.takes_own_rewards)
        self.wandb_config = check_wandb_config(wandb_config, **wandb_flags(self.args))
        check_report_to(self.args.report_to)
        # the first rank alone: it may have made the folder before the last has come here
        if self.launch.is_main and self.args.resume_from_checkpoint is None and not may_go_on(self.args):
            check_run_folder(self.args.output_dir, named(self.args))
        self.total_steps = self._total_steps()
        rates = agent_learning_rates(self.args, self.num_agents)
        prepared = prepare_team(
            self.args,
            self.launch,
            self.environment,
            models,
            setting=models_setting(self.args, agents),
            tokenizer=tokenizer,
            model_config=model_config,
        )
        self.dtype, self.prompt_limits = prepared.dtype, prepared.prompt_limits
        self._check_extras()
        self._fingerprints = functools.cache(
            lambda: fingerprints(self.algorithm, self.task, prepared.sources, prepared.dtype)
        )
        self._resume = self._find_resume(self.args.resume_from_checkpoint)

        self.collector = prepared.load(mesh=self.mesh)
        self.team, self.sampler = self.collector.team, self.collector.sampler
        self._load_extras()
        self.engines = [self._make_engine(agents, rates[agents[0].index]) for agents in self.team.trainable]
        self.averager, self.interval = MetricAverager(), LoggingInterval(self.args.logging_steps)
        self.step_number = self.env_step = self.items_done = 0
        self.epoch = 0.0
        self.generated_tokens = 0
        self.last_reward = 0.0
        self.run_folder: RunFolder | None = None
        self.profile: profiling.Profile | None = None
        self.console = Console(enabled=False)  # until `train`, so that a step can be taken by hand
        self.evaluations = Evaluations(self)
        self.nonfinite = NonFiniteGuard(self)

    # What subclasses say ---------------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> None:
        """One step: sample, estimate, update, and add metrics to `averager`."""
        raise NotImplementedError

    def _check_extras(self) -> None:
        """What can be known of further models before any weights are read."""

    def _load_extras(self) -> None:
        """Further models (reference, critics …), loaded after the team."""

    def settle(self) -> None:
        """Waits for what a subclass does beside the steps; called before evaluations and checkpoints."""

    def phase(self, name: str) -> None:
        """What the run does from now on, for the console and the profile."""
        self.console.phase(name)
        profiling.phase(name)

    # Training --------------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | Path | None = None,
        checkpoint_dir: str | Path | None = None,
        checkpoint_interval: int = 1,
    ) -> None:
        """Trains to the last step, evaluates as asked, and saves the agents in the run folder.

        Args:
            resume_from_checkpoint: in place of the setting: "latest", checkpoint-N, or a folder of such.
            checkpoint_dir: writes checkpoint-N there, every `checkpoint_interval` epochs, in place of every
                `save_steps` steps into the run folder.

        Raises:
            ConfigError: there is nothing to train on, or a checkpoint is of another run.
            mlrl.parallel.signals.Stopped: a signal asked for it; the run can be resumed.
        """
        if self.task.train_dataset is None:
            raise ConfigError("train_dataset=None: there is nothing to train on. Give one to the trainer or the task")
        check_field("checkpoint_interval", checkpoint_interval, int)
        args = self.args
        if checkpoint_interval < 1:
            raise ConfigError(f"checkpoint_interval={checkpoint_interval!r}: must be 1 or more. Give such a number")
        where = resume_from_checkpoint or args.resume_from_checkpoint
        if resume_from_checkpoint is not None or checkpoint_dir is not None:
            self._resume = self._find_resume(where, checkpoint_dir)
        restore(self, self._resume)
        self.run_folder = make_run_folder(args, self.algorithm, self.task.name or "task", self.world, self._resume)
        first_evaluation = self.console.first_evaluation  # of the run that goes on
        self.console = Console(
            enabled=self.launch.is_main,
            verbose=is_verbose(self.wandb_config),
            log_interval=args.logging_steps,
            reward=self._reward_name(),
            first_evaluation=first_evaluation,
        )
        with self.run_folder.keeping_error(), self.console:
            go_on(self, self._resume)
            self.tracking = Tracking(
                self.run_folder,
                args.report_to,
                resumed_wandb(self._resume.wandb_identity, self.wandb_config),
                masked(dataclasses.asdict(args)),  # what reaches a tracker has left this machine
                is_main=self.launch.is_main,
            )
            schedule = Schedule.of(args, self.run_folder, checkpoint_dir, checkpoint_interval)
            self.checkpoints = Checkpoints(self, schedule, self._fingerprints(), self._resume)
            try:
                self.console.header(self._describe())
                self.sampler.open(self.run_folder.sampling)
                self.profile = self._make_profile()
                if args.max_steps is not None and (self.total_steps or args.max_steps) < args.max_steps:
                    ends = f"num_train_epochs={args.num_train_epochs} ends the run after step {self.total_steps}"
                    self.console.note(f"{ends}, before max_steps={args.max_steps}")
                with profiling.profiling(self.profile):
                    saved = self._run_to_the_end(schedule) | {"metrics": self.run_folder.metrics}
                saved |= next_commands(args, self.run_folder)
                self.console.finish(saved, summarize_run(self))
            except Exception:
                self.tracking.finish(failed=True)
                raise
            finally:
                self.sampler.close()
                self.tracking.finish()

    def _run_to_the_end(self, schedule: Schedule) -> dict[str, Path]:
        """The steps and what follows the last of them; where what was saved lies."""
        before = self.step_number
        with self.checkpoints.requests if schedule.folder is not None else nullcontext():
            self._run_steps()
        if before == self.step_number > 0:
            self.console.note(f"the run that goes on was at its end, step {before}: nothing was trained")
        self.checkpoints.at_end()
        self._log_training()
        self.evaluations.run()
        self.phase("saving")
        saved = self._save_run()
        if self.profile is not None:
            self.profile.end_step(None)
        return saved

    def _run_steps(self) -> None:
        """All steps, with the evaluations and log lines between them."""
        items = run_items(self.task.train_dataset, self.args)
        self.console.start(self.total_steps, items, self.step_number, self.items_done, self.env_step)
        for batch in self._batches():
            if self.args.eval_interval and (batch.first or self.evaluations.due(batch, self.args.rollout_batch_size)):
                self.evaluations.run()
                self.checkpoints.stop_if_asked()
            profiling.phase(profiling.BETWEEN)
            self._run_step(batch)
            if self.interval.due(self.env_step):
                self._log_training()
            self.checkpoints.after_step(batch)
            profiling.phase(profiling.BETWEEN)  # the next rows are no part of a checkpoint

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def entities(self) -> list[Entity]:
        """What is trained and lives here, as checkpoints hold it."""
        return [
            agent_entity(agents, engine, self._heads())
            for agents, engine in zip(self.team.trainable, self.engines, strict=True)
        ]

    def kept(self) -> list[Kept]:
        """What else of tensors a run needs to go on."""
        return []

    def _heads(self) -> dict[str, nn.Module]:
        """Modules on the agents' networks that their engines train too, by name."""
        return {}

    def progress(self) -> dict[str, Any]:
        """What else the next step depends on, of what JSON can hold; the same on all ranks."""
        return {
            "items_done": self.items_done,
            "generated_tokens": self.generated_tokens,
            "last_reward": self.last_reward,
            "averages": self.averager.state(),
            "logged_at": self.interval.last,
            "nonfinite_in_a_row": self.nonfinite.in_a_row,
            "evaluated_at": self.evaluations.done_at,
            "first_evaluation": self.console.first_evaluation,
        }

    def restore_progress(self, progress: dict[str, Any]) -> None:
        """Takes over what `progress` gave."""
        self.items_done, self.generated_tokens = progress["items_done"], progress["generated_tokens"]
        self.last_reward = progress["last_reward"]
        self.averager.restore(progress["averages"])
        self.interval.last = progress["logged_at"]
        self.nonfinite.in_a_row, self.evaluations.done_at = progress["nonfinite_in_a_row"], progress["evaluated_at"]
        self.console.first_evaluation = progress["first_evaluation"]

    def _find_resume(self, where: str | Path | None, checkpoint_dir: str | Path | None = None) -> Resume:
        return resolve_resume(where, self.args, self.world, self._fingerprints, checkpoint_dir)

    # Steps -----------------------------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[Batch]:
        """The batches of all steps; the first rank alone reads rows, so that all train on the same."""
        args = self.args
        rows = batches(
            self.task.train_dataset,
            args.rollout_batch_size,
            args.num_train_epochs,
            args.max_steps,
            self.checkpoints.place,
        )
        while (batch := self.world.from_first(lambda: next(rows, None))) is not None:
            yield batch

    def _run_step(self, batch: Batch) -> None:
        started, tokens_before = time.perf_counter(), self.generated_tokens
        self.step(batch)
        self.step_number += 1
        self.items_done += len(batch.items)
        self.epoch = batch.epoch_after
        seconds = time.perf_counter() - started
        self.averager.add_value("time/step_s", seconds)
        self.console.step(
            step=self.step_number,
            items=self.items_done,
            env_step=self.env_step,
            reward=self.last_reward,
            tokens_per_s=(self.generated_tokens - tokens_before) / seconds,
        )
        if self.profile is not None:
            self.profile.end_step(self.step_number)
        self.nonfinite.stop_if_too_many()

    def growth(self, **changes: Any) -> Growth:
        """How episodes are played in training; `changes` replace fields."""
        args = self.args
        base = Growth(
            generations=(1,) * args.num_turns,
            sampling=SamplingParams(args.temperature, args.top_p, args.top_k, args.max_new_tokens),
            seed=args.seed,
            threshold=args.early_termination_threshold,
            reseed=self.step_number,
            discount=args.discount,
            max_prompt_tokens=args.max_prompt_tokens,
            prompt_limits=self.prompt_limits,
        )
        return dataclasses.replace(base, **changes)

    # Evaluation ------------------------------------------------------------------------------------------------------

    def evaluate(self, num_eval_samples: int | None = None) -> dict[str, float]:
        """Plays the first `num_eval_samples` items (default: the setting) of the evaluation set.

        Returns:
            Metrics by name, {} without an evaluation set. Training streams are neither used nor moved.
        """
        self.settle()
        metrics, _ = self.evaluations.play(num_eval_samples)
        return metrics

    # Logging and saving ----------------------------------------------------------------------------------------------

    def _log_training(self) -> None:
        """Logs the means since the last line, if there was anything since."""
        means = self.averager.flush()
        if means:
            gauges = {
                "memory/peak_gb": max(self.world.gather(peak_memory_gb(self.launch.device))),
                "total_generated_tokens": self.generated_tokens,
            }
            if self.checkpoints.seconds is not None:
                gauges["time/checkpoint_s"], self.checkpoints.seconds = self.checkpoints.seconds, None
            self.log(means | self._interval_metrics() | gauges)

    def _interval_metrics(self) -> dict[str, float]:
        """Metrics since the last line that are no means of the steps'."""
        return {}

    def log(self, metrics: dict[str, float]) -> None:
        """Writes a row of metrics at this step."""
        with profiling.span("files"):
            self.tracking.log(metrics, step=self.step_number, env_step=self.env_step, epoch=self.epoch)

    def _save_run(self) -> dict[str, Path]:
        """Writes what was trained into the run folder; where each kind lies."""
        self.team.save(self.run_folder.agents)
        return {"agents": self.run_folder.agents}

    def save_what_was_learned(self) -> dict[str, Path]:
        """Logs and saves before a run ends early; where each kind lies."""
        self._log_training()
        return self._save_run()

    def save_model(self, directory: str | Path) -> None:
        """Writes directory/agent_0, agent_1 …: PEFT adapters or full models, with their tokenizers. Ends nothing.

        With several processes, all call it together.
        """
        self.team.save(directory)

    # Set-up ----------------------------------------------------------------------------------------------------------

    def _total_steps(self) -> int | None:
        return run_steps(self.task.train_dataset, self.args)

    def _make_engine(self, agents: Sequence[Agent], learning_rate: float) -> AnyEngine:
        """The optimization of the weights that these agents train."""
        group = self.mesh.agents[agents[0].index]
        return make_engine(agents, group, self._optimizer_settings(learning_rate), self.launch.zero)

    def _optimizer_settings(self, learning_rate: float) -> OptimizerSettings:
        updates = run_updates(self.task.train_dataset, self.args, self.total_steps, self._updates_per_step)
        return optimizer_settings(self.args, learning_rate, updates)

    def _updates_per_step(self, items: int) -> int:
        """Optimizer updates of a step with so many items and full trees."""
        return 1

    def _reward_name(self) -> str:
        """What the console calls the reward of a step."""
        return "reward" if self.args.num_turns == 1 else "return"

    def _describe(self) -> dict[str, Any]:
        """The header of a run, line by line."""
        return describe_run(self)

    def _make_profile(self) -> profiling.Profile | None:
        path = self.run_folder.profile / f"rank_{self.world.rank}.jsonl"
        return profiling.Profile(path, self.launch.device.type == "cuda") if self.args.profile else None
