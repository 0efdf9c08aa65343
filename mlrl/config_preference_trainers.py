"""Settings of the preference trainers: MADPO, MARLHF, and their iterative forms."""

from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from mlrl import config_rules as rules
from mlrl.config import (
    AgentArguments,
    EvaluationArguments,
    LearningArguments,
    PlacementArguments,
    RunArguments,
    SamplingArguments,
    TrainerConfig,
    TrainingConfig,
)
from mlrl.config_checkpoints import CheckpointArguments, check_checkpoints
from mlrl.config_checks import check_fields
from mlrl.config_critics import (
    CentralizedCriticArguments,
    IndependentCriticArguments,
    check_centralized,
    check_independent,
)
from mlrl.config_preference import (
    DEFAULT_MARLHF_KL_COEF,
    DPOArguments,
    PreferenceArguments,
    RewardModelArguments,
    check_dpo,
    check_preferences,
    check_reward_model,
)
from mlrl.config_rollout import RewardArguments, check_rewards
from mlrl.errors import ConfigError

# rl_algorithm → the baseline of its trainer and what divides it
_BASELINES = {
    "magrpo": ("mean", "node"),
    "mareinforce": ("raw", "none"),
    "marloo": ("rloo", "none"),
    "maremax": ("max", "none"),
    "maac": ("raw", "batch"),
    "iac": ("raw", "batch"),
}
_CRITIC_GROUPS = {"maac": CentralizedCriticArguments, "iac": IndependentCriticArguments}


@dataclass(kw_only=True)
class MADPOConfig(
    DPOArguments,
    PreferenceArguments,
    AgentArguments,
    PlacementArguments,
    SamplingArguments,
    RewardArguments,
    LearningArguments,
    EvaluationArguments,
    RunArguments,
    CheckpointArguments,
    TrainingConfig,
):
    """Settings of MADPO: direct preference optimization of the joint margin."""

    train_batch_size: int | None = 16
    """Pairs an update; None: all"""
    num_train_epochs: int = 1
    """Passes over the pairs of a round"""
    max_steps: int | None = None
    """Stop after this many updates, even within a round; None: no limit"""
    eval_interval: int = 16
    """Pairs between evaluations; also at the start and at the end of a round; 0: only by hand"""
    reference_model: str | None = None
    """Reference policy of the margins; None: the agents' initial policies"""

    @property
    def no_reference(self) -> str | None:
        return None if self.dpo_reference else "dpo_reference is False"

    def check(self, num_agents: int | None = None) -> list[str]:
        check_fields(self)
        rules.check_models(self)
        rules.check_team(self, num_agents)
        check_rewards(self)
        return [
            *rules.check_tuning(self, policy_gradients=False),
            *rules.check_placement(self, num_agents),
            *rules.check_collaboration(self),
            *check_preferences(self, num_agents),
            *check_dpo(self),
            *rules.check_run(self),
            *check_checkpoints(self),
        ]


@dataclass(kw_only=True)
class MADPOIterConfig(MADPOConfig):
    """Settings of iterative MADPO."""

    num_iterations: int = 2


@dataclass(kw_only=True)
class MARLHFConfig(
    RewardModelArguments, IndependentCriticArguments, CentralizedCriticArguments, PreferenceArguments, TrainerConfig
):
    """Settings of MARLHF: a joint reward model, and a policy gradient that follows it."""

    reference_kl_coef: float = DEFAULT_MARLHF_KL_COEF
    num_train_epochs: int = 1
    """Passes over the train set in a round's policy phase"""
    advantage_mode: Literal["raw", "mean", "rloo", "max"] | None = None
    """Baseline: raw (none), mean, rloo (the others' mean), max; None: that of rl_algorithm"""
    advantage_normalization: Literal["none", "node", "batch"] | bool | None = None
    """Advantages divided by the std of: none, node, batch; None: as rl_algorithm does"""

    def check(self, num_agents: int | None = None) -> list[str]:
        critics = self.rl_algorithm in _CRITIC_GROUPS
        if critics and self.advantage_normalization is True:  # on: there that is the std of the whole batch
            self.advantage_normalization = "batch"
        check_fields(self)
        mode, normalization = _BASELINES[self.rl_algorithm]
        self.advantage_mode = self.advantage_mode or mode
        self.advantage_normalization = self.advantage_normalization or normalization
        _check_in_turn(self)
        return [
            *super().check(num_agents),
            *check_preferences(self, num_agents),
            *check_reward_model(self),
            *_check_critics_used(self),
        ]

    def check_baseline(self, num_agents: int | None) -> list[str]:
        if self.rl_algorithm == "iac":
            return check_independent(self, num_agents)
        if self.rl_algorithm == "maac":
            return check_centralized(self, num_agents)
        return rules.check_advantages(self)


@dataclass(kw_only=True)
class MARLHFIterConfig(MARLHFConfig):
    """Settings of iterative MARLHF."""

    num_iterations: int = 2


def _check_in_turn(config: Any) -> None:
    """Nothing is drawn ahead of a round whose pairs and reward model are still to come."""
    if config.async_rollouts:
        raise ConfigError(
            f"async_rollouts={config.async_rollouts!r}: MARLHF plays, fits and learns in turn, nothing ahead. "
            "Set it to 0, or leave it out."
        )


def _check_critics_used(config: Any) -> list[str]:
    """Settings of critics that the policy algorithm does not have."""
    own = _CRITIC_GROUPS.get(config.rl_algorithm)
    if own is None and config.critic_ranks != "agents":
        raise ConfigError(
            f"critic_ranks={config.critic_ranks!r}: rl_algorithm={config.rl_algorithm!r} has no critics, and these "
            "ranks would have nothing to do. Use maac or iac, or leave critic_ranks out."
        )
    used = {field.name for field in fields(own)} if own else set()
    groups = [field for group in _CRITIC_GROUPS.values() for field in fields(group)]
    unused = {field.name: field.default for field in groups if field.name not in used and field.default is not MISSING}
    return [
        f"{name}={getattr(config, name)!r} has no effect with rl_algorithm={config.rl_algorithm!r}"
        for name, default in unused.items()
        if getattr(config, name) != default
    ]
