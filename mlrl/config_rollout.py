"""Settings of episodes: sampling, calls of the reward, and the shape of rollout trees."""

from dataclasses import dataclass
from typing import Any, Literal

from mlrl.errors import ConfigError


@dataclass(kw_only=True)
class SamplingArguments:
    """Episodes and sampling"""

    num_turns: int = 1
    """Turns of an episode; more than 1 needs the task's external_transition"""
    max_new_tokens: int = 128
    """Longest response, in tokens"""
    max_prompt_tokens: int | None = None
    """Longer prompts are cut on the left and counted; None: never cut"""
    temperature: float = 1.0
    """Sampling temperature; the loss scores tokens at the same one"""
    top_p: float = 1.0
    """Nucleus sampling; 1 is off. Below 1 the gradient is biased"""
    top_k: int = 0
    """Sample from the k likeliest tokens; 0 is off. Above 0 the gradient is biased"""
    early_termination_threshold: float | None = None
    """An episode ends early where the processed reward is above this; None: never"""
    external_prompt_passthrough: bool = False
    """Prompts of the transition skip the formatters"""
    discount: float = 1.0
    """Discount factor of later turns, between 0 and 1"""
    max_rollout_rows: int = 256
    """Sequences decoded at once: bounds the memory of sampling"""
    collaboration_mode: Literal["decentralized", "centralized"] = "decentralized"
    """decentralized; centralized: one actor writes all roles in one text"""


@dataclass(kw_only=True)
class RewardArguments:
    """Reward calls"""

    reward_timeout: float | None = None
    """Seconds a call of the reward or the transition may take; None: no limit"""
    reward_fallback: float | None = None
    """Score of responses whose reward call is late or dies; None: the run ends"""
    reward_processes: int = 0
    """Processes that make these calls, in parallel, killed when late; 0: a thread"""


@dataclass(kw_only=True)
class RolloutArguments(SamplingArguments):
    """Rollout trees"""

    num_generations: int = 4
    """Responses an agent draws at every node (K)"""
    joint_mode: Literal["aligned", "cross"] = "aligned"
    """aligned: K joint responses a node; cross: all K^N combinations"""
    early_termination_scope: Literal["node", "joint"] = "node"
    """node: the mean reward stops a whole node; joint: each branch by its own"""
    rollout_batch_size: int = 4
    """Task items a step, over all processes"""


def check_rewards(config: Any) -> None:
    """Raise `ConfigError` for a fallback where no call can fail."""
    if config.reward_fallback is not None and config.reward_timeout is None and config.reward_processes == 0:
        raise ConfigError(
            f"reward_fallback={config.reward_fallback!r}: without a time limit and processes no reward call can fail. "
            "Set reward_timeout or reward_processes, or leave it out."
        )
