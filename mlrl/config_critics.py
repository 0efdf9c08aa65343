"""Settings of critics, and the checks that need no model."""

from dataclasses import dataclass
from typing import Any, Literal

from mlrl.config_team import DEFAULT_LEARNING_RATE, agreed
from mlrl.errors import ConfigError

# A Q critic that has learned nothing yet would lead the actor anywhere; V is a baseline from its first value on.
DEFAULT_WARMUP_ROLLOUTS = {"v": 0, "q": 10}


@dataclass(kw_only=True)
class ActorCriticArguments:
    """Critics"""

    critic_type: Literal["v", "q"] = "v"
    """v: value of a history; q: value of a history and a response"""
    critic_model: str | None = None
    """Model of the critics: hub id, folder (of a saved critic too); None: the agents'"""
    critics: list[str] | None = None
    """One model a critic (in place of critic_model)"""
    critic_ranks: Literal["agents"] | int = "agents"
    """Ranks of the critics: agents (each with its agent, the centralized one with agent 0), or how many extra ones"""
    critic_learning_rate: float | None = None
    """AdamW learning rate of separate critics; None: 1e-4 (lora), 1e-5 (full)"""
    critic_max_length: int | None = None
    """Longest input of a critic, in tokens; longer ones are cut on the left and counted; None: what its model holds"""
    value_head_hidden_dim: int | None = None
    """Width of a tanh layer in the value head; None: one linear layer"""
    value_clip_range: float | None = None
    """Clipping of a value's change in an update, in units of the reward; None: off"""
    gae_lambda: float = 0.95
    """0: one-step TD targets; 1: Monte-Carlo returns"""
    critic_warmup_rollouts: int | None = None
    """First steps that train the critics only; None: 0 (v), 10 (q)"""


@dataclass(kw_only=True)
class IndependentCriticArguments(ActorCriticArguments):
    """Critics"""

    use_separate_critic: bool = True
    """True: a backbone or adapter of its own; False: a value head on the actor"""
    value_loss_coef: float = 0.5
    """Weight of the value loss beside the actor's, for a value head on the actor"""


@dataclass(kw_only=True)
class CentralizedCriticArguments(ActorCriticArguments):
    """Critics"""

    counterfactual_baseline: bool = False
    """Baseline of aligned q: own other responses with the partners' same ones"""


def critic_models(config: Any, count: int, critic_model: Any = None, critics: Any = None) -> list[Any]:
    """The models of `count` critics from a trainer's arguments and its config, None for the agents'.

    Raises:
        ConfigError: two answers to one question, or counts that differ.
    """
    critic_model = agreed("critic_model", critic_model, config.critic_model)
    critics = agreed("critics", critics, config.critics)
    if critics is None:
        return [critic_model] * count
    if critic_model is not None:
        raise ConfigError("critic_model: critics is given too. Give one of the two.")
    if not isinstance(critics, list | tuple) or len(critics) != count:
        given = (
            critics if isinstance(critics, str) else [c if isinstance(c, str) else type(c).__name__ for c in critics]
        )
        raise ConfigError(f"critics={given!r}: there are {count} critics. Give a list of one model each.")
    return list(critics)


def critic_extra_ranks(config: Any) -> dict[str, int]:
    """Ranks that follow the agents' for the critics."""
    return {} if config.critic_ranks == "agents" else {"critic": config.critic_ranks}


def warmup_rollouts(config: Any) -> int:
    """Steps that train critics only, the default filled in."""
    if config.critic_warmup_rollouts is not None:
        return config.critic_warmup_rollouts
    return DEFAULT_WARMUP_ROLLOUTS[config.critic_type]


def critic_learning_rate(config: Any) -> float:
    """The learning rate of separate critics, the default filled in: that of agents."""
    if config.critic_learning_rate is not None:
        return config.critic_learning_rate
    return DEFAULT_LEARNING_RATE[config.tuning]


def check_critics(config: Any, num_agents: int | None = None) -> list[str]:
    """Raise `ConfigError` for settings of critics that cannot work together; return what is only doubtful."""
    if config.critics is not None and config.critic_model is not None:
        raise ConfigError(
            f"critic_model={config.critic_model!r}: critics={config.critics!r} is given too. Give one of the two."
        )
    if config.critic_type == "q" and config.num_generations < 2:
        raise ConfigError(
            f"num_generations={config.num_generations!r}: critic_type='q' compares the responses of one node. "
            "Give num_generations of 2 or more, or critic_type v."
        )
    doubts = [*_check_normalization(config), *_check_sampling(config)]
    if config.critic_type == "v" and config.value_clip_range is None and config.num_updates_per_rollout > 4:
        doubts.append(
            f"num_updates_per_rollout={config.num_updates_per_rollout!r}: so many passes fit the values to one "
            "rollout; value_clip_range bounds their change"
        )
    return doubts


def check_independent(config: Any, num_agents: int | None = None) -> list[str]:
    """The checks of a critic an agent."""
    doubts = check_critics(config, num_agents)
    count = num_agents or config.num_agents or (config.agents and len(config.agents))
    if config.critics is not None and count and len(config.critics) != count:
        raise ConfigError(
            f"critics={config.critics!r}: {len(config.critics)} critics for {count} agents. "
            "Give one an agent, or critic_model for all."
        )
    if not config.use_separate_critic and config.critic_ranks != "agents":
        raise ConfigError(
            f"critic_ranks={config.critic_ranks!r}: with use_separate_critic=False a critic is a head on its actor and "
            "lives there. Leave it out, or set use_separate_critic."
        )
    if not config.use_separate_critic and config.critic_learning_rate is not None:
        raise ConfigError(
            f"critic_learning_rate={config.critic_learning_rate!r}: with use_separate_critic=False the value head is "
            "trained by the actor's optimizer. Set agent_learning_rate, or use_separate_critic."
        )
    if config.use_separate_critic and config.value_loss_coef != IndependentCriticArguments.value_loss_coef:
        doubts.append(
            f"value_loss_coef={config.value_loss_coef!r} has no effect on a separate critic, whose step has a learning "
            "rate of its own"
        )
    return doubts


def check_centralized(config: Any, num_agents: int | None = None) -> list[str]:
    """The checks of one critic for all agents."""
    doubts = check_critics(config, num_agents)
    if config.critics is not None and len(config.critics) != 1:
        raise ConfigError(
            f"critics={config.critics!r}: there is one centralized critic. Give one model, or critic_model."
        )
    if config.counterfactual_baseline and config.critic_type != "q":
        raise ConfigError(
            f"counterfactual_baseline=True: critic_type={config.critic_type!r} has no value of a response. "
            "Use critic_type q, or leave it out."
        )
    if config.counterfactual_baseline and config.joint_mode == "cross":
        doubts.append(
            "counterfactual_baseline=True has no effect with joint_mode='cross', whose baseline is counterfactual "
            "anyway"
        )
    return doubts


def _check_normalization(config: Any) -> list[str]:
    if config.advantage_normalization == "node":
        raise ConfigError(
            "advantage_normalization='node': with a critic it is the std of the whole rollout batch. "
            "Use batch (or True), or none."
        )
    if config.advantage_mode != "raw":
        raise ConfigError(
            f"advantage_mode={config.advantage_mode!r}: with a critic its value is the baseline. Leave it out."
        )
    if config.loss_aggregation == "sequence_mean":
        return [
            "loss_aggregation='sequence_mean' learns the advantage per length, which favours short responses that are "
            "better than expected; sequence_sum, token_mean and constant do not"
        ]
    return []


def _check_sampling(config: Any) -> list[str]:
    truncated = "top_p" if config.top_p < 1 else "top_k" if config.top_k > 0 else None
    if truncated is None:
        return []
    return [
        f"{truncated}={getattr(config, truncated)!r}: tokens are drawn from a cut distribution but scored under the "
        "full one, so the gradient is biased; top_p=1 and top_k=0 avoid that"
    ]
