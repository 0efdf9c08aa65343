"""Activations that the backward pass makes again from what is kept anyway, instead of keeping them too.

A gated MLP, down(act(gate(x))·up(x)), would keep four tensors of its wide size a token: gate, act(gate), up, and their
product, which the adapter of `down` needs for its gradient. Two of them make the other two. In the same way what a
normalisation gives follows from the residual stream, which is kept for the normalisation's own gradient. Of a 135M
model under LoRA that is a third of all activations, for a few elementwise operations; every value is the same to the
last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_GATED_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class Recipe:
    """How to make a tensor again: `make(*inputs)`. The tensor made of it carries it as its attribute `recipe`.

    Several layers read one normalised state, and the backward pass comes to all of them in a row: what the first one
    made stays until as many have asked as there were in the forward pass.
    """

    def __init__(self, make: Callable[..., Tensor], *inputs: Tensor):
        self.make, self.inputs = make, tuple(given.detach() for given in inputs)
        self.readers = self._asked = 0
        self._made: Tensor | None = None

    def again(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """The tensor, of inputs as autograd kept them."""
        if self._made is None:
            with torch.no_grad():
                self._made = self.make(*inputs)
        made = self._made
        self._asked += 1
        if self._asked >= self.readers:
            self._asked, self._made = 0, None
        return made


def recipe_of(tensor: Tensor) -> Recipe | None:
    """How to make it again, where that is known."""
    return getattr(tensor, "recipe", None)


def linear_of_recipe(x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    """x·Wᵀ, (tokens, in) → (tokens, out), which keeps what x is made of in place of x."""
    return _LinearOfRecipe.apply(x, weight, recipe)


class _LinearOfRecipe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, recipe):
        recipe.readers += 1
        ctx.make_again = recipe.again
        ctx.save_for_backward(weight, *recipe.inputs)
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        weight, *inputs = ctx.saved_tensors
        x = ctx.make_again(tuple(inputs))
        return (
            upstream @ weight if ctx.needs_input_grad[0] else None,
            upstream.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None,
            None,
        )


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
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            gate = gate.detach().requires_grad_()
            acted = ctx.act(gate)
        (gate_upstream,) = torch.autograd.grad(acted, gate, upstream * up)
        return gate_upstream, upstream * acted.detach(), None


def remake_activations(model: nn.Module) -> None:
    """Sets the gated MLPs and normalisations of a model up for it; their results stay the same. Again is no harm."""
    for module in model.modules():
        if {name for name, _ in module.named_children()} == _GATED_PARTS:
            if not isinstance(module.forward, _GatedForward) and _is_plain(module):
                module.forward = _GatedForward(module)
        elif type(module).__name__.endswith("Norm") and _with_recipe not in module._forward_hooks.values():
            module.register_forward_hook(_with_recipe)


class _GatedForward:
    """Forward of one gated MLP, set on the instance."""

    def __init__(self, mlp: nn.Module):
        self.mlp = mlp

    def __call__(self, x: Tensor) -> Tensor:
        mlp = self.mlp
        gate, up, act = mlp.gate_proj(x), mlp.up_proj(x), mlp.act_fn
        if not (torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad)):
            return mlp.down_proj(act(gate) * up)
        product = _Gated.apply(gate, up, act)
        product.recipe = Recipe(lambda gate, up: act(gate) * up, gate, up)
        return mlp.down_proj(product)


@torch.no_grad()
def _is_plain(mlp: nn.Module) -> bool:
    """Whether it computes down(act(gate(x))·up(x)) and nothing else, tried on two made-up tokens."""
    width = getattr(mlp.gate_proj, "in_features", 0)
    weight = next(mlp.gate_proj.parameters(), None)
    if not width or weight is None or any(True for _ in mlp.act_fn.parameters()):
        return False
    x = torch.linspace(-2, 2, 2 * width, device=weight.device, dtype=weight.dtype).view(1, 2, width)
    return torch.equal(mlp(x), _GatedForward(mlp)(x))


def _with_recipe(norm: nn.Module, args: tuple[Any, ...], out: Any) -> None:
    """Forward hook of a normalisation."""
    sharded = any(hasattr(parameter, "ds_id") for parameter in norm.parameters(recurse=False))
    if torch.is_grad_enabled() and not sharded and len(args) == 1 and isinstance(out, Tensor):
        out.recipe = Recipe(norm.forward, args[0])  # of a sharded network's part, the weights are here while it runs
