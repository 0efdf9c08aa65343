"""Linear layers of a decode step that read one state, with the LoRA adapters of all agents in the batch.

The adapters' down-projections are one product, or part of the layers' own where those are packed; a mask leaves each
row what its own adapter has made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn

from mlrl.models.lora import MixedRoute
from mlrl.models.packing import PackedLinear
from mlrl.models.products import as_columns, by_columns, linear, linear_of_columns, onednn_pays


def base_of(linear: nn.Module) -> nn.Module:
    """The layer itself below an adapter."""
    return linear.base_layer if isinstance(linear, LoraLinear) else linear


def normed(x: Tensor, norm: nn.Module) -> Tensor:
    """RMS norm of Llama and its kin, over the last dimension."""
    if x.dtype != torch.float32:  # where F.rms_norm rounds otherwise
        return norm(x)
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


class Projections:
    """Linear layers (out, in) of one input, for as long as no weight changes.

    Args:
        norm: RMS norm that the input has yet to go through.
    """

    def __init__(self, linears: Sequence[nn.Module], route: MixedRoute | None, norm: nn.Module | None = None):
        bases = [base_of(linear) for linear in linears]
        self.route, self.norm = route, norm
        self.multiply = _by_onednn if onednn_pays() else _by_default
        self.weights = [(base.weight, base.weight.t(), base.bias) for base in bases]
        found = [_adapters(linear, route, bases[0].weight.dtype) for linear in linears]
        self.ups = [(up, up.t()) if up is not None else None for _, up, _ in found]
        self.sizes = [up.shape[1] if up is not None else 0 for _, up, _ in found]
        self.ranks = tuple(ranks for down, _, ranks in found if down is not None)
        self.down = torch.cat([down for down, _, _ in found if down is not None]) if self.ranks else None

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """(R, in) → (R, out) of each."""
        if self.norm is not None:
            x = normed(x, self.norm)
        if by_columns(x):
            return self._by_columns(as_columns(x), len(x))
        inner = None
        if self.down is not None:
            inner = F.linear(x, self.down).mul_(self.route.masks(self.ranks, x.dtype)).split(self.sizes, 1)
        outputs = []
        for number, (layer, up) in enumerate(zip(self.weights, self.ups, strict=True)):
            result = self.multiply(x, *layer)
            outputs.append(result if up is None else result.addmm_(inner[number], up[1]))
        return outputs

    def joined(self, x: Tensor) -> Tensor:
        """(R, in) → (R, sum of all out): the outputs side by side."""
        outputs = self(x)
        return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]

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


class PackedProjections:
    """The same with one packed weight: all weights below each other, the adapters' down-projections below them.

    The norm's weight is a factor of that weight, so that of the norm a row's length alone is left to be computed.
    """

    def __init__(self, linears: Sequence[nn.Module], route: MixedRoute | None, norm: nn.Module | None = None):
        bases = [base_of(linear) for linear in linears]
        weights, biases = [base.weight for base in bases], [base.bias for base in bases]
        found = [_adapters(linear, route, weights[0].dtype) for linear in linears]
        downs = [down for down, _, _ in found if down is not None]
        self.route, self.ranks = route, tuple(ranks for down, _, ranks in found if down is not None)
        self.width = sum(len(weight) for weight in weights)  # of all outputs side by side
        self.parts = [*map(len, weights), *([sum(map(len, downs))] if downs else [])]  # and of what is behind them
        self.sizes = [up.shape[1] if up is not None else 0 for _, up, _ in found]
        self.ups = [up.t().contiguous() if up is not None else None for _, up, _ in found]  # faster than as they lie
        whole = torch.cat([*weights, *downs])
        self.floor = None
        if norm is not None:
            size = whole.shape[1]
            whole *= norm.weight * size**0.5
            self.floor = whole.new_tensor((size * norm.variance_epsilon) ** 0.5)
        bias = None
        if any(b is not None for b in biases):
            bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)])
            bias = F.pad(bias, (0, len(whole) - self.width))
        self.packed = PackedLinear(whole, bias)

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """(R, in) → (R, out) of each."""
        return self._run(x)[1]

    def joined(self, x: Tensor) -> Tensor:
        """(R, in) → (R, sum of all out): the outputs side by side."""
        return self._run(x)[0].narrow(1, 0, self.width)

    def _run(self, x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """The product, with the adapters' parts added to the outputs in it; and each output, as a part of it."""
        if self.floor is not None:
            x = x / torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), self.floor)
        result = self.packed(x)
        outputs = result.split_with_sizes(self.parts, 1)
        if self.ranks:
            *outputs, inner = outputs
            inner = inner.mul_(self.route.masks(self.ranks, x.dtype)).split_with_sizes(self.sizes, 1)
            for number, up in enumerate(self.ups):
                if up is not None:
                    outputs[number].addmm_(inner[number], up)
        return result, outputs


def _by_default(x: Tensor, _, weight_t: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight_t) if bias is None else torch.addmm(bias, x, weight_t)


def _by_onednn(x: Tensor, weight: Tensor, _, bias: Tensor | None) -> Tensor:
    return linear(x, weight, bias)


def _adapters(linear: nn.Module, route: MixedRoute | None, dtype: torch.dtype):
    """(down, scaled up, ranks) of a layer as of `MixedRoute.weights`, Nones without."""
    if route is None or not isinstance(linear, LoraLinear):
        return None, None, ()
    return route.weights(linear, dtype)
