"""Settings of preference learning, and the checks that need no model."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mlrl.config_rules import is_local_path
from mlrl.config_team import DEFAULT_LEARNING_RATE
from mlrl.errors import ConfigError
from mlrl.remote_formats import NEEDS_MODEL, check_no_secrets, check_url

# MARLHF's policy phase: a learned reward is exploited where nothing holds the policy near its start.
DEFAULT_MARLHF_KL_COEF = 0.05


@dataclass(kw_only=True)
class PairArguments:
    """Preference pairs"""

    num_iterations: int = 0
    """Rounds of collecting and learning; 0: pairs are collected once, at the start"""
    preference_num_candidates: int = 4
    """Joint responses an item, of which pairs are made"""
    preference_pairs_per_sample: int | None = 4
    """Most pairs an item; None: all there are"""
    pair_selection: Literal["reward_gap", "random", "all", "comparator_reward"] = "reward_gap"
    """Which pairs first: reward_gap (largest), random, all, comparator_reward"""
    label_smoothing: float = 0.0
    """Assumed share of wrong preferences, below 0.5"""


@dataclass(kw_only=True)
class ComparatorArguments:
    """Comparators (iterative)"""

    comparator_policy: Literal["current", "current_copy", "history", "model", "api"] = "current"
    """Who the policy is compared with: itself, a copy, an earlier self, model, api"""
    comparator_generation_mode: Literal["decentralized", "centralized"] = "decentralized"
    """centralized: one model or api writes all roles in tagged sections"""
    comparator_model_name: str | None = None
    """comparator_policy model: one model for all roles, hub id or folder"""
    comparator_agents: list[str] | None = None
    """comparator_policy model: one model an agent"""
    comparator_num_candidates: int | None = None
    """Joint responses an item; None: preference_num_candidates"""
    comparator_ranks: Literal["agents"] | int = "agents"
    """Ranks of comparator_policy model: agents (of the agent it stands in for), or a count of more"""
    comparator_history_k: int | None = None
    """comparator_policy history: rounds back from the current one; None: 1"""
    comparator_api_url: str | None = None
    """comparator_policy api: full address of the endpoint"""
    comparator_api_format: Literal["generic", "openai", "anthropic", "openai_responses"] = "generic"
    """generic (own server), openai (chat), anthropic or openai_responses"""
    comparator_api_model: str | None = None
    """Model's name on that server"""
    comparator_api_key_env: str | None = None
    """Environment variable that holds the key; the key itself is never a setting"""
    comparator_api_key_header: str | None = None
    """Header for the key; None: as the format wants it"""
    comparator_api_key_prefix: str | None = None
    """What stands before the key in its header; None: as the format wants it"""
    comparator_api_headers: dict[str, str] = field(default_factory=dict)
    """Further headers, none of them secret: name=value ..."""
    comparator_api_extra_body: dict[str, Any] = field(default_factory=dict)
    """Further fields of a request: key=value ...; null takes one out"""
    comparator_api_response_field: str = "completions"
    """Field with the texts in answers of the generic format"""
    comparator_api_max_n_per_request: int | None = None
    """Most answers asked for in one request; None: all candidates"""
    comparator_api_timeout: float = 120.0
    """Seconds until an attempt is given up"""
    comparator_api_max_retries: int = 5
    """Further attempts after 429, 5xx, time-outs and broken answers"""
    comparator_api_max_concurrency: int = 8
    """Requests under way at once"""
    comparator_api_max_requests: int | None = None
    """Budget of requests a run, failed ones included; None: no limit"""


@dataclass(kw_only=True)
class ReplayArguments:
    """Replay (iterative)"""

    preference_replay_mode: Literal["current", "nearest_k", "all_history", "lambda_decay"] = "current"
    """Rounds that are learned from: current, nearest_k, all_history, lambda_decay"""
    preference_replay_k: int | None = None
    """nearest_k: how many rounds"""
    preference_replay_lambda: float | None = None
    """lambda_decay: weight of a round beside the next newer one, from 0 to 1"""
    preference_replay_sample_size: int | None = None
    """Pairs drawn a round; None: as many as the current round has"""
    preference_replay_from: str | None = None
    """Run folder of an earlier run, whose rounds come before this run's own"""


@dataclass(kw_only=True)
class PreferenceArguments(PairArguments, ComparatorArguments, ReplayArguments):
    """Preferences"""


@dataclass(kw_only=True)
class DPOArguments:
    """Direct preference optimization"""

    dpo_beta: float = 0.1
    """Scale of the joint margin in the loss"""
    rpo_alpha: float = 0.0
    """Weight of the winners' negative log-likelihood a token, added to the loss (iterative RPO)"""
    dpo_reference: bool = True
    """Margins relative to the initial policy; False: without a reference"""


@dataclass(kw_only=True)
class RewardModelArguments:
    """Joint reward model"""

    reward_model_name: str | None = None
    """Model of the reward model: hub id or folder; None: that of agent 0"""
    reward_learning_rate: float | None = None
    """AdamW learning rate; None: 1e-4 (lora), 1e-5 (full)"""
    reward_num_train_epochs: int = 2
    """Passes over the pairs; the weights of the best validation are kept"""
    reward_train_batch_size: int = 16
    """Pairs an update"""
    reward_max_length: int | None = None
    """Longest joint text in tokens, split over the agents; None: what it holds"""
    reward_pooling: Literal["last", "mean", "agents"] = "last"
    """What the head reads: the last token, the responses' mean, or a sum an agent"""
    reward_validation_fraction: float = 0.1
    """Share of the items whose pairs validate"""
    reward_model_ranks: Literal["agents"] | int = "agents"
    """Ranks of the reward model: agents (those of agent 0), or a count of more"""
    rl_algorithm: Literal["magrpo", "mareinforce", "marloo", "maremax", "maac", "iac"] = "magrpo"
    """Policy algorithm that follows the learned reward"""


def num_comparator_candidates(config: Any) -> int:
    """Joint responses of the comparator an item, the default filled in."""
    given = config.comparator_num_candidates
    return config.preference_num_candidates if given is None else given


def history_k(config: Any) -> int:
    """Rounds back of the history comparator, the default filled in."""
    return 1 if config.comparator_history_k is None else config.comparator_history_k


def reward_learning_rate(config: Any) -> float:
    """Learning rate of the reward model, the default filled in."""
    rate = config.reward_learning_rate
    return DEFAULT_LEARNING_RATE[config.tuning] if rate is None else rate


def check_preferences(config: Any, num_agents: int | None = None) -> list[str]:
    """Raise `ConfigError` for settings of preferences that cannot work together; return what is only doubtful."""
    _check_pairs(config)
    doubts = [*_check_comparator(config, num_agents), *_check_replay(config)]
    if config.num_iterations == 0:
        doubts += [
            f"{name}={getattr(config, name)!r} has no effect while num_iterations is 0"
            for name in ("comparator_policy", "preference_replay_mode")
            if getattr(config, name) != "current"
        ]
    return doubts


def check_dpo(config: Any) -> list[str]:
    """What is doubtful about DPO."""
    if config.dpo_reference:
        return []
    return [
        "dpo_reference=False: margins start at the difference in length, so that the first updates learn length; "
        "at dpo_beta=0.1 a winner of 120 and a loser of 40 tokens weigh 0.9997, of 40 and 120 tokens 0.0003"
    ]


def check_reward_model(config: Any) -> list[str]:
    """The reward model's folder exists."""
    _check_folder("reward_model_name", config.reward_model_name)
    return []


def _check_pairs(config: Any) -> None:
    if config.num_iterations == 0:
        if config.preference_num_candidates < 2:
            raise ConfigError(
                f"preference_num_candidates={config.preference_num_candidates!r}: a pair is made of two candidates of "
                "an item. Give 2 or more."
            )
        if config.pair_selection == "comparator_reward":
            raise ConfigError(
                "pair_selection='comparator_reward': without iterations there is no comparator. "
                "Set num_iterations, or use reward_gap, random or all."
            )


def _check_comparator(config: Any, num_agents: int | None) -> list[str]:
    policy = config.comparator_policy
    if policy == "model":
        _check_models(config, num_agents)
    if policy == "api":
        _check_api(config)
    centralized = config.comparator_generation_mode == "centralized"
    if centralized and policy not in ("model", "api"):
        raise ConfigError(
            f"comparator_generation_mode='centralized': comparator_policy={policy!r} writes each role by its own "
            "agent. Use comparator_policy model or api, or decentralized."
        )
    if config.comparator_ranks != "agents" and (policy != "model" or config.num_iterations == 0):
        raise ConfigError(
            f"comparator_ranks={config.comparator_ranks!r}: only another model may live on ranks of its own; copies of "
            "the policy stay where it lives. Set comparator_policy to model and num_iterations, or leave it out."
        )
    if config.comparator_history_k is not None and policy != "history":
        raise ConfigError(
            f"comparator_history_k={config.comparator_history_k!r}: comparator_policy={policy!r} has no history. "
            "Set comparator_policy to history, or leave it out."
        )
    for name in ("comparator_model_name", "comparator_agents"):
        if getattr(config, name) is not None and policy != "model":
            raise ConfigError(
                f"{name}={getattr(config, name)!r}: comparator_policy={policy!r} uses no other model. "
                "Set comparator_policy to model, or leave it out."
            )
    if config.comparator_api_url is not None and policy != "api":
        raise ConfigError(
            f"comparator_api_url: comparator_policy={policy!r} asks no server. Set comparator_policy to api, "
            "or leave it out."
        )
    candidates = num_comparator_candidates(config)
    if config.num_iterations > 0 and candidates != config.preference_num_candidates:
        fewer = min(candidates, config.preference_num_candidates)
        return [
            f"comparator_num_candidates={candidates!r}: preference_num_candidates is "
            f"{config.preference_num_candidates}, and only the first {fewer} of both are compared"
        ]
    return []


def _check_models(config: Any, num_agents: int | None) -> None:
    name, models = config.comparator_model_name, config.comparator_agents
    if name is None and models is None:
        raise ConfigError(
            "comparator_policy='model': names no model. Give comparator_model_name (one for all roles) or "
            "comparator_agents (one an agent)."
        )
    if name is not None and models is not None:
        raise ConfigError(f"comparator_model_name={name!r}: comparator_agents={models!r} is given too. Give one.")
    if models is not None:
        if config.comparator_generation_mode == "centralized":
            raise ConfigError(
                f"comparator_agents={models!r}: with comparator_generation_mode='centralized' one model writes all "
                "roles. Give comparator_model_name."
            )
        count = num_agents or config.num_agents or (config.agents and len(config.agents))
        if count and len(models) != count:
            raise ConfigError(f"comparator_agents={models!r}: {len(models)} models for {count} agents. Give one each.")
    _check_folder("comparator_model_name", name)
    for model in models or []:
        _check_folder("comparator_agents", model)


def _check_api(config: Any) -> None:
    if config.comparator_api_url is None:
        raise ConfigError(
            "comparator_api_url=None: comparator_policy='api' needs an address. "
            "Give the endpoint's, such as https://host/v1/chat/completions."
        )
    check_url("comparator_api_url", config.comparator_api_url)
    header = config.comparator_api_key_header
    if header is not None and not header.replace("-", "").isalnum():
        raise ConfigError(f"comparator_api_key_header={header!r}: is no header. Give letters, digits and hyphens.")
    check_no_secrets("comparator_api_headers", config.comparator_api_headers)
    check_no_secrets("comparator_api_extra_body", config.comparator_api_extra_body)
    if config.comparator_api_model is None and config.comparator_api_format in NEEDS_MODEL:
        raise ConfigError(
            f"comparator_api_model=None: format {config.comparator_api_format} needs one. "
            "Give the model's name on that server."
        )


def _check_replay(config: Any) -> list[str]:
    mode = config.preference_replay_mode
    needed = {"nearest_k": "preference_replay_k", "lambda_decay": "preference_replay_lambda"}
    for owner, name in needed.items():
        value = getattr(config, name)
        if mode == owner and value is None:
            raise ConfigError(f"{name}=None: preference_replay_mode={mode!r} needs it. Give a number.")
        if mode != owner and value is not None:
            raise ConfigError(
                f"{name}={value!r}: preference_replay_mode={mode!r} does not use it. "
                f"Set preference_replay_mode to {owner}, or leave it out."
            )
    if mode == "current":
        for name in ("preference_replay_sample_size", "preference_replay_from"):
            if getattr(config, name) is not None:
                raise ConfigError(
                    f"{name}={getattr(config, name)!r}: preference_replay_mode='current' learns from the current "
                    "round as it is. Use nearest_k, all_history or lambda_decay, or leave it out."
                )
    folder = config.preference_replay_from
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"preference_replay_from={folder!r}: there is no such folder. Give an earlier run's.")
    return []


def _check_folder(name: str, model: str | None) -> None:
    if model is not None and is_local_path(model) and not Path(model).is_dir():
        raise ConfigError(f"{name}={model!r}: there is no such folder. Give a model's folder or a hub id.")
