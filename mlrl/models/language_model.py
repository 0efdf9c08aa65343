"""A causal language model as two callables: packed tokens → hidden states, and hidden states → logits.

Keeping the head apart is what lets it run on completion positions only: full (tokens, vocabulary) logits never exist.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from mlrl.errors import ConfigError
from mlrl.models.attention import IMPLEMENTATION, AttentionPlan
from mlrl.models.decode_attention import DecodeAttention
from mlrl.models.linear import quicken_linears
from mlrl.models.packing import PackedLinear
from mlrl.models.prefix_tree import PrefixTree
from mlrl.models.products import as_columns, by_columns, linear, linear_of_columns
from mlrl.models.recompute import remake_activations
from mlrl.models.rms_norm import shorten_norms


class LanguageModel:
    """Backbone and head of a transformers causal language model, set up for attention plans.

    Args:
        model: the (possibly adapter-injected) model. Its attention implementation is switched to ours; `release`
            gives the original back.
        name: used in errors.
        attn_implementation: `sdpa` (fused kernels, the default) or `eager`.

    Raises:
        ConfigError: where the architecture cannot be run this way (checked on a few tokens, against its own forward).
    """

    def __init__(self, model: PreTrainedModel, name: str, attn_implementation: str | None = None):
        if attn_implementation not in (None, "sdpa", "eager"):
            raise ConfigError(
                f"attn_implementation={attn_implementation!r}: prefix-shared attention has the kernels sdpa and eager. "
                "Use one of them"
            )
        self.model, self.name, self.attn_implementation = model, name, attn_implementation
        self.lean_decoding: bool | None = None  # whether `mlrl.models.decoding` decodes it; None: not tried
        self.config = model.config.get_text_config()
        self.softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        scale, divide = getattr(self.config, "logit_scale", None), getattr(self.config, "logits_scaling", None)
        self.logit_scale: float = scale if scale is not None else 1.0 / divide if divide else 1.0
        if model.config._attn_implementation == IMPLEMENTATION:  # a loaded model that served another team before
            model.set_attn_implementation("sdpa")
        self._original_implementation = model.config._attn_implementation
        remake_activations(model)
        shorten_norms(model)
        quicken_linears(model)
        model.eval()  # the same mode for sampling and scoring: no dropout of the base model anywhere
        reference = self._own_logits()
        self._compare(self._planned_logits, reference, "when its prefixes are shared")
        self._compare(self._decoded_logits, reference, "token by token")

    @property
    def backbone(self) -> nn.Module:
        """The decoder without its head."""
        return getattr(self.model, self.model.base_model_prefix)

    @property
    def head(self) -> nn.Module:
        """The linear layer that makes logits."""
        return self.model.get_output_embeddings()

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    @property
    def max_length(self) -> int | None:
        """Longest sequence that this model computes exactly, None if unknown: its positions, its attention window."""
        limits = [getattr(self.config, "max_position_embeddings", None)]
        if any("sliding" in kind for kind in getattr(self.config, "layer_types", None) or []):
            limits.append(getattr(self.config, "sliding_window", None))
        known = [limit for limit in limits if limit]
        return min(known) if known else None

    def hidden_states(self, input_ids: torch.Tensor, position_ids: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Final hidden states, (rows, L, D), of (rows, L) tokens under an attention plan."""
        plan.eager = self.attn_implementation == "eager"
        output = self.backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False, attention_plan=plan)
        return output.last_hidden_state

    def logits(self, hidden: torch.Tensor, packed_head: PackedLinear | None = None) -> torch.Tensor:
        """Logits of hidden states (…, D) → (…, V) in float32, as the model itself makes them."""
        if packed_head is not None:
            logits = packed_head(hidden)
        elif hidden.dim() == 2 and by_columns(hidden) and not torch.is_grad_enabled():
            columns = linear_of_columns(as_columns(hidden), self.head.weight, self.head.bias)
            logits = columns[:, : len(hidden)].t().contiguous()
        else:
            logits = linear(hidden, self.head.weight, self.head.bias).float()
        if self.logit_scale != 1.0:
            logits *= self.logit_scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def claim(self) -> None:
        """Switches the model to attention by plan."""
        self.model.set_attn_implementation(IMPLEMENTATION)

    def release(self) -> None:
        """Gives the model its own attention implementation back."""
        self.model.set_attn_implementation(self._original_implementation)

    def _check_ids(self) -> list[int]:
        return [(7 * i + 3) % min(self.config.vocab_size, 500) for i in range(8)]

    def _compare(self, run: Callable[[], torch.Tensor], reference: torch.Tensor, how: str) -> None:
        """Raises ConfigError where the model cannot be run our way, or says something else."""
        kind = type(self.model).__name__
        try:
            ours = run()
        except (TypeError, AttributeError, RuntimeError, ValueError, NotImplementedError, IndexError) as error:
            raise ConfigError(f"model {self.name!r}: {kind} cannot be run {how} ({error})") from error
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.1
        if not torch.allclose(ours, reference, rtol=tolerance, atol=tolerance * float(reference.abs().max())):
            raise ConfigError(
                f"model {self.name!r}: {kind} gives other logits {how} "
                f"(largest difference {float((ours - reference).abs().max()):.2g}). "
                "Use a decoder with ordinary causal attention"
            )

    @torch.no_grad()
    def _own_logits(self) -> torch.Tensor:
        """The model's own logits after the last of a few tokens."""
        ids = torch.tensor([self._check_ids()], device=self.device)
        return self.model(input_ids=ids, use_cache=False).logits[0, -1].float()

    @torch.no_grad()
    def _planned_logits(self) -> torch.Tensor:
        """The same through a prefix tree of two branches, by attention that is ours from now on."""
        self.claim()
        ids = self._check_ids()
        tree = PrefixTree()
        root = tree.add(ids[:5])
        tree.add(ids[4:2:-1], root)
        tree.add(ids[5:], root)
        packed = tree.pack(self.device)
        return self.logits(self.hidden_states(packed.input_ids, packed.position_ids, packed.attention)[0, -1])

    @torch.no_grad()
    def _decoded_logits(self) -> torch.Tensor:
        """The same with the last token as sampling runs it."""
        ids = self._check_ids()
        tree = PrefixTree()
        tree.add(ids[:-1])
        packed = tree.pack(self.device)
        packed.attention.captured = []
        self.hidden_states(packed.input_ids, packed.position_ids, packed.attention)
        before = len(ids) - 1
        store = DecodeAttention(torch.tensor([0]), torch.tensor([before], device=self.device), steps=1)
        store.prefill(torch.tensor(packed.paths, device=self.device), packed.attention.captured)
        last, position = (torch.tensor([[number]], device=self.device) for number in (ids[-1], before))
        return self.logits(self.hidden_states(last, position, store)[0, -1])
