"""Every wrong setting gives one error that names the field, the value and what would be right."""

import copy
import dataclasses
import pickle
import typing
import warnings

import pytest

from mlrl import config_rules, config_team
from mlrl.config import (
    EvaluationConfig,
    MAGRPOConfig,
    MAREINFORCEConfig,
    MAReMaxConfig,
    MARLOOConfig,
    TrainerConfig,
    field_names,
    known_fields,
)
from mlrl.config_checks import RANGES, alternatives
from mlrl.config_file import dump_config, read_config
from mlrl.config_preference import DPOArguments, PreferenceArguments, RewardModelArguments
from mlrl.errors import ConfigError
from tests.test_config_critics import OUT_OF_RANGE as CRITICS_OUT_OF_RANGE

# field, wrong value, part of the remedy
OUT_OF_RANGE = [
    ("ranks_per_agent", [2, 0], "1 or more"),
    ("reference_ranks", 0, "agents, or 1 or more"),
    ("num_agents", 0, "1 or more"),
    ("lora_rank", 0, "1 or more"),
    ("lora_alpha", 0, "above 0"),
    ("lora_dropout", 1.0, "from 0 to below 1"),
    ("lora_dropout", -0.1, "from 0 to below 1"),
    ("num_turns", 0, "1 or more"),
    ("max_new_tokens", 0, "1 or more"),
    ("max_prompt_tokens", 0, "leave it out"),
    ("temperature", 0, "eval_temperature=0"),
    ("temperature", -1.0, "above 0"),
    ("top_p", 0.0, "at most 1"),
    ("top_p", 1.1, "at most 1"),
    ("top_k", -1, "0 (off) or more"),
    ("discount", 1.01, "from 0 to 1"),
    ("discount", -0.1, "from 0 to 1"),
    ("max_rollout_rows", 0, "1 or more"),
    ("reward_timeout", 0, "seconds, above 0"),
    ("reward_processes", -1, "0 (a thread of this process)"),
    ("num_generations", 0, "1 or more"),
    ("num_generations", -3, "1 or more"),
    ("rollout_batch_size", 0, "1 or more"),
    ("agent_learning_rate", -1e-5, "0 or more"),
    ("agent_learning_rate", [1e-5, -1e-5], "0 or more"),
    ("num_train_epochs", 0, "1 or more"),
    ("max_steps", -1, "leave it out"),
    ("train_batch_size", 0, "leave it out"),
    ("micro_batch_tokens", 0, "1 or more"),
    ("num_updates_per_rollout", 0, "1 or more"),
    ("max_grad_norm", 0.0, "None for no clipping"),
    ("warmup_steps", -1, "0 or more"),
    ("weight_decay", -0.1, "0 or more"),
    ("adam_beta1", 1.0, "from 0 to below 1"),
    ("adam_beta2", -0.1, "from 0 to below 1"),
    ("max_nonfinite_steps", 0, "1 or more"),
    ("clip_range", 0.0, "None for no clipping"),
    ("clip_range", 1.0, "between 0 and 1"),
    ("clip_range_high", 0.0, "above 0"),
    ("dual_clip", 1.0, "above 1"),
    ("target_kl", 0.0, "None for off"),
    ("entropy_coef", -0.1, "0 or more"),
    ("reference_kl_coef", -0.1, "0 (off) or more"),
    ("eval_num_samples", -1, "0 (no evaluation)"),
    ("eval_num_generations", 0, "1 or more"),
    ("eval_batch_size", 0, "leave it out"),
    ("eval_temperature", -0.1, "0 (greedy)"),
    ("eval_interval", -1, "0 (only by hand)"),
    ("logging_steps", 0, "1 or more"),
    ("completions_steps", -1, "0 (never)"),
    ("save_steps", -1, "0 (no checkpoints)"),
    ("save_total_limit", 0, "1 or more, or None"),
    ("vllm_start_timeout", 0, "above 0"),
    ("vllm_timeout", 0, "above 0"),
    ("vllm_max_retries", -1, "0 or more"),
    ("vllm_max_concurrency", 0, "1 or more"),
    ("async_rollouts", 2, "1 for one step ahead"),
    ("rollout_is_cap", 0.0, "None for no weights"),
    ("rollout_kl_limit", 0.0, "None for no limit"),
    ("vllm_url", [], "leave it out"),
    ("seed", -1, "from 0 to"),
    ("seed", 2**32, "from 0 to"),
    ("discount", float("nan"), "ordinary number"),
    ("early_termination_threshold", float("inf"), "ordinary number"),
    ("agent_model", " ", "leave it out"),
    ("agents", [], "leave it out"),
    ("agents", ["a", ""], "leave it out"),
    ("output_dir", "", "leave it out"),
    ("report_to", [], "leave it out"),
    ("lora_target_modules", [], "leave it out"),
    ("run_name", "a/b", "output_dir"),
    ("run_name", "..", "output_dir"),
]

UNKNOWN_WORD = [
    ("attn_implementation", "flash_attention_2", "sdpa or eager"),
    ("tuning", "qlora", "lora or full"),
    ("dtype", "float64", "float32 or bfloat16"),
    ("dtype", "float16", "Use bfloat16"),
    ("joint_mode", "crossed", "Did you mean 'cross'?"),
    ("early_termination_scope", "branch", "node or joint"),
    ("placement", "splitted", "Did you mean 'split'?"),
    ("reference_ranks", "agent", "Did you mean 'agents'?"),
    ("collaboration_mode", "central", "Did you mean 'centralized'?"),
    ("lr_scheduler", "cosin", "Did you mean 'cosine'?"),
    ("advantage_mode", "grpo", "raw, mean, rloo, max or greedy"),
    ("advantage_normalization", "group", "none, node or batch, or True or False"),
    ("turn_weighting", "flat", "objective, undiscounted or node"),
    ("loss_aggregation", "sum", "sequence_sum, token_mean, constant or sequence_mean"),
    ("importance_level", "tokens", "Did you mean 'token'?"),
    ("rollout_backend", "vlm", "Did you mean 'vllm'?"),
    ("report_to", "mlflow", "none, wandb, tensorboard or trackio"),
    ("report_to", ["wandb", "tensorbord"], "Did you mean 'tensorboard'?"),
]

WRONG_TYPE = [
    ("num_generations", "4", "a whole number"),
    ("num_generations", 4.0, "a whole number"),
    ("num_generations", True, "a whole number"),
    ("num_generations", None, "a whole number"),
    ("temperature", "1.0", "a number"),
    ("temperature", False, "a number"),
    ("share_parameters", "false", "True or False"),
    ("share_parameters", 1, "True or False"),
    ("agents", "gpt2", "a list (a text each), or None"),
    ("agents", [1, 2], "a list (a text each), or None"),
    ("agent_model", 3, "a text, or None"),
    ("agent_learning_rate", "1e-4", "a number, or a list (a number each), or None"),
    ("agent_learning_rate", [1e-4, "1e-4"], "a list (a number each)"),
    ("joint_mode", 1, "aligned or cross"),
    ("lora_target_modules", 7, "a text, or a list"),
    ("wandb_tags", "a", "a list (a text each), or None"),
]

# other settings, field named, its value, part of the remedy
COMBINATIONS = [
    ({"ranks_per_agent": [1, 1]}, "ranks_per_agent", [1, 1], "Set placement to split"),
    (
        {"placement": "split", "ranks_per_agent": [1, 1], "num_agents": 3},
        *("ranks_per_agent", [1, 1], "one an agent"),
    ),
    ({"placement": "split", "share_parameters": True}, "placement", "split", "Leave one of them out"),
    ({"reward_fallback": 0.0}, "reward_fallback", 0.0, "Set reward_timeout or reward_processes"),
    ({"reference_ranks": 1}, "reference_ranks", 1, "leave reference_ranks out"),
    ({"collaboration_mode": "centralized", "num_turns": 2}, "collaboration_mode", "centralized", "Set num_turns to 1"),
    (
        {"collaboration_mode": "centralized", "agents": ["a", "b"]},
        *("collaboration_mode", "centralized", "Give one agent_model"),
    ),
    ({"advantage_mode": "mean", "num_generations": 1}, "num_generations", 1, "raw or greedy"),
    ({"advantage_mode": "rloo", "num_generations": 1}, "num_generations", 1, "2 or more"),
    ({"advantage_mode": "max", "num_generations": 1}, "num_generations", 1, "2 or more"),
    ({"num_generations": 1, "advantage_normalization": "node"}, "num_generations", 1, "normalization none"),
    ({"num_generations": 1, "advantage_normalization": "batch"}, "num_generations", 1, "normalization none"),
    ({"num_generations": 1, "advantage_normalization": True}, "num_generations", 1, "normalization none"),
    ({"top_p": 0.9}, "top_p", 0.9, "Set top_p to 1"),
    ({"top_k": 50}, "top_k", 50, "top_k to 0"),
    ({"loss_aggregation": "sequence_mean"}, "loss_aggregation", "sequence_mean", "sequence_sum"),
    ({"num_updates_per_rollout": 2}, "num_updates_per_rollout", 2, "Set clip_range"),
    ({"train_batch_size": 3, "rollout_batch_size": 4}, "train_batch_size", 3, "Set clip_range"),
    # 2 turns, aligned K=3: 2 items x (1 + 3) nodes = 8
    (
        {"train_batch_size": 7, "rollout_batch_size": 2, "num_turns": 2, "num_generations": 3},
        "train_batch_size",
        7,
        "8 nodes",
    ),
    # 2 turns, cross, K=2, N=3: 1 item x (1 + 2^3) nodes = 9
    (
        {
            "train_batch_size": 8,
            "rollout_batch_size": 1,
            "num_turns": 2,
            "num_generations": 2,
            "joint_mode": "cross",
            "num_agents": 3,
        },
        "train_batch_size",
        8,
        "9 nodes",
    ),
    ({"clip_range_high": 0.3}, "clip_range_high", 0.3, "Set clip_range"),
    ({"dual_clip": 3.0}, "dual_clip", 3.0, "Set clip_range"),
    ({"importance_level": "sequence"}, "importance_level", "sequence", "Set clip_range"),
    ({"lora_dropout": 0.1}, "lora_dropout", 0.1, "lora_dropout to 0"),
    ({"agent_model": "a", "agents": ["a", "b"]}, "agent_model", "a", "one model for all"),
    ({"agents": ["a", "b"], "num_agents": 3}, "num_agents", 3, "Give 2"),
    ({"agents": ["a", "b"], "share_parameters": True}, "share_parameters", True, "one agent_model"),
    ({"agents": ["a", "b"], "agent_learning_rate": [1e-4]}, "agent_learning_rate", [1e-4], "one an agent"),
    ({"num_agents": 3, "agent_learning_rate": [1e-4, 1e-5]}, "agent_learning_rate", [1e-4, 1e-5], "one an agent"),
    ({"share_parameters": True, "agent_learning_rate": [1e-4, 1e-5]}, "agent_learning_rate", [1e-4, 1e-5], "one value"),
    ({"report_to": ["none", "wandb"]}, "report_to", ["none", "wandb"], "Drop none"),
    ({"vllm_url": ["http://a:1"]}, "vllm_url", ["http://a:1"], "Set rollout_backend to vllm"),
    ({"vllm_spawn": True}, "vllm_spawn", True, "Set rollout_backend to vllm"),
    ({"async_rollouts": 1}, "async_rollouts", 1, "Set rollout_backend to vllm"),
    (
        {"async_rollouts": 1, "rollout_backend": "vllm", "vllm_url": ["http://a:1"], "rollout_is_cap": None},
        *("rollout_is_cap", None, "2.0 as a rule"),
    ),
    ({"rollout_backend": "vllm"}, "vllm_url", None, "or set vllm_spawn"),
    (
        {"rollout_backend": "vllm", "vllm_url": ["http://a:1"], "vllm_spawn": True},
        *("vllm_url", ["http://a:1"], "Give one of the two"),
    ),
    (
        {"rollout_backend": "vllm", "vllm_url": ["http://a:1"], "vllm_devices": ["0"]},
        *("vllm_devices", ["0"], "Set vllm_spawn"),
    ),
    ({"rollout_backend": "vllm", "vllm_url": ["a:1"]}, "vllm_url", ["a:1"], "such as http://localhost:8000"),
    (
        {"rollout_backend": "vllm", "vllm_url": ["http://a:1", "http://a:1"]},
        *("vllm_url", ["http://a:1", "http://a:1"], "Give each once"),
    ),
    ({"agent_model": "./no/such"}, "agent_model", "./no/such", "hub id"),
    ({"agents": ["gpt2", "/no/such"]}, "agents", ["gpt2", "/no/such"], "hub id"),
    ({"reference_model": "/no/such", "reference_kl_coef": 0.1}, "reference_model", "/no/such", "hub id"),
]


def assert_names(error: ConfigError, field: str, value: object, remedy: str) -> None:
    message = str(error)
    assert message.startswith(f"{field}={value!r}: "), message
    assert remedy in message, message
    assert message.endswith((".", "?")) and message.count(". ") >= 1, message


@pytest.mark.parametrize(("field", "value", "remedy"), OUT_OF_RANGE + UNKNOWN_WORD + WRONG_TYPE)
def test_a_wrong_value_names_field_value_and_remedy(field, value, remedy):
    with pytest.raises(ConfigError) as caught:
        MAREINFORCEConfig(**{field: value})
    assert_names(caught.value, field, value, remedy)


@pytest.mark.parametrize(("settings", "field", "value", "remedy"), COMBINATIONS)
def test_a_wrong_combination_names_field_value_and_remedy(settings, field, value, remedy):
    with pytest.raises(ConfigError) as caught:
        MAREINFORCEConfig(**settings)
    assert_names(caught.value, field, value, remedy)


def test_the_tables_cover_every_range_and_every_set_of_words():
    elsewhere = {
        name for group in (PreferenceArguments, DPOArguments, RewardModelArguments) for name in field_names(group)
    }
    here = {field for field, *_ in OUT_OF_RANGE + CRITICS_OUT_OF_RANGE}
    assert here >= set(RANGES) - elsewhere  # those are in test_config_preference
    hints = {name: hint for name, hint in typing.get_type_hints(TrainerConfig).items() if name != "sources"}
    with_words = {
        name for name, hint in hints.items() if any(typing.get_origin(o) is typing.Literal for o in alternatives(hint))
    }
    assert {field for field, *_ in UNKNOWN_WORD} == with_words
    numbers = {name for name, hint in hints.items() if {int, float} & set(alternatives(hint))}
    assert numbers - set(RANGES) == {"early_termination_threshold", "reward_fallback"}  # any finite reward will do
    assert set(RANGES) <= known_fields()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lora_dropout", 0.0),
        ("top_p", 1),
        ("discount", 0),
        ("discount", 1),
        ("agent_learning_rate", 0.0),
        ("agent_learning_rate", [1e-4, 0.0]),
        ("max_grad_norm", None),
        ("max_steps", None),
        ("eval_num_samples", 0),
        ("eval_num_samples", None),
        ("eval_temperature", 0),
        ("eval_interval", 0),
        ("seed", 0),
        ("seed", 2**32 - 1),
        ("clip_range", 0.999),
        ("num_generations", 1),
        ("train_batch_size", 4),  # all 4 nodes of a step in one update
        ("agent_model", "owner/model"),
        ("agent_model", "/"),
        ("early_termination_threshold", -0.2),
    ],
)
def test_values_at_the_edge_are_right(field, value):
    assert getattr(MAREINFORCEConfig(**{field: value}), field) == value


def test_unknown_names_suggest_the_closest():
    with pytest.raises(ConfigError, match="num_generation: there is no such setting. Did you mean 'num_generations'"):
        MAGRPOConfig(num_generation=4)
    with pytest.raises(ConfigError, match="--help"):
        MAGRPOConfig(xyzzy=4)


def test_values_take_one_normal_form():
    config = MAGRPOConfig(
        temperature=1,
        agents=("a", "b"),
        report_to="wandb",
        lora_target_modules="q_proj",
        lora_alpha=8,
        wandb_project="p",
    )
    assert isinstance(config.temperature, float)
    assert config.agents == ["a", "b"]
    assert config.report_to == ["wandb"]
    assert config.lora_target_modules == ["q_proj"]
    assert isinstance(config.lora_alpha, float)
    assert MAGRPOConfig(advantage_normalization=True).advantage_normalization == "node"
    assert MAGRPOConfig(advantage_normalization=False).advantage_normalization == "none"
    assert MAGRPOConfig().lora_target_modules == "all-linear"
    assert MAGRPOConfig(lora_target_modules=r".*\.q_proj").lora_target_modules == r".*\.q_proj"
    assert not MAGRPOConfig(output_dir="~/x").output_dir.startswith("~")


def test_algorithms_differ_only_in_baseline_and_normalization():
    configs = {c: c() for c in (MAREINFORCEConfig, MAGRPOConfig, MARLOOConfig, MAReMaxConfig)}
    assert [(c.advantage_mode, c.advantage_normalization) for c in configs.values()] == [
        ("raw", "none"),
        ("mean", "node"),
        ("rloo", "none"),
        ("max", "none"),
    ]
    for config_class, config in configs.items():
        assert field_names(config_class) == field_names(TrainerConfig)
        for name in set(field_names(TrainerConfig)) - {"advantage_mode", "advantage_normalization"}:
            assert getattr(config, name) == getattr(TrainerConfig(), name)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"top_k": 20}, "top_k=20"),
        ({"clip_range": 0.2, "importance_level": "sequence"}, "clip_range=0.2"),
        ({"clip_range": 0.2, "target_kl": 0.1}, "target_kl=0.1"),
        ({"reference_model": "a/b"}, "reference_model='a/b'"),
        ({"wandb_project": "p"}, "wandb_project='p'"),
        # 4 items x (1 + 10 + 100 + 1000 + 10000) nodes x 10 responses x 2 agents > 100 000
        ({"num_turns": 5, "num_generations": 10, "num_agents": 2}, "888880 responses"),
    ],
)
def test_doubtful_settings_warn_once(settings, named):
    with pytest.warns(UserWarning) as caught:
        config = MAGRPOConfig(**settings)
    assert len(caught) == 1 and named in str(caught[0].message)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config.check()  # a trainer's second look does not warn again


def test_check_sees_fields_that_were_set_later_and_the_team_of_the_caller():
    config = MAGRPOConfig()
    config.num_generations = 0
    with pytest.raises(ConfigError, match="num_generations=0"):
        config.check()
    with pytest.raises(ConfigError, match="num_agents=3"):
        MAGRPOConfig(num_agents=3).check(num_agents=2)
    # cross with K=2: with one agent 1 + 2 = 3 nodes fit in one update, with two 1 + 4 = 5 do not
    config = MAGRPOConfig(joint_mode="cross", num_generations=2, num_turns=2, rollout_batch_size=1, train_batch_size=3)
    config.check(num_agents=1)
    with pytest.raises(ConfigError, match="5 nodes"):
        config.check(num_agents=2)


def test_configs_copy_and_pickle():
    config = MAGRPOConfig(num_generations=3)
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, num_generations=5).num_generations == 5


def test_team_models():
    assert config_team.team_models(MAGRPOConfig(), agent_model="m") == ["m", "m"]
    assert config_team.team_models(MAGRPOConfig(agent_model="m"), num_agents=3) == ["m"] * 3
    assert config_team.team_models(MAGRPOConfig(agents=["a", "b", "c"])) == ["a", "b", "c"]
    model = object()
    assert config_team.team_models(MAGRPOConfig(), agents=[model, "b"]) == [model, "b"]
    assert config_team.team_models(MAGRPOConfig(agent_model="m", num_agents=1), agent_model="m", num_agents=1) == ["m"]


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ({}, {}, "agent_model=None: there is no model"),
        ({"num_agents": 2}, {"agent_model": "m", "num_agents": 3}, "num_agents=3: the config says num_agents=2"),
        ({"agent_model": "a"}, {"agent_model": "b"}, "agent_model='b': the config says agent_model='a'"),
        ({"agent_model": "a"}, {"agents": ["a", "b"]}, "agent_model='a': agents is given too"),
        ({}, {"agents": ["a", "b"], "num_agents": 3}, "num_agents=3: agents has 2"),
        ({"num_agents": 3}, {"agents": ["a", "b"]}, "num_agents=3: agents has 2"),
        ({}, {"agents": "ab"}, "agents='ab': is not a list of models"),
        ({}, {"agents": []}, r"agents=\[\]: is not a list of models"),
        ({}, {"agent_model": "m", "num_agents": 0}, "num_agents=0: is out of range"),
        ({}, {"agent_model": "m", "num_agents": "2"}, "num_agents='2': has the wrong type"),
    ],
)
def test_team_models_disagree(config, arguments, message):
    with pytest.raises(ConfigError, match=message):
        config_team.team_models(MAGRPOConfig(**config), **arguments)


def test_agent_learning_rates():
    assert config_team.agent_learning_rates(MAGRPOConfig(), 2) == [1e-4, 1e-4]
    assert config_team.agent_learning_rates(MAGRPOConfig(tuning="full"), 3) == [1e-5] * 3
    assert config_team.agent_learning_rates(MAGRPOConfig(agent_learning_rate=[1e-3, 0.0]), 2) == [1e-3, 0.0]
    with pytest.raises(ConfigError, match="has 2 values for 3 agents"):
        config_team.agent_learning_rates(MAGRPOConfig(agent_learning_rate=[1e-3, 0.0]), 3)


def test_evaluation_config(tmp_path):
    run = tmp_path / "run"
    for i in (0, 1):
        (run / "agents" / f"agent_{i}").mkdir(parents=True)
    (run / "agents" / "agent_0" / "adapter_config.json").write_text("{}")
    agents_dir = str(run / "agents")
    EvaluationConfig(agents_dir=agents_dir, num_agents=2)
    for settings, message in [
        ({"agents_dir": str(run)}, f"Give {agents_dir}"),
        ({"agents_dir": str(tmp_path / "none")}, "there is no such folder"),
        ({"agents_dir": str(tmp_path)}, "there is no folder agent_0 in it"),
        ({"agents_dir": str(run / "agents" / "agent_0")}, "is one agent .* --agents .*agent_0, or the folder"),
        ({"agents_dir": agents_dir, "agent_model": "m"}, "agent_model='m' is given too"),
        ({"agents_dir": agents_dir, "agents": ["m"]}, "is given too"),
        ({"agents_dir": agents_dir, "num_agents": 3}, "num_agents=3: .* holds 2 agents"),
        ({"temperature": 0}, "eval_temperature=0"),
        ({"num_generations": 4}, "num_generations: there is no such setting. Did you mean 'eval_num_generations'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            EvaluationConfig(**settings)
    (run / "agents" / "agent_3").mkdir()
    with pytest.raises(ConfigError, match="agent_2 is missing"):
        EvaluationConfig(agents_dir=agents_dir)


def test_run_folder_must_be_new_and_writable(tmp_path):
    config_rules.check_run_folder(str(tmp_path / "a" / "b"), "new")
    (tmp_path / "old").mkdir()
    with pytest.raises(ConfigError, match=r"run_name='old': .* exists already. Give another run_name"):
        config_rules.check_run_folder(str(tmp_path), "old")
    with pytest.raises(ConfigError, match="delete it: it has no checkpoint"):
        config_rules.check_run_folder(str(tmp_path), "old")
    (tmp_path / "old/checkpoints/checkpoint-2").mkdir(parents=True)
    with pytest.raises(ConfigError, match="--resume_from_checkpoint latest to go on with it"):
        config_rules.check_run_folder(str(tmp_path), "old")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output_dir='.*file/x': nothing can be written in"):
        config_rules.check_run_folder(str(tmp_path / "file" / "x"), "new")


@pytest.mark.parametrize("name", ["my_agents/agent_0", "a/b/c", "./x"])
def test_a_folder_that_is_not_there_is_no_hub_id(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_agents").mkdir()
    with pytest.raises(ConfigError, match=f"agents=.*: there is no folder {name}"):
        MAGRPOConfig(agents=[name, "org/model"])


def test_the_config_of_a_run_starts_another_one(tmp_path):
    config = MAGRPOConfig(agent_model="org/model", run_name="first", resume_from_checkpoint="latest", seed=7)
    dump_config(config, {"run_name": "flag"}, tmp_path / "config.yaml")
    again = read_config(tmp_path / "config.yaml")
    assert again["seed"] == 7 and not {"run_name", "resume_from_checkpoint", "allow_changed", "record"} & set(again)
