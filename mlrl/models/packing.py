"""Weights laid out once, for the many products of few rows that decoding makes of them.

The BLAS behind PyTorch on CPU copies a weight into its own layout in every call. Where few rows read the weight, that
costs more than the product: on cores with AVX-512 the layers of a 135M model take 45 ms for 18 rows and 33 ms once all
is laid out before (6 rows: 40 and 23, 64 rows: 79 and 58). MKL gives that layout away, and PyTorch has it as an
operator, as its compiler uses it. Results differ from those of `F.linear` by rounding at most.

The price is a copy of the weights while tokens are sampled, which `machine_memory` keeps from adding to what updates
leave behind. Whether to pay it goes by the machine, the model and what is asked for, never by a clock or by the memory
that is free just now: a seed stands for one run.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mlrl.models.machine_memory import memory_limit

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
    """Whether PyTorch has MKL's packed products here, and the processor is of the kind on which they were measured."""
    built = torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")
    return built and torch.backends.cpu.get_cpu_capability() == "AVX512"


class PackedLinear:
    """A linear layer without gradient: weight (out, in) and bias (out,) as they are now."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _ROWS)
        self.shape = weight.new_full((), torch.nan).expand(weight.shape)  # the product asks no more of the weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out)."""
        rows = x.reshape(-1, x.shape[-1])
        result = torch.ops.mkl._mkl_linear.default(rows, self.packed, self.shape, self.bias, len(rows))
        return result.view(*x.shape[:-1], len(self.shape))
