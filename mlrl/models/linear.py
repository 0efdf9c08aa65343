"""Linear layers whose products are those of `mlrl.models.products`, forwards and backwards, where that pays."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mlrl.models import products


def quicken_linears(model: nn.Module) -> None:
    """Sets the linear layers of a model up for it; their values stay the same. A second time does nothing."""
    if not products.onednn_pays():
        return
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module):
            module.forward = LinearForward(module)


class LinearForward:
    """Forward of one linear layer, set on the instance; as its class has it where the products would be the same."""

    def __init__(self, layer: nn.Linear):
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.layer.weight, self.layer.bias
        float32 = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
        otherwise = torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()
        if not float32 or otherwise or hasattr(weight, "ds_tensor"):  # which ZeRO-3 fetches
            return type(self.layer).forward(self.layer, x)
        flat = x.reshape(-1, x.shape[-1])
        return _Linear.apply(flat, weight, bias).view(*x.shape[:-1], len(weight))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        needs_x, trains_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if trains_weight else None, weight if needs_x else None)
        return products.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        x, weight = ctx.saved_tensors
        needs_x, trains_weight, trains_bias = ctx.needs_input_grad
        return (
            products.matmul(upstream, weight) if needs_x else None,
            products.matmul(upstream.t(), x) if trains_weight else None,
            upstream.sum(0) if trains_bias else None,
        )
