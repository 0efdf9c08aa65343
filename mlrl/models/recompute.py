"""Activations that the backward pass makes again from what is kept anyway, instead of keeping them too.

A gated MLP, down(act(gate(x))·up(x)), would keep four tensors of its wide size a token: gate, act(gate), up, and their
product, which the adapter of `down` needs for its gradient. Two of them make the other two, by elementwise operations
and to the same last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP


class Remade(Protocol):
    """A tensor that is made again in one backward pass, without gradients of these gradients."""

    def value(self) -> Tensor: ...

    def gradients(self, upstream: Tensor, overwrite: bool = False) -> tuple[Tensor, ...]:
        """Of what it is made of, asked for once and last; `overwrite`: `upstream` may be written over."""
        ...


class Recipe:
    """How a tensor is made again, `remake(*inputs)`. What it made carries it as its attribute `recipe`.

    It lives as long as that tensor: autograd keeps the inputs by itself, where hooks see them, until they were used.
    """

    def __init__(self, remake: Callable[..., Remade], made: Tensor, *inputs: Tensor):
        self.remake, self.inputs, self.version = remake, inputs, made._version


def recipe_of(tensor: Tensor) -> Recipe | None:
    """How to make it again, where that is known and nobody has changed it since."""
    recipe = getattr(tensor, "recipe", None)
    return recipe if recipe is not None and recipe.version == tensor._version else None


def linear_of_recipe(x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    """x·Wᵀ, (tokens, in) → (tokens, out), which keeps what x is made of in place of x."""
    return _LinearOfRecipe.apply(x, weight, recipe.remake, *(given.detach() for given in recipe.inputs))


class _LinearOfRecipe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, remake, *inputs):
        ctx.remake = remake
        ctx.save_for_backward(weight, *inputs)
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        weight, *inputs = ctx.saved_tensors
        x_upstream = upstream @ weight if ctx.needs_input_grad[0] else None
        weight_upstream = None
        if ctx.needs_input_grad[1]:
            x = ctx.remake(*inputs).value()
            weight_upstream = upstream.t() @ x.reshape(-1, x.shape[-1])
        return x_upstream, weight_upstream, *[None] * (1 + len(inputs))


class _Gated(torch.autograd.Function):
    """act(gate)·up, which keeps gate and up."""

    @staticmethod
    def forward(ctx, gate, up, act):
        ctx.act = act
        ctx.save_for_backward(gate, up)
        return act(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        return *RemadeGated(ctx.act, *ctx.saved_tensors).gradients(upstream), None


class RemadeGated:
    """act(gate)·up of tensors (…, I), of any activation without weights, which runs once for all that is asked."""

    def __init__(self, act: nn.Module, gate: Tensor, up: Tensor):
        self.closed, self.up = gate.dtype == up.dtype and _is_silu(act), up
        self.gate = gate.detach().requires_grad_(not self.closed)
        with torch.enable_grad():
            self.acted = act(self.gate)

    def value(self) -> Tensor:
        return self.acted.detach() * self.up

    def gradients(self, upstream: Tensor, overwrite: bool = False) -> tuple[Tensor, Tensor]:
        acted = self.acted.detach()
        up_upstream = torch.mul(acted, upstream, out=acted if self.closed else None)
        acted_upstream = torch.mul(upstream, self.up, out=upstream if overwrite else None)
        if not self.closed:
            return torch.autograd.grad(self.acted, self.gate, acted_upstream)[0], up_upstream
        silu_backward = torch.ops.aten.silu_backward.grad_input  # autograd's own, here in the memory of its input
        return silu_backward(acted_upstream, self.gate, grad_input=acted_upstream), up_upstream


def _is_silu(act: nn.Module) -> bool:
    """Whether its derivative is known here: x·sigmoid(x), and nobody looks into it as it runs."""
    plain = type(act) in (nn.SiLU, SiLUActivation) and "forward" not in vars(act)
    return plain and not (act._forward_pre_hooks or act._forward_hooks)


def remake_activations(model: nn.Module) -> None:
    """Sets the gated MLPs of a model up for it; their results stay the same. A second time does nothing."""
    for module in model.modules():
        if _is_gated_mlp(module) and "forward" not in vars(module):
            module.forward = GatedForward(module)


def _is_gated_mlp(module: nn.Module) -> bool:
    """Whether its forward is, instruction for instruction, that of Llama, and its activation has no weights."""
    code, plain = getattr(type(module).forward, "__code__", None), LlamaMLP.forward.__code__
    return (
        (code is plain or (code is not None and (code.co_code, code.co_names) == (plain.co_code, plain.co_names)))
        and hasattr(module, "act_fn")
        and not any(True for _ in module.act_fn.parameters())
    )


class GatedForward:
    """Forward of one gated MLP, set on the instance."""

    def __init__(self, mlp: nn.Module):
        self.mlp = mlp

    def __call__(self, x: Tensor) -> Tensor:
        mlp = self.mlp
        gate, up, act = mlp.gate_proj(x), mlp.up_proj(x), mlp.act_fn
        if not (torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad)):
            return mlp.down_proj(act(gate) * up)
        product = _Gated.apply(gate, up, act)
        product.recipe = Recipe(partial(RemadeGated, act), product, gate, up)
        return mlp.down_proj(product)
