"""Learning from preferences in rounds: play and pair, write the pairs down, draw which to learn from, learn.

MADPO (`mlrl.trainers.madpo`) learns the pairs themselves, MARLHF (`mlrl.trainers.marlhf`) a reward model of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from mlrl.checkpoint import Kept
from mlrl.config_preference import num_comparator_candidates
from mlrl.errors import ConfigError
from mlrl.models.base import Base
from mlrl.models.parking import Parking
from mlrl.preference.collection import Collected, CollectionSettings, collect_pairs
from mlrl.preference.comparators import PolicyComparator, WrittenComparator
from mlrl.preference.drift import collection_metrics, pair_digest, reward_histograms
from mlrl.preference.dropout import quiet_adapter
from mlrl.preference.pairs import PreferencePair, require_pairs
from mlrl.preference.replay import replay
from mlrl.preference.rounds import FOLDER, Round, check_pairs, earlier_rounds, find_rounds, read_pairs, write_round
from mlrl.preference.setup import check_comparator, make_comparator
from mlrl.preference.snapshots import history_kept
from mlrl.random_state import random_state, set_random_state
from mlrl.rollout.sampler import SamplingParams
from mlrl.run_folder import append_jsonl
from mlrl.trainers.base import Trainer
from mlrl.trainers.data import Batch
from mlrl.wording import counted


@dataclass
class RoundState:
    """Where a run of rounds stands, as plain data; the pairs of its rounds are on disk.

    Attributes:
        round: the one under way, from 1; 0 for the only one of a run without iterations.
        phase: what of it comes next, `collect` or one of the trainer's own; batches: of that phase, done already.
        rewards: of the candidates of the latest collection. seen: digests of the pairs of all collections.
        requests: that the comparator's API has been sent, of `comparator_api_max_requests`.
    """

    round: int
    phase: str = "collect"
    batches: int = 0
    rewards: list[float] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    requests: int = 0

    def enter(self, phase: str) -> None:
        """The phase before is done."""
        self.phase, self.batches = phase, 0


class PreferenceTrainer(Trainer):
    """Rounds of collecting and learning; a subclass says how pairs are learned (`learn`). See `Trainer` for arguments.

    Without iterations there is one round, whose pairs are made among the policy's own candidates.
    """

    iterative: ClassVar[bool] = False
    first_phase: ClassVar[str]
    """Of learning, after `collect`."""

    def _run_steps(self) -> None:
        self._begin()
        while self.round_state.round in self.rounds and self.steps_left > 0:
            self.run_round(self.round_state.round)
            self._log_training()
            self.evaluations.run()
            if self.round_state.round + 1 not in self.rounds:
                return
            if self.steps_left <= 0:  # in this round, which a longer run goes on with
                reached = f"in round {self.round_state.round} of {len(self.rounds)}"
                self.console.note(f"max_steps={self.args.max_steps} was reached {reached}; the others were not played")
                return
            self.round_state.round += 1
            self.round_state.enter("collect")
            self.checkpoints.stop_if_asked()

    def run_round(self, round: int) -> None:
        """One round from where it stands."""
        if self.round_state.phase == "collect":
            self.collect_round(round)  # → preferences/iteration_0001.jsonl
            self.round_state.enter(self.first_phase)
            self.checkpoints.phase_done()
        pairs = self.draw_pairs()  # of this round and, with replay, of those before it
        self.learn(round, pairs)

    def learn(self, round: int, pairs: list[PreferencePair]) -> None:
        """Learns from the pairs of a round, from `round_state` on."""
        raise NotImplementedError

    @property
    def rounds(self) -> range:
        """Numbers of the rounds, from 1; only 0 without iterations."""
        return range(1, self.args.num_iterations + 1) if self.iterative else range(1)

    @property
    def steps_left(self) -> int:
        """Steps that `max_steps` allows from here on."""
        return 10**18 if self.args.max_steps is None else self.args.max_steps - self.step_number

    def _of_round(self, round: int) -> str:
        return f" of round {round}" if self.iterative else ""

    @property
    def _compared_with(self) -> str | None:
        return self.args.comparator_policy if self.iterative else None

    def collect_round(self, round: int) -> None:
        """Plays the train set, against the comparator where there are iterations, and writes the round's pairs."""
        self.phase("collecting pairs")
        args = self.args
        rows = counted(len(self.task.train_dataset), "item")
        self.console.note(f"playing {rows} for the pairs{self._of_round(round)}")
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
        before = random_state()
        with self.comparator_networks.use():
            collected = collect_pairs(
                self.collector, items, self.growth(), settings, comparator=self.comparator, round=round,
                between=lambda: self._stop_collecting_if_asked(before),
            )  # fmt: skip
        self.env_step += collected.cost.joint_evaluations
        self.generated_tokens += collected.cost.generated_tokens
        if self.comparator is not None:
            self.round_state.requests = self.comparator.requests
        if self.launch.is_main:
            write_round(self.run_folder.path / FOLDER, max(round, 1), collected.pairs)
        self._report(round, collected)
        replays = args.preference_replay_mode != "current" and (self.earlier or round > 1)
        if not replays:  # else a round without a pair of its own may learn from earlier ones
            require_pairs(collected.pairs, collected.num_items, collected.lost, self._compared_with)

    def _stop_collecting_if_asked(self, random_before: dict[str, Any]) -> None:
        """A run that was asked to stop does not play the whole train set first; it will play it again."""
        if self.comparator is not None:
            self.round_state.requests = self.comparator.requests  # that were sent are sent
        self.checkpoints.stop_if_asked(rewind=lambda: set_random_state(random_before))

    def draw_pairs(self) -> list[PreferencePair]:
        """The pairs to learn from after the latest round on disk. Raises TaskError where there are none."""
        args, folder, current = self.args, self.run_folder.path / FOLDER, max(self.round_state.round, 1)
        pairs = self.world.from_first(
            lambda: replay(
                [*self.earlier, *(round for round in find_rounds(folder) if round.number <= current)],
                mode=args.preference_replay_mode if self.iterative else "current",
                k=args.preference_replay_k,
                decay=args.preference_replay_lambda,
                sample_size=args.preference_replay_sample_size,
                seed=args.seed,
            )
        )
        require_pairs(pairs, len(self.task.train_dataset), comparator=self._compared_with)
        if self.round_state.phase == self.first_phase and self.round_state.batches == 0:  # else it was logged before
            self.averager.add_value("preference/num_learned_pairs", len(pairs))
            self._log_training()
        return pairs

    def _report(self, round: int, collected: Collected) -> None:
        """Metrics of a collection, and histograms of its rewards in the run folder and the trackers."""
        self.last_reward = statistics.fmean(collected.policy_rewards) if collected.policy_rewards else 0.0
        metrics = collection_metrics(collected, self.round_state.rewards, set(self.round_state.seen))
        for name, value in (metrics | {"preference/round": round}).items():
            self.averager.add_value(name, value)
        self.averager.update(collected.counts)
        self.round_state.rewards = collected.policy_rewards
        known = dict.fromkeys([*self.round_state.seen, *map(pair_digest, collected.pairs)])
        self.round_state.seen = list(known)
        rewards = {"policy": collected.policy_rewards, "comparator": collected.comparator_rewards}
        if self.launch.is_main:
            record = {"round": round, "env_step": self.env_step, **reward_histograms(rewards)}
            append_jsonl(self.run_folder.histograms, [record])
        histograms = {f"preference/{name}_rewards": values for name, values in rewards.items() if values}
        self.tracking.log_histograms(histograms, step=self.step_number, env_step=self.env_step, epoch=self.epoch)

    # Set-up ----------------------------------------------------------------------------------------------------------

    def _check_extras(self) -> None:
        super()._check_extras()
        if (self.args.num_iterations > 0) != self.iterative:
            right = "num_iterations of 1 or more" if self.iterative else "0, or use the iterative trainer"
            raise ConfigError(
                f"num_iterations={self.args.num_iterations!r}: {type(self).__name__} cannot have that. Give {right}"
            )
        self.earlier: list[Round] = []
        if self.iterative:
            check_comparator(self.args)
            if self.args.preference_replay_from is not None:
                self.earlier = earlier_rounds(self.args.preference_replay_from)

    def _load_extras(self) -> None:
        super()._load_extras()
        self.round_state = RoundState(self.rounds.start)
        for policy in (p for agent in self.team.agents for p in (agent.policy, agent.reference) if p is not None):
            quiet_adapter(policy)
        for round in self.earlier:
            some = read_pairs(round, list(range(min(3, round.num_pairs))))
            check_pairs(some, [agent.decode for agent in self.team.agents], str(self.args.preference_replay_from))
        self.comparator: PolicyComparator | WrittenComparator | None = None
        if self.iterative and self.args.comparator_policy != "api":  # whose answers are kept in the run folder
            self.comparator = self._make_comparator(None)
        self.comparator_networks = self._parking([] if self.comparator is None else self.comparator.bases)
        self.reference_networks = self._parking([a.reference.base for a in self.team.agents if a.reference is not None])

    def _parking(self, bases: list[Base]) -> Parking:
        """Networks that some phases of a round do not use; those of agents are used in all."""
        return Parking(bases, self.team.bases, self.team.loading.device)

    def _make_comparator(self, cache: Path | None) -> PolicyComparator | WrittenComparator:
        args = self.args
        sampling = SamplingParams(args.temperature, args.top_p, args.top_k, args.max_new_tokens)
        return make_comparator(args, self.collector, sampling, cache, self.round_state.requests)

    def _begin(self) -> None:
        """What needs the run folder, and the evaluation before anything is learned."""
        self.console.start(self.total_steps, None, self.step_number, self.items_done, self.env_step)
        if self.iterative and self.comparator is None:
            self.comparator = self._make_comparator(self.run_folder.path / FOLDER / "answers.jsonl")
        if self.round_state == RoundState(self.rounds.start):
            self.evaluations.run()

    def _total_steps(self) -> int | None:
        dataset = self.task.train_dataset
        if dataset is not None and not hasattr(dataset, "__len__"):
            raise ConfigError(
                "train_dataset: does not tell its length, and pairs are collected over all of it. Give one"
            )
        return 0 if dataset is None else None

    def _describe(self) -> dict[str, Any]:
        items = counted(len(self.task.train_dataset), "item")
        size = f"{items} × {counted(self.args.preference_num_candidates, 'candidate')}"
        bound = "" if self.args.max_steps is None else f", at most {counted(self.args.max_steps, 'step')}"
        return super()._describe() | {"steps": f"{counted(len(self.rounds), 'round')}, {size} each{bound}"}

    def take_steps(self, batches: Iterator[Batch], log_all: bool = False) -> None:
        """The steps of a phase from where it stands, with the evaluations, log lines and checkpoints between them.

        Args:
            log_all: a line a step, for steps that evaluate no rewards, as `logging_steps` counts.
        """
        for batch in self._remaining(batches):
            if self.evaluations.due(batch, self.batch_size(batch)):
                self.evaluations.run()
            self._run_step(batch)
            if log_all or self.interval.due(self.env_step):
                self._log_training()
            self.checkpoints.after_step(batch)

    def batch_size(self, batch: Batch) -> int:
        """Items of a whole batch of the phase that this one is of."""
        return self.args.rollout_batch_size

    def _remaining(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches of a phase that are still to be trained on, as many as `max_steps` allows."""
        for number, batch in enumerate(batches):
            if number < self.round_state.batches:
                continue
            if self.steps_left <= 0:
                return
            self.round_state.batches += 1
            yield batch

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def progress(self) -> dict[str, Any]:
        return super().progress() | {"round": asdict(self.round_state)}

    def restore_progress(self, progress: dict[str, Any]) -> None:
        super().restore_progress(progress)
        self.round_state = RoundState(**progress["round"])

    def kept(self) -> list[Kept]:
        history = getattr(self.comparator, "history", None)
        return super().kept() + ([] if history is None else history_kept(history, self.team))
