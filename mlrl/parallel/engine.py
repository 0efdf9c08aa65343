"""Optimization of one trainable entity over its ranks: backward, gradient norm, step, state.

Three backings with one interface:

- `Engine`, on one rank: AdamW over float32 masters, whatever type the model computes in. With bfloat16 weights stepped
  directly, an update below 1/256 of a weight is rounded away; a float32 master keeps it.
- the same over several ranks, data-parallel: gradients are added up once an update, in few reductions, before the norm
  is taken. Losses are sums over samples, so ranks may have different numbers of them, or none.
- `mlrl.parallel.zero.ZeroEngine`: DeepSpeed ZeRO.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import AdamW

from mlrl.parallel.group import Group

STATE_KINDS = ("master", "step", "exp_avg", "exp_avg_sq")
"""What an engine's state consists of, in the order in which it is put back; one tensor a parameter of each."""


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and its schedule, counted in updates."""

    learning_rate: float
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    scheduler: str = "constant"
    warmup_steps: int = 0
    total_updates: int = 0
    betas: tuple[float, float] = (0.9, 0.999)

    def make_optimizer(self, parameters: Sequence[torch.Tensor], fused: bool | None = None) -> AdamW:
        """Its first learning rate is for all; `rate` says those that follow."""
        return AdamW(parameters, self.learning_rate, self.betas, weight_decay=self.weight_decay, fused=fused)

    def rate(self, updates: int) -> float:
        """Learning rate of the update after `updates` others."""
        return self.learning_rate * schedule(updates, self.scheduler, self.warmup_steps, self.total_updates)


class Engine:
    """Accumulates gradients of `parameters` and steps their float32 masters.

    A parameter that is float32 is its own master; for others a float32 copy is kept and written back after a step, and
    gradients are added up in float32 from one micro-batch to the next.

    Args:
        group: the ranks that hold these parameters, with equal values.
    """

    lockstep = False
    """Whether all ranks must run the same number of forward and backward passes."""

    def __init__(self, parameters: Sequence[nn.Parameter], settings: OptimizerSettings, group: Group | None = None):
        self.parameters = list(parameters)
        self.settings = settings
        self.group = group or Group.alone()
        self.masters = [p if p.dtype == torch.float32 else p.detach().float().requires_grad_() for p in self.parameters]
        fused = all(p.device.type in ("cpu", "cuda") for p in self.masters)
        self.optimizer = settings.make_optimizer(self.masters, fused)
        self.updates = 0

    def backward(self, loss: torch.Tensor, last: bool = True) -> None:
        """Adds a loss's gradients to what has accumulated since the last step; `last` of an update on this rank."""
        loss.backward()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    def grad_norm(self) -> float:
        """L2 norm of the gradients that all ranks accumulated; NaN or inf where one of them is. Call once an update."""
        self._reduce()
        gradients = [m.grad for m in self.masters if m.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0

    def _reduce(self) -> None:
        if self.group.size == 1:
            return
        given = torch.tensor([float(m.grad is not None) for m in self.masters], device=self.masters[0].device)
        self.group.sum_([given])
        used = [m for m, count in zip(self.masters, given.tolist(), strict=True) if count]
        for master in used:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        self.group.sum_([master.grad for master in used])

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

    def state(self, kind: str) -> Iterator[torch.Tensor]:
        """One of `STATE_KINDS` for every parameter, whole, float32: the same whatever the ranks and sharding.

        All ranks of the group go through it together; a parameter that was never updated has step 0.
        """
        for master in self.masters:
            if kind == "master":
                yield master.detach()
            else:
                held = self.optimizer.state.get(master, {}).get(kind)
                yield held if held is not None else torch.zeros([] if kind == "step" else master.shape)

    @torch.no_grad()
    def load_state(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Takes over what `state` gave, here or in another layout; call it for every kind, in order."""
        for parameter, master, tensor in zip(self.parameters, self.masters, tensors, strict=True):
            held = self.optimizer.state
            if kind == "master":
                master.copy_(tensor)
                parameter.copy_(master)
            elif kind == "step":
                held.pop(master, None)
                if tensor > 0:
                    held[master] = {
                        "step": tensor.to(master.device, copy=True),
                        "exp_avg": torch.zeros_like(master, memory_format=torch.preserve_format),
                        "exp_avg_sq": torch.zeros_like(master, memory_format=torch.preserve_format),
                    }
            elif master in held:
                held[master][kind].copy_(tensor)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return self.settings.rate(self.updates)


def schedule(update: int, scheduler: str, warmup: int, total: int) -> float:
    """Factor of the learning rate at an update (from 0): linear warm-up, then constant, linear or cosine down to 0."""
    if update < warmup:
        return (update + 1) / warmup
    if scheduler == "constant":
        return 1.0
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    return 1.0 - progress if scheduler == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
