"""Attention as a plan that is handed to any model, and the plan over packed prefix trees.

The model runs its linear layers over whatever token layout it is given; only attention needs to know which token sees
which. Transformers hands keyword arguments of the forward through to the attention function, so a *plan* object in
`attention_plan` decides: `TreeAttention` for packed prefix trees (training, scoring, prefill), and that of
`mlrl.models.decode_attention` for one new token a row (sampling). A model set to this function needs no key-value cache
class and no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from mlrl.models.prefix_cache import KnownStates

IMPLEMENTATION = "mlrl"


class AttentionPlan(Protocol):
    """Computes attention for one layer. Heads-first tensors: query (R, H, L, D), key and value (R, Hkv, L, D)."""

    eager: bool

    def attend(self, layer: int, query, key, value, scaling: float, softcap: float | None) -> torch.Tensor:
        """Returns (R, L, H, D)."""
        ...


def _attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, attention_plan=None, **kwargs):
    if attention_plan is None:
        raise RuntimeError(
            f"{type(module).__name__} got no attention plan: call the model through mlrl.models.LanguageModel, or give "
            "it back an ordinary implementation with model.set_attn_implementation('sdpa')"
        )
    if kwargs.get("s_aux") is not None:
        raise NotImplementedError(f"{type(module).__name__}: attention sinks are not supported")
    scaling = module.head_dim**-0.5 if scaling is None else scaling
    return attention_plan.attend(module.layer_idx, query, key, value, scaling, kwargs.get("softcap")), None


AttentionInterface.register(IMPLEMENTATION, _attention)


def scaled_dot_product(
    query, key, value, mask, causal: bool, scaling: float, softcap: float | None = None, eager: bool = False
) -> torch.Tensor:
    """softmax(q·k·scaling)·v with grouped key-value heads; `mask` is True where a query may look, or added to scores.

    `eager` spells it out in matrix products, as capped scores need; otherwise PyTorch chooses a fused kernel.
    """
    groups = query.shape[1] // key.shape[1]
    if softcap is None and not eager:
        if groups > 1 and query.device.type == "cpu":  # no grouped-query kernel on CPU
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, scale=scaling, enable_gqa=key.shape[1] != query.shape[1]
        )
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores.float().softmax(-1).to(value.dtype) @ value


@dataclass
class SegmentGroup:
    """n segments attended in one padded call.

    Attributes:
        query_index: (n·Lq,) packed positions of the segments' tokens; key_index: (n·Lk,) places of what they may see.
            Padding points at position 0 and is masked, so that it neither contributes nor receives gradient.
        mask: (n, 1, Lq, Lk) True where a query sees a key; None if plain causal attention does.
        rows: (valid,) places of real tokens among the n·Lq, in the order of `tokens`; tokens: their packed positions.
    """

    shape: tuple[int, int, int]
    query_index: torch.Tensor
    key_index: torch.Tensor
    mask: torch.Tensor | None
    rows: torch.Tensor
    tokens: torch.Tensor
    _biases: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict, repr=False)

    def bias(self, groups: int, dtype: torch.dtype) -> torch.Tensor:
        """The mask as what is added to scores, 0 or −inf, (n, 1, groups·Lq, Lk), made once for all layers."""
        if (groups, dtype) not in self._biases:
            bias = torch.zeros(self.mask.shape, dtype=dtype, device=self.mask.device)
            self._biases[groups, dtype] = bias.masked_fill_(~self.mask, float("-inf")).repeat(1, 1, groups, 1)
        return self._biases[groups, dtype]

    @classmethod
    def build(cls, segments: Sequence[tuple[int, int, list[int]]], device) -> SegmentGroup:
        """From (start, stop, keys) a segment: its packed range, and the places of its ancestors' and its own keys."""
        n = len(segments)
        queries = max(stop - start for start, stop, _ in segments)
        keys = max(len(k) for _, _, k in segments)
        query_index = torch.zeros(n, queries, dtype=torch.long)
        key_index = torch.zeros(n, keys, dtype=torch.long)
        lengths = torch.tensor([stop - start for start, stop, _ in segments])
        prefix = torch.tensor([len(k) for _, _, k in segments]) - lengths
        for row, (start, stop, seen) in enumerate(segments):
            query_index[row, : stop - start] = torch.arange(start, stop)
            key_index[row, : len(seen)] = torch.tensor(seen)
        # query q of a segment with `prefix` ancestors' tokens sees keys 0 … prefix + q
        last = prefix[:, None] + torch.arange(queries)[None]
        plain = bool((prefix == 0).all() and (lengths == queries).all())
        mask = None if plain else (torch.arange(keys)[None, None] <= last[..., None])[:, None]
        valid = torch.arange(queries)[None] < lengths[:, None]
        return cls(
            shape=(n, queries, keys),
            query_index=query_index.flatten().to(device),
            key_index=key_index.flatten().to(device),
            mask=None if mask is None else mask.to(device),
            rows=valid.flatten().nonzero().flatten().to(device),
            tokens=query_index[valid].to(device),
        )


def _gather(states_TC: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of a (T, C) tensor; as an embedding look-up, whose backward sums repeated rows in parallel."""
    return F.embedding(index, states_TC)


class TreeAttention:
    """Every segment of a packed prefix tree attends to its ancestors and causally to itself."""

    eager = False

    def __init__(
        self,
        groups: list[SegmentGroup],
        num_tokens: int,
        device,
        capture: bool = False,
        known: KnownStates | None = None,
    ):
        self.groups, self.known = groups, known
        restore = torch.empty(num_tokens, dtype=torch.long, device=device)
        offset = 0
        for group in groups:
            restore[group.tokens] = group.rows + offset
            offset += group.shape[0] * group.shape[1]
        self.restore = restore
        self.captured: list[tuple[torch.Tensor, torch.Tensor]] | None = [] if capture else None

    def attend(self, layer: int, query, key, value, scaling: float, softcap: float | None) -> torch.Tensor:
        """One row of T packed tokens in, one row out; with `capture`, (T, Hkv, D) keys and values are kept a layer,
        with those in front that were known."""
        heads, head_dim = query.shape[1], query.shape[-1]
        query, key, value = (x.transpose(1, 2)[0] for x in (query, key, value))  # (T, H, D)
        if self.known is not None:
            key, value = self.known.before(layer, key, value)
        if self.captured is not None:
            self.captured.append((key, value))
        flat_q, flat_k, flat_v = query.flatten(1), key.flatten(1), value.flatten(1)
        outputs = []
        for group in self.groups:
            n, queries, keys = group.shape
            q = _gather(flat_q, group.query_index).view(n, queries, heads, head_dim).transpose(1, 2)
            k = _gather(flat_k, group.key_index).view(n, keys, -1, head_dim).transpose(1, 2)
            v = _gather(flat_v, group.key_index).view(n, keys, -1, value.shape[-1]).transpose(1, 2)
            if group.mask is None or softcap is not None or self.eager:
                out = scaled_dot_product(q, k, v, group.mask, group.mask is None, scaling, softcap, self.eager)
            else:
                # the query heads of one key-value head become more queries of it: no key is repeated, nor kept so
                fold = heads // k.shape[1]
                q = q.reshape(n, k.shape[1], fold * queries, head_dim)
                out = scaled_dot_product(q, k, v, group.bias(fold, q.dtype), False, scaling)
                out = out.reshape(n, heads, queries, -1)
            outputs.append(out.transpose(1, 2).reshape(n * queries, -1))
        return _gather(torch.cat(outputs) if len(outputs) > 1 else outputs[0], self.restore).view(
            1, -1, heads, value.shape[-1]
        )
