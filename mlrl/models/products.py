"""Matrix products of few rows, as decoding makes them.

The BLAS behind PyTorch on CPU takes very different times for the same product of few rows by the layout of its
operands, and not the same ones on every processor. On cores with AVX2 the layers of a 135M model took half the time as
W·xᵀ, with x in memory row after row up to 8 rows, and above with columns in memory row after row, where the last few of
every 16 columns are dear (31 cost three quarters more than 32). On cores with AVX-512 x·Wᵀ, the way of `F.linear`, is
as fast or faster by half, and faster still of packed weights (`mlrl.models.packing`). Which it is goes by the processor
and never by a clock: the way changes roundings, so that one seed would give other samples from one start to the next.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

_MOST_ROWS = 160  # above, all ways take the same time
_ROW_MAJOR = 8


def by_columns(x: torch.Tensor) -> bool:
    """Whether a product of rows x (R, in) is to be made of columns."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.shape[0] <= _MOST_ROWS and columns_pay()


@functools.cache
def columns_pay() -> bool:
    """Whether products of columns are the faster ones on processors of this machine's kind."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


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
