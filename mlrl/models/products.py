"""Matrix products on CPU, by the library and the layout that are the fastest on this machine's processor.

PyTorch gives float32 products to MKL. On processors of AMD, MKL makes no use of AVX-512 and spends most of a product of
few rows on copying the weight; oneDNN, which PyTorch has too, and uses for bfloat16, takes about half the
time. On two cores of Zen 5 the products of 1,024 rows with the layers of a 135M model run at 450 GFLOP/s beside MKL's
210; those of 18 rows take 24 ms beside 43, and 16 ms where the weights are packed (`mlrl.models.packing`).

On other cores without AVX-512, MKL takes half the time for the same product of few rows as W·xᵀ, with x in memory row
after row up to 8 rows, and above with columns in memory row after row, where the last few of every 16 columns are dear
(31 cost three quarters more than 32).

Which it is goes by the processor and never by a clock: the way changes roundings, so that one seed would give other
samples from one start to the next.
"""

from __future__ import annotations

import functools
import os

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST_WORK = 2**21  # multiplications; smaller products are over before oneDNN has begun
_KERNELS = 32
_MOST_ROWS = 160  # above, columns take as long as rows
_ROW_MAJOR = 8


@functools.cache
def onednn_pays() -> bool:
    """Whether float32 products of oneDNN are the faster ones on processors of this machine's kind."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    made_by_amd = torch.cpu.get_capabilities().get("sse4a", False)  # instructions that no other maker took up
    pays = made_by_amd and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    if pays:
        _keep_few_kernels()
    return pays


def _keep_few_kernels() -> None:
    """oneDNN compiles a kernel for every number of rows, in half a millisecond, and keeps 1,024 of them, of a megabyte
    or more each. Trees differ in their tokens, so that memory would grow by gigabytes; an update needs some 20."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # of oneDNN, and of PyTorch on top of it
        os.environ.setdefault(name, str(_KERNELS))  # read at the first product


def _by_onednn(a: Tensor, b: Tensor, work: int) -> bool:
    return (
        work >= _LEAST_WORK
        and a.dtype == b.dtype == torch.float32
        and a.device.type == b.device.type == "cpu"
        and onednn_pays()
        and not (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad))  # it has no derivative
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x·Wᵀ + b, (rows, in) → (rows, out), of weights (out, in) and (out,)."""
    fits = x.dim() == 2 and x.shape[1] == weight.shape[1]  # else PyTorch says what is wrong
    if fits and _by_onednn(x, weight, x.shape[0] * weight.numel()):
        return onednn_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """(M, K) · (K, N) → (M, N)."""
    if a.shape[1] != b.shape[0] or not _by_onednn(a, b, a.shape[0] * b.numel()):
        return torch.mm(a, b)
    if b.shape[1] < a.shape[0] and not a.is_contiguous():  # a gradient of a narrow weight: slow in this order
        return onednn_linear(b.t(), a).t()
    return onednn_linear(a, b.t())


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` of oneDNN, without a derivative."""
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        weight = weight.contiguous()  # for which it has no fast way, a thousand times slower
    return onednn_product(x, weight, bias)


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same of a weight without gaps, or of one that oneDNN has laid out itself."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def by_columns(x: Tensor) -> bool:
    """Whether a product of rows x (R, in) is to be made of columns."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.shape[0] <= _MOST_ROWS and columns_pay()


@functools.cache
def columns_pay() -> bool:
    """Whether products of columns are the faster ones on processors of this machine's kind."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2" and not onednn_pays()


def as_columns(x: Tensor) -> Tensor:
    """Rows (R, in) → columns (in, C), laid out for fast products: C is R, or a little more with columns of zeros."""
    rows = x.shape[0]
    if rows <= _ROW_MAJOR:
        return x.contiguous().t()
    return F.pad(x.t(), (0, -rows % 8)) if rows % 16 > 4 else x.t()


def linear_of_columns(columns: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer on columns: (in, C) → (out, C)."""
    if bias is None:
        return torch.mm(weight, columns)
    return torch.addmm(bias[:, None], weight, columns)
