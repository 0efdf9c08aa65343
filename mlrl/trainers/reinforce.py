"""The MAREINFORCE family: policy gradients on rollout trees with group-relative baselines.

Every step samples a tree of joint responses for each task item, credits each response with the return of the joints it
took part in, turns the K credited returns of a node into advantages, and follows

    ∇J_i ≈ Σ w · A_k · ∇ log π_i(a_i^k | h_i)

The four trainers differ in the baseline alone (`advantage_mode`), which their configs name.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, ClassVar

import torch

from mlrl.config import MAGRPOConfig, MAREINFORCEConfig, MAReMaxConfig, MARLOOConfig, TrainerConfig
from mlrl.config_rules import nodes_per_step
from mlrl.rollout.collect import Growth
from mlrl.rollout.tree import RolloutTree
from mlrl.trainers.ahead import RolloutsAhead, staleness
from mlrl.trainers.base import Trainer
from mlrl.trainers.data import Batch
from mlrl.trainers.estimate import estimate_advantages, reference_kl
from mlrl.trainers.metrics import advantage_metrics, flat, mean_return, rollout_metrics
from mlrl.trainers.mismatch import correct_mismatch
from mlrl.trainers.policy_update import PolicyUpdate
from mlrl.trainers.records import write_nodes
from mlrl.trainers.samples import Sample, make_samples
from mlrl.wording import counted


class ReinforceTrainer(Trainer):
    """Trains a team by policy gradients on rollout trees; see `Trainer` for the arguments."""

    _warned_of_forfeits = False
    ahead: RolloutsAhead | None = None
    """Who grows the next batch meanwhile, where that is asked for."""

    def _load_extras(self) -> None:
        if self.args.reference_kl_coef > 0:
            self.team.add_references(self.args.reference_model)
        if self.args.async_rollouts:
            self.ahead = RolloutsAhead(self.collector, self.growth, self.args)

    def _updates_per_step(self, items: int) -> int:
        nodes = items * nodes_per_step(self.args, self.num_agents) // self.args.rollout_batch_size
        return self.args.num_updates_per_rollout * -(-nodes // (self.args.train_batch_size or nodes))

    def step(self, batch: Batch) -> None:
        trees = self.collect(batch)
        samples = self.estimate(trees)
        self.update(samples)
        self.record(trees)

    def collect(self, batch: Batch) -> list[RolloutTree]:
        """Grows a tree of joint responses for every item."""
        self.phase("sampling")
        trees = self.grow(batch)
        cost = self.collector.cost
        self.env_step += cost.joint_evaluations
        self.generated_tokens += cost.generated_tokens
        has_raw = self.task.reward_processor is not None
        self.averager.update(rollout_metrics(trees, cost, self.args.discount, self.args.num_turns, has_raw))
        self.averager.update(self.environment.response_metrics(trees))
        self.last_reward = mean_return(trees, self.args.discount)
        return trees

    def grow(self, batch: Batch) -> list[RolloutTree]:
        """The trees themselves, with the rewards of the task."""
        if self.ahead is None:
            trees = self.collector.collect(batch.items, self.growth())
        else:
            trees = self.ahead.take(batch, self.step_number)
            self.averager.update(self.ahead.metrics)
        self._warn_of_forfeits(trees)
        return trees

    def growth(self, **changes: Any) -> Growth:
        """How training trees are grown; `changes` replace fields."""
        args = self.args
        tree = {
            "generations": (args.num_generations,) * args.num_turns,
            "joint_mode": args.joint_mode,
            "scope": args.early_termination_scope,
            "greedy_baseline": args.advantage_mode == "greedy",
        }
        return super().growth(**tree | changes)

    def _warn_of_forfeits(self, trees: list[RolloutTree]) -> None:
        """Says once that an episode which ends early on a positive reward may have cost the agents later ones."""
        threshold = self.args.early_termination_threshold
        if self._warned_of_forfeits or threshold is None or self.args.num_turns == 1:
            return
        if any(reward > 0 for tree in trees for node in tree.nodes() for reward in flat(node.rewards)):
            self._warned_of_forfeits = True
            warnings.warn(
                f"early_termination_threshold={threshold!r}: rewards above 0 occur, so ending an episode early "
                "forfeits the rewards of later turns. "
                "Shift the rewards to 0 or below with a reward_processor, or set None.",
                stacklevel=2,
            )

    def estimate(self, trees: list[RolloutTree]) -> list[list[Sample]]:
        """Every agent's samples, with weights, advantages and, where asked for, their KL to the reference."""
        self.phase("advantages")
        samples = self._samples(trees)
        zero_std = estimate_advantages(trees, samples, self.args)
        self.averager.update(advantage_metrics(samples, zero_std, self.args))
        return samples

    def _samples(self, trees: list[RolloutTree]) -> list[list[Sample]]:
        """Every agent's samples without advantages."""
        args = self.args
        samples = [
            make_samples(
                trees,
                agent,
                discount=args.discount,
                turn_weighting=args.turn_weighting,
                mask_truncated=args.mask_truncated,
            )
            for agent in range(self.num_agents)
        ]
        if args.rollout_backend != "in_process":
            is_present = staleness(trees, self.step_number) == 0
            self.averager.update(correct_mismatch(self.team, samples, args, bounded=is_present))
        if args.reference_kl_coef > 0:
            started = time.perf_counter()
            reference_kl(self.team, samples, args, sampling_is_exact=self._sampling_is_exact)
            self.averager.add_value("time/reference_s", time.perf_counter() - started)
        return samples

    @functools.cached_property
    def _sampling_is_exact(self) -> bool:
        """Whether what sampling kept is log π of the whole distribution, to the rounding of a training forward."""
        args = self.args
        if args.rollout_backend != "in_process" or args.top_k > 0 or args.top_p < 1:
            return False
        return all(self.world.gather(all(b.language_model.dtype == torch.float32 for b in self.team.bases)))

    def update(self, samples: list[list[Sample]]) -> None:
        """One or several optimizer updates of every agent from the same trees."""
        self.phase("update")
        update = PolicyUpdate(self.team, self.engines, self.args, self.step_number, self._sampling_is_exact)
        outcomes = list(update.run(samples))
        for outcome in outcomes:
            self.averager.update(outcome.metrics)
        self.nonfinite.count(*(outcome.finite for outcome in outcomes))

    # One step ahead --------------------------------------------------------------------------------------------------

    def _run_steps(self) -> None:
        with self.ahead or nullcontext():
            super()._run_steps()

    def _batches(self) -> Iterator[Batch]:
        return super()._batches() if self.ahead is None else self.ahead.watched(super()._batches())

    def settle(self) -> None:
        if self.ahead is not None:
            self.phase("sampling")
            self.ahead.settle()

    def progress(self) -> dict[str, Any]:
        return super().progress() | ({} if self.ahead is None else {"next_trees": self.ahead.state()})

    def restore_progress(self, progress: dict[str, Any]) -> None:
        super().restore_progress(progress)
        if self.ahead is not None and not self.args.allow_changed:  # else they may be of another batch or sampling
            self.ahead.restore(progress.get("next_trees"))

    # -----------------------------------------------------------------------------------------------------------------

    def _describe(self) -> dict[str, Any]:
        return super()._describe() | {"rollouts": describe_rollouts(self.args)}

    def record(self, trees: list[RolloutTree]) -> None:
        """Writes the step's nodes where one is due."""
        every = self.args.completions_steps
        if every and self.launch.is_main and self.step_number % every == 0:
            write_nodes(self.tracking, trees, self.step_number + 1, self.env_step, "train", self.args.discount)


def describe_rollouts(args: TrainerConfig) -> str:
    """Size of a step in words, and whether the task had a say in it."""
    text = (
        f"{counted(args.rollout_batch_size, 'item')} a step, {counted(args.num_turns, 'turn')}, "
        f"{counted(args.num_generations, 'generation')} ({args.joint_mode}) "
        f"of up to {counted(args.max_new_tokens, 'token')}"
    )
    text += ", drawn one step ahead" if args.async_rollouts else ""
    own = ("rollout_batch_size", "num_turns", "num_generations", "joint_mode", "max_new_tokens")
    recommended = [name for name in own if args.sources.get(name) == "task"]
    if not recommended:
        return text
    if any(args.sources.get(name) in ("yaml", "flag") for name in own):
        return f"{text}; {', '.join(recommended)} as the task recommends"
    return f"{text}, as the task recommends"


class MAREINFORCETrainer(ReinforceTrainer):
    """REINFORCE on returns as they are: unbiased, of high variance."""

    config_class: ClassVar[type[TrainerConfig]] = MAREINFORCEConfig
    algorithm = "MAREINFORCE"


class MAGRPOTrainer(ReinforceTrainer):
    """Deviation from the mean of a node's returns, in units of their standard deviation."""

    config_class: ClassVar[type[TrainerConfig]] = MAGRPOConfig
    algorithm = "MAGRPO"


class MARLOOTrainer(ReinforceTrainer):
    """Deviation from the mean of the other responses' returns: unbiased, of lower variance."""

    config_class: ClassVar[type[TrainerConfig]] = MARLOOConfig
    algorithm = "MARLOO"


class MAReMaxTrainer(ReinforceTrainer):
    """Deviation from the best return of a node; `advantage_mode="greedy"` takes ReMax's own baseline."""

    config_class: ClassVar[type[TrainerConfig]] = MAReMaxConfig
    algorithm = "MAReMax"
