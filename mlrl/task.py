"""A task: data, and the user's callables that make prompts, rewards and next prompts; and how one is loaded.

`Task` is what a user writes, `load_task` finds it, and `Environment` is the same bound to a team and checked.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from mlrl.call_limits import LimitedCalls
from mlrl.calling import shown
from mlrl.config_checks import suggestion
from mlrl.errors import ConfigError
from mlrl.eval_hooks import EvalHooks, RolloutSample
from mlrl.prompts import Formatters, Prompt, Transition, missing_prompt
from mlrl.rewards import Reward, RewardResult
from mlrl.rows import checked_dataset, field_names
from mlrl.task_file import find_task, fit_task_args

P, R = TypeVar("P"), TypeVar("R")


@dataclass(kw_only=True)
class Task:
    """What a team is trained on.

    Raises:
        ConfigError: a callable that is none, a data set without rows, a wrong type.
    """

    train_dataset: Any = None
    """`datasets.Dataset`, `datasets.IterableDataset` or list of dicts; each row is a task item."""
    eval_dataset: Any = None
    """Rows for evaluation, of the same kinds."""
    formatters: Callable | Sequence[Callable] | None = None
    """Item → str or chat messages: one shared or a list of one an agent; None takes the item's `prompt` field."""
    reward_func: Callable | None = None
    """`reward_func(*completions_by_agent, batch_items=[item])` → J numbers, called once for each node."""
    reward_processor: Callable | None = None
    """Maps each reward before training, such as `RewardProcessors.scale(factor=2)`."""
    external_transition: Callable | None = None
    """The turn just played → N next prompts; needed for several turns."""
    eval_logger: Callable | None = None
    """`eval_logger(agent_completions_turns=, batch_items=, prompts=)` → one dict an item."""
    eval_aggregator: Callable | None = None
    """`eval_aggregator(rows, num_turns=)` → scalars; by default the mean of every numeric key."""
    metrics_callback: Callable | None = None
    """`metrics_callback(rollouts)` gets `RolloutSample`s and returns scalars or None."""
    recommended: dict[str, Any] = field(default_factory=dict)
    """Config fields and the values that suit this task; YAML and flags win over them. Under `madpo`, `maac` … a dict of
    those that suit one algorithm better."""
    name: str | None = None
    """Names the run; `load_task` sets it where it is None."""

    def __new__(cls, *args: Any, **kwargs: Any):
        parts = [part.name for part in fields(cls)]
        for name in kwargs:
            if name not in parts:
                hint = suggestion(name, parts) or f" It has {', '.join(parts)}."
                raise ConfigError(f"{name}={shown(kwargs[name])}: a Task has no such part.{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self.train_dataset = checked_dataset(self.train_dataset, "train_dataset")
        self.eval_dataset = checked_dataset(self.eval_dataset, "eval_dataset")
        if self.train_dataset is None and self.eval_dataset is None:
            raise ConfigError("train_dataset=None: a task needs rows. Give train_dataset, eval_dataset or both.")
        if self.reward_func is None:
            raise ConfigError("reward_func=None: a task needs a reward. Give a function of the agents' completions.")
        callables = {name: getattr(self, name) for name in _CALLABLE_FIELDS if getattr(self, name) is not None}
        formatters = self.formatters
        if isinstance(formatters, list | tuple):
            callables |= {f"formatters[{i}]": formatter for i, formatter in enumerate(formatters)}
        elif formatters is not None:
            callables["formatters"] = formatters
        for name, value in callables.items():
            if not callable(value):
                raise ConfigError(f"{name}={shown(value)}: a {type(value).__name__} cannot be called. Give a function.")
        if not isinstance(self.recommended, dict) or not all(isinstance(key, str) for key in self.recommended):
            raise ConfigError(f"recommended={shown(self.recommended)}: not a dict of config field names to values.")


_CALLABLE_FIELDS = (
    "reward_func",
    "reward_processor",
    "external_transition",
    "eval_logger",
    "eval_aggregator",
    "metrics_callback",
)


def load_task(spec: str, task_args: Mapping[str, Any] | None = None) -> Task:
    """Loads ``NAME`` (a task shipped in mlrl.tasks), ``path/to/file.py`` or ``path/to/file.py:ATTR``.

    NAME and a bare file hold a `Task`, or a function ``(**task_args) -> Task``, under the name `task`. A text in
    `task_args` is read as a bool, int or float where the function's default or annotation is one. An exception of the
    user's file passes through with its own traceback.

    Raises:
        ConfigError: no such file, name or attribute, unknown or missing task_args, or no Task came out.
    """
    spec = os.fspath(spec)
    module, attribute, name = find_task(spec)
    if not hasattr(module, attribute):
        own = [
            key
            for key, value in vars(module).items()
            if isinstance(value, Task) or getattr(value, "__module__", None) == module.__name__
        ]
        raise ConfigError(
            f"task={spec!r}: {module.__file__} has nothing named {attribute!r}. It has {', '.join(own) or 'no task'}; "
            f"name one as file.py:NAME, or call your Task `task`."
        )
    found = getattr(module, attribute)
    if isinstance(found, Task):
        if task_args:
            raise ConfigError(
                f"task_args={shown(dict(task_args))}: {spec} holds a finished Task, which takes none. "
                f"Make it a function task(...) -> Task to take some."
            )
        task = found
    elif callable(found):
        task = found(**fit_task_args(found, spec, task_args or {}))
    else:
        task = found
    if not isinstance(task, Task):
        raise ConfigError(
            f"task={spec!r}: {attribute} gave {shown(task)} of type {type(task).__name__}. "
            f"It has to be a Task or a function that returns one."
        )
    if task.name is None:
        task.name = name
    return task


class Environment:
    """A task bound to a team of N agents, checked before any model loads. Turns are 0-based.

    Args:
        external_prompt_passthrough: what the transition returns is the next prompt, without the formatters.
        per_agent_rewards: the algorithm takes J×N rewards.

    Raises:
        ConfigError: a callable that cannot be called for this team, or no transition for several turns.
    """

    def __init__(
        self,
        task: Task,
        num_agents: int,
        num_turns: int = 1,
        external_prompt_passthrough: bool = False,
        per_agent_rewards: bool = False,
    ):
        self.task = task
        self.num_agents = num_agents
        self.num_turns = num_turns
        self.passthrough = external_prompt_passthrough
        self._formatters = Formatters(task.formatters, num_agents)
        self._reward = Reward(task.reward_func, task.reward_processor, num_agents, per_agent_rewards)
        self._transition = task.external_transition and Transition(task.external_transition, num_agents)
        if task.eval_aggregator is not None and task.eval_logger is None:
            raise ConfigError(
                "eval_logger=None: eval_aggregator is given and has no rows to aggregate. "
                "Give an eval_logger too, or leave eval_aggregator out."
            )
        self._calls: LimitedCalls | None = None
        self._hooks = EvalHooks(task.eval_logger, task.eval_aggregator, task.metrics_callback)
        if num_turns > 1 and self._transition is None:
            raise ConfigError(
                f"external_transition=None: num_turns={num_turns} needs one. "
                f"Give a function that returns the next prompts, or set num_turns=1."
            )
        for name in ("train_dataset", "eval_dataset"):
            fields = field_names(getattr(task, name)) if getattr(task, name) is not None else None
            if task.formatters is None and fields is not None and "prompt" not in fields:
                raise ConfigError(missing_prompt(fields, name))

    def limit_calls(self, timeout: float | None, fallback: float | None, processes: int) -> None:
        """Bounds calls of the reward and the transition; called once, before any weights are read.

        Args:
            timeout: seconds of a call; None: no limit.
            fallback: the score of every joint response of a reward call that fails; None: an error.
            processes: how many make the calls; 0: a thread of this one.
        """
        if timeout is None and processes == 0:
            return
        transition = [self._transition.bound] if self._transition else []
        self._calls = LimitedCalls([self._reward.func, *transition], timeout, processes)
        self._reward.func, self._reward.fallback = self._calls.limited(self._reward.func), fallback
        if self._transition:
            self._transition.bound = self._calls.limited(self._transition.bound)

    def map(self, function: Callable[[P], R], pieces: Sequence[P]) -> list[R]:
        """`function` of every piece, which may call reward and transition; in parallel where they have processes."""
        return [function(piece) for piece in pieces] if self._calls is None else self._calls.map(function, pieces)

    def initial_prompts(self, item: Mapping[str, Any], item_index: int | None = None) -> list[Prompt]:
        """The N prompts of turn 0.

        Raises:
            TaskError: a formatter returned no prompt, or there is neither formatter nor `prompt` field.
        """
        return [
            self._formatters(agent, item, external_prompts=None, turn=0, item_index=item_index)
            for agent in range(self.num_agents)
        ]

    def next_prompts(
        self,
        *,
        item: Mapping[str, Any],
        turn: int,
        completions: Sequence[str],
        reward: float,
        prompt_history: Sequence[Sequence[Prompt]],
        response_history: Sequence[Sequence[str]],
        episode_seed: int,
        item_index: int | None = None,
    ) -> list[Prompt]:
        """The N prompts of turn `turn` + 1, after one joint response of turn `turn`.

        What the transition returns for an agent becomes the `prompt` of a copy of the item (a str or a message list)
        and goes through that agent's formatter, which also gets it as `external_prompts` where it takes that. It is
        the prompt as it stands without a formatter or with passthrough.

        Args:
            completions: the joint response, one an agent.
            reward: its processed reward.
            prompt_history: [agent][turns 0..turn], each prompt as the agent saw it.
            response_history: [agent][turns 0..turn], so the last entries are `completions`.

        Raises:
            TaskError: the transition returned no N prompts, or a formatter none.
        """
        returned = self._transition(
            item=item,
            turn=turn,
            completions=completions,
            reward=reward,
            prompt_history=prompt_history,
            response_history=response_history,
            episode_seed=episode_seed,
            item_index=item_index,
        )
        if self.passthrough or self.task.formatters is None:
            return returned
        return [
            self._formatters(
                agent, {**item, "prompt": prompt}, external_prompts=prompt, turn=turn + 1, item_index=item_index
            )
            for agent, prompt in enumerate(returned)
        ]

    def rewards(
        self,
        *,
        item: Mapping[str, Any],
        completions: Sequence[Sequence[str]],
        prompts: Sequence[Prompt],
        turn: int,
        prompt_history: Sequence[Sequence[Prompt]],
        response_history: Sequence[Sequence[str]],
        episode_seed: int,
        item_index: int | None = None,
    ) -> RewardResult:
        """Rewards of a node's J joint responses, in one call.

        Args:
            completions: [agent][joint].
            prompts: this turn's N prompts.
            prompt_history: [agent][turns 0..turn-1]; this turn's are in `prompts`.
            response_history: [agent][turns 0..turn-1].

        Raises:
            TaskError: what the reward or its processor returned is not J finite numbers.
        """
        return self._reward(
            item=item,
            completions=completions,
            prompts=prompts,
            turn=turn,
            prompt_history=prompt_history,
            response_history=response_history,
            episode_seed=episode_seed,
            item_index=item_index,
        )

    def eval_rows(
        self, *, agent_completions_turns: Sequence[Sequence[Sequence[str]]], items: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """The eval logger's dicts, one an item, for responses [agent][item][turn]; [] without a logger."""
        return self._hooks.rows(agent_completions_turns=agent_completions_turns, items=items)

    def aggregate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Scalars of these rows, to be logged under ``eval/``."""
        return self._hooks.aggregate(rows, self.num_turns)

    def callback_metrics(self, samples: Sequence[RolloutSample]) -> dict[str, float]:
        """The metrics callback's scalars, to be logged under ``eval/``; {} without a callback."""
        return self._hooks.callback_metrics(samples)

    def response_metrics(self, trees: Sequence[Any]) -> dict[str, tuple[float, float]]:
        """What the environment counts of the responses in rollout trees, as (sum, count)."""
        return {}

    def check_first_row(self) -> None:
        """Makes the first prompts of each data set whose rows can be looked up, so that faults show before the run."""
        for dataset in (self.task.train_dataset, self.task.eval_dataset):
            if hasattr(dataset, "__len__"):
                self.initial_prompts(dataset[0], item_index=0)
