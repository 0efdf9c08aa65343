"""The forward of one new token a row, spelled out in few operations.

A decode step of a small model, or of any model on a GPU, spends much of its time between matrix products: in modules,
hooks and small operations. The step of Llama, Mistral, Qwen 2 and Qwen 3 is written down here once, with one
down-projection for the adapters of all layers that read the same state. Its first use is run both ways, in case a
release of transformers has changed what those layers compute. All other models are decoded by their own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from mlrl.models.attention import DecodeAttention
from mlrl.models.language_model import LanguageModel
from mlrl.models.lora import MixedRoute, RoutedForward
from mlrl.models.packing import PackedLinear, give_back_memory, packing_pays
from mlrl.models.projections import Projections, base_of
from mlrl.models.recompute import GatedForward
from mlrl.models.rms_norm import NormForward

Step = Callable[[Tensor, Tensor, DecodeAttention], Tensor]
"""(token ids (R,), positions (R,), store) → logits (R, V) in float32."""

_LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
_OUR_FORWARDS = (RoutedForward, GatedForward, NormForward)


def decode_step(model: LanguageModel, route: MixedRoute | None, rows: int, steps: int) -> Step:
    """What runs a token a row, for as long as no weight changes. Call it inside the route, without gradients.

    Where packing pays, the layers are packed that are spelled out here, and the head in any case.

    Args:
        rows, steps: at most so many of each are to come, by which it prepares itself.
    """
    weights = model.head.weight
    packed_rows = rows if packing_pays(weights, _size(model), rows, steps) else 0
    if packed_rows:
        give_back_memory()
    head = PackedLinear(weights, model.head.bias, rows) if packed_rows else None
    states = _states(model, route, packed_rows)

    def step(ids: Tensor, positions: Tensor, store: DecodeAttention) -> Tensor:
        return model.logits(states(ids, positions, store), head)

    return step


def _size(model: LanguageModel) -> int:
    """Bytes of the linear layers and the head, adapters left out."""
    modules = model.backbone.named_modules()
    linears = [m.weight for name, m in modules if isinstance(m, nn.Linear) and ".lora_" not in name]
    return sum(w.nbytes for w in [*linears, model.head.weight])


def _states(model: LanguageModel, route: MixedRoute | None, packed_rows: int) -> Step:
    """The part below the head: … → final hidden states (R, D)."""

    def own(ids: Tensor, positions: Tensor, store: DecodeAttention) -> Tensor:
        return model.hidden_states(ids[:, None], positions[:, None], store)[:, 0]

    if model.lean_decoding is False or not _is_known(model):
        return own
    lean = _LeanStep(model, route, packed_rows)

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
        and all(type(base_of(m)) is nn.Linear for n, m in backbone.named_modules() if n.endswith("_proj"))
        and not any(m._forward_hooks or m._forward_pre_hooks for m in backbone.modules())
        and all(isinstance(m.forward, _OUR_FORWARDS) for m in backbone.modules() if "forward" in vars(m))
    )


def _normed(x: Tensor, norm: nn.Module) -> Tensor:
    if x.dtype != torch.float32:  # where F.rms_norm rounds otherwise
        return norm(x)
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


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

    def __init__(self, model: LanguageModel, route: MixedRoute | None, packed_rows: int):
        self.model, self.backbone = model, model.backbone

        def projections(*linears: nn.Module) -> Projections:
            return Projections(linears, route, packed_rows)

        self.layers = [
            _Layer(
                index=layer.self_attn.layer_idx,
                attention=layer.self_attn,
                mlp=layer.mlp,
                before_attention=layer.input_layernorm,
                before_mlp=layer.post_attention_layernorm,
                asks=projections(*(getattr(layer.self_attn, f"{name}_proj") for name in "qkv")),
                answers=projections(layer.self_attn.o_proj),
                widens=projections(layer.mlp.gate_proj, layer.mlp.up_proj),
                narrows=projections(layer.mlp.down_proj),
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
