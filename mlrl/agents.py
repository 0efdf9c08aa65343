"""The team: which network, adapter and tokenizer each agent has, how they are loaded, and how they are saved.

Agents whose model is the same share one frozen base and differ by their LoRA adapters; with full tuning every agent has
a network of its own. Loading goes in two steps, so that a wrong name or prompt is found before weights are read:
`resolve_sources` and `load_tokenizers` first, `Team.load` then.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from mlrl.config import AgentArguments
from mlrl.embedded import embedded_model_path
from mlrl.errors import ConfigError
from mlrl.models.base import Base, Policy
from mlrl.rollout.streams import derive_seed


@dataclass(frozen=True)
class Source:
    """Where an agent comes from: a base (name or loaded object) and, maybe, a saved adapter on it."""

    base: str | PreTrainedModel | PeftModel
    adapter: str | None = None

    @property
    def name(self) -> str:
        return self.base if isinstance(self.base, str) else self.base.name_or_path or type(self.base).__name__


@dataclass
class Agent:
    """One member of the team."""

    index: int
    policy: Policy
    tokenizer: PreTrainedTokenizerBase
    source: Source
    stop_ids: frozenset[int]
    parameters: list[nn.Parameter]  # what training changes
    reference: Policy | None = None  # the frozen initial policy, where a reference KL is asked for

    @property
    def base(self) -> Base:
        return self.policy.base

    @property
    def adapter(self) -> str | None:
        return self.policy.adapter

    def decode(self, token_ids: list[int]) -> str:
        """Text of a response, without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        """Writes a PEFT adapter, or a full model, with its tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.adapter is None:
            self.base.model.save_pretrained(folder)
        else:
            peft_model = self.base.peft_model
            state = get_peft_model_state_dict(peft_model, adapter_name=self.adapter)
            save_file({k: v.detach().cpu().contiguous() for k, v in state.items()}, folder / "adapter_model.safetensors")
            lora = copy.copy(peft_model.peft_config[self.adapter])
            lora.inference_mode, lora.base_model_name_or_path = True, self.base.name
            lora.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class _Loading:
    """How networks are loaded."""

    arguments: AgentArguments
    dtype: torch.dtype
    device: torch.device
    attn_implementation: str | None
    model_kwargs: dict

    def base(self, source: Source) -> Base:
        """Loads a network. Raises ConfigError where that fails."""
        model = source.base
        if isinstance(model, str):
            load_config(source)
            try:
                model = AutoModelForCausalLM.from_pretrained(model, dtype=self.dtype, **self.model_kwargs)
            except (OSError, ValueError, TypeError) as error:
                raise ConfigError(
                    f"agent_model={source.name!r}: its weights cannot be loaded ({_first_line(error)})"
                ) from error
        base = Base(model.to(self.device), source.name, self.attn_implementation)
        if self.arguments.gradient_checkpointing:
            base.enable_gradient_checkpointing()
        return base


@dataclass
class Team:
    """All agents, and the bases they run on."""

    agents: list[Agent]
    bases: list[Base]
    shared_parameters: bool
    loading: _Loading

    @classmethod
    def load(
        cls,
        arguments: AgentArguments,
        sources: Sequence[Source],
        tokenizers: Sequence[PreTrainedTokenizerBase],
        *,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        attn_implementation: str | None = None,
        model_kwargs: dict | None = None,
    ) -> Team:
        """Loads networks and adapters. Raises ConfigError where a model, an adapter or a target module is missing."""
        loading = _Loading(arguments, dtype, device, attn_implementation or arguments.attn_implementation, model_kwargs or {})
        bases: dict[object, Base] = {}
        adapters: dict[object, str] = {}
        agents = []
        for index, (source, tokenizer) in enumerate(zip(sources, tokenizers, strict=True)):
            first = arguments.share_parameters and agents
            if first:
                policy = agents[0].policy
            else:
                own_copy = arguments.tuning == "full"
                key = (_key(source.base), index if own_copy else None)
                if own_copy and not isinstance(source.base, str) and any(k[0] == key[0] for k in bases):
                    raise ConfigError(
                        "agents: one loaded model was given to several agents with tuning='full'. "
                        "Give each its own copy, or set share_parameters"
                    )
                if key not in bases:
                    bases[key] = loading.base(source)
                policy = _policy(bases[key], source, arguments, f"agent_{index}", adapters, derive_seed(seed, "lora", index))
            agents.append(
                Agent(index, policy, tokenizer, source, _stop_ids(tokenizer, policy.base.model), policy.parameters())
            )
            _check_vocabulary(index, tokenizer, policy.base)
        for agent in agents:  # PEFT leaves all adapters but one frozen
            for parameter in agent.parameters:
                parameter.requires_grad_(True)
        return cls(agents, list(bases.values()), arguments.share_parameters, loading)

    @property
    def trainable(self) -> list[list[Agent]]:
        """Agents by the weights they train: one group an agent, or all in one where parameters are shared."""
        return [self.agents] if self.shared_parameters else [[agent] for agent in self.agents]

    def add_references(self, reference_model: str | None = None) -> None:
        """Gives every agent its frozen reference. Call before the first update.

        With LoRA it is the base without adapter where the adapter started at zero, else a frozen copy of the starting
        adapter; with full tuning a frozen copy, one for all agents that started from the same weights.
        """
        frozen: dict[object, Policy] = {}
        for agent in self.agents:
            if reference_model is not None:
                key, adapter = reference_model, None
                source = resolve_source(reference_model)
                if source.adapter is not None:
                    raise ConfigError(f"reference_model={reference_model!r}: is an adapter. Name a full model")
            elif agent.adapter is None:
                key, source, adapter = _key(agent.source.base), agent.source, None
            elif agent.source.adapter is None and not isinstance(agent.source.base, PeftModel):
                agent.reference = Policy(agent.base, None)
                continue
            else:
                key, source, adapter = (id(agent.base), agent.adapter), None, f"reference_{agent.adapter}"
            if key not in frozen and adapter is not None:
                agent.base.copy_adapter(agent.adapter, adapter)
                frozen[key] = Policy(agent.base, adapter)
            elif key not in frozen:
                base = self.loading.base(source) if reference_model is not None else agent.base.copy()
                base.model.requires_grad_(False)
                frozen[key] = Policy(base, None)
            agent.reference = frozen[key]

    def save(self, directory: str | Path) -> None:
        """Writes directory/agent_0, agent_1 …; shared parameters are written under every agent."""
        for agent in self.agents:
            agent.save(Path(directory) / f"agent_{agent.index}")

    def num_parameters(self) -> tuple[int, int]:
        """(trained, all) parameters, shared ones counted once."""
        trained = {id(p): p.numel() for agent in self.agents for p in agent.parameters}
        every = {id(p): p.numel() for base in self.bases for p in base.model.parameters()}
        return sum(trained.values()), sum(every.values())


def resolve_source(agent: str | PreTrainedModel | PeftModel) -> Source:
    """A hub id, a folder (of a full model or an adapter), `embedded`, or a loaded model."""
    if not isinstance(agent, str):
        if not isinstance(agent, PreTrainedModel | PeftModel):
            raise ConfigError(f"agents={type(agent).__name__} object: not a model. Give ids, folders or transformers models")
        return Source(agent)
    name = embedded_model_path() if agent == "embedded" else agent
    adapter_config = _find_file(name, "adapter_config.json")
    if adapter_config is None:
        return Source(name)
    base = json.loads(Path(adapter_config).read_text()).get("base_model_name_or_path")
    if not base:
        raise ConfigError(f"agents={agent!r}: its adapter_config.json names no base_model_name_or_path")
    return Source(embedded_model_path() if base == "embedded" else base, name)


def load_tokenizers(sources: Sequence[Source], given=None) -> list[PreTrainedTokenizerBase]:
    """A tokenizer an agent: the given one (or one each), else the one that lies with its model."""
    if given is not None:
        given = list(given) if isinstance(given, list | tuple) else [given] * len(sources)
        if len(given) != len(sources):
            raise ConfigError(f"tokenizer: {len(given)} tokenizers for {len(sources)} agents. Give one, or one an agent")
        return given
    loaded: dict[str, PreTrainedTokenizerBase] = {}
    for source in sources:
        name = source.name
        if source.adapter is not None and _find_file(source.adapter, "tokenizer_config.json") is not None:
            name = source.adapter
        if name not in loaded:
            try:
                loaded[name] = AutoTokenizer.from_pretrained(name)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"agents={name!r}: no tokenizer can be loaded from there ({_first_line(error)}). "
                    "Give a hub id or a folder that holds a model, or pass tokenizer="
                ) from error
            if loaded[name].eos_token_id is None:
                raise ConfigError(f"agents={name!r}: the tokenizer has no end token, so responses could never end")
    return [loaded[name] for name in _tokenizer_names(sources)]


def _tokenizer_names(sources: Sequence[Source]) -> list[str]:
    return [
        s.adapter if s.adapter is not None and _find_file(s.adapter, "tokenizer_config.json") else s.name for s in sources
    ]


def max_model_length(source: Source) -> int | None:
    """Positions that the model of a source holds, read from its config alone; None where it does not say."""
    config = load_config(source) if isinstance(source.base, str) else source.base.config
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def load_config(source: Source):
    try:
        return AutoConfig.from_pretrained(source.name)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"agent_model={source.name!r}: no model can be loaded from there ({_first_line(error)}). "
            "Give 'embedded', a local folder, or a hub id that this machine can reach"
        ) from error


def _policy(base: Base, source: Source, arguments: AgentArguments, name: str, adapters: dict, seed: int) -> Policy:
    """The policy that an agent trains: the whole network, or an adapter of its own on it."""
    if arguments.tuning == "full":
        if source.adapter is not None or base.peft_model is not None:
            raise ConfigError(
                f"tuning='full': {source.adapter or source.name!r} is a LoRA adapter. Use tuning='lora', or merge it first"
            )
        return Policy(base, None)
    if source.adapter is not None:
        base.load_adapter(name, source.adapter)
    elif isinstance(source.base, PeftModel):
        active = source.base.active_adapter
        if (id(source.base), active) in adapters:
            raise ConfigError("agents: one PeftModel was given to several agents. Give each its own, or set share_parameters")
        adapters[id(source.base), active] = name
        return Policy(base, active)
    else:
        targets = arguments.lora_target_modules
        lora = LoraConfig(
            r=arguments.lora_rank,
            lora_alpha=arguments.lora_alpha,
            lora_dropout=arguments.lora_dropout,
            target_modules=targets[0] if isinstance(targets, list) and targets == ["all-linear"] else targets,
            task_type="CAUSAL_LM",
        )
        base.add_adapter(name, lora, seed)
    return Policy(base, name)


def _key(base: str | nn.Module) -> object:
    return base if isinstance(base, str) else id(base)


def _stop_ids(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> frozenset[int]:
    """Tokens that end a response: the tokenizer's end token, and those that the model itself names as such."""
    named = [tokenizer.eos_token_id, model.config.eos_token_id]
    if model.generation_config is not None:
        named.append(model.generation_config.eos_token_id)
    ids = {i for entry in named if entry is not None for i in (entry if isinstance(entry, list | tuple) else [entry])}
    return frozenset(i for i in ids if 0 <= i < model.config.get_text_config().vocab_size)


def _check_vocabulary(index: int, tokenizer: PreTrainedTokenizerBase, base: Base) -> None:
    rows = base.model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ConfigError(
            f"tokenizer of agent {index}: {len(tokenizer)} tokens, but {base.name} embeds {rows}. "
            "Call model.resize_token_embeddings first, or use the model's own tokenizer"
        )


def _find_file(name: str, file: str) -> str | None:
    """A file of a local folder or hub repository; None where it has none, or the hub cannot be reached."""
    if Path(name).is_dir():
        path = Path(name) / file
        return str(path) if path.is_file() else None
    try:
        return cached_file(
            name,
            file,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except (OSError, ValueError):
        return None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
