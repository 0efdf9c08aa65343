"""A network that one or several agents run on, and a policy: that network through one adapter or none."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from peft.utils import ModulesToSaveWrapper
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from mlrl.errors import ConfigError
from mlrl.losses.logprobs import LogProbs, completion_logprobs
from mlrl.models.language_model import LanguageModel
from mlrl.models.lora import AdapterRouter, MixedRoute
from mlrl.models.prefix_tree import PackedTree, PrefixTree
from mlrl.models.products import matmul, onednn_pays


class Shard(Protocol):
    """A network's weights, of which every rank holds a part."""

    def whole(self) -> AbstractContextManager[None]:
        """All weights are on every rank inside; entered by all ranks together."""
        ...


class Scorer(nn.Module):
    """What training reads of packed tokens, as one module's forward, in which a sharded network fetches its weights:
    log-probabilities, the values that a head makes of hidden states, or without a temperature those states."""

    def __init__(self, language_model: LanguageModel):
        super().__init__()
        self.network = language_model.model
        self._language_model = language_model

    @property
    def head_weight(self) -> nn.Parameter:
        """Read here outside of the layer it belongs to."""
        return self._language_model.head.weight

    def forward(
        self,
        packed: PackedTree,
        temperature: float | None = 1.0,
        entropy: str = "none",
        value_head: nn.Module | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs and entropies, each flat over all scored tokens, (S,); with a value head (values, None); without a
        temperature (hidden states (T, D), None)."""
        model = self._language_model
        hidden = model.hidden_states(packed.input_ids, packed.position_ids, packed.attention)[0]
        if value_head is not None:
            return value_head(hidden[packed.predecessors]), None
        if temperature is None:
            return hidden, None
        scored = completion_logprobs(
            hidden[packed.predecessors],
            model.head.weight,
            packed.targets,
            bias=model.head.bias,
            temperature=temperature,
            logit_scale=model.logit_scale,
            softcap=model.softcap,
            entropy=entropy,
            matmul=matmul if onednn_pays() else None,
        )
        return scored.logprobs_L, scored.entropy_L


class Base:
    """One loaded network, with any number of LoRA adapters on it.

    Args:
        model: a causal language model, or a PeftModel whose adapters are kept.
        name: the hub id or folder it came from.
        attn_implementation: see `LanguageModel`.
    """

    def __init__(self, model: PreTrainedModel | PeftModel, name: str, attn_implementation: str | None = None):
        self.name = name
        self.peft_model = model if isinstance(model, PeftModel) else None
        self.router = None
        self.model: PreTrainedModel = model.get_base_model() if isinstance(model, PeftModel) else model
        self.language_model = LanguageModel(self.model, name, attn_implementation)
        self.scorer = Scorer(self.language_model)
        self.score: nn.Module = self.scorer  # what runs it: itself, or an engine around it
        self.shard: Shard | None = None
        if self.peft_model is not None:
            self._route()

    def whole(self) -> AbstractContextManager[None]:
        """All weights are here inside, for sampling or saving; all ranks of a sharded network enter together."""
        return self.shard.whole() if self.shard is not None else nullcontext()

    def enable_gradient_checkpointing(self) -> None:
        """Activations of each layer are computed again in the backward pass."""
        self.model.activation_checkpointing_enable({"use_reentrant": False})
        for module in self.model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = (
                    True  # this flag alone turns it on; the layer's parts stay in eval mode, without dropout
                )

    def copy(self) -> Base:
        """A copy of the network as it is now, without adapters."""
        self.language_model.release()
        model = copy.deepcopy(self.model)
        self.language_model.claim()
        return Base(model, self.name, self.language_model.attn_implementation)

    def add_adapter(self, adapter: str, lora: LoraConfig, seed: int) -> None:
        """Adds a fresh adapter (zero effect at the start), initialised from `seed` alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                if self.peft_model is None:
                    self.peft_model = get_peft_model(self.model, lora, adapter_name=adapter)
                else:
                    self.peft_model.add_adapter(adapter, lora)
            except ValueError as error:
                linear = sorted({n.split(".")[-1] for n, m in self.model.named_modules() if isinstance(m, nn.Linear)})
                raise ConfigError(
                    f"lora_target_modules={lora.target_modules!r}: {error}. "
                    f"Linear layers of {self.name}: {', '.join(linear)}"
                ) from error
        self._route()

    def load_adapter(self, adapter: str, folder: str) -> None:
        """Adds a saved PEFT adapter under the name `adapter`."""
        try:
            if self.peft_model is None:
                self.peft_model = PeftModel.from_pretrained(self.model, folder, adapter_name=adapter)
            else:
                self.peft_model.load_adapter(folder, adapter_name=adapter)
        except (ValueError, RuntimeError, OSError, SafetensorError) as error:
            raise ConfigError(f"agents={folder!r}: the adapter does not load on {self.name} ({error})") from error
        self._route()

    def copy_adapter(self, source: str, target: str) -> None:
        """Adds a frozen copy of an adapter's present weights."""
        self.peft_model.add_adapter(target, self.peft_model.peft_config[source])
        self._route()
        with torch.no_grad():
            for copy, original in zip(self.adapter_parameters(target), self.adapter_parameters(source), strict=True):
                copy.copy_(original)
                copy.requires_grad_(False)

    def adapter_parameters(self, adapter: str) -> list[nn.Parameter]:
        """An adapter's weights, layer after layer, whatever PEFT has active."""
        return [
            side[adapter].weight
            for layer in self.router.layers
            if adapter in layer.lora_A
            for side in (layer.lora_A, layer.lora_B)
        ]

    def _route(self) -> None:
        if self.router is not None:
            self.router.release()
        whole = [name for name, module in self.model.named_modules() if isinstance(module, ModulesToSaveWrapper)]
        if whole:
            raise ConfigError(
                f"adapter on {self.name}: trains {whole[0]} as a whole (modules_to_save), which is not supported. "
                "Use plain LoRA"
            )
        if any(isinstance(m, LoraLayer) for m in (self.language_model.head, self.model.get_input_embeddings())):
            raise ConfigError(
                f"lora_target_modules: the embedding or the head of {self.name} is adapted, which is not supported. "
                "Leave it out, or use 'all-linear'"
            )
        self.router = AdapterRouter(self.model)
        for adapter in self.peft_model.peft_config:
            self.router.check(adapter)

    @contextmanager
    def mixed_adapters(
        self, adapters: list[str], owner: torch.Tensor, route: MixedRoute | None = None
    ) -> Iterator[MixedRoute | None]:
        """Route of a sampling batch, `route` again if given; None where there is nothing to choose."""
        if self.router is None:
            yield None
        else:
            with self.router.use_mixed(adapters, owner, route) as used:
                yield used


@dataclass(frozen=True)
class Policy:
    """A network through one adapter (None: the network as it is)."""

    base: Base
    adapter: str | None

    @contextmanager
    def use(self) -> Iterator[None]:
        """Forwards, and their backward, belong inside."""
        if self.base.router is None:
            yield
        else:
            with self.base.router.use(self.adapter):
                yield

    def parameters(self) -> list[nn.Parameter]:
        """The weights that make this policy differ from its frozen base; all of them without an adapter."""
        if self.adapter is None:
            return list(self.base.model.parameters())
        return self.base.adapter_parameters(self.adapter)

    def logprobs(self, tree: PrefixTree, temperature: float, entropy: str = "none") -> tuple[LogProbs, list[int]]:
        """Log-probabilities of the scored segments of a prefix tree, in one forward. Call inside `use`.

        Returns:
            (log-probs and entropies, each flat over all scored tokens, (S,)), and the tokens a scored segment.
        """
        packed = tree.pack(self.base.language_model.device)
        return LogProbs(*self.base.score(packed, temperature, entropy)), packed.lengths
