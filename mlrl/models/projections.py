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
from mlrl.models.products import as_columns, by_columns, linear_of_columns


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
        packed: whether to pack the weights; else they stay where they are.
        norm: RMS norm that the input has yet to go through.
    """

    def __init__(
        self,
        linears: Sequence[nn.Module],
        route: MixedRoute | None,
        packed: bool = False,
        norm: nn.Module | None = None,
    ):
        bases = [base_of(linear) for linear in linears]
        self.route, self.norm = route, norm
        self.weights = [(base.weight, base.weight.t(), base.bias) for base in bases]
        found = [_adapters(linear, route, bases[0].weight.dtype) for linear in linears]
        self.ups = [(up, up.t()) if up is not None else None for _, up, _ in found]
        self.sizes = [up.shape[1] if up is not None else 0 for _, up, _ in found]
        self.ranks = tuple(ranks for down, _, ranks in found if down is not None)
        self.down = torch.cat([down for down, _, _ in found if down is not None]) if self.ranks else None
        self.widths = [len(base.weight) for base in bases]
        self.width = sum(self.widths)  # of all outputs side by side
        self.packed = self._pack() if packed else None

    def _pack(self) -> PackedLinear:
        """All weights below each other, and the adapters' below them, with the norm's weight as a factor."""
        weights, biases = [weight for weight, _, _ in self.weights], [bias for _, _, bias in self.weights]
        if self.down is not None:
            weights, biases = [*weights, self.down], [*biases, None]
            self.widths.append(len(self.down))
            self.fast_ups = [up and up[1].contiguous() for up in self.ups]
        bias = None
        if any(b is not None for b in biases):
            bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)])
        weight = torch.cat(weights) if len(weights) > 1 or self.norm is not None else weights[0]
        if self.norm is not None:
            size = weight.shape[1]
            weight *= self.norm.weight * size**0.5  # a copy by now
            self.floor = weight.new_tensor((size * self.norm.variance_epsilon) ** 0.5)
        return PackedLinear(weight, bias)

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """(R, in) → (R, out) of each."""
        if self.packed is not None:
            return self._by_packed(x)[1]
        if self.norm is not None:
            x = normed(x, self.norm)
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

    def joined(self, x: Tensor) -> Tensor:
        """(R, in) → (R, sum of all out): the outputs side by side."""
        if self.packed is not None:
            return self._by_packed(x)[0].narrow(1, 0, self.width)
        outputs = self(x)
        return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]

    def _by_packed(self, x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """One tensor of all outputs and, behind them, what is left of the adapters; and each output as a part of it."""
        if self.norm is not None:  # a row's length is all that is left of it: the other factors are in the weights
            x = x / torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), self.floor)
        result = self.packed(x)
        outputs = result.split_with_sizes(self.widths, 1)
        if self.down is not None:
            *outputs, inner = outputs
            inner = inner.mul_(self.route.masks(self.ranks, x.dtype)).split_with_sizes(self.sizes, 1)
            for number, up in enumerate(self.fast_ups):
                if up is not None:
                    outputs[number].addmm_(inner[number], up)
        return result, outputs

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
