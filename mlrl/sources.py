"""Where agents come from: names, folders and loaded objects, and what can be read of them before any weights are."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from mlrl.config_rules import is_local_path
from mlrl.embedded import embedded_model_path
from mlrl.errors import ConfigError


@dataclass(frozen=True)
class Source:
    """Where an agent comes from: a base (name or loaded object) and, maybe, a saved adapter on it.

    Attributes:
        setting: what names it, for errors.
    """

    base: str | PreTrainedModel | PeftModel
    adapter: str | None = None
    setting: str = field(default="agent_model", compare=False)

    @property
    def place(self) -> str | None:
        """Hub id or folder of the base; None for a loaded model that came from neither."""
        return self.base if isinstance(self.base, str) else self.base.name_or_path or None

    @property
    def name(self) -> str:
        """What to call the base in messages."""
        return self.place or f"loaded {type(self.base).__name__}"

    @property
    def config(self) -> PretrainedConfig:
        """The configuration of the base, read without its weights. Raises ConfigError where there is none."""
        return load_config(self.base, self.setting) if isinstance(self.base, str) else self.base.config


def resolve_source(model: str | os.PathLike | PreTrainedModel | PeftModel, setting: str = "agent_model") -> Source:
    """A hub id, a folder (of a full model or an adapter), `embedded`, or a loaded model.

    Args:
        setting: what names it, for errors.

    Raises:
        ConfigError: something else, a folder that does not exist, an adapter whose base is not named, a loaded model
            that cannot be trained.
    """
    if not isinstance(model, str | os.PathLike):
        return _loaded_source(model, setting)
    name = embedded_model_path() if model == "embedded" else os.fspath(model)
    if is_local_path(name) and not Path(name).is_dir():
        raise ConfigError(f"{setting}={name!r}: there is no such folder. Give the folder of a model, or a hub id")
    adapter_config = _find_file(name, "adapter_config.json")
    if adapter_config is None:
        return Source(name, setting=setting)
    base = json.loads(Path(adapter_config).read_text()).get("base_model_name_or_path")
    if not base:
        raise ConfigError(
            f"{setting}={name!r}: its adapter_config.json names no base_model_name_or_path. Write the base's hub id or "
            "folder there, or load it with peft and pass the object"
        )
    return Source(embedded_model_path() if base == "embedded" else base, name, setting)


def _loaded_source(model: Any, setting: str) -> Source:
    if not isinstance(model, PreTrainedModel | PeftModel):
        kind = type(model).__name__
        raise ConfigError(f"{setting}={kind} object: not a model. Give ids, folders or transformers models")
    source = Source(model, setting=setting)
    if model.dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"{setting}={source.name}: its weights are {model.dtype}. Load it with float32 or bfloat16")
    if not isinstance(model, PeftModel) and any(isinstance(module, LoraLayer) for module in model.modules()):
        raise ConfigError(
            f"{setting}={source.name}: it carries LoRA adapters already, maybe from an earlier trainer. "
            "Give its PeftModel to train those on, or load the model afresh"
        )
    return source


def weights_fingerprint(source: Source) -> str:
    """Tells one model from another, without reading it all: its configuration, and of local files size and beginning.

    Not the place it lies in, so that a model may be moved. A loaded model is told by its configuration alone.
    """
    digest = hashlib.blake2b(digest_size=6)
    facts = {key: value for key, value in source.config.to_dict().items() if not key.startswith("_")}
    for passing in ("transformers_version", "dtype", "torch_dtype", "use_cache"):
        facts.pop(passing, None)
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    for place in (source.base, source.adapter):
        if isinstance(place, str) and Path(place).is_dir():
            for file in sorted(Path(place).glob("*.safetensors")):
                digest.update(f"{file.name} {file.stat().st_size}".encode())
                with file.open("rb") as content:
                    digest.update(content.read(1 << 20))
    return f"{facts.get('model_type')} {digest.hexdigest()}"


def load_tokenizers(sources: Sequence[Source], given: Any = None) -> list[PreTrainedTokenizerBase]:
    """A tokenizer an agent: the given one (or one each), else the one that lies with its adapter or model.

    Raises:
        ConfigError: none can be found, their number is wrong, or one has no end token.
    """
    if given is None:
        names = [_tokenizer_name(source) for source in sources]
        settings = dict(zip(names, (source.setting for source in sources), strict=True))
        loaded = {name: _load_tokenizer(name, setting) for name, setting in settings.items()}
        tokenizers = [loaded[name] for name in names]
    else:
        tokenizers = list(given) if isinstance(given, list | tuple) else [given] * len(sources)
        if len(tokenizers) != len(sources):
            raise ConfigError(
                f"tokenizer: {len(tokenizers)} tokenizers for {len(sources)} agents. Give one, or one an agent"
            )
    for agent, tokenizer in enumerate(tokenizers):
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ConfigError(f"tokenizer={tokenizer!r}: not a tokenizer. Give what AutoTokenizer loads")
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                f"tokenizer of agent {agent} ({tokenizer.name_or_path!r}): has no end token, so responses could never "
                "end. Set its eos_token"
            )
    return tokenizers


def _tokenizer_name(source: Source) -> str:
    if source.adapter is not None and _find_file(source.adapter, "tokenizer_config.json") is not None:
        return source.adapter
    if source.place is None:
        raise ConfigError(
            f"tokenizer=None: {source.setting}={source.name} does not tell where its tokenizer is. Pass tokenizer="
        )
    return source.place


def _load_tokenizer(name: str, setting: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting}={name!r}: no tokenizer can be loaded from there ({first_line(error)}). "
            "Give a hub id or a folder that holds a model, or pass tokenizer="
        ) from error


def check_source(source: Source) -> None:
    """Raises ConfigError where a model has no configuration or no tokenizer; reads no weights."""
    _ = source.config
    load_tokenizers([source])


def max_model_length(source: Source) -> int | None:
    """Positions that the model of a source holds, read from its config alone; None where it does not say."""
    return getattr(source.config.get_text_config(), "max_position_embeddings", None)


def check_vocabulary(where: str, tokenizer: PreTrainedTokenizerBase, rows: int, name: str) -> None:
    """Raises ConfigError where a tokenizer has ids that a model of `rows` embedded tokens lacks."""
    if len(tokenizer) > rows:
        raise ConfigError(
            f"{where}: {len(tokenizer)} tokens, but {name} embeds {rows}. "
            "Call model.resize_token_embeddings first, or use the model's own tokenizer"
        )


def load_config(name: str, setting: str = "agent_model") -> PretrainedConfig:
    """A model's configuration, without its weights. Raises ConfigError where there is none."""
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting}={name!r}: no model can be loaded from there ({first_line(error)}). "
            "Give 'embedded', a local folder, or a hub id that this machine can reach"
        ) from error


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


def first_line(error: Exception) -> str:
    """The first line of an exception's message."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
