"""Matrix products of few rows, as decoding makes them.

The BLAS behind PyTorch on CPU takes very different times for the same product of few rows, by the layout of its
operands. Measured on the layers of a 135M model: at up to 8 rows W·xᵀ with x in memory row after row is up to twice
as fast as any other form; above, with columns in memory row after row, where the last few of every 16 columns are dear:
31 cost three quarters more than 32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_MOST_ROWS = 160  # above, all ways take the same time
_ROW_MAJOR = 8


def few_rows(x: torch.Tensor) -> bool:
    """Whether a product of rows x (R, in) is faster by columns."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.shape[0] <= _MOST_ROWS


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
