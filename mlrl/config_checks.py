"""The checks of one setting by itself: its name, type, words and range (combinations are in `mlrl.config_rules`).

Messages have the form ``<field>=<value!r>: <what is wrong>. <what would be right>``.
"""

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

from mlrl.errors import ConfigError

_POSITIVE = (lambda v: v > 0, "a number above 0")
_NOT_NEGATIVE = (lambda v: v >= 0, "0 or more")
_ONE_OR_MORE = (lambda v: v >= 1, "1 or more")
_ONE_OR_NONE = (lambda v: v >= 1, "1 or more, or leave it out (None)")
_BELOW_ONE = (lambda v: 0 <= v < 1, "a number from 0 to below 1")
_FRACTION = (lambda v: 0 <= v <= 1, "a number from 0 to 1")

# field: (holds for a value, or for each element of a list; what is right)
RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_agents": _ONE_OR_MORE,
    "lora_rank": _ONE_OR_MORE,
    "lora_alpha": _POSITIVE,
    "lora_dropout": _BELOW_ONE,
    "num_turns": _ONE_OR_MORE,
    "max_new_tokens": _ONE_OR_MORE,
    "max_prompt_tokens": _ONE_OR_NONE,
    "temperature": (lambda v: v > 0, "a number above 0 (greedy evaluation is eval_temperature=0)"),
    "top_p": (lambda v: 0 < v <= 1, "a number above 0 and at most 1; 1 is off"),
    "top_k": (lambda v: v >= 0, "0 (off) or more"),
    "discount": _FRACTION,
    "reward_timeout": (lambda v: v > 0, "seconds, above 0, or None for no limit"),
    "reward_processes": (lambda v: v >= 0, "0 (a thread of this process) or more"),
    "max_rollout_rows": _ONE_OR_MORE,
    "num_generations": _ONE_OR_MORE,
    "rollout_batch_size": _ONE_OR_MORE,
    "vllm_start_timeout": _POSITIVE,
    "vllm_timeout": _POSITIVE,
    "vllm_max_retries": _NOT_NEGATIVE,
    "vllm_max_concurrency": _ONE_OR_MORE,
    "async_rollouts": (lambda v: v in (0, 1), "0, or 1 for one step ahead"),
    "rollout_is_cap": (lambda v: v > 0, "a number above 0, or None for no weights"),
    "rollout_kl_limit": (lambda v: v > 0, "a number above 0, or None for no limit"),
    "agent_learning_rate": _NOT_NEGATIVE,
    "num_train_epochs": _ONE_OR_MORE,
    "max_steps": _ONE_OR_NONE,
    "train_batch_size": _ONE_OR_NONE,
    "micro_batch_tokens": _ONE_OR_MORE,
    "num_updates_per_rollout": _ONE_OR_MORE,
    "max_grad_norm": (lambda v: v > 0, "a number above 0, or None for no clipping"),
    "warmup_steps": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "adam_beta1": _BELOW_ONE,
    "adam_beta2": _BELOW_ONE,
    "max_nonfinite_steps": _ONE_OR_MORE,
    "clip_range": (lambda v: 0 < v < 1, "a number between 0 and 1, or None for no clipping"),
    "clip_range_high": (lambda v: v > 0, "a number above 0, or None for the same as clip_range"),
    "dual_clip": (lambda v: v > 1, "a number above 1, or None for off"),
    "target_kl": (lambda v: v > 0, "a number above 0, or None for off"),
    "entropy_coef": _NOT_NEGATIVE,
    "reference_kl_coef": (lambda v: v >= 0, "0 (off) or more"),
    "critic_learning_rate": _NOT_NEGATIVE,
    "critic_max_length": (lambda v: v >= 16, "16 or more, or None for what the model holds"),
    "value_head_hidden_dim": _ONE_OR_NONE,
    "value_clip_range": (lambda v: v > 0, "a number above 0, or None for no clipping"),
    "gae_lambda": _FRACTION,
    "critic_warmup_rollouts": (lambda v: v >= 0, "0 or more, or None for the default"),
    "value_loss_coef": _NOT_NEGATIVE,
    "eval_num_samples": (lambda v: v >= 0, "0 (no evaluation) or more, or None for all items"),
    "eval_num_generations": _ONE_OR_MORE,
    "eval_batch_size": _ONE_OR_NONE,
    "eval_temperature": (lambda v: v >= 0, "0 (greedy) or more, or None for the training temperature"),
    "eval_interval": (lambda v: v >= 0, "0 (only by hand) or more"),
    "logging_steps": _ONE_OR_MORE,
    "completions_steps": (lambda v: v >= 0, "0 (never) or more"),
    "save_steps": (lambda v: v >= 0, "0 (no checkpoints) or more"),
    "save_total_limit": (lambda v: v >= 1, "1 or more, or None for all"),
    "ranks_per_agent": _ONE_OR_MORE,
    "critic_ranks": (lambda v: v == "agents" or v >= 1, "agents, or 1 or more"),
    "reference_ranks": (lambda v: v == "agents" or v >= 1, "agents, or 1 or more"),
    "reward_model_ranks": (lambda v: v == "agents" or v >= 1, "agents, or 1 or more"),
    "comparator_ranks": (lambda v: v == "agents" or v >= 1, "agents, or 1 or more"),
    "seed": (lambda v: 0 <= v < 2**32, "a number from 0 to 4294967295"),
    "num_iterations": (lambda v: v >= 0, "0 (pairs are collected once) or more"),
    "preference_num_candidates": _ONE_OR_MORE,
    "preference_pairs_per_sample": (lambda v: v >= 1, "1 or more, or None for all"),
    "label_smoothing": (lambda v: 0 <= v < 0.5, "a number from 0 to below 0.5"),
    "comparator_num_candidates": _ONE_OR_NONE,
    "comparator_history_k": (lambda v: v >= 1, "1 (the round before) or more"),
    "comparator_api_max_n_per_request": _ONE_OR_NONE,
    "comparator_api_timeout": _POSITIVE,
    "comparator_api_max_retries": _NOT_NEGATIVE,
    "comparator_api_max_concurrency": _ONE_OR_MORE,
    "comparator_api_max_requests": (lambda v: v >= 1, "1 or more, or None for no limit"),
    "preference_replay_k": _ONE_OR_NONE,
    "preference_replay_lambda": _FRACTION,
    "preference_replay_sample_size": _ONE_OR_NONE,
    "dpo_beta": _POSITIVE,
    "rpo_alpha": _NOT_NEGATIVE,
    "reward_learning_rate": _NOT_NEGATIVE,
    "reward_num_train_epochs": _ONE_OR_MORE,
    "reward_train_batch_size": _ONE_OR_MORE,
    "reward_max_length": _ONE_OR_NONE,
    "reward_validation_fraction": (lambda v: 0 <= v < 1, "a number from 0 to below 1"),
}
# Texts and lists that must not be empty.
_NOT_EMPTY = {"agent_model", "agents", "reference_model", "agents_dir", "output_dir", "run_name", "task"}
_NOT_EMPTY |= {"critic_model", "critics", "lora_target_modules", "report_to", "agent_learning_rate"}
_NOT_EMPTY |= {"comparator_model_name", "comparator_agents", "comparator_api_url", "comparator_api_model"}
_NOT_EMPTY |= {"comparator_api_key_env", "reward_model_name", "preference_replay_from"}
_NOT_EMPTY |= {"comparator_api_key_header", "comparator_api_response_field"}
_NOT_EMPTY |= {"vllm_url", "vllm_devices", "vllm_python"}
_NOT_EMPTY |= {"resume_from_checkpoint", "allow_changed"}
_NOT_EMPTY |= {"wandb_project", "wandb_entity", "wandb_tags", "wandb_dir", "output"}
_PATHS = ("agent_model", "agents", "reference_model", "agents_dir", "output_dir", "wandb_dir", "output")
_PATHS += ("critic_model", "critics")
_PATHS += ("comparator_model_name", "comparator_agents", "reward_model_name", "preference_replay_from")


def suggestion(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the known name that is closest, or an empty text."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def check_names(given: Iterable[str], known: list[str]) -> None:
    """Raise `ConfigError` for the first name that is no setting."""
    for name in given:
        if name not in known:
            hint = suggestion(str(name), known) or " --help of a training script lists the settings."
            raise ConfigError(f"{name}: there is no such setting.{hint}")


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union type, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def check_field(name: str, value: Any, hint: Any) -> Any:
    """The value as its type wants it (1 becomes 1.0 for a float); `ConfigError` for a wrong type, word or range."""
    given, value = value, _check_type(name, value, hint)
    if name in _NOT_EMPTY and (value == [] or any(isinstance(e, str) and not e.strip() for e in _elements(value))):
        raise ConfigError(f"{name}={given!r}: is empty. Give a value, or leave it out.")
    for element in _elements(value):
        if isinstance(element, str) and any(character < " " for character in element):
            raise ConfigError(f"{name}={given!r}: holds a line end or another control character. Give one line.")
        if isinstance(element, float) and not math.isfinite(element):
            raise ConfigError(f"{name}={given!r}: is not finite. Give an ordinary number.")
        if name in RANGES and element is not None and not RANGES[name][0](element):
            raise ConfigError(f"{name}={given!r}: is out of range. Give {RANGES[name][1]}.")
    if name == "run_name" and value is not None and (Path(value).name != value or value == ".."):
        raise ConfigError(f"{name}={value!r}: is not a plain folder name. Give its parent folder as output_dir.")
    return value


def _elements(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _check_type(name: str, value: Any, hint: Any) -> Any:
    for option in alternatives(hint):
        converted = _as_type(value, option)
        if converted is not _NO_FIT:
            return converted
    words = [word for word in _words(hint) if isinstance(word, str)]
    if words and isinstance(value, str | list | tuple):
        if name == "dtype" and value in ("float16", "fp16", "half"):
            raise ConfigError(f"{name}={value!r}: float16 gradients underflow without loss scaling. Use bfloat16.")
        wrong = next((v for v in ([value] if isinstance(value, str) else value) if v not in words), value)
        close = suggestion(str(wrong), words)
        raise ConfigError(f"{name}={value!r}: unknown word {wrong!r}. Use {_describe(hint)}.{close}")
    raise ConfigError(f"{name}={value!r}: has the wrong type, {type(value).__name__}. Give {_describe(hint)}.")


_NO_FIT = object()


def _as_type(value: Any, hint: Any) -> Any:
    """The value as this one type, or _NO_FIT. Booleans are no numbers, texts are never read as numbers."""
    origin = typing.get_origin(hint)
    if hint is Any:
        return value
    if origin is Literal:
        return value if isinstance(value, str) and value in typing.get_args(hint) else _NO_FIT
    if origin is list:
        if not isinstance(value, list | tuple):
            return _NO_FIT
        options = alternatives(typing.get_args(hint)[0])
        elements = [next((e for o in options if (e := _as_type(v, o)) is not _NO_FIT), _NO_FIT) for v in value]
        return _NO_FIT if any(e is _NO_FIT for e in elements) else elements
    if origin is dict:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            return _NO_FIT
        if typing.get_args(hint)[1] is not str:
            return dict(value)
        numbers = {k: str(v) for k, v in value.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        texts = {**value, **numbers}  # YAML reads a flag's version=3 as a number
        return texts if all(isinstance(v, str) for v in texts.values()) else _NO_FIT
    if hint in (bool, str, types.NoneType):
        return value if isinstance(value, hint) else _NO_FIT
    if isinstance(value, bool):
        return _NO_FIT
    if hint is int:
        return int(value) if isinstance(value, Integral) else _NO_FIT
    if hint is float:
        return float(value) if isinstance(value, Real) else _NO_FIT
    raise TypeError(f"a config field has the type {hint}, which is not supported")


def _words(hint: Any) -> list[str]:
    """The words that a type allows, inside lists too."""
    found = []
    for option in alternatives(hint):
        if typing.get_origin(option) is Literal:
            found += typing.get_args(option)
        elif typing.get_origin(option) is list:
            found += _words(typing.get_args(option)[0])
    return list(dict.fromkeys(found))


def _describe(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "True or False", str: "a text", types.NoneType: "None"}
    parts = []
    for option in alternatives(hint):
        origin, arguments = typing.get_origin(option), typing.get_args(option)
        if origin is Literal:
            parts.append(", ".join(arguments[:-1]) + f" or {arguments[-1]}")
        elif origin is list:
            parts.append("a list of them" if _words(option) else f"a list ({_describe(arguments[0])} each)")
        elif origin is dict:
            parts.append(f"a mapping of names to {'texts' if arguments[1] is str else 'values'}")
        else:
            parts.append(names[option])
    return ", or ".join(parts)


@functools.cache
def setting_types(config_class: type) -> dict[str, Any]:
    """Setting → type. A script that restates a setting changes its default, not what may stand there."""
    hints = typing.get_type_hints(config_class)
    for base in reversed(config_class.__mro__):
        if base.__module__.startswith("mlrl."):
            hints |= typing.get_type_hints(base)
    return {field.name: hints[field.name] for field in dataclasses.fields(config_class) if field.init}


def check_fields(config: Any) -> None:
    """Check every field by itself, and write it in its one normal form (True as 'node', one tracker as a list)."""
    for name, hint in setting_types(type(config)).items():
        value = check_field(name, getattr(config, name), hint)
        if name == "advantage_normalization" and isinstance(value, bool):
            value = "node" if value else "none"
        elif name == "report_to" and isinstance(value, str):
            value = [value]
        elif name == "lora_target_modules" and isinstance(value, str) and value.isidentifier():
            value = [value]  # one plain name; peft would take a text for a regex of the whole path
        elif name in _PATHS and value is not None:
            value = [_expand_home(v) for v in value] if isinstance(value, list) else _expand_home(value)
        setattr(config, name, value)


def _expand_home(path: str) -> str:
    return str(Path(path).expanduser()) if path.startswith("~") else path
