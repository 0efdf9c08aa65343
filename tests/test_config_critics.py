"""Settings of critics: wrong ones are named, doubtful ones warn."""

import typing
import warnings

import pytest

from mlrl.config import IACConfig, MAACConfig, TrainerConfig, field_names, known_fields
from mlrl.config_checks import RANGES, alternatives
from mlrl.config_critics import critic_learning_rate, warmup_rollouts
from mlrl.errors import ConfigError

# field, wrong value, part of the remedy
OUT_OF_RANGE = [
    ("critic_ranks", 0, "agents"),
    ("critic_learning_rate", -1e-5, "0 or more"),
    ("critic_max_length", 15, "16 or more"),
    ("value_head_hidden_dim", 0, "1 or more"),
    ("value_clip_range", 0.0, "above 0"),
    ("gae_lambda", 1.1, "from 0 to 1"),
    ("gae_lambda", -0.1, "from 0 to 1"),
    ("critic_warmup_rollouts", -1, "None for the default"),
    ("value_loss_coef", -0.5, "0 or more"),
    ("critic_model", " ", "leave it out"),
    ("critics", [], "leave it out"),
    ("critic_type", "a", "v or q"),
    ("gae_lambda", True, "a number"),
]

# config, other settings, start of the message, part of the remedy
COMBINATIONS = [
    (IACConfig, {"critic_model": "a", "critics": ["a", "b"]}, "critic_model='a': ", "one of the two"),
    (IACConfig, {"use_separate_critic": False, "critic_ranks": 1}, "critic_ranks=1: ", "head on its actor"),
    (IACConfig, {"critics": ["a", "b"], "num_agents": 3}, "critics=['a', 'b']: ", "one an agent"),
    (MAACConfig, {"critics": ["a", "b"]}, "critics=['a', 'b']: ", "one centralized critic"),
    (IACConfig, {"critic_type": "q", "num_generations": 1}, "num_generations=1: ", "critic_type v"),
    (MAACConfig, {"critic_type": "q", "num_generations": 1}, "num_generations=1: ", "2 or more"),
    (MAACConfig, {"counterfactual_baseline": True}, "counterfactual_baseline=True: ", "critic_type q"),
    (MAACConfig, {"advantage_normalization": "node"}, "advantage_normalization='node': ", "batch (or True)"),
    (MAACConfig, {"advantage_mode": "rloo"}, "advantage_mode='rloo': ", "Leave it out"),
    (
        IACConfig,
        {"use_separate_critic": False, "critic_learning_rate": 1e-4},
        "critic_learning_rate=0.0001: ",
        "agent_learning_rate",
    ),
    (IACConfig, {"critic_model": "/no/such"}, "critic_model='/no/such': ", "hub id"),
    (IACConfig, {"critics": ["gpt2", "/no/such"]}, "critics=['gpt2', '/no/such']: ", "hub id"),
    # what every trainer checks is checked here too
    (MAACConfig, {"lora_dropout": 0.1}, "lora_dropout=0.1: ", "lora_dropout to 0"),
    (MAACConfig, {"num_updates_per_rollout": 2}, "num_updates_per_rollout=2: ", "clip_range"),
]


@pytest.mark.parametrize(("field", "value", "remedy"), OUT_OF_RANGE)
def test_a_wrong_value_names_field_value_and_remedy(field, value, remedy):
    with pytest.raises(ConfigError) as caught:
        IACConfig(**{field: value})
    assert str(caught.value).startswith(f"{field}={value!r}: ") and remedy in str(caught.value)


@pytest.mark.parametrize(("config_class", "settings", "start", "remedy"), COMBINATIONS)
def test_a_wrong_combination_names_field_value_and_remedy(config_class, settings, start, remedy):
    with pytest.raises(ConfigError) as caught:
        config_class(**settings)
    assert str(caught.value).startswith(start) and remedy in str(caught.value)


def test_every_number_has_a_range_and_is_known_to_tasks():
    own = set(field_names(IACConfig)) | set(field_names(MAACConfig))
    own -= set(field_names(TrainerConfig))
    hints = typing.get_type_hints(IACConfig) | typing.get_type_hints(MAACConfig)
    assert {name for name in own if {int, float} & set(alternatives(hints[name]))} <= set(RANGES)
    assert own <= known_fields()


def test_each_algorithm_has_its_own_settings():
    independent, centralized = set(field_names(IACConfig)), set(field_names(MAACConfig))
    assert independent - centralized == {"use_separate_critic", "value_loss_coef"}
    assert centralized - independent == {"counterfactual_baseline"}
    with pytest.raises(ConfigError, match="there is no such setting"):
        MAACConfig(use_separate_critic=False)


def test_defaults():
    for config in (IACConfig(), MAACConfig()):
        assert (config.critic_type, config.gae_lambda, config.value_clip_range) == ("v", 0.95, None)
        assert config.advantage_normalization == "batch" and config.check() == []
        assert critic_learning_rate(config) == 1e-4 and warmup_rollouts(config) == 0
    assert (IACConfig().use_separate_critic, IACConfig().value_loss_coef) == (True, 0.5)
    assert critic_learning_rate(MAACConfig(tuning="full")) == 1e-5
    assert critic_learning_rate(MAACConfig(critic_learning_rate=0.0)) == 0.0
    assert warmup_rollouts(MAACConfig(critic_type="q")) == 10
    assert warmup_rollouts(MAACConfig(critic_type="q", critic_warmup_rollouts=0)) == 0


def test_normalization_on_is_that_of_the_batch():
    assert MAACConfig(advantage_normalization=True).advantage_normalization == "batch"
    assert MAACConfig(advantage_normalization=False).advantage_normalization == "none"
    config = IACConfig()
    config.advantage_normalization = True
    config.check()
    assert config.advantage_normalization == "batch"


def test_one_generation_is_enough_for_v():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for joint_mode in ("aligned", "cross"):
            assert MAACConfig(num_generations=1, num_turns=3, joint_mode=joint_mode).num_generations == 1


@pytest.mark.parametrize(
    ("config_class", "settings", "named"),
    [
        (MAACConfig, {"top_p": 0.9}, "top_p=0.9"),
        (IACConfig, {"top_k": 5}, "top_k=5"),
        (IACConfig, {"value_loss_coef": 0.1}, "value_loss_coef=0.1"),
        (
            MAACConfig,
            {"counterfactual_baseline": True, "critic_type": "q", "joint_mode": "cross"},
            "counterfactual_baseline=True",
        ),
        (MAACConfig, {"loss_aggregation": "sequence_mean"}, "sequence_mean"),
        (MAACConfig, {"num_updates_per_rollout": 8, "clip_range": 0.2}, "value_clip_range"),
    ],
)
def test_doubtful_settings_warn_once(config_class, settings, named):
    with pytest.warns(UserWarning) as caught:
        config_class(**settings)
    assert len(caught) == 1 and named in str(caught[0].message)
