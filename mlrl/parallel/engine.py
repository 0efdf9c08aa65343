"""Optimization of one trainable entity: backward, gradient norm, step, state.

`Engine` is the plain backing, for one process: AdamW over float32 masters, whatever type the model computes in. With
bfloat16 weights stepped directly, an update below 1/256 of a weight is rounded away; a float32 master keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and its schedule, counted in updates."""

    learning_rate: float
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    scheduler: str = "constant"
    warmup_steps: int = 0
    total_updates: int = 0


class Engine:
    """Accumulates gradients of `parameters` and steps their float32 masters.

    A parameter that is float32 is its own master; for others a float32 copy is kept and written back after a step, and
    gradients are added up in float32 from one micro-batch to the next.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], settings: OptimizerSettings):
        self.parameters = list(parameters)
        self.settings = settings
        self.masters = [p if p.dtype == torch.float32 else p.detach().float().requires_grad_() for p in self.parameters]
        fused = all(p.device.type in ("cpu", "cuda") for p in self.masters)
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=fused
        )
        self.updates = 0

    def backward(self, loss: torch.Tensor) -> None:
        """Adds a loss's gradients to what has accumulated since the last step."""
        loss.backward()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    def grad_norm(self) -> float:
        """L2 norm of the accumulated gradients; NaN or inf where one of them is."""
        gradients = [m.grad for m in self.masters if m.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0

    def step(self, grad_norm: float) -> None:
        """Clips by `grad_norm` (as measured before), updates the masters and writes them back."""
        limit = self.settings.max_grad_norm
        if limit is not None and grad_norm > limit:
            torch.nn.utils.clip_grads_with_norm_(self.masters, limit, torch.tensor(grad_norm))
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        self.optimizer.step()
        self.zero_grad()
        self.updates += 1
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)

    def zero_grad(self) -> None:
        """Drops what has accumulated."""
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self.parameters:
            parameter.grad = None

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return self.settings.learning_rate * schedule(
            self.updates, self.settings.scheduler, self.settings.warmup_steps, self.settings.total_updates
        )


def schedule(update: int, scheduler: str, warmup: int, total: int) -> float:
    """Factor of the learning rate at an update (from 0): linear warm-up, then constant, linear or cosine down to 0."""
    if update < warmup:
        return (update + 1) / warmup
    if scheduler == "constant":
        return 1.0
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    return 1.0 - progress if scheduler == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
