"""Matrix products of few rows, as decoding makes them.

On CPU the BLAS behind PyTorch takes 1.5 to 3 times as long for x·Wᵀ with few rows of x as for the transposed product
W·xᵀ: there the large matrix is the left one, and its rows are spread over the vector units.
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
