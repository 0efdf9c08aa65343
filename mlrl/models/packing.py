"""Weights laid out once, for the many products of few rows that decoding makes of them.

The libraries behind PyTorch on CPU copy a weight into their own layout in every product. Where few rows read the
weight, that costs more than the product: on two cores of Zen 5 the layers of a 135M model take 24 ms for 18 rows and 16
ms once all is laid out before (oneDNN; 6 rows: 17 and 11, 64 rows: 54 and 37), on other cores with AVX-512 45 and 33 ms
(MKL; 6 rows: 40 and 23, 64 rows: 79 and 58). Both libraries give that layout away, and PyTorch has it as operators, as
its compiler uses it. Results differ from those of `F.linear` by rounding at most.

The price is a copy of the weights while tokens are sampled, which `machine_memory` keeps from adding to what updates
leave behind. Whether to pay it goes by the machine, the model and what is asked for, never by a clock or by the memory
that is free just now: a seed stands for one run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from mlrl.models.machine_memory import memory_limit
from mlrl.models.products import onednn_pays, onednn_product

_LEAST_ROWS = 3  # fewer are read at the speed of memory anyway
_LEAST_STEPS = 16  # packing costs as much as some ten steps gain
_ROWS = 64  # that the layout is made for; on one of 32 to 256, products of 3 to 256 rows are as fast as on their own
_SHARE_OF_MEMORY = 1 / 16  # of what this machine or container has: other processes there have copies too


def packing_pays(weight: Tensor, size: int, rows: int, steps: int) -> bool:
    """Whether to pack a model with such weights, `size` bytes in all, for `steps` products of `rows` rows each."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and rows >= _LEAST_ROWS
        and steps >= _LEAST_STEPS
        and can_pack()
        and size <= _SHARE_OF_MEMORY * memory_limit()
    )


@functools.cache
def can_pack() -> bool:
    """Whether PyTorch has packed products here, and the processor is of a kind on which they were measured."""
    if onednn_pays():
        return hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return mkl_packs() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def mkl_packs() -> bool:
    """Whether PyTorch was built with MKL, and has its packed products."""
    return torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")


class PackedLinear:
    """A linear layer without gradient: weight (out, in) and bias (out,) as they are now."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.width = len(weight)
        pack = _of_onednn if onednn_pays() else _of_mkl
        self._product = pack(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out)."""
        rows = x.reshape(-1, x.shape[-1])
        return self._product(rows).view(*x.shape[:-1], self.width)


def _of_onednn(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Product of rows (R, in) with a weight that oneDNN has laid out."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    return lambda rows: onednn_product(rows, packed, bias)


def _of_mkl(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The same of MKL."""
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _ROWS)
    shape = weight.new_full((), torch.nan).expand(weight.shape)  # the product asks no more of the weight
    return lambda rows: torch.ops.mkl._mkl_linear.default(rows, packed, shape, bias, len(rows))
