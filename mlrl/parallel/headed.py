"""A network under ZeRO with small modules on it that stay whole on every rank, as value heads do.

A head is float32 whatever its network computes in, and too small to be worth sharding; both follow one loss and are
clipped by one norm.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from mlrl.parallel.engine import Engine
from mlrl.parallel.zero import ZeroEngine


class HeadedEngine:
    """The interface of `mlrl.parallel.engine.Engine` over both.

    Args:
        body: of the network.
        parameters: of the heads, which take its settings.
    """

    lockstep = True

    def __init__(self, body: ZeroEngine, parameters: Sequence[nn.Parameter]):
        self.body = body
        self.head = Engine(parameters, body.settings, body.group)
        self.settings, self.group = body.settings, body.group
        self.parameters = [*body.parameters, *parameters]

    def backward(self, loss: torch.Tensor, last: bool = True) -> None:
        """Adds a loss's gradients to both; `last` of an update on this rank."""
        self.body.backward(loss, last)

    def grad_norm(self) -> float:
        """L2 norm of all gradients of all ranks; not finite where one of them is not. Call once an update."""
        for parameter in self.head.parameters:
            if parameter.grad is not None:
                parameter.grad /= self.group.size  # the body multiplies losses by it
        return math.hypot(self.body.grad_norm(), self.head.grad_norm())

    def step(self, grad_norm: float) -> None:
        """Clips by the norm of all gradients and updates both."""
        self.body.updates = self.head.updates  # the head alone has made those of a critic's warm-up
        self.body.step(grad_norm)
        self.head.step(grad_norm)

    def zero_grad(self) -> None:
        """Drops what has accumulated."""
        self.body.zero_grad()
        self.head.zero_grad()

    @property
    def updates(self) -> int:
        return self.head.updates

    @updates.setter
    def updates(self, value: int) -> None:
        self.head.updates = self.body.updates = value

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return self.head.learning_rate

    def state(self, kind: str) -> Iterator[torch.Tensor]:
        """As of `mlrl.parallel.engine.Engine`, for the network's parameters and then the heads'."""
        yield from self.body.state(kind)
        yield from self.head.state(kind)

    def load_state(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Takes over what `state` gave, here or in another layout."""
        tensors = iter(tensors)
        of_body = itertools.islice(tensors, len(self.body.parameters))
        self.body.load_state(kind, of_body)
        for _ in of_body:  # which it need not have read
            pass
        self.head.load_state(kind, tensors)
