"""Every wrong setting of preference learning gives one error that names the field, the value and what is right."""

import typing
import warnings
from dataclasses import dataclass

import pytest

from mlrl.config import CheckedConfig, TrainerConfig, field_names, known_fields
from mlrl.config_checks import RANGES, alternatives
from mlrl.config_preference import (
    DPOArguments,
    PreferenceArguments,
    RewardModelArguments,
    check_dpo,
    check_preferences,
    check_reward_model,
    history_k,
    num_comparator_candidates,
    reward_learning_rate,
)
from mlrl.errors import ConfigError

GROUPS = (PreferenceArguments, DPOArguments, RewardModelArguments)
KEY = "sk-planted-5f2c9e"
URL = "https://host/v1/chat/completions"


@dataclass(kw_only=True)
class Config(*reversed(GROUPS), TrainerConfig, CheckedConfig):
    """All settings of preference learning with those of a trainer."""

    def check(self, num_agents=None):
        doubts = super().check(num_agents)
        return [*doubts, *check_preferences(self, num_agents), *check_dpo(self), *check_reward_model(self)]


OUT_OF_RANGE = [
    ("num_iterations", -1, "0 (pairs are collected once)"),
    ("preference_num_candidates", 0, "1 or more"),
    ("preference_pairs_per_sample", 0, "None for all"),
    ("label_smoothing", 0.5, "below 0.5"),
    ("label_smoothing", -0.1, "below 0.5"),
    ("comparator_num_candidates", 0, "leave it out"),
    ("comparator_ranks", 0, "agents, or 1 or more"),
    ("reward_model_ranks", 0, "agents, or 1 or more"),
    ("comparator_history_k", 0, "the round before"),
    ("comparator_api_max_n_per_request", 0, "leave it out"),
    ("comparator_api_timeout", 0, "above 0"),
    ("comparator_api_max_retries", -1, "0 or more"),
    ("comparator_api_max_concurrency", 0, "1 or more"),
    ("comparator_api_max_requests", 0, "None for no limit"),
    ("preference_replay_k", 0, "leave it out"),
    ("preference_replay_lambda", 1.1, "from 0 to 1"),
    ("preference_replay_lambda", -0.1, "from 0 to 1"),
    ("preference_replay_sample_size", 0, "leave it out"),
    ("dpo_beta", 0.0, "above 0"),
    ("rpo_alpha", -1.0, "0 or more"),
    ("reward_learning_rate", -1e-5, "0 or more"),
    ("reward_num_train_epochs", 0, "1 or more"),
    ("reward_train_batch_size", 0, "1 or more"),
    ("reward_max_length", 0, "leave it out"),
    ("reward_validation_fraction", 1.0, "below 1"),
]

WRONG_WORD = {
    "pair_selection": "gap",
    "comparator_policy": "previous",
    "comparator_generation_mode": "joint",
    "comparator_api_format": "open_ai",
    "preference_replay_mode": "latest",
    "rl_algorithm": "ppo",
    "reward_pooling": "max",
    "comparator_ranks": "all",
    "reward_model_ranks": "all",
}

# settings, message
IMPOSSIBLE = [
    ({"preference_num_candidates": 1}, "preference_num_candidates=1: a pair is made of two"),
    ({"pair_selection": "comparator_reward"}, "pair_selection='comparator_reward': without iterations"),
    ({"comparator_ranks": 1}, "comparator_ranks=1: only another model"),
    *(
        ({"comparator_policy": word, "comparator_api_url": url, "comparator_ranks": 2}, "comparator_ranks=2: only ano")
        for word, url in (("current_copy", None), ("history", None), ("api", URL))
    ),
    ({"comparator_policy": "model"}, "comparator_policy='model': names no model"),
    (
        {"comparator_policy": "model", "comparator_model_name": "a/b", "comparator_agents": ["a/b"]},
        "comparator_model_name='a/b': comparator_agents=.* is given too",
    ),
    ({"comparator_policy": "model", "comparator_agents": ["a"] * 3, "num_agents": 2}, "3 models for 2 agents"),
    (
        {"comparator_policy": "model", "comparator_agents": ["a"], "comparator_generation_mode": "centralized"},
        "comparator_agents=.*one model writes all",
    ),
    ({"comparator_policy": "model", "comparator_model_name": "./absent"}, "comparator_model_name='./absent': there"),
    ({"comparator_generation_mode": "centralized"}, "comparator_generation_mode='centralized': .*'current'"),
    ({"comparator_history_k": 2}, "comparator_history_k=2: comparator_policy='current' has no history"),
    ({"comparator_model_name": "a/b"}, "comparator_model_name='a/b': comparator_policy='current' uses no other"),
    ({"comparator_agents": ["a/b"]}, "comparator_agents=.*comparator_policy='current' uses no other"),
    ({"comparator_api_url": URL}, "comparator_api_url: comparator_policy='current' asks no server"),
    ({"comparator_policy": "api"}, "comparator_api_url=None"),
    ({"comparator_policy": "api", "comparator_api_url": "host/v1"}, "comparator_api_url='host/v1': is no HTTP address"),
    (
        {"comparator_policy": "api", "comparator_api_url": URL, "comparator_api_format": "openai"},
        "comparator_api_model=None: format openai needs one",
    ),
    ({"preference_replay_mode": "nearest_k"}, "preference_replay_k=None"),
    ({"preference_replay_mode": "lambda_decay"}, "preference_replay_lambda=None"),
    ({"preference_replay_k": 2}, "preference_replay_k=2: preference_replay_mode='current' does not use it"),
    (
        {"preference_replay_mode": "all_history", "preference_replay_lambda": 0.5},
        "preference_replay_lambda=0.5: .*Set preference_replay_mode to lambda_decay",
    ),
    ({"preference_replay_sample_size": 5}, "preference_replay_sample_size=5: preference_replay_mode='current'"),
    ({"preference_replay_from": "runs/a"}, "preference_replay_from='runs/a': preference_replay_mode='current'"),
    (
        {"preference_replay_from": "absent", "preference_replay_mode": "all_history"},
        "preference_replay_from='absent': there is no such folder",
    ),
    ({"reward_model_name": "/absent"}, "reward_model_name='/absent'"),
]  # fmt: skip


def make(**settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Config(agent_model="m", **settings)


@pytest.mark.parametrize(("field", "value", "remedy"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_named(field, value, remedy):
    with pytest.raises(ConfigError) as caught:
        make(**{field: value})
    assert str(caught.value).startswith(f"{field}={value!r}: is out of range.")
    assert remedy in str(caught.value)


@pytest.mark.parametrize(("field", "word"), WRONG_WORD.items())
def test_an_unknown_word_is_named(field, word):
    with pytest.raises(ConfigError, match=f"{field}='{word}': unknown word.*Use "):
        make(**{field: word})


def test_the_tables_cover_all_numbers_and_words():
    hints = {name: hint for group in GROUPS for name, hint in typing.get_type_hints(group).items()}
    numbers = {name for name, hint in hints.items() if {int, float} & set(alternatives(hint))}
    assert numbers == {field for field, *_ in OUT_OF_RANGE}
    assert numbers <= set(RANGES)
    words = {n for n, hint in hints.items() if any(typing.get_origin(o) is typing.Literal for o in alternatives(hint))}
    assert words == set(WRONG_WORD)
    assert known_fields() >= {name for group in GROUPS for name in field_names(group)}


@pytest.mark.parametrize(("settings", "message"), IMPOSSIBLE)
def test_what_cannot_work_is_said(settings, message):
    with pytest.raises(ConfigError, match=message):
        make(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"comparator_api_url": f"https://me:{KEY}@host/v1"},
        {"comparator_api_url": f"https://host/v1?api_key={KEY}"},
        {"comparator_api_url": URL, "comparator_api_headers": {"X-Api-Key": KEY}},
        {"comparator_api_url": URL, "comparator_api_extra_body": {"auth": {"token": KEY}}},
    ],
)
def test_a_secret_is_refused_and_not_repeated(settings):
    with pytest.raises(ConfigError, match="holds a secret") as caught:
        make(num_iterations=1, comparator_policy="api", **settings)
    assert KEY not in str(caught.value)


def test_there_is_no_setting_for_the_key_itself():
    with pytest.raises(
        ConfigError, match="comparator_api_key: there is no such setting.*comparator_api_key_env"
    ) as caught:
        make(comparator_api_key=KEY)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_iterations": 3, "preference_num_candidates": 1, "pair_selection": "comparator_reward"},
        {"num_iterations": 3, "comparator_policy": "history", "comparator_history_k": 2},
        {"num_iterations": 3, "comparator_policy": "model", "comparator_model_name": "a/b",
         "comparator_generation_mode": "centralized"},
        {"num_iterations": 3, "comparator_policy": "model", "comparator_agents": ["a", "b"], "num_agents": 2},
        {"num_iterations": 3, "comparator_policy": "api", "comparator_api_url": URL, "comparator_api_format": "openai",
         "comparator_api_model": "m", "comparator_api_extra_body": {"max_tokens": None, "max_completion_tokens": 9}},
        {"num_iterations": 3, "preference_replay_mode": "nearest_k", "preference_replay_k": 2},
        {"num_iterations": 3, "preference_replay_mode": "lambda_decay", "preference_replay_lambda": 0,
         "preference_replay_sample_size": 64},
    ],
)  # fmt: skip
def test_what_works_is_taken_without_a_word(settings):
    make(**settings)


@pytest.mark.parametrize(
    ("settings", "doubt"),
    [
        ({"dpo_reference": False}, "length"),
        ({"num_iterations": 1, "comparator_num_candidates": 2}, "only the first 2 of both"),
        ({"comparator_policy": "history"}, "no effect while num_iterations is 0"),
        ({"preference_replay_mode": "all_history"}, "no effect while num_iterations is 0"),
    ],
)
def test_what_is_doubtful_warns(settings, doubt):
    with pytest.warns(UserWarning, match=doubt):
        Config(agent_model="m", **settings)


def test_an_earlier_run_is_taken(tmp_path):
    folder = str(tmp_path)
    assert make(
        num_iterations=1, preference_replay_mode="all_history", preference_replay_from=folder
    ).preference_replay_from == folder  # fmt: skip


def test_defaults_are_filled_in():
    config = make(num_iterations=1)
    assert (num_comparator_candidates(config), history_k(config), reward_learning_rate(config)) == (4, 1, 1e-4)
    config = make(num_iterations=1, tuning="full", reward_learning_rate=3e-5)
    assert reward_learning_rate(config) == 3e-5
