"""Calling a task's reward, checking what it returned, and processing it before training.

Shapes: N agents, J joint responses of a node.
"""

import math
import numbers
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from mlrl.call_limits import CallFailed
from mlrl.calling import BoundCall, add_context, bind_call, copied, shown
from mlrl.errors import ConfigError, TaskError
from mlrl.prompts import Prompt, located
from mlrl.wording import counted

_REWARD_NAMES = ("batch_items", "prompts", "turn", "prompt_history", "response_history")


@dataclass(frozen=True)
class RewardResult:
    """The rewards of one node's joint responses: float64 [J], or [J, N] where the reward is per agent."""

    processed: np.ndarray
    """What training optimises: each reward through the reward processor."""
    raw: np.ndarray
    """What the reward function returned."""
    failed: bool = False
    """Whether the call had no result, so that these are the fallback."""


def bind_reward(func: Callable, num_agents: int) -> BoundCall:
    """Binds a reward function to the N lists of completions and the names it takes, from its signature.

    Positional parameters without default and ``*args`` take the agents' lists. `batch_items`, `prompts`, `turn`,
    `prompt_history` and `response_history` are passed by name where named or through ``**kwargs``, `episode_seed` only
    where named. Other parameters keep their defaults.

    Raises:
        ConfigError: not callable, or the parameters without default are not N (or ``*args``).
    """
    return bind_call(
        func,
        field="reward_func",
        num_values=num_agents,
        values_are=f"one list of completions an agent, and num_agents={num_agents}",
        named=_REWARD_NAMES,
        named_only=("episode_seed",),
    )


class Reward:
    """A reward function and its processor, bound to N agents; called once for each node.

    Attributes:
        func: what is called; `mlrl.call_limits` may put a time limit around it.
        fallback: what the function is taken to have returned for every joint of a call without result; None: an error.

    Raises:
        ConfigError: the function or the processor cannot be called as interface demands.
    """

    fallback: float | None = None
    _warned = False

    def __init__(self, func: Callable, processor: Callable | None, num_agents: int, per_agent: bool = False):
        self.num_agents = num_agents
        self.per_agent = per_agent
        self.func = bind_reward(func, num_agents)
        self.processor = None
        if processor is not None:
            self.processor = bind_call(processor, field="reward_processor", num_values=1, values_are="one reward")

    def __call__(
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
        """Rewards of the J joint responses ``zip(*completions)`` ([N][J] strings).

        Raises:
            TaskError: what came back is not J finite numbers (or J×N where per agent), or nothing came back and there
                is no fallback; names item, turn and value.
        """
        where = located(item, item_index, turn)
        named = {
            "batch_items": [copied(item)],
            "prompts": copied(list(prompts)),
            "turn": turn,
            "prompt_history": copied([list(history) for history in prompt_history]),
            "response_history": [list(history) for history in response_history],
            "episode_seed": episode_seed,
        }
        num_joints = len(completions[0])
        failed = False
        try:
            returned = self.func([list(agent_completions) for agent_completions in completions], named)
        except CallFailed as failure:
            returned, failed = [self._fallback(failure, where)] * num_joints, True
        except Exception as error:
            add_context(error, f"raised by reward_func for {where}")
            raise
        raw = checked_rewards(
            returned, num_joints=num_joints, num_agents=self.num_agents, per_agent=self.per_agent, where=where
        )
        processed = raw.copy()
        if self.processor is not None:
            for index in np.ndindex(raw.shape):
                processed[index] = self._process(float(raw[index]), where)
        return RewardResult(processed=processed, raw=raw, failed=failed)

    def _fallback(self, failure: CallFailed, where: str) -> float:
        """The score that stands for a call without result."""
        if self.fallback is None or not failure.by_chance:
            other = ", or set reward_fallback, the score of a call that fails" if failure.by_chance else ""
            raise TaskError(f"{failure.setting}: reward_func {failure} ({where}). {failure.remedy}{other}.") from None
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"reward_fallback={self.fallback!r}: is the reward of {where}, since reward_func {failure}. "
                "reward_failure_fraction in the metrics counts such calls.",
                stacklevel=2,
            )
        return self.fallback

    def _process(self, reward: float, where: str) -> float:
        try:
            value = self.processor([reward], {})
        except Exception as error:
            add_context(error, f"raised by reward_processor on {reward!r} for {where}")
            raise
        try:
            return finite_number(value)
        except ValueError as problem:
            raise TaskError(
                f"reward_processor returned={shown(value)}: {problem}, from the reward {reward!r} ({where}). "
                f"Right is one finite number."
            ) from None


def checked_rewards(returned: Any, *, num_joints: int, num_agents: int, per_agent: bool, where: str) -> np.ndarray:
    """What a reward function returned, as float64 [J], or [J, N] where `per_agent` allows it and J rows came.

    Takes a list, tuple, tensor or array of numbers (bool counts as 0 or 1).

    Raises:
        TaskError: another count or type, None, NaN, infinity, text or nesting, naming the place and the value.
    """
    joints = counted(num_joints, "joint response")
    right = f"Right is {counted(num_joints, 'finite number')}, one a joint response"
    right += f", or {counted(num_joints, 'row')} of {num_agents}." if per_agent else "."
    rows = _plain(returned)
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
        kind = "None" if rows is None else f"a single {type(returned).__name__}"
        raise TaskError(f"reward_func returned={shown(returned)}: {kind} ({where}). {right}")
    if len(rows) != num_joints:
        raise TaskError(
            f"reward_func returned={shown(returned)}: {counted(len(rows), 'reward')} for {joints} ({where}). {right}"
        )
    rows = [_plain(row) for row in rows]
    if per_agent and any(isinstance(row, list | tuple) for row in rows):
        for joint, row in enumerate(rows):
            if not isinstance(row, list | tuple) or len(row) != num_agents:
                raise TaskError(
                    f"reward_func returned[{joint}]={shown(row)}: not {num_agents} rewards, one an agent ({where}). "
                    f"{right}"
                )
        return np.array(
            [[_checked(entry, f"{j}][{i}", where, right) for i, entry in enumerate(row)] for j, row in enumerate(rows)]
        )
    return np.array([_checked(row, str(joint), where, right) for joint, row in enumerate(rows)], dtype=np.float64)


def _checked(value: Any, index: str, where: str, right: str) -> float:
    try:
        return finite_number(value)
    except ValueError as problem:
        raise TaskError(f"reward_func returned[{index}]={shown(value)}: {problem} ({where}). {right}") from None


def _plain(value: Any) -> Any:
    """Tensors and arrays as Python lists or numbers, everything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def finite_number(value: Any) -> float:
    """A Python, numpy or 0-d tensor number as a float.

    Raises:
        ValueError: the reason why it is none.
    """
    value = _plain(value)
    if isinstance(value, list | tuple):
        raise ValueError("a nested list")
    if not isinstance(value, numbers.Real | Decimal):
        raise ValueError("None" if value is None else f"a {type(value).__name__}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("not a finite number")
    return number


@dataclass(frozen=True)
class RewardProcessor:
    """A map of one reward: scalings and shifts in the order in which they were chained."""

    steps: tuple[tuple[float, float], ...] = ()

    def __call__(self, reward: float) -> float:
        for factor, value in self.steps:
            reward = reward * factor + value
        return reward

    def scale(self, factor: float) -> "RewardProcessor":
        """Then multiplies by `factor`."""
        return RewardProcessor((*self.steps, (_setting("factor", factor), 0.0)))

    def shift(self, value: float) -> "RewardProcessor":
        """Then adds `value`."""
        return RewardProcessor((*self.steps, (1.0, _setting("value", value))))


class RewardProcessors:
    """The first link of a processor: ``RewardProcessors.scale(factor=0.5).shift(value=-4)`` is r → 0.5·r − 4."""

    @staticmethod
    def scale(factor: float) -> RewardProcessor:
        """Multiplies each reward by `factor`."""
        return RewardProcessor().scale(factor)

    @staticmethod
    def shift(value: float) -> RewardProcessor:
        """Adds `value` to each reward."""
        return RewardProcessor().shift(value)


def _setting(name: str, value: float) -> float:
    try:
        return finite_number(value)
    except ValueError as problem:
        raise ConfigError(f"{name}={shown(value)}: {problem}. Give a finite number.") from None
