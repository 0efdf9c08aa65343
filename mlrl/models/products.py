"""Matrix products of few rows, as decoding makes them.

The BLAS behind PyTorch on CPU takes very different times for the same product of few rows by the layout of its
operands, and not the same ones on every processor. On some, the layers of a 135M model take half the time as W·xᵀ, with
x in memory row after row up to 8 rows, and above with columns in memory row after row, where the last few of every 16
columns are dear (31 cost three quarters more than 32). On others x·Wᵀ, the way of `F.linear`, is as fast or faster by
half. So the first product asks the machine.
"""

from __future__ import annotations

import functools
import statistics
import time

import torch
import torch.nn.functional as F

_MOST_ROWS = 160  # above, all ways take the same time
_ROW_MAJOR = 8
_WORTH = 0.8  # of the time of `F.linear`: far from what noise does, so that a machine answers the same every time


def by_columns(x: torch.Tensor) -> bool:
    """Whether a product of rows x (R, in) is to be made of columns."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.shape[0] <= _MOST_ROWS and columns_pay()


@functools.cache
def columns_pay() -> bool:
    """Whether products of columns are clearly faster on this machine, tried once, for some 0.1 s."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 768, generator=generator)
    weights = [torch.randn(768, 768, generator=generator) for _ in range(16)]  # more than the caches near a core hold
    ways = (lambda weight: F.linear(x, weight), lambda weight: linear_of_columns(as_columns(x), weight, None))
    seconds: tuple[list[float], list[float]] = ([], [])
    with torch.no_grad():
        for _ in range(7):
            for way, taken in zip(ways, seconds, strict=True):
                start = time.perf_counter()
                for weight in weights:
                    way(weight)
                taken.append(time.perf_counter() - start)
    rows, columns = map(statistics.median, seconds)
    return columns < _WORTH * rows


def as_columns(x: torch.Tensor) -> torch.Tensor:
    """Rows (R, in) → columns (in, C), laid out for fast products: C is R, or a little more with columns of zeros."""
    rows = x.shape[0]
    if rows <= _ROW_MAJOR:
        return x.contiguous().t()
    return F.pad(x.t(), (0, -rows % 8)) if rows % 16 > 4 else x.t()


def linear_of_columns(columns: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A linear layer on columns: (in, C) → (out, C)."""
    if bias is None:
        return torch.mm(weight, columns)
    return torch.addmm(bias[:, None], weight, columns)
