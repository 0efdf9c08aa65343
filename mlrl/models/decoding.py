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
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from mlrl.models.decode_attention import DecodeAttention
from mlrl.models.language_model import LanguageModel
from mlrl.models.linear import LinearForward
from mlrl.models.lora import MixedRoute, RoutedForward
from mlrl.models.machine_memory import give_back_memory
from mlrl.models.packing import PackedLinear, packing_pays
from mlrl.models.projections import PackedProjections, Projections, base_of, normed
from mlrl.models.recompute import GatedForward
from mlrl.models.rms_norm import NormForward

States = Callable[[Tensor, Tensor, DecodeAttention], Tensor]
"""(token ids (R,), positions (R,), store) → final hidden states (R, D)."""

AnyProjections = Projections | PackedProjections

_LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
_OUR_FORWARDS = (RoutedForward, GatedForward, NormForward, LinearForward)


class DecodeStep:
    """What runs a token a row, for as long as no weight changes. Make and call it inside the route, without gradients.

    Where packing pays, the layers are packed that are spelled out here, and the head in any case.

    Args:
        rows, steps: at most so many of each are to come, by which it prepares itself.
    """

    def __init__(self, model: LanguageModel, route: MixedRoute | None, rows: int, steps: int):
        self.model = model
        self.packed = self._pays(rows, steps)
        if self.packed:
            give_back_memory()
        self._head = PackedLinear(model.head.weight, model.head.bias) if self.packed else None
        self._states = _states(model, route, self.packed)

    def _pays(self, rows: int, steps: int) -> bool:
        return packing_pays(self.model.head.weight, _size(self.model), rows, steps)

    def serves(self, rows: int, steps: int) -> bool:
        """Whether it is what one would make for so many rows and steps, or better."""
        return self.packed or not self._pays(rows, steps)

    def __call__(self, ids: Tensor, positions: Tensor, store: DecodeAttention) -> Tensor:
        """(token ids (R,), positions (R,), store) → logits (R, V) in float32."""
        return self.model.logits(self._states(ids, positions, store), self._head)


def _size(model: LanguageModel) -> int:
    """Bytes of the linear layers and the head, adapters left out."""
    modules = model.backbone.named_modules()
    linears = [m.weight for name, m in modules if isinstance(m, nn.Linear) and ".lora_" not in name]
    return sum(w.nbytes for w in [*linears, model.head.weight])


def _states(model: LanguageModel, route: MixedRoute | None, packed: bool) -> States:
    """The part below the head."""

    def own(ids: Tensor, positions: Tensor, store: DecodeAttention) -> Tensor:
        return model.hidden_states(ids[:, None], positions[:, None], store)[:, 0]

    if model.lean_decoding is False or not _is_known(model):
        return own
    lean = _LeanStep(model, route, packed)

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


@dataclass
class _Layer:
    index: int
    asks: AnyProjections
    answers: AnyProjections
    widens: AnyProjections
    narrows: AnyProjections
    heads: tuple[int, int, int]  # of queries, keys and values
    head_size: int
    scaling: float
    head_norms: tuple[nn.Module, nn.Module] | None  # of queries and keys
    act: Callable[[Tensor], Tensor]


def _layer_of(layer: nn.Module, route: MixedRoute | None, packed: bool) -> _Layer:
    def projections(*linears: nn.Module, norm: nn.Module | None = None) -> AnyProjections:
        return (PackedProjections if packed else Projections)(linears, route, norm)

    attention, mlp = layer.self_attn, layer.mlp
    asking = (attention.q_proj, attention.k_proj, attention.v_proj)
    return _Layer(
        index=attention.layer_idx,
        asks=projections(*asking, norm=layer.input_layernorm),
        answers=projections(attention.o_proj),
        widens=projections(mlp.gate_proj, mlp.up_proj, norm=layer.post_attention_layernorm),
        narrows=projections(mlp.down_proj),
        heads=tuple(linear.out_features // attention.head_dim for linear in asking),
        head_size=attention.head_dim,
        scaling=attention.scaling,
        head_norms=(attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None,
        act=mlp.act_fn.forward,
    )


class _LeanStep:
    """A step of a plain decoder."""

    def __init__(self, model: LanguageModel, route: MixedRoute | None, packed: bool):
        self.model, self.backbone = model, model.backbone
        self.layers = [_layer_of(layer, route, packed) for layer in self.backbone.layers]

    def __call__(self, ids: Tensor, positions: Tensor, store: DecodeAttention) -> Tensor:
        store.eager = self.model.attn_implementation == "eager"
        rows = len(ids)
        x = self.backbone.embed_tokens(ids)
        cos, sin = self.backbone.rotary_emb(x[:, None], positions[:, None])  # (R, 1, head size): of all heads
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)  # of a head whose halves have changed places
        for layer in self.layers:
            queries, keys, values = layer.heads
            heads = layer.asks.joined(x).view(rows, queries + keys + values, layer.head_size)
            both, v = heads.split_with_sizes((queries + keys, values), 1)
            if layer.head_norms is not None:
                q, k = both.split_with_sizes((queries, keys), 1)
                both = torch.cat([normed(q, layer.head_norms[0]), normed(k, layer.head_norms[1])], 1)
            both = torch.addcmul(both * cos, both.roll(half, -1), sin)
            q, k = both.split_with_sizes((queries, keys), 1)
            out = store.attend_rows(layer.index, q, k, v, layer.scaling).view(rows, -1)
            x = layer.answers.joined(out).add_(x)
            gate, up = layer.widens(x)
            x = layer.narrows.joined(layer.act(gate).mul_(up)).add_(x)
        return normed(x, self.backbone.norm)
