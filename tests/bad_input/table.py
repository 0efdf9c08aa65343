"""Wrong input and what is said about it: one row a fault.

A setting's row is (field, wrong value, pattern of the remedy, other settings that it needs). The value is given as a
flag and from Python. The other tables say which parts the message holds: field, value and remedy.
"""

import dataclasses
from typing import Any

API = {"comparator_policy": "api", "comparator_api_url": "https://host/v1"}

# Every field of every config class has a row: test_every_setting_has_a_row finds those that have none.
SETTINGS: list[tuple] = [
    # Task
    ("task", "lenght_ratio", "closest: length_ratio"),
    ("task_args", {"hight": 3.0}, "It takes: .*low.*high"),
    # Models
    ("agent_model", " ", "leave it out"),
    ("agents", ["one", ""], "leave it out"),
    ("num_agents", 0, "Give 1 or more"),
    ("dtype", "float16", "Use bfloat16"),
    ("attn_implementation", "flash_attention_2", "Use sdpa or eager"),
    # Tuning
    ("tuning", "qlora", "Use lora or full"),
    ("lora_rank", 0, "Give 1 or more"),
    ("lora_alpha", 0, "a number above 0"),
    ("lora_dropout", 1.5, "from 0 to below 1"),
    ("lora_target_modules", "", "leave it out"),
    ("share_parameters", "maybe", "Give True or False"),
    ("gradient_checkpointing", "often", "Give True or False"),
    ("reference_model", "", "leave it out"),
    # Episodes and sampling
    ("num_turns", 0, "Give 1 or more"),
    ("max_new_tokens", -8, "Give 1 or more"),
    ("max_prompt_tokens", 0, "leave it out"),
    ("temperature", 0, "eval_temperature=0"),
    ("top_p", 1.5, "at most 1"),
    ("top_k", -1, "or more"),
    ("early_termination_threshold", float("nan"), "Give an ordinary number"),
    ("external_prompt_passthrough", "perhaps", "Give True or False"),
    ("discount", 1.01, "from 0 to 1"),
    ("max_rollout_rows", 0, "Give 1 or more"),
    # Reward calls
    ("reward_timeout", 0, "seconds, above 0"),
    ("reward_fallback", -1.0, "Set reward_timeout or reward_processes"),
    ("reward_processes", -1, "0 .* or more"),
    # Rollout trees
    ("num_generations", "four", "Give a whole number"),
    ("joint_mode", "crossed", "Did you mean 'cross'"),
    ("early_termination_scope", "branch", "Use node or joint"),
    ("rollout_batch_size", 0, "Give 1 or more"),
    # Rollouts on vLLM
    ("rollout_backend", "vlm", "Did you mean 'vllm'"),
    ("vllm_url", ["localhost:8000"], "such as http://localhost:8000", {"rollout_backend": "vllm"}),
    ("vllm_spawn", "maybe", "Give True or False"),
    ("vllm_devices", ["cuda"], "numbers of GPUs", {"rollout_backend": "vllm", "vllm_spawn": True}),
    ("vllm_python", "no-such-python", "has vLLM", {"rollout_backend": "vllm", "vllm_spawn": True}),
    ("vllm_args", {"max_model_len": 512}, "Set rollout_backend to vllm"),
    ("vllm_start_timeout", 0.0, "a number above 0"),
    ("vllm_timeout", 0.0, "a number above 0"),
    ("vllm_max_retries", -1, "Give 0 or more"),
    ("vllm_max_concurrency", 0, "Give 1 or more"),
    ("async_rollouts", 2, "0, or 1 for one step ahead", {"rollout_backend": "vllm"}),
    ("rollout_is_cap", 0.0, "None for no weights"),
    ("rollout_kl_limit", 0.0, "None for no limit"),
    # Where models live
    ("placement", "splitted", "Did you mean 'split'"),
    ("ranks_per_agent", [2, 0], "Give 1 or more"),
    ("reference_ranks", "agent", "Did you mean 'agents'"),
    # Learning
    ("agent_learning_rate", -0.1, "Give 0 or more"),
    ("num_train_epochs", 0, "Give 1 or more"),
    ("max_steps", 0, "leave it out"),
    ("train_batch_size", 0, "leave it out"),
    ("micro_batch_tokens", 0, "Give 1 or more"),
    ("num_updates_per_rollout", 0, "Give 1 or more"),
    ("max_grad_norm", 0.0, "None for no clipping"),
    ("lr_scheduler", "cosin", "Did you mean 'cosine'"),
    ("warmup_steps", -1, "Give 0 or more"),
    ("weight_decay", -0.1, "Give 0 or more"),
    ("adam_beta1", 1.0, "from 0 to below 1"),
    ("adam_beta2", -0.1, "from 0 to below 1"),
    ("max_nonfinite_steps", 0, "Give 1 or more"),
    # Policy loss
    ("advantage_mode", "grpo", "raw, mean, rloo(, max or greedy| or max)"),
    ("advantage_normalization", "group", "none, node or batch, or True or False"),
    ("turn_weighting", "flat", "objective, undiscounted or node"),
    ("loss_aggregation", "sum", "sequence_sum, token_mean, constant or sequence_mean"),
    ("clip_range", 1.0, "between 0 and 1"),
    ("clip_range_high", 0.0, "above 0"),
    ("dual_clip", 1.0, "above 1"),
    ("target_kl", 0.0, "None for off"),
    ("importance_level", "tokens", "Did you mean 'token'"),
    ("mask_truncated", "x", "Give True or False"),
    ("entropy_coef", -0.1, "Give 0 or more"),
    ("reference_kl_coef", -0.1, "or more"),
    # Evaluation
    ("eval_num_samples", -1, "None for all items"),
    ("eval_num_generations", 0, "Give 1 or more"),
    ("eval_batch_size", 0, "leave it out"),
    ("eval_temperature", -0.1, "0 .greedy. or more"),
    ("agents_dir", "nowhere", "the folder that holds agent_0"),
    ("output", ".", "Give the name of a file"),
    ("protocol", "debate", "single, parallel, sequential or discussion"),
    # Logging and saving
    ("eval_interval", -1, "or more"),
    ("logging_steps", 0, "Give 1 or more"),
    ("report_to", ["wandb", "tensorbord"], "Did you mean 'tensorboard'"),
    ("output_dir", "", "leave it out"),
    ("run_name", "a/b", "Give its parent folder as output_dir"),
    ("wandb_project", "", "leave it out"),
    ("wandb_entity", " ", "leave it out"),
    ("wandb_tags", [""], "leave it out"),
    ("wandb_dir", "", "leave it out"),
    ("completions_steps", -1, "or more"),
    ("profile", "yes", "True"),
    ("seed", -1, "from 0 to 4294967295"),
    # Checkpoints
    ("save_steps", -1, "or more"),
    ("save_total_limit", 0, "None for all"),
    ("resume_from_checkpoint", "", "leave it out|Give latest"),
    ("allow_changed", [""], "leave it out"),
    # Critics
    ("critic_type", "vq", "Use v or q"),
    ("critic_model", "./nowhere", "Give a model's folder or a hub id"),
    ("critics", [""], "leave it out"),
    ("critic_ranks", 0, "agents, or 1 or more"),
    ("critic_learning_rate", -1.0, "Give 0 or more"),
    ("critic_max_length", 8, "Give 16 or more"),
    ("value_head_hidden_dim", 0, "leave it out"),
    ("value_clip_range", 0.0, "None for no clipping"),
    ("gae_lambda", 1.1, "from 0 to 1"),
    ("critic_warmup_rollouts", -1, "or more"),
    ("use_separate_critic", "both", "Give True or False"),
    ("value_loss_coef", -0.5, "Give 0 or more"),
    ("counterfactual_baseline", "coma", "Give True or False"),
    # Preferences
    ("num_iterations", -1, "or more"),
    ("preference_num_candidates", 0, "Give 1 or more"),
    ("preference_pairs_per_sample", 0, "None for all"),
    ("pair_selection", "best", "reward_gap, random, all or comparator_reward"),
    ("collaboration_mode", "central", "Did you mean 'centralized'"),
    ("label_smoothing", 0.5, "from 0 to below 0.5"),
    ("comparator_policy", "other", "current, current_copy, history, model or api"),
    ("comparator_generation_mode", "central", "Did you mean 'centralized'"),
    ("comparator_model_name", "./nowhere", "Give a model's folder or a hub id", {"comparator_policy": "model"}),
    ("comparator_agents", [""], "leave it out"),
    ("comparator_num_candidates", 0, "leave it out"),
    ("comparator_history_k", 0, "or more"),
    ("comparator_api_url", "host/v1", "https?://", {"comparator_policy": "api"}),
    ("comparator_api_format", "gpt", "generic, openai, anthropic or openai_responses"),
    ("comparator_api_model", "", "leave it out"),
    ("comparator_api_key_env", "", "leave it out"),
    ("comparator_api_key_header", "x key", "letters, digits and hyphens", API),
    ("comparator_api_key_prefix", "Bearer\n", "Give one line"),
    ("comparator_api_headers", "x-version", "key=value|mapping of names to (values|texts)"),
    ("comparator_api_extra_body", "stream", "key=value|mapping of names to (values|texts)"),
    ("comparator_api_response_field", "", "leave it out"),
    ("comparator_api_max_n_per_request", 0, "leave it out"),
    ("comparator_api_timeout", 0, "above 0"),
    ("comparator_api_max_retries", -1, "Give 0 or more"),
    ("comparator_api_max_concurrency", 0, "Give 1 or more"),
    ("comparator_api_max_requests", 0, "None for no limit"),
    ("preference_replay_mode", "all", "Use current, nearest_k, all_history or lambda_decay"),
    ("preference_replay_k", 0, "leave it out"),
    ("preference_replay_lambda", 1.1, "from 0 to 1"),
    ("preference_replay_sample_size", 0, "leave it out"),
    ("preference_replay_from", "nowhere", "Give an earlier run's", {"preference_replay_mode": "all_history"}),
    ("dpo_beta", 0.0, "above 0"),
    ("rpo_alpha", -1.0, "0 or more"),
    ("dpo_reference", "initial", "Give True or False"),
    ("comparator_ranks", 0, "agents, or 1 or more"),
    ("reward_model_ranks", 0, "agents, or 1 or more"),
    ("reward_model_name", "./nowhere", "Give a model's folder or a hub id"),
    ("reward_learning_rate", -1.0, "Give 0 or more"),
    ("reward_num_train_epochs", 0, "Give 1 or more"),
    ("reward_train_batch_size", 0, "Give 1 or more"),
    ("reward_max_length", 0, "leave it out"),
    ("reward_pooling", "max", "Use last, mean or agents"),
    ("reward_validation_fraction", 1.0, "below 1"),
    ("rl_algorithm", "ppo", "Use magrpo, mareinforce"),
]

GOOD = """
from mlrl import Task

def reward(first, second):
    return [1.0] * len(first)

"""
ROWS = "[{'prompt': 'a'}]"


@dataclasses.dataclass(frozen=True)
class TaskFile:
    """A task file `mine.py`, the words of a command line, and what its message holds.

    `users_line`: the line of an exception of the user's own, which is shown with no frame of ours above it.
    """

    fault: str
    source: str | bytes | None
    says: tuple[str, ...]
    words: tuple[str, ...] = ("--task", "mine.py")
    users_line: str | None = None


def built(arguments: str) -> str:
    return f"{GOOD}task = Task({arguments})\n"


TASK_FILES = [
    TaskFile("no file", None, ("task='mine.py'", "there is no file", "Give the path")),
    TaskFile("a folder", None, ("task='.'", "no task of that name", "a file that ends in .py"), ("--task", ".")),
    TaskFile("no suffix", None, ("task='mine'", "is shipped", "a file that ends in .py"), ("--task", "mine")),
    TaskFile("a typo", None, ("task='magrpo'", "Right is one of", "length_ratio"), ("--task", "magrpo")),
    TaskFile("empty", "", ("task='mine.py'", "nothing named 'task'", "call your Task `task`")),
    TaskFile("another name", GOOD + f"mine = Task(train_dataset={ROWS}, reward_func=reward)",
             ("task='mine.py'", "It has", "mine", "file.py:NAME")),
    TaskFile("no such attribute", built(f"train_dataset={ROWS}, reward_func=reward"),
             ("task='mine.py:other'", "nothing named 'other'", "It has", "task"), ("--task", "mine.py:other")),
    TaskFile("no Task", "task = 3", ("task='mine.py'", "gave 3 of type int", "It has to be a Task")),
    TaskFile("a function that returns nothing", "def task():\n    pass",
             ("task='mine.py'", "gave None", "It has to be a Task or a function that returns one")),
    TaskFile("a class of its own", "class task:\n    pass", ("task='mine.py'", "has to be a Task")),
    TaskFile("an unknown argument", "def task(size=3):\n    pass", ("task_args.sice=4", "closest: size", "size=3"),
             ("--task", "mine.py", "--task_args", "sice=4")),
    TaskFile("a missing argument", "def task(size):\n    pass", ("task_args.size", "needs it", "--task_args size=")),
    TaskFile("an argument of another type", "def task(size=3):\n    pass", ("task_args.size='big'", "of type int"),
             ("--task", "mine.py", "--task_args", "size=big")),
    TaskFile("an argument without a value", built(f"train_dataset={ROWS}, reward_func=reward"),
             ("task_args='size'", "key=value"), ("--task", "mine.py", "--task_args", "size")),
    TaskFile("arguments of a finished Task", built(f"train_dataset={ROWS}, reward_func=reward"),
             ("task_args={'size': 4}", "takes none", "Make it a function"),
             ("--task", "mine.py", "--task_args", "size=4")),
    TaskFile("an unknown part", built(f"train_dataset={ROWS}, reward_fn=reward"),
             ("reward_fn", "no such part", "Did you mean 'reward_func'?")),
    TaskFile("no reward", built(f"train_dataset={ROWS}"), ("reward_func=None", "Give a function")),
    TaskFile("no rows", built("reward_func=reward"), ("train_dataset=None", "Give train_dataset, eval_dataset")),
    TaskFile("recommends what does not exist",
             built(f"train_dataset={ROWS}, reward_func=reward, recommended={{'num_turn': 2}}"),
             ("recommended='num_turn'", "Did you mean 'num_turns'?")),
    TaskFile("recommends what cannot be",
             built(f"train_dataset={ROWS}, reward_func=reward, recommended={{'num_turns': 0}}"),
             ("num_turns=0", "Give 1 or more", "recommended by task mine")),
    TaskFile("recommends a list", built(f"train_dataset={ROWS}, reward_func=reward, recommended=['num_turns']"),
             ("recommended=['num_turns']", "dict of config field names")),
    TaskFile("no Python", "def task(:\n", ("mine.py", "line 1", "SyntaxError"), users_line="def task(:"),
    TaskFile("not text", b"PK\x03\x00\x00", ("task='mine.py'", "is no Python source", "Give a file of Python code")),
    TaskFile("not UTF-8", b"task = '\xff'", ("task='mine.py'", "is no Python source", "Give a file of Python code")),
    TaskFile("a missing package", "import nothing_of_that_name\n", ("line 1", "ModuleNotFoundError"),
             users_line="import nothing_of_that_name"),
    TaskFile("an error in it", "def task():\n    return {}['rows']\n", ("line 2, in task", "KeyError: 'rows'"),
             users_line="return {}['rows']"),
    TaskFile("an error below it", "import json\n\ndef task():\n    json.loads('{')\n",
             ("line 4, in task", "JSONDecodeError"), users_line="json.loads('{')"),
]  # fmt: skip

# Files given as data_path of a shipped task: name, content, what the message holds.
DATA_FILES: list[tuple[str, str | bytes | None, tuple[str, ...]]] = [
    ("absent.jsonl", None, ("there is no such file", "Give a JSON, JSONL or parquet file")),
    ("broken.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c\n', ("line 3 is no JSON", "Correct it")),
    ("cut.jsonl", '{"prompt": "a"}\n{"prompt"', ("line 2 is no JSON", "Correct it")),
    ("numbers.jsonl", '{"prompt": "a"}\n7\n', ("line 2 is no row of named fields: 7", "Correct it")),
    ("broken.json", '[{"prompt": "a"},\n {"prompt": }]', ("no JSON", "line 2", "Correct it")),
    ("empty.jsonl", "", ("no JSON", "Correct it")),
    ("mapping.json", '{"prompt": "a"}', ("no list of rows", "Give one object a row")),
    ("texts.json", '["a", "b"]', ("no list of rows", "Give one object a row")),
    ("none.json", "[]", ("no list of rows", "Give one object a row")),
    ("bytes.jsonl", b"\xff\xfe", ("cannot be read", "utf-8", "Correct it")),
    ("no.gz", b"plain text", ("cannot be read", "Not a gzipped file")),
    ("cut.jsonl.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00", ("cannot be read", "Correct it, or give another file")),
    ("no.parquet", b"PAR1 not really", ("cannot be read", "Correct it, or give another file")),
]


class BrokenRow:
    """Rows of which one raises while it is read."""

    def __init__(self, broken: int, error: Exception | None = None):
        self.broken, self.error = broken, error or ValueError("bad image")

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict:
        if index == self.broken:
            raise self.error
        if index >= 4:
            raise IndexError(index)
        return {"prompt": "a"}


def iterator() -> Any:
    return iter([{"prompt": "a"}])


# What is given to a trainer as its data, and what the message holds.
DATA: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("nothing", {"train_dataset": None}, ("train_dataset=None", "Give")),
    ("no rows", {"train_dataset": []}, ("train_dataset=[]", "no rows", "at least one row")),
    ("a number", {"train_dataset": 7}, ("train_dataset=7", "Give a datasets.Dataset")),
    ("a path", {"train_dataset": "rows.jsonl"}, ("train_dataset='rows.jsonl'", "holds no rows", "datasets.Dataset")),
    ("splits", {"train_dataset": {"train": [{"prompt": "a"}]}}, ("train_dataset={", "maybe of splits", "one split")),
    ("an iterator", {"train_dataset": iterator()}, ("train_dataset=", "read only once", "a list of dicts")),
    ("a set", {"train_dataset": {1, 2}}, ("train_dataset={1, 2}", "no row order", "a list of dicts")),
    ("rows of text", {"train_dataset": ["a", "b"]}, ("train_dataset[0]='a'", "a row of type str", "a list of dicts")),
    ("a row of text", {"train_dataset": [{"prompt": "a"}, "b"]}, ("train_dataset[1]='b'", "row of type str", "Give")),
    ("rows without prompt", {"train_dataset": [{"question": "why?"}]}, ("'prompt'", "'question'", "give formatters")),
    ("an unreadable row", {"train_dataset": BrokenRow(0)},
     ("train_dataset[0]", "cannot be read", "ValueError: bad image", "Correct it, or take it out")),
    ("an unreadable file", {"eval_dataset": BrokenRow(0, OSError(5, "Input/output error"))},
     ("eval_dataset[0]", "Input/output error", "Correct it, or take it out")),
    ("evaluation rows of text", {"eval_dataset": "rows"}, ("eval_dataset='rows'", "datasets.Dataset")),
    ("a prompt that is None", {"train_dataset": [{"prompt": None}]}, ("item['prompt']", "None", "item 0", "a str or")),
    ("a prompt that is a number", {"train_dataset": [{"prompt": 3}]}, ("item['prompt']", "3", "item 0", "a str or")),
    ("an empty prompt", {"train_dataset": [{"prompt": ""}]}, ("item 0", "empty")),
    ("a message without content", {"train_dataset": [{"prompt": [{"role": "user"}]}]}, ("content", "item 0")),
    ("a prompt that is too long", {"train_dataset": [{"prompt": "word " * 300}]}, ("item 0", "max_prompt_tokens")),
]  # fmt: skip


def chat(content: Any = "hello") -> list[dict]:
    return [{"role": "user", "content": content}]


def needs_three(first, second, third):
    return [0.0]


def wants_a_name(first, second, *, target):
    return [0.0]


class Judge:
    def __call__(self, first, second):
        return [0.0]


def next_prompts(agent_completions, mood):
    return agent_completions


# What is given to a trainer as its callables, and what the message holds.
CALLABLES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"reward_func": None}, ("reward_func=None", "Give")),
    ({"reward_func": "length"}, ("reward_func='length'", "cannot be called", "Give a function")),
    ({"reward_func": needs_three}, ("reward_func=needs_three", "for 2 values", "num_agents=2")),
    ({"reward_func": lambda only: [0.0]}, ("reward_func=<lambda>", "1 parameter ", "num_agents=2")),
    ({"reward_func": wants_a_name}, ("reward_func=wants_a_name", "'target'", "functools.partial")),
    ({"reward_func": Judge}, ("reward_func=Judge", "a class", "Give an instance")),
    ({"reward_func": max}, ("reward_func=<built-in function max>", "Wrap it")),
    ({"reward_processor": 2.0}, ("reward_processor=2.0", "cannot be called", "Give a function")),
    ({"reward_processor": lambda: 0.0}, ("reward_processor=<lambda>", "0 parameters", "one reward")),
    ({"formatters": "upper"}, ("formatters='upper'", "cannot be called", "Give a function")),
    ({"formatters": [chat, 3]}, ("formatters[1]=3", "cannot be called", "Give a function")),
    ({"formatters": [chat, chat, chat]}, ("formatters", "3", "2")),
    ({"formatters": lambda item, style: ""}, ("formatters", "<lambda>", "style")),
    ({"external_transition": []}, ("external_transition=[]", "cannot be called", "Give a function")),
    ({"external_transition": next_prompts}, ("external_transition=next_prompts", "mood", "agent_completions")),
    ({"eval_logger": 1}, ("eval_logger=1", "cannot be called", "Give a function")),
    ({"eval_aggregator": "mean"}, ("eval_aggregator='mean'", "cannot be called", "Give a function")),
    ({"eval_aggregator": len}, ("eval_logger=None", "Give an eval_logger too")),
    ({"metrics_callback": {}}, ("metrics_callback={}", "cannot be called", "Give a function")),
]

# Rows that run as a command of their own: script, words, what the message holds.
COMMANDS: list[tuple[str, str, tuple[str, ...]]] = [
    ("maremax", "--num_generations 1", ("num_generations=1", "Give num_generations of 2 or more")),
    ("magrpo", "--task mine.py", ("task='mine.py'", "Give the path of a Python file")),
    ("mareinforce", "--top_p 0.9", ("top_p=0.9", "Set top_p to 1")),
    ("marloo", "--num_turn 2", ("--num_turn", "--num_turns")),
    ("iac", "--critic_ranks 0", ("critic_ranks=0", "agents, or 1 or more")),
    ("maac", "--counterfactual_baseline --critic_type v", ("counterfactual_baseline=True", "Use critic_type q")),
    ("madpo", "--comparator_policy api", ("comparator_api_url=None", "Give the endpoint's")),
    ("marlhf", "--rl_algorithm ppo", ("rl_algorithm='ppo'", "Use magrpo")),
    ("evaluate", "--agents_dir nowhere", ("agents_dir='nowhere'", "the folder that holds agent_0")),
    ("evaluate", "--output /proc/results.json", ("output='/proc/results.json'", "Give another file")),
    ("magrpo", "--config absent.yaml", ("config='absent.yaml'", "Give a YAML file")),
]
