"""The forward of one new token a row, spelled out in few operations.

A decode step of a small model, or of any model on a GPU, spends much of its time between matrix products: in modules,
hooks and small operations. The step of Llama, Mistral, Qwen 2 and Qwen 3 is written down here once, with one
down-projection for the adapters of all layers that read the same state. Its first use is run both ways, in case a
release of transformers has changed what those layers compute. All other models are decoded by their own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from mlrl.models.attention import DecodeAttention
from mlrl.models.language_model import LanguageModel
from mlrl.models.lora import MixedRoute, RoutedForward
from mlrl.models.products import as_columns, by_columns, linear_of_columns
from mlrl.models.recompute import GatedForward

Step = Callable[[Tensor, Tensor, DecodeAttention], Tensor]
"""(token ids (R,), positions (R,), store) → final hidden states (R, D)."""

_LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
_OUR_FORWARDS = (RoutedForward, GatedForward)


def decode_step(model: LanguageModel, route: MixedRoute | None) -> Step:
    """What runs a token a row, for as long as no weight changes. Call it inside the route, without gradients."""

    def own(ids: Tensor, positions: Tensor, store: DecodeAttention) -> Tensor:
        return model.hidden_states(ids[:, None], positions[:, None], store)[:, 0]

    if model.lean_decoding is False or not _is_known(model):
        return own
    lean = _LeanStep(model, route)

    def tried(ids: Tensor, positions: Tensor, store: DecodeAttention) -> Tensor:
        if model.lean_decoding is None:
            expected = own(ids, positions, store)
            model.lean_decoding = _agree(lean(ids, positions, store), expected)
        return (lean if model.lean_decoding else own)(ids, positions, store)  # stores again what the trial stored

    return tried


def _agree(ours: Tensor, expected: Tensor) -> bool:
    """Whether every row differs by no more than rounding."""
    tolerance = 1e-3 if expected.dtype == torch.float32 else 0.05
    difference, size = (x.float().norm(dim=-1) for x in (ours.float() - expected.float(), expected))
    return bool((difference <= tolerance * size).all())


def _is_known(model: LanguageModel) -> bool:
    """Whether its layers are those that are spelled out here, and nobody has hooked into them or wrapped them."""
    backbone = model.backbone
    return (
        all(type(layer) in _LAYERS for layer in getattr(backbone, "layers", [None]))
        and all(type(_base(m)) is nn.Linear for n, m in backbone.named_modules() if n.endswith("_proj"))
        and not any(m._forward_hooks or m._forward_pre_hooks for m in backbone.modules())
        and all(isinstance(m.forward, _OUR_FORWARDS) for m in backbone.modules() if "forward" in vars(m))
    )


def _base(linear: nn.Module) -> nn.Module:
    return linear.base_layer if isinstance(linear, LoraLinear) else linear


def _normed(x: Tensor, norm: nn.Module) -> Tensor:
    if x.dtype != torch.float32:  # where F.rms_norm rounds otherwise
        return norm(x)
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


class Projections:
    """Linear layers that read one state, with all adapters of the batch."""

    def __init__(self, linears: Sequence[nn.Module], route: MixedRoute | None):
        bases = [_base(linear) for linear in linears]
        self.route = route
        self.weights = [(base.weight, base.weight.t(), base.bias) for base in bases]
        found = [_adapters(linear, route, bases[0].weight.dtype) for linear in linears]
        self.ups = [(up, up.t()) if up is not None else None for _, up, _ in found]
        self.sizes = [up.shape[1] if up is not None else 0 for _, up, _ in found]
        self.ranks = tuple(ranks for down, _, ranks in found if down is not None)
        self.down = torch.cat([down for down, _, _ in found if down is not None]) if self.ranks else None

    def __call__(self, x: Tensor) -> list[Tensor]:
        """(R, in) → (R, out) of each."""
        if by_columns(x):
            return self._by_columns(as_columns(x), len(x))
        inner = None
        if self.down is not None:
            inner = F.linear(x, self.down).mul_(self.route.masks(self.ranks, x.dtype)).split(self.sizes, 1)
        outputs = []
        for number, ((_, weight_t, bias), up) in enumerate(zip(self.weights, self.ups, strict=True)):
            result = torch.mm(x, weight_t) if bias is None else torch.addmm(bias, x, weight_t)
            outputs.append(result if up is None else result.addmm_(inner[number], up[1]))
        return outputs

    def _by_columns(self, columns: Tensor, rows: int) -> list[Tensor]:
        inner = None
        if self.down is not None:
            mask = self.route.masks_of_columns(self.ranks, columns.dtype, columns.shape[1])
            inner = torch.mm(self.down, columns).mul_(mask).split(self.sizes)
        outputs = []
        for number, ((weight, _, bias), up) in enumerate(zip(self.weights, self.ups, strict=True)):
            result = linear_of_columns(columns, weight, bias)
            if up is not None:
                result.addmm_(up[0], inner[number])
            outputs.append(result[:, :rows].t())
        return outputs


def _adapters(linear: nn.Module, route: MixedRoute | None, dtype: torch.dtype):
    """(down, scaled up, ranks) of a layer as of `MixedRoute.weights`, Nones without."""
    if route is None or not isinstance(linear, LoraLinear):
        return None, None, ()
    return route.weights(linear, dtype)


@dataclass
class _Layer:
    index: int
    attention: nn.Module
    mlp: nn.Module
    before_attention: nn.Module
    before_mlp: nn.Module
    asks: Projections
    answers: Projections
    widens: Projections
    narrows: Projections


class _LeanStep:
    """A step of a plain decoder."""

    def __init__(self, model: LanguageModel, route: MixedRoute | None):
        self.model, self.backbone = model, model.backbone
        self.layers = [
            _Layer(
                index=layer.self_attn.layer_idx,
                attention=layer.self_attn,
                mlp=layer.mlp,
                before_attention=layer.input_layernorm,
                before_mlp=layer.post_attention_layernorm,
                asks=Projections([getattr(layer.self_attn, f"{name}_proj") for name in "qkv"], route),
                answers=Projections([layer.self_attn.o_proj], route),
                widens=Projections([layer.mlp.gate_proj, layer.mlp.up_proj], route),
                narrows=Projections([layer.mlp.down_proj], route),
            )
            for layer in self.backbone.layers
        ]

    def __call__(self, ids: Tensor, positions: Tensor, store: DecodeAttention) -> Tensor:
        store.eager = self.model.attn_implementation == "eager"
        x = self.backbone.embed_tokens(ids)
        rows = len(ids)
        cos, sin = self.backbone.rotary_emb(x[:, None], positions[:, None])  # (R, 1, head size): of all heads
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)  # of a head whose halves have changed places
        for layer in self.layers:
            attention = layer.attention
            size = attention.head_dim
            q, k, v = (y.reshape(rows, -1, size) for y in layer.asks(_normed(x, layer.before_attention)))
            if hasattr(attention, "q_norm"):
                q, k = _normed(q, attention.q_norm), _normed(k, attention.k_norm)
            heads = q.shape[1]
            both = torch.cat([q, k], 1)
            both = torch.addcmul(both * cos, both.roll(half, -1), sin)[:, :, None]
            out = store.attend(layer.index, both[:, :heads], both[:, heads:], v[:, :, None], attention.scaling, None)
            [out] = layer.answers(out.reshape(rows, -1))
            x = out.add_(x)
            gate, up = layer.widens(_normed(x, layer.before_mlp))
            [out] = layer.narrows(layer.mlp.act_fn(gate).mul_(up))
            x = out.add_(x)
        return _normed(x, self.backbone.norm)
