"""Bad input to a trainer and to an evaluation: one clear error, before any weights are read.

The model folder here holds a config and a tokenizer but no weights, so what gets as far as reading them fails with
another message than the one that a test wants.
"""

import json

import pytest
import torch

from mlrl import ConfigError, Task, TaskError
from mlrl.trainers import EvaluationConfig, MAGRPOConfig, MAGRPOTrainer, MAREINFORCEConfig, evaluate_team
from tests.tiny import save_tiny, tiny_config, tiny_tokenizer

ROWS = [{"prompt": "Tell me about the sea."}, {"prompt": "Tell me about the town."}]


def reward(first, second):
    return [float(len(a) > len(b)) for a, b in zip(first, second, strict=True)]


@pytest.fixture(scope="module")
def weightless(tmp_path_factory) -> dict[str, str]:
    """Model folders without weights, by kind of tiny model."""
    folders = {}
    for kind, architecture in (
        ("llama", "LlamaForCausalLM"),
        ("gpt2", "GPT2LMHeadModel"),
        ("qwen2", "Qwen2ForCausalLM"),
    ):
        folder = tmp_path_factory.mktemp("weightless") / kind
        tiny_config(kind).save_pretrained(folder)
        content = json.loads((folder / "config.json").read_text())
        content["architectures"] = [architecture]
        (folder / "config.json").write_text(json.dumps(content))
        tiny_tokenizer(kind).save_pretrained(folder)
        folders[kind] = str(folder)
    return folders


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make(folder: str, settings: dict | None = None, config=MAGRPOConfig, **arguments):
    """A trainer that is right but for its weights, and for what is changed here."""
    arguments = {"agent_model": folder, "reward_func": reward, "train_dataset": ROWS} | arguments
    settings = {"max_new_tokens": 16, "num_generations": 2} | (settings or {})
    return MAGRPOTrainer(**arguments, args=config(**settings))


def test_without_a_fault_it_is_the_weights_that_fail(weightless):
    with pytest.raises(ConfigError, match="agent_model=.*weights cannot be loaded"):
        make(weightless["llama"])


def chat(content="hello"):
    return [{"role": "user", "content": content}]


def needs_three(first, second, third):
    return [0.0]


def returns(value):
    return lambda item: value


# what is changed in the trainer's arguments, and what the message must hold: field, value, remedy
ARGUMENTS = [
    ({"reward_func": None}, ["reward_func=None", "Give"]),
    ({"reward_func": "length"}, ["reward_func='length'", "cannot be called"]),
    ({"reward_func": needs_three}, ["reward_func=needs_three", "given 2", "num_agents=2"]),
    ({"reward_func": lambda only: [0.0]}, ["reward_func=<lambda>", "1 parameters", "num_agents=2"]),
    ({"reward_processor": 2.0}, ["reward_processor=2.0", "cannot be called"]),
    ({"formatters": "upper"}, ["formatters='upper'", "cannot be called"]),
    ({"formatters": [chat, 3]}, ["formatters[1]=3", "cannot be called"]),
    ({"formatters": [chat, chat, chat]}, ["formatters", "3", "2"]),
    ({"external_transition": []}, ["external_transition=[]", "cannot be called"]),
    ({"eval_logger": 1}, ["eval_logger=1", "cannot be called"]),
    ({"eval_aggregator": "mean"}, ["eval_aggregator='mean'", "cannot be called"]),
    ({"metrics_callback": {}}, ["metrics_callback={}", "cannot be called"]),
    ({"train_dataset": None}, ["train_dataset=None", "Give"]),
    ({"train_dataset": []}, ["train_dataset", "Give"]),
    ({"train_dataset": 7}, ["train_dataset=7", "datasets.Dataset"]),
    ({"train_dataset": [{"question": "why?"}]}, ["'prompt'", "question", "formatters"]),
    ({"eval_dataset": "rows"}, ["eval_dataset='rows'", "datasets.Dataset"]),
    ({"agent_model": None}, ["agent_model=None", "Give agent_model"]),
    ({"agent_model": "./nothing-here"}, ["agent_model='./nothing-here'", "Give"]),
    ({"agent_model": "nobody/no-such-model"}, ["'nobody/no-such-model'", "hub id"]),
    ({"agent_model": None, "agents": []}, ["agents=[]", "Give one model an agent"]),
    ({"agent_model": None, "agents": [1, 2]}, ["agents=int", "not a model"]),
    ({"num_agents": 0}, ["num_agents=0", "Give 1 or more"]),
    ({"num_agents": 3}, ["reward_func=reward", "num_agents=3"]),
    ({"agents": ["a", "b"]}, ["agent_model=", "agents is given too"]),
    ({"tokenizer": []}, ["tokenizer", "0 tokenizers for 2 agents"]),
    ({"model_config": {"dtpye": "float32"}}, ["model_config='dtpye'", "dtype"]),
    ({"model_config": {"dtype": torch.float16}}, ["dtype='float16'", "bfloat16"]),
    ({"model_config": {"attn_implementation": "flash_attention_2"}}, ["'flash_attention_2'", "sdpa or eager"]),
    ({"model_config": "float32"}, ["model_config='float32'", "dict"]),
    ({"wandb_config": {"projekt": "x"}}, ["wandb_config='projekt'", "project"]),
    ({"task": Task(train_dataset=ROWS, reward_func=reward)}, ["reward_func", "not both"]),
    ({"task": "length_ratio", "reward_func": None, "train_dataset": None}, ["task='length_ratio'", "load_task"]),
]

OTHER = "(a model with other tokens)"

SETTINGS = [
    ({"num_turns": 2}, ["external_transition=None", "num_turns=2"]),
    ({"num_agents": 3}, ["num_agents=3", "reward_func=reward"]),
    ({"agent_learning_rate": [1e-4, 1e-4, 1e-4]}, ["agent_learning_rate=[0.0001", "3 values for 2 agents"]),
    ({"max_new_tokens": 256}, ["max_new_tokens=256", "Give less than 256"]),
    ({"max_new_tokens": 250}, ["item 0", "max_new_tokens", "max_prompt_tokens"]),
    ({"lora_target_modules": ["q_prj"]}, ["lora_target_modules=['q_prj']", "q_proj"]),
    ({"lora_target_modules": ["q_proj", "kproj"]}, ["lora_target_modules=", "'kproj'", "k_proj"]),
    ({"lora_target_modules": ".*attn\\.x"}, ["lora_target_modules='.*attn\\\\.x'", "q_proj"]),
    ({"lora_target_modules": "q_proj("}, ["lora_target_modules='q_proj('", "no regex"]),
    ({"lora_target_modules": ["lm_head"]}, ["lora_target_modules=['lm_head']", "output layer", "all-linear"]),
    ({"reference_model": "nobody/no-such-model", "reference_kl_coef": 0.1}, ["'nobody/no-such-model'", "hub id"]),
    ({"reference_model": OTHER, "reference_kl_coef": 0.1}, ["reference_model=", "448 tokens", "384"]),
    ({"report_to": ["swanlab"]}, ["report_to=['swanlab']", "wandb"]),
]

FORMATTED = [
    (returns(None), ["None", "item 0"]),
    (returns(""), ["item 0", "empty"]),
    (returns(5), ["5", "item 0"]),
    (returns([{"role": "user"}]), ["content", "item 0"]),
    (returns([]), ["[]", "item 0"]),
    (returns("word " * 300), ["item 0", "agent 0", "max_prompt_tokens"]),
]


def assert_says(error: Exception, parts: list[str]):
    message = str(error)
    assert [part for part in parts if part not in message] == [], message
    assert "weights" not in message


@pytest.mark.parametrize(("arguments", "parts"), ARGUMENTS, ids=lambda value: str(value)[:50])
def test_wrong_arguments(weightless, arguments, parts):
    with pytest.raises(ConfigError) as caught:
        make(weightless["llama"], **arguments)
    assert_says(caught.value, parts)


@pytest.mark.parametrize(("settings", "parts"), SETTINGS, ids=lambda value: str(value)[:50])
def test_wrong_settings_that_only_the_trainer_can_know(weightless, settings, parts):
    if settings.get("reference_model") == OTHER:
        settings = settings | {"reference_model": weightless["qwen2"]}
    with pytest.raises((ConfigError, TaskError)) as caught:
        make(weightless["llama"], settings)
    assert_says(caught.value, parts)


@pytest.mark.parametrize(("formatter", "parts"), FORMATTED, ids=lambda value: str(value)[:30])
def test_what_formatters_return(weightless, formatter, parts):
    with pytest.raises(TaskError) as caught:
        make(weightless["llama"], formatters=formatter)
    assert_says(caught.value, parts)


def test_chat_messages_without_a_chat_template(weightless):
    with pytest.raises(ConfigError) as caught:
        make(weightless["gpt2"], formatters=lambda item: chat(item["prompt"]))
    assert_says(caught.value, ["item 0", "no chat template", "Return a str"])


def test_args_of_another_kind(weightless):
    with pytest.raises(ConfigError, match="args=dict: not a config. Give a MAGRPOConfig"):
        MAGRPOTrainer(agent_model=weightless["llama"], reward_func=reward, train_dataset=ROWS, args={"seed": 1})


def test_an_endless_data_set_needs_max_steps_for_a_schedule(weightless):
    class Endless:
        def __iter__(self):
            while True:
                yield ROWS[0]

    from datasets import IterableDataset

    rows = IterableDataset.from_generator(lambda: iter(Endless()))
    with pytest.raises(ConfigError) as caught:
        make(weightless["llama"], {"lr_scheduler": "linear"}, train_dataset=rows)
    assert_says(caught.value, ["lr_scheduler='linear'", "max_steps"])


def test_a_run_folder_that_exists(weightless, tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    with pytest.raises(ConfigError) as caught:
        make(weightless["llama"], {"run_name": "mine"})
    assert_says(caught.value, ["run_name='mine'", "exists already"])


def test_a_setting_that_was_changed_after_the_config_was_made(weightless):
    args = MAREINFORCEConfig(agent_model=weightless["llama"])
    args.num_generations = "4"
    with pytest.raises(ConfigError, match="num_generations='4'"):
        MAGRPOTrainer(reward_func=reward, train_dataset=ROWS, args=args)


# ---------------------------------------------------------------------------------------------------------- evaluation
def test_evaluation_needs_rows_and_a_team(weightless, tmp_path):
    folder = weightless["llama"]
    rows = Task(eval_dataset=ROWS, reward_func=reward)

    def fails(task, parts, **settings):
        with pytest.raises(ConfigError) as caught:
            evaluate_team(task, EvaluationConfig(**settings))
        assert_says(caught.value, parts)

    fails(Task(train_dataset=ROWS, reward_func=reward), ["eval_dataset=None", "Give"], agent_model=folder)
    fails(rows, ["eval_num_samples=0", "None for all"], agent_model=folder, eval_num_samples=0)
    fails(rows, ["agent_model=None", "Give"])
    fails(rows, ["agents_dir", "agent_0"], agents_dir=str(tmp_path))
    fails(rows, ["num_agents=3", "reward_func=reward"], agent_model=folder, num_agents=3)
    fails(rows, [f"output={str(tmp_path)!r}", "results.json"], agent_model=folder, output=str(tmp_path))
    with pytest.raises(ConfigError, match="EvaluationConfig"):
        evaluate_team(rows, MAGRPOConfig(agent_model=folder))


# ------------------------------------------------------------------------------------------------------ during the run
@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ([1.0], ["1 rewards for 2 joint responses"]),
        (None, ["returned=None"]),
        (0.5, ["returned=0.5", "a single float"]),
        ([1.0, float("nan")], ["returned[1]=nan", "not a finite number"]),
        ([1.0, None], ["returned[1]=None"]),
        (["1.0", "0.0"], ["returned[0]='1.0'", "not a number"]),
        ([[1.0], [0.0]], ["nested list"]),
        ("ab", ["returned='ab'"]),
    ],
    ids=str,
)
def test_reward_faults_name_item_turn_and_value(model, value, parts):
    trainer = make(model, {"eval_interval": 0, "max_steps": 1}, reward_func=lambda first, second: value)
    with pytest.raises(TaskError) as caught:
        trainer.train()
    assert_says(caught.value, [*parts, "reward_func returned", "item 0", "turn 0", "Right is 2 finite numbers"])


def test_a_type_error_of_the_users_own_code_reaches_the_user(model):
    calls = []

    def broken(first, second):
        calls.append(1)
        return len(first) + "s"

    trainer = make(model, {"eval_interval": 0}, reward_func=broken)
    with pytest.raises(TypeError, match="unsupported operand"):
        trainer.train()
    assert calls == [1]  # not called again in another way


def test_a_transition_that_returns_too_few_prompts(model):
    trainer = make(
        model,
        {"num_turns": 2, "eval_interval": 0},
        external_transition=lambda agent_completions: ["only one"],
    )
    with pytest.raises(TaskError) as caught:
        trainer.train()
    assert_says(caught.value, ["external_transition", "item 0", "2"])
