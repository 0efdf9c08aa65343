"""Settings of the preference trainers: MADPO, MARLHF, and their iterative forms."""

from dataclasses import dataclass
from typing import Any

from mlrl import config_rules as rules
from mlrl.config import TrainerConfig
from mlrl.config_checks import check_fields
from mlrl.config_preference import (
    DEFAULT_MARLHF_KL_COEF,
    DPOArguments,
    PreferenceArguments,
    RewardModelArguments,
    check_dpo,
    check_preferences,
    check_reward_model,
)
from mlrl.config_rollout import check_rewards
from mlrl.errors import ConfigError

# rl_algorithm → the baseline of its trainer and what divides it
_BASELINES = {
    "magrpo": ("mean", "node"),
    "mareinforce": ("raw", "none"),
    "marloo": ("rloo", "none"),
    "maremax": ("max", "none"),
}


@dataclass(kw_only=True)
class MADPOConfig(DPOArguments, PreferenceArguments, TrainerConfig):
    """Settings of MADPO: direct preference optimization of the joint margin."""

    train_batch_size: int | None = 16
    """Pairs an update; None: all"""
    max_steps: int | None = None
    """Most updates of a round; None: no limit"""

    def check(self, num_agents: int | None = None) -> list[str]:
        check_fields(self)
        rules.check_models(self)
        rules.check_team(self, num_agents)
        check_rewards(self)
        _check_supported(self)
        for name, instead in (("reference_ranks", "agents"), ("reference_model", None)):
            if getattr(self, name) != instead:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r}: the reference of MADPO is the initial policy, on its agent's "
                    "ranks. Leave it out."
                )
        return [
            *rules.check_tuning(self, policy_gradients=False),
            *rules.check_placement(self, num_agents),
            *check_preferences(self, num_agents),
            *check_dpo(self),
            *rules.check_run(self),
        ]


@dataclass(kw_only=True)
class MADPOIterConfig(MADPOConfig):
    """Settings of iterative MADPO."""

    num_iterations: int = 2


@dataclass(kw_only=True)
class MARLHFConfig(RewardModelArguments, PreferenceArguments, TrainerConfig):
    """Settings of MARLHF: a joint reward model, and a policy gradient that follows it."""

    reference_kl_coef: float = DEFAULT_MARLHF_KL_COEF
    max_steps: int | None = None
    """Most policy steps of a round; None: no limit"""

    def check(self, num_agents: int | None = None) -> list[str]:
        check_fields(self)
        _check_supported(self)
        if self.rl_algorithm not in _BASELINES:
            raise ConfigError(
                f"rl_algorithm={self.rl_algorithm!r}: critics do not follow a learned reward here yet. "
                f"Use one of {', '.join(_BASELINES)}."
            )
        if self.placement == "split":
            raise ConfigError(
                "placement='split': the reward model reads all agents and lives on every rank. Set placement to shared."
            )
        self.advantage_mode, self.advantage_normalization = _BASELINES[self.rl_algorithm]
        return [
            *super().check(num_agents),
            *check_preferences(self, num_agents),
            *check_reward_model(self),
        ]


@dataclass(kw_only=True)
class MARLHFIterConfig(MARLHFConfig):
    """Settings of iterative MARLHF."""

    num_iterations: int = 2


def _check_supported(config: Any) -> None:
    """What preference trainers do not offer."""
    if config.collaboration_mode == "centralized":
        raise ConfigError(
            "collaboration_mode='centralized': no trainer lets one actor write all roles yet. Use decentralized."
        )
