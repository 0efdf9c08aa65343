"""Which LoRA adapter each token goes through, for many adapters on one frozen base.

PEFT owns the adapters: their layers, their initialisation, their files. What it lacks is a cheap switch. Its
`set_adapter` flips `requires_grad` of everything that is not active, and its mixed-adapter forward is refused in
training and loops over index lists. `AdapterRouter` decides per forward instead: one adapter for all tokens
(training), none (the frozen base: the reference policy), or one a token (sampling for all agents in one batch).
Outside of a `with router...` block the layers behave as PEFT made them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from mlrl.errors import ConfigError
from mlrl.models.lora_linear import is_plain, lora_linear
from mlrl.models.recompute import Recipe, linear_of_recipe, recipe_of

_PEFT = object()  # no route: PEFT's own forward


class MixedRoute:
    """One adapter a token: `owner` holds, in the layout of the forward (rows, tokens), the number of its adapter."""

    def __init__(self, adapters: list[str], owner: torch.Tensor):
        self.adapters = adapters
        self.owner = owner
        self._weights: dict[int, tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]] = {}
        self._masks: dict[tuple, torch.Tensor] = {}

    def set_owner(self, owner: torch.Tensor) -> None:
        """Tells the adapters of the next forward's tokens."""
        self.owner = owner
        self._masks.clear()

    def weights(self, layer: LoraLinear, dtype: torch.dtype):
        """All adapters of a layer side by side: A (ΣR, in), scaled B (out, ΣR), and the rank of each."""
        if id(layer) not in self._weights:
            present = [a for a in self.adapters if a in layer.lora_A]
            ranks = tuple(layer.lora_A[a].weight.shape[0] if a in present else 0 for a in self.adapters)
            if not present:
                self._weights[id(layer)] = (None, None, ranks)
            else:
                down = torch.cat([layer.lora_A[a].weight for a in present]).to(dtype)
                up = torch.cat([layer.lora_B[a].weight * layer.scaling[a] for a in present], 1).to(dtype)
                self._weights[id(layer)] = (down, up, ranks)
        return self._weights[id(layer)]

    def mask(self, ranks: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """(tokens, ΣR): 1 in the columns of the token's own adapter, else 0."""
        if (ranks, dtype) not in self._masks:
            columns = torch.repeat_interleave(torch.tensor(ranks, device=self.owner.device))
            self._masks[ranks, dtype] = (self.owner.reshape(-1, 1) == columns).to(dtype)
        return self._masks[ranks, dtype]

    def masks(self, ranks: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> torch.Tensor:
        """Masks of several layers side by side, (tokens, sum of all their ranks)."""
        if (ranks, dtype) not in self._masks:
            self._masks[ranks, dtype] = torch.cat([self.mask(own, dtype) for own in ranks], 1)
        return self._masks[ranks, dtype]

    def masks_of_columns(self, ranks: tuple[tuple[int, ...], ...], dtype: torch.dtype, width: int) -> torch.Tensor:
        """The same for tokens as columns: (sum of all ranks, width), with zeros behind the last token."""
        if (ranks, width) not in self._masks:
            masks = self.masks(ranks, dtype)
            self._masks[ranks, width] = F.pad(masks, (0, 0, 0, width - len(masks))).t().contiguous()
        return self._masks[ranks, width]


class AdapterRouter:
    """Routes the LoRA layers of one model. Make one a base, after its first adapter was added."""

    def __init__(self, model: nn.Module):
        self.route: object = _PEFT
        self.layers = [m for m in model.modules() if isinstance(m, LoraLayer)]
        for layer in self.layers:
            if type(layer) is not LoraLinear:
                raise ConfigError(
                    f"lora_target_modules: {type(layer).__name__} layers ({layer.get_base_layer()}) cannot be adapted "
                    "here. Name linear layers, or 'all-linear'"
                )
            layer.forward = RoutedForward(layer, self)

    def release(self) -> None:
        """Gives the layers their own forward back."""
        for layer in self.layers:
            layer.forward = layer.forward.original

    def check(self, adapter: str) -> None:
        """Raises ConfigError where an adapter uses what routing does not compute."""
        for layer in self.layers:
            if adapter in layer.lora_variant or layer.lora_bias.get(adapter):
                raise ConfigError(
                    f"adapter {adapter!r}: DoRA, LoRA biases and other variants are not supported. Use plain LoRA"
                )

    @contextmanager
    def use(self, adapter: str | None) -> Iterator[None]:
        """All tokens through one adapter, or through none. Backward belongs inside, before any other `use`."""
        with self._set(adapter):
            yield

    @contextmanager
    def use_mixed(
        self, adapters: list[str], owner: torch.Tensor, route: MixedRoute | None = None
    ) -> Iterator[MixedRoute]:
        """Each token through `adapters[owner[token]]`; sampling only (no gradient).

        A `route` of before serves again, if it was one of these adapters and no weight has changed since.
        """
        if route is None:
            route = MixedRoute(adapters, owner)
        route.set_owner(owner)
        with self._set(route):
            yield route

    @contextmanager
    def _set(self, route: object) -> Iterator[None]:
        if self.route is not _PEFT:
            raise RuntimeError("an adapter is already in use: its backward must be done before another takes its place")
        self.route = route
        try:
            yield
        finally:
            self.route = _PEFT


class RoutedForward:
    """Forward of one LoRA layer, set on the instance; keeps PEFT's own for use outside of a route."""

    def __init__(self, layer: LoraLinear, router: AdapterRouter):
        self.layer, self.router, self.original = layer, router, layer.forward

    def __call__(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        route, layer = self.router.route, self.layer
        if route is _PEFT:
            return self.original(x, *args, **kwargs)
        flat = x.reshape(-1, x.shape[-1])
        if isinstance(route, MixedRoute):
            return self._mixed(flat, route).view(*x.shape[:-1], -1)
        if route is None or route not in layer.lora_A:
            result = layer.base_layer(flat)
        else:
            result = self._adapted(flat, route, recipe_of(x))
        return result.view(*x.shape[:-1], result.shape[-1])

    def _adapted(self, x: torch.Tensor, adapter: str, recipe: Recipe | None) -> torch.Tensor:
        """(tokens, in) → (tokens, out), all tokens through one adapter."""
        layer, base = self.layer, self.layer.base_layer
        down, up = layer.lora_A[adapter].weight.to(x.dtype), layer.lora_B[adapter].weight.to(x.dtype)
        dropped = layer.lora_dropout[adapter](x)
        whole = dropped is x and torch.is_grad_enabled()  # no part of x was dropped
        if whole and is_plain(base):
            return lora_linear(x, base, down, up, layer.scaling[adapter], recipe)
        result = base(x)
        known = whole and recipe is not None
        inner = linear_of_recipe(x, down, recipe) if known else F.linear(dropped, down)
        return result.addmm_(inner, up.t(), alpha=layer.scaling[adapter])

    def _mixed(self, x: torch.Tensor, route: MixedRoute) -> torch.Tensor:
        """(tokens, in) → (tokens, out), each token through its own adapter."""
        down, up, ranks = route.weights(self.layer, x.dtype)
        result = self.layer.base_layer(x)
        if down is not None:
            result.addmm_(F.linear(x, down).mul_(route.mask(ranks, x.dtype)), up.t())
        return result
