"""A frozen linear layer and a LoRA adapter on it as one autograd function: y = x·Wᵀ + b + s·(x·Aᵀ)·Bᵀ.

Autograd by itself makes the gradient of x in two tensors, one through W and one through A, and their sum in a third.
Here the adapter's part is added to the layer's by the matrix product that makes it. What is kept for the backward pass
is the same: x, or what x is made of, and x·Aᵀ.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mlrl.models import products
from mlrl.models.linear import LinearForward
from mlrl.models.recompute import Recipe


def is_plain(linear: nn.Module) -> bool:
    """Whether it is a frozen x·Wᵀ + b that nobody looks into as it runs, its weights all here at any time."""
    if type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter:
        return False
    if not isinstance(vars(linear).get("forward"), LinearForward | None):
        return False
    if hasattr(linear.weight, "ds_tensor"):  # sharded by ZeRO-3, fetched as the layer itself runs
        return False
    hooks = (linear._forward_pre_hooks, linear._forward_hooks, linear._backward_pre_hooks, linear._backward_hooks)
    frozen = not any(weight.requires_grad for weight in (linear.weight, linear.bias) if weight is not None)
    return frozen and not any(hooks)


def lora_linear(
    x: Tensor, linear: nn.Linear, down: Tensor, up: Tensor, scaling: float, recipe: Recipe | None = None
) -> Tensor:
    """(T, in) → (T, out) through a plain layer and the adapter A (r, in), B (out, r), all of one dtype.

    With a recipe of x, what x is made of is kept in place of x, and gets its gradient from here: x is made again once.
    """
    weights = (linear.weight, linear.bias, down, up)
    if recipe is None:
        return _LoraLinear.apply(x, *weights, scaling, None)
    return _LoraLinear.apply(x.detach(), *weights, scaling, recipe.remake, *recipe.inputs)


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, down, up, scaling, remake, *parts):
        inner = products.linear(x, down)
        trains_down, trains_up, _, _, *needs_parts = ctx.needs_input_grad[3:]
        ctx.scaling, ctx.remake = scaling, remake
        kept = parts or (x,)
        kept = kept if trains_down or any(needs_parts) else ()
        ctx.save_for_backward(weight, down, up, inner if trains_up else None, *kept)
        return products.linear(x, weight, bias).addmm_(inner, up.t(), alpha=scaling)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        weight, down, up, inner, *kept = ctx.saved_tensors
        needs_x, _, _, trains_down, trains_up, _, _, *needs_parts = ctx.needs_input_grad
        x_upstream = down_upstream = up_upstream = None
        parts_upstream = [None] * len(needs_parts)
        remade = ctx.remake(*kept) if kept and ctx.remake is not None else None
        if trains_up:
            up_upstream = products.matmul(upstream.t(), inner).mul_(ctx.scaling)
        if needs_x or trains_down or any(needs_parts):
            inner_upstream = products.matmul(upstream, up).mul_(ctx.scaling)
        if trains_down:
            x = kept[0] if remade is None else remade.value().view(len(upstream), -1)
            down_upstream = products.matmul(inner_upstream.t(), x)
            del x
        if needs_x or any(needs_parts):
            x_upstream = products.matmul(upstream, weight).addmm_(inner_upstream, down)
        if any(needs_parts):
            parts_upstream = remade.gradients(x_upstream.view_as(kept[0]), overwrite=True)
            x_upstream = None
        return x_upstream, None, None, down_upstream, up_upstream, None, None, *parts_upstream
