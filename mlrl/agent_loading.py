"""Reading agents' networks and adapters: each step that turns a `Source` into weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from peft import LoraConfig, PeftModel
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from mlrl.config import AgentArguments
from mlrl.errors import ConfigError
from mlrl.models.base import Base, Policy
from mlrl.parallel.group import Group
from mlrl.parallel.zero import fetch_with, shard_frozen
from mlrl.sources import Source, check_vocabulary, first_line, load_config


@dataclass(frozen=True)
class Loading:
    """How networks are loaded; `zero` is set where they are to be sharded over the ranks of a group (stage 3)."""

    arguments: AgentArguments
    dtype: torch.dtype
    device: torch.device
    attn_implementation: str | None
    model_kwargs: dict
    zero: dict | None = None

    def base(self, source: Source) -> Base:
        """Loads a network. Raises ConfigError where that fails."""
        model = source.base
        if isinstance(model, str):
            load_config(model, source.setting)
            try:
                model, report = AutoModelForCausalLM.from_pretrained(
                    model, dtype=self.dtype, output_loading_info=True, **self.model_kwargs
                )
            except (OSError, ValueError, TypeError, SafetensorError) as error:
                raise ConfigError(
                    f"{source.setting}={source.name!r}: its weights cannot be loaded ({first_line(error)})"
                ) from error
            if report["missing_keys"]:  # transformers would train on, from random numbers
                missing = ", ".join(sorted(report["missing_keys"])[:3])
                raise ConfigError(f"agent_model={source.name!r}: its weights lack {missing}. Save the model again")
        elif self.arguments.dtype is not None and model.dtype != self.dtype:
            raise ConfigError(
                f"dtype={self.arguments.dtype!r}: {source.name} was loaded as {model.dtype}. "
                "Make them agree, or drop dtype"
            )
        # sharded models go to the device a shard a rank
        return Base(model if self.zero else model.to(self.device), source.name, self.attn_implementation)

    def frozen(self, base: Base, group: Group) -> Base:
        """A network that is not trained, sharded over a group where that is asked for. Adapters come afterwards."""
        base.model.requires_grad_(False)
        if self.zero is not None and base.shard is None:
            if base.peft_model is not None:
                raise ConfigError(
                    f"agents: {base.name} was loaded with an adapter on it, which ZeRO-3 would shard too. "
                    "Give the adapter's folder"
                )
            for buffer in base.model.buffers():
                buffer.data = buffer.data.to(self.device)
            base.shard = shard_frozen(base.scorer, self.zero, group)
            fetch_with(base.scorer, base.scorer.head_weight)
        return base


def load_frozen_adapter(base: Base, source: Source) -> str | None:
    """The adapter that a reference on ranks of its own starts from, if it has one."""
    if source.adapter is None:
        return None
    base.load_adapter("reference", source.adapter)
    for parameter in base.adapter_parameters("reference"):
        parameter.requires_grad_(False)
    return "reference"


def load_policy(base: Base, source: Source, arguments: AgentArguments, name: str, adapters: dict, seed: int) -> Policy:
    """The policy that an agent trains: the whole network, or an adapter of its own on it."""
    if arguments.tuning == "full":
        if source.adapter is not None or base.peft_model is not None:
            raise ConfigError(
                f"tuning='full': {source.adapter or source.name!r} is a LoRA adapter. "
                "Use tuning='lora', or merge it first"
            )
        return Policy(base, None)
    if source.adapter is not None:
        base.load_adapter(name, source.adapter)
    elif isinstance(source.base, PeftModel):
        active = source.base.active_adapter
        if (id(source.base), active) in adapters:
            raise ConfigError(
                "agents: one PeftModel was given to several agents. Give each its own, or set share_parameters"
            )
        adapters[id(source.base), active] = name
        return Policy(base, active)
    else:
        base.add_adapter(name, lora_config(arguments), seed)
    return Policy(base, name)


def lora_config(arguments: AgentArguments) -> LoraConfig:
    """A fresh adapter's."""
    targets = arguments.lora_target_modules
    return LoraConfig(
        r=arguments.lora_rank,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=targets[0] if isinstance(targets, list) and targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
    )


def check_sources(
    sources: Sequence[Source], tokenizers: Sequence[PreTrainedTokenizerBase], arguments: AgentArguments
) -> None:
    """What can be known before any weights are read."""
    if arguments.share_parameters and len({(source_key(source.base), source.adapter) for source in sources}) > 1:
        names = ", ".join(source.adapter or source.name for source in sources)
        raise ConfigError(f"share_parameters=True: agents={names} are different models. Give one, or leave it out")
    for agent, (source, tokenizer) in enumerate(zip(sources, tokenizers, strict=True)):
        rows = source.config.get_text_config().vocab_size
        check_vocabulary(f"tokenizer of agent {agent}", tokenizer, rows, source.name)


def source_key(base: str | nn.Module) -> object:
    return base if isinstance(base, str) else id(base)


def find_stop_ids(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> frozenset[int]:
    """Tokens that end a response: the tokenizer's end token, and those that the model itself names as such."""
    named = [tokenizer.eos_token_id, model.config.eos_token_id]
    if model.generation_config is not None:
        named.append(model.generation_config.eos_token_id)
    ids = {i for entry in named if entry is not None for i in (entry if isinstance(entry, list | tuple) else [entry])}
    return frozenset(i for i in ids if 0 <= i < model.config.get_text_config().vocab_size)
