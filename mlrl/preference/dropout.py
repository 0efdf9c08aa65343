"""Dropout of an adapter: active in the losses of this room, never in sampling or scoring."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from mlrl.models.base import Policy


def quiet_adapter(policy: Policy) -> None:
    """Turns the dropout of a policy's adapter off; PEFT makes adapters with it on."""
    for module in _dropouts(policy):
        module.eval()


@contextmanager
def adapter_dropout(policy: Policy, seed: int) -> Iterator[None]:
    """Dropout is active inside, drawn from `seed` alone: a run that goes on drops what it would have dropped."""
    modules = _dropouts(policy)
    for module in modules:
        module.train()
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            yield
    finally:
        for module in modules:
            module.eval()


def _dropouts(policy: Policy) -> list[nn.Module]:
    if policy.adapter is None:
        return []
    layers = [layer for layer in policy.base.router.layers if policy.adapter in layer.lora_dropout]
    return [layer.lora_dropout[policy.adapter] for layer in layers]
