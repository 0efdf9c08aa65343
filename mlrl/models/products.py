"""Matrix products of few rows, as decoding makes them.

On CPU the BLAS behind PyTorch is slower at x·Wᵀ with few rows of x than at the transposed product W·xᵀ, by up to two
times, and most of all for the large matrix of a language-model head.
"""

from __future__ import annotations

import torch

_MOST_ROWS = 160  # above, both ways take the same time


def few_rows(x: torch.Tensor) -> bool:
    """Whether the transposed product is the faster one for rows x (R, in)."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.shape[0] <= _MOST_ROWS


def linear_of_columns(columns: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A linear layer on columns: (in, R) → (out, R)."""
    if bias is None:
        return torch.mm(weight, columns)
    return torch.addmm(bias[:, None], weight, columns)
