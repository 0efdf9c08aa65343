"""Actor-critic on rollout trees: a critic takes the place of the baseline that siblings make.

Every step grows the same trees as the MAREINFORCE family. Critics value all nodes (V) or all responses (Q), TD(λ)
targets go up the trees, and each agent follows

    ∇J_i ≈ Σ w · A_k · ∇ log π_i(a_i^k | h_i)        A_k from the critic (`mlrl.estimators.td`), divided by the std of
                                                      the batch

while the critics follow their targets. IAC has a critic an agent on what that agent sees; MAAC one critic on the joint
history of all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from mlrl.agents import Agent
from mlrl.checkpoint import Entity
from mlrl.config import IACConfig, MAACConfig, TrainerConfig
from mlrl.config_critics import critic_learning_rate, critic_models, warmup_rollouts
from mlrl.critic_loading import check_critic_models, load_critics
from mlrl.critic_samples import mean_return
from mlrl.critics import save_critics
from mlrl.losses.value import ExplainedVariance
from mlrl.parallel.engine import OptimizerSettings
from mlrl.parallel.group import Group
from mlrl.parallel.headed import HeadedEngine
from mlrl.rollout.tree import RolloutTree
from mlrl.trainers.checkpointing import critic_entity
from mlrl.trainers.critic_report import CriticReport, estimate_over, report_over, set_advantages
from mlrl.trainers.critic_update import ActorCriticUpdate, CriticTraining
from mlrl.trainers.engines import AnyEngine, critic_engine, headed_engine
from mlrl.trainers.metrics import advantage_metrics
from mlrl.trainers.reinforce import ReinforceTrainer
from mlrl.trainers.samples import Sample
from mlrl.trainers.setup import agent_arguments


class ActorCriticTrainer(ReinforceTrainer):
    """Trains a team with critics; see `Trainer` for the other arguments.

    Args:
        critic_model: one model for all critics, a saved critic among others; default: the agents'.
        critics: one model a critic, in place of `critic_model`.
        critic_tokenizer: of the critics; default: what lies with their model.
    """

    def __init__(
        self,
        *arguments: Any,
        critic_model: Any = None,
        critics: Sequence[Any] | None = None,
        critic_tokenizer: Any = None,
        **named: Any,
    ):
        self._given = (critic_model, critics)
        self._critic_tokenizer = critic_tokenizer
        self._explained: dict[tuple[int, int], ExplainedVariance] = {}
        super().__init__(*arguments, **named)

    # What the two algorithms differ in -------------------------------------------------------------------------------

    @property
    def critic_agents(self) -> list[int | None]:
        """The agent that each critic serves; [None] for one that serves all."""
        raise NotImplementedError

    @property
    def separate(self) -> bool:
        """Whether critics have weights and optimizers of their own; else they are heads on their actors."""
        return True

    @property
    def counterfactual(self) -> bool:
        """Whether the baseline is made of responses that were not given together."""
        return False

    # Set-up ----------------------------------------------------------------------------------------------------------

    def _check_extras(self) -> None:
        self._critic_models = critic_models(self.args, len(self.critic_agents), *self._given)
        check_critic_models(self._critic_models, self.args, self.critic_agents, self.separate)

    def _load_extras(self) -> None:
        super()._load_extras()
        here = [n for n, agent in enumerate(self.critic_agents) if self._group(agent or 0).member]
        self.critics = load_critics(
            self.team,
            self.args,
            agent_arguments(self.args),
            agents=[self.critic_agents[n] for n in here],
            models=[self._critic_models[n] for n in here],
            separate=self.separate,
            tokenizer=self._critic_tokenizer,
            seed=self.args.seed,
        )
        self.critic_engines: list[AnyEngine] = []
        if self.separate:
            settings = super()._optimizer_settings(critic_learning_rate(self.args))
            self.critic_engines = [
                critic_engine(critic, self._group(critic.index), settings, self.launch.zero) for critic in self.critics
            ]

    def _make_engine(self, agents: Sequence[Agent], learning_rate: float) -> AnyEngine:
        if self.separate:
            return super()._make_engine(agents, learning_rate)
        members = {agent.index for agent in agents}
        heads = [p for critic in self.critics if critic.index in members for p in critic.parameters]
        group, settings = self._group(agents[0].index), self._optimizer_settings(learning_rate)
        engine = headed_engine(agents[0].policy, agents[0].parameters, heads, group, settings, self.launch.zero)
        agents[0].parameters = engine.parameters  # one optimizer trains both
        return engine

    def _group(self, critic: int) -> Group:
        """The ranks that hold a critic."""
        return self.mesh.critic(critic)

    def _optimizer_settings(self, learning_rate: float) -> OptimizerSettings:
        settings = super()._optimizer_settings(learning_rate)
        if not self.separate:
            return settings
        warmup = warmup_rollouts(self.args) * self._updates_per_step(self.args.rollout_batch_size)  # critics alone
        return dataclasses.replace(settings, total_updates=max(0, settings.total_updates - warmup))

    # A step ----------------------------------------------------------------------------------------------------------

    def estimate(self, trees: list[RolloutTree]) -> list[list[Sample]]:
        """Every agent's samples with advantages from the critics, and what the critics learn (`estimates`)."""
        self.phase("advantages")
        samples = self._samples(trees)
        if self.step_number == 0:
            for critic in self.critics:
                if critic.is_new:
                    critic.start_at(mean_return(trees, critic.reader.agent, self.args.discount))
        self.estimates = [estimate_over(c, trees, self._group(c.index), self.args) for c in self.critics]
        told: dict[int, CriticReport] = {}
        for critic, estimate in zip(self.critics, self.estimates, strict=True):
            group = self._group(critic.index)
            report = report_over(critic, estimate, trees, group, self.args, self.counterfactual)
            if group.is_first:
                told[critic.index] = report
        reports = self.world.collect(told, len(self.critic_agents))
        for number, report in enumerate(reports):
            self.averager.update(report.metrics)
            for turn, explained in report.explained_variance.items():
                before = self._explained.get((turn, number), ExplainedVariance())
                self._explained[turn, number] = before + explained
        noise = set_advantages(trees, samples, reports, self.args)
        self.averager.update(advantage_metrics(samples, noise, self.args))
        return samples

    def update(self, samples: list[list[Sample]]) -> None:
        """One or several optimizer updates of critics and agents from the same trees."""
        self.phase("update")
        update = ActorCriticUpdate(
            self.team,
            self.engines,
            self.args,
            self.step_number,
            self._training(),
            on_actors=not self.separate,
            warming_up=self._is_warming_up,
            sampling_is_exact=self._sampling_is_exact,
        )
        outcomes = list(update.run(samples))
        for outcome in outcomes:
            self.averager.update(outcome.metrics)
        self.nonfinite.count(*(outcome.finite for outcome in outcomes))

    @property
    def _is_warming_up(self) -> bool:
        return self.step_number < warmup_rollouts(self.args)

    def _training(self) -> list[CriticTraining]:
        if self.separate:
            engines, coef = self.critic_engines, 1.0
        else:
            by_agent = {a.index: e for g, e in zip(self.team.trainable, self.engines, strict=True) for a in g}
            engines, coef = [by_agent[critic.index] for critic in self.critics], self.args.value_loss_coef
        if not self.separate and self._is_warming_up:  # the heads alone
            engines = [engine.head if isinstance(engine, HeadedEngine) else engine for engine in engines]
        return [
            CriticTraining(critic, estimate, engine, self._group(critic.index), coef)
            for critic, estimate, engine in zip(self.critics, self.estimates, engines, strict=True)
        ]

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def entities(self) -> list[Entity]:
        critics = zip(self.critics, self.critic_engines, strict=True) if self.separate else ()
        return [*super().entities(), *(critic_entity(critic, engine) for critic, engine in critics)]

    def _heads(self) -> dict[str, nn.Module]:
        return {} if self.separate else {f"head_{critic.index}": critic.head for critic in self.critics}

    def progress(self) -> dict[str, Any]:
        sums = [[*key, *dataclasses.astuple(explained)] for key, explained in self._explained.items()]
        return super().progress() | {"explained_variance": sums}

    def restore_progress(self, progress: dict[str, Any]) -> None:
        super().restore_progress(progress)
        self._explained = {
            (turn, critic): ExplainedVariance(*sums) for turn, critic, *sums in progress["explained_variance"]
        }

    # Logging and saving ----------------------------------------------------------------------------------------------

    def _interval_metrics(self) -> dict[str, float]:
        """Explained variances, from the sums of all steps since the last line."""
        values = {
            f"critic/turn_{turn + 1}/critic_{critic}/explained_variance": explained.value
            for (turn, critic), explained in sorted(self._explained.items())
        }
        self._explained = {}
        return {name: value for name, value in values.items() if value is not None}

    def _describe(self) -> dict[str, Any]:
        names = list(dict.fromkeys("the agents'" if m is None else str(m) for m in self._critic_models))
        where = "of their own" if self.separate else "on their actors"
        count = len(self.critic_agents)
        return super()._describe() | {"critics": f"{count} × {', '.join(names)} ({self.args.critic_type}, {where})"}

    def _save_run(self) -> dict[str, Path]:
        super().save_model(self.run_folder.agents)
        self._save_critics(self.run_folder.critics)
        return {"agents": self.run_folder.agents, "critics": self.run_folder.critics}

    def save_model(self, directory: str | Path) -> None:
        """Writes directory/agent_0, agent_1 … and beside them critic_0 …, each with its value head. Ends nothing.

        With several processes, all call it together.
        """
        super().save_model(directory)
        self._save_critics(directory)

    def _save_critics(self, directory: str | Path) -> None:
        save_critics(self.critics, directory, self.mesh)
        self.world.barrier()


class IACTrainer(ActorCriticTrainer):
    """Independent actor-critic: a critic an agent, on that agent's own history."""

    config_class: ClassVar[type[TrainerConfig]] = IACConfig
    algorithm = "IAC"
    takes_own_rewards = True

    @property
    def critic_agents(self) -> list[int | None]:
        return list(range(self.num_agents))

    @property
    def separate(self) -> bool:
        return self.args.use_separate_critic


class MAACTrainer(ActorCriticTrainer):
    """Multi-agent actor-critic: one centralized critic on the joint history of all agents."""

    config_class: ClassVar[type[TrainerConfig]] = MAACConfig
    algorithm = "MAAC"

    @property
    def critic_agents(self) -> list[int | None]:
        return [None]

    @property
    def counterfactual(self) -> bool:
        # across all joints the credited means are counterfactual already
        return self.args.counterfactual_baseline and self.args.joint_mode == "aligned"
