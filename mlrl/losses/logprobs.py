"""Log-probabilities of given tokens straight from final hidden states, without a [tokens, vocabulary] tensor.

Legend: L tokens, C tokens of one chunk, D hidden size, V vocabulary.

With z = logits / temperature, p = softmax(z) and s = logit_scale / temperature:

    log π(y)          = z_y − logsumexp(z)               ∂ log π(y) / ∂z = onehot(y) − p
    entropy H         = −Σ_v p_v log p_v                 ∂H / ∂z_v       = −p_v (log p_v + H)

The vocabulary is visited in chunks of rows. Where the output weight is frozen (LoRA), ∂ log π(y)/∂hidden = s·(W_y − pW)
is formed from the same chunk in the forward pass, [L, D] in all, and the backward pass is one multiplication; else the
chunks are recomputed there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

ENTROPY_WORDS = ("none", "value", "grad")

_REUSED = 7_500_000
"""Numbers of a float32 tensor whose memory the C allocator uses again; above 32 MB it asks the system for every one."""

MatMul = Callable[[Tensor, Tensor], Tensor]
"""(M, K) · (K, N) → (M, N), in float32, without a derivative."""


class LogProbs(NamedTuple):
    logprobs_L: Tensor
    """log π of each target in nats, float32 (float64 for float64 inputs)."""
    entropy_L: Tensor | None
    """Entropy over the full vocabulary in nats at the same temperature; None if not asked for."""


def completion_logprobs(
    hidden_LD: Tensor,
    weight_VD: Tensor,
    targets_L: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    entropy: str = "none",
    matmul: MatMul | None = None,
) -> LogProbs:
    """Log-softmax of `softcap(logit_scale · (hidden @ weight.T + bias)) / temperature` at the targets.

    Products run in the dtype of the inputs, softmax and sums in float32. The result does not depend on `chunk_size`.
    First derivatives only. Under `torch.no_grad`, or where nothing requires grad, no derivative is formed.

    Args:
        hidden_LD: final hidden states, one for each token to score: the position *before* that token.
        weight_VD: output embedding; gets a gradient if it requires one.
        targets_L: the tokens, int64 in [0, V).
        bias: [V], of the output layer.
        temperature: the sampling temperature, > 0.
        logit_scale: factor on the logits (Cohere's `logit_scale`; 1/`logits_scaling` of Granite).
        softcap: c of c·tanh(logits/c) (`final_logit_softcapping` of Gemma 2).
        chunk_size: rows at a time; default about 64 MB of logits on CPU, 30 MB with a `matmul`, 512 MB elsewhere.
        entropy: `none`; `value`, detached; `grad`, differentiable.
        matmul: makes the products with the output embedding, where something is faster at it than PyTorch.
    """
    _check(hidden_LD, weight_VD, targets_L, bias, temperature, chunk_size, entropy)
    if chunk_size is None:
        elements = 2**24 if hidden_LD.device.type == "cpu" else 2**27
        if matmul is not None:
            elements = _REUSED  # its results are new tensors
        chunk_size = max(16, elements // len(weight_VD))
    # Equal chunks: a last one of few rows would read the whole weight for them.
    num_chunks = max(1, math.ceil(len(hidden_LD) / chunk_size))
    chunk_size = max(1, math.ceil(len(hidden_LD) / num_chunks))
    if softcap is not None:
        return _softcapped(
            hidden_LD, weight_VD, targets_L, bias, temperature, logit_scale, softcap, chunk_size, entropy
        )
    scale = logit_scale / temperature
    differentiate = torch.is_grad_enabled()
    trains_head = differentiate and (weight_VD.requires_grad or (bias is not None and bias.requires_grad))
    stores = differentiate and hidden_LD.requires_grad and not trains_head
    logprobs_L, entropy_L = _LinearLogProbs.apply(
        hidden_LD, weight_VD, bias, targets_L, scale, chunk_size, entropy, stores, matmul
    )
    return LogProbs(logprobs_L, entropy_L)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_LD, weight_VD, bias_V, targets_L, scale, chunk_size, entropy, stores, matmul):
        head = _Head(weight_VD, bias_V, scale, matmul)
        logprobs_L = hidden_LD.new_empty(len(hidden_LD), dtype=_statistics_dtype(weight_VD))
        entropy_L = torch.empty_like(logprobs_L) if entropy != "none" else None
        grad_LD = torch.empty_like(hidden_LD) if stores else None
        entropy_grad_LD = torch.empty_like(hidden_LD) if stores and entropy == "grad" else None
        # In full precision the entropy falls out of the stored derivative (below); else it takes passes over the chunk.
        from_derivative = stores and entropy == "value" and weight_VD.dtype == logprobs_L.dtype
        keeps_logits = entropy != "none" and not from_derivative
        for rows in _slices(len(hidden_LD), chunk_size):
            hidden_CD, targets_C1 = hidden_LD[rows], targets_L[rows, None]
            probs_CV, logits_CV, logprobs_C = _softmax(hidden_CD, head, targets_C1, keeps_logits)
            logprobs_L[rows] = logprobs_C
            if keeps_logits:
                entropy_L[rows] = _entropy_terms(probs_CV, logits_CV, targets_C1, logprobs_C)
            if entropy_grad_LD is not None:
                negative_CV = logits_CV.addcmul_(probs_CV, entropy_L[rows, None])
                entropy_grad_LD[rows] = head.gradient(negative_CV)
            if stores:
                negative_CV = probs_CV.scatter_add_(1, targets_C1, probs_CV.new_full(targets_C1.shape, -1.0))
                grad_LD[rows] = grad_CD = head.gradient(negative_CV)
            if from_derivative:
                # z is linear in hidden, so hidden · ∂ log π(y)/∂hidden = z_y − E[z], and H = −log π(y) + z_y − E[z].
                entropy_L[rows] = torch.linalg.vecdot(hidden_CD, grad_CD) - logprobs_C
                if bias_V is not None:
                    entropy_L[rows] -= scale * (negative_CV @ bias_V)
        ctx.scale, ctx.chunk_size, ctx.entropy, ctx.stores, ctx.matmul = scale, chunk_size, entropy, stores, matmul
        if stores:
            ctx.save_for_backward(grad_LD, entropy_grad_LD)
        else:
            ctx.save_for_backward(hidden_LD, weight_VD, bias_V, targets_L)
        if entropy == "value":
            ctx.mark_non_differentiable(entropy_L)
        return logprobs_L, entropy_L

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream_L, entropy_upstream_L):
        if ctx.stores:
            grad_LD, entropy_grad_LD = ctx.saved_tensors
            hidden_grad_LD = grad_LD * upstream_L[:, None]
            if entropy_grad_LD is not None:
                hidden_grad_LD += entropy_grad_LD * entropy_upstream_L[:, None]
            return hidden_grad_LD.to(grad_LD.dtype), *[None] * 8
        if ctx.entropy != "grad":
            entropy_upstream_L = None
        return *_recomputed_gradients(ctx, upstream_L, entropy_upstream_L), *[None] * 6


def _recomputed_gradients(ctx, upstream_L, entropy_upstream_L):
    """Gradients of hidden, weight and bias for given upstream gradients, chunk by chunk from fresh logits."""
    hidden_LD, weight_VD, bias_V, targets_L = ctx.saved_tensors
    needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    head = _Head(weight_VD, bias_V, ctx.scale, ctx.matmul)
    # Sums over chunks are float32: in bfloat16 the later chunks would be rounded away.
    hidden_grad_LD = torch.empty_like(hidden_LD) if needs_hidden else None
    weight_grad_VD = torch.zeros_like(weight_VD, dtype=_statistics_dtype(weight_VD)) if needs_weight else None
    bias_grad_V = torch.zeros_like(bias_V, dtype=_statistics_dtype(weight_VD)) if needs_bias else None
    for rows in _slices(len(hidden_LD), ctx.chunk_size):
        hidden_CD, targets_C1, upstream_C1 = hidden_LD[rows], targets_L[rows, None], upstream_L[rows, None]
        keeps_logits = entropy_upstream_L is not None
        probs_CV, logits_CV, logprobs_C = _softmax(hidden_CD, head, targets_C1, keeps_logits)
        if keeps_logits:
            entropy_C = _entropy_terms(probs_CV, logits_CV, targets_C1, logprobs_C)
            negative_CV = logits_CV.addcmul_(probs_CV, entropy_C[:, None]).mul_(entropy_upstream_L[rows, None])
            negative_CV.addcmul_(probs_CV, upstream_C1)
        else:
            negative_CV = probs_CV.mul_(upstream_C1)
        negative_CV.scatter_add_(1, targets_C1, -upstream_C1)
        if needs_bias:
            bias_grad_V.add_(negative_CV.sum(dim=0), alpha=-ctx.scale)
        if needs_hidden:
            hidden_grad_LD[rows] = head.gradient(negative_CV)
        if needs_weight and weight_grad_VD.dtype == hidden_CD.dtype:
            weight_grad_VD.addmm_(negative_CV.T, hidden_CD, alpha=-ctx.scale)
        elif needs_weight:
            weight_grad_VD.add_(negative_CV.to(hidden_CD.dtype).T @ hidden_CD, alpha=-ctx.scale)
    return (
        hidden_grad_LD,
        weight_grad_VD.to(weight_VD.dtype) if needs_weight else None,
        bias_grad_V.to(bias_V.dtype) if needs_bias else None,
    )


class _Head:
    """z = s·(hidden·Wᵀ + b), a chunk of rows after another."""

    def __init__(self, weight_VD: Tensor, bias_V: Tensor | None, scale: float, matmul: MatMul | None):
        self.weight_VD, self.bias_V, self.scale = weight_VD, bias_V, scale
        self.full_precision = weight_VD.dtype == _statistics_dtype(weight_VD)
        self.matmul = matmul if self.full_precision else None
        self._buffer: Tensor | None = None  # of the first chunk, which is the longest

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """[C, V] in float32, which the caller may write over; the next call may, too."""
        if not self.full_precision:
            # Scaling after rounding, as the sampler does: scaled hidden states would round to other logits.
            logits_CV = self._take_buffer(hidden_CD).copy_(F.linear(hidden_CD, self.weight_VD, self.bias_V))
            return logits_CV if self.scale == 1.0 else logits_CV.mul_(self.scale)
        scaled_CD = hidden_CD if self.scale == 1.0 else hidden_CD * self.scale
        if self.matmul is not None:
            logits_CV = self.matmul(scaled_CD, self.weight_VD.T)
        else:
            logits_CV = self._take_buffer(hidden_CD)
            # MKL multiplies by a long transposed matrix 1.3 to 1.9 times faster when it gets 512 rows of it at a time.
            vocab = len(self.weight_VD)
            for columns in _slices(vocab, 512 if logits_CV.device.type == "cpu" else vocab):
                torch.mm(scaled_CD, self.weight_VD[columns].T, out=logits_CV[:, columns])
        if self.bias_V is not None:
            logits_CV.add_(self.bias_V, alpha=self.scale)
        return logits_CV

    def gradient(self, negative_CV: Tensor) -> Tensor:
        """Of hidden states [C, D], from minus that of logits."""
        multiply = self.matmul or torch.mm
        return multiply(negative_CV.to(self.weight_VD.dtype), self.weight_VD).mul_(-self.scale)

    def _take_buffer(self, hidden_CD: Tensor) -> Tensor:
        if self._buffer is None:
            shape, dtype = (len(hidden_CD), len(self.weight_VD)), _statistics_dtype(self.weight_VD)
            self._buffer = hidden_CD.new_empty(shape, dtype=dtype)
        return self._buffer[: len(hidden_CD)]


def _softmax(hidden_CD, head, targets_C1, keeps_logits):
    """(p, z or None, log π(target)) of one chunk; in as few passes over [C, V] as the kernels allow."""
    logits_CV = head.logits(hidden_CD)
    largest_C = logits_CV.amax(dim=1)
    targets_C = logits_CV.gather(1, targets_C1).squeeze(1)
    # The softmax kernel goes over a row while it is in cache; a separate exp costs ten times as much on CPU.
    in_place = not keeps_logits and logits_CV.device.type == "cpu"
    probs_CV = torch.softmax(logits_CV, dim=1, out=logits_CV if in_place else None)
    # max p = 1 / Σ exp(z − max z), so this is −logsumexp without another pass of exponentials.
    logprobs_C = targets_C - largest_C + probs_CV.amax(dim=1).log_()
    return probs_CV, logits_CV if keeps_logits else None, logprobs_C


def _entropy_terms(probs_CV, logits_CV, targets_C1, logprobs_C) -> Tensor:
    """Entropy of each row; leaves p · log p in `logits_CV`."""
    logsumexp_C1 = logits_CV.gather(1, targets_C1) - logprobs_C[:, None]
    return logits_CV.sub_(logsumexp_C1).mul_(probs_CV).sum(dim=1).neg_()


def _softcapped(hidden_LD, weight_VD, targets_L, bias, temperature, logit_scale, softcap, chunk_size, entropy):
    """The same for capped logits, which are not linear in hidden: plain autograd, recomputed chunk by chunk."""

    def score(hidden_CD, targets_C):
        logits_CV = F.linear(hidden_CD, weight_VD, bias).to(_statistics_dtype(weight_VD)) * logit_scale
        all_logprobs_CV = F.log_softmax(softcap * torch.tanh(logits_CV / softcap) / temperature, dim=1)
        logprobs_C = all_logprobs_CV.gather(1, targets_C[:, None]).squeeze(1)
        if entropy == "none":
            return logprobs_C, torch.zeros_like(logprobs_C)
        scored_CV = all_logprobs_CV if entropy == "grad" else all_logprobs_CV.detach()
        return logprobs_C, -(scored_CV.exp() * scored_CV).sum(dim=1)

    chunks = _slices(len(hidden_LD), chunk_size) or [slice(0, 0)]
    parts = [checkpoint(score, hidden_LD[rows], targets_L[rows], use_reentrant=False) for rows in chunks]
    logprobs_L, entropy_L = (torch.cat(column) for column in zip(*parts, strict=True))
    return LogProbs(logprobs_L, None if entropy == "none" else entropy_L)


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _statistics_dtype(weight_VD: Tensor) -> torch.dtype:
    return torch.promote_types(weight_VD.dtype, torch.float32)


def _check(hidden_LD, weight_VD, targets_L, bias, temperature, chunk_size, entropy) -> None:
    if hidden_LD.dim() != 2 or weight_VD.dim() != 2 or hidden_LD.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"hidden_LD of shape {tuple(hidden_LD.shape)}, weight_VD of shape {tuple(weight_VD.shape)}: "
            "the hidden sizes must agree. Give [L, D] and [V, D]."
        )
    if targets_L.shape != hidden_LD.shape[:1]:
        raise ValueError(f"targets_L of shape {tuple(targets_L.shape)}: give one token a row, ({len(hidden_LD)},).")
    if bias is not None and bias.shape != weight_VD.shape[:1]:
        raise ValueError(f"bias of shape {tuple(bias.shape)}: give one number a token, ({weight_VD.shape[0]},).")
    if hidden_LD.dtype != weight_VD.dtype:
        raise ValueError(f"hidden_LD is {hidden_LD.dtype}, weight_VD {weight_VD.dtype}: cast one to the other's dtype.")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature!r}: logits are divided by it. Use a number above 0.")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size!r}: no rows at a time. Use 1 or more, or None.")
    if entropy not in ENTROPY_WORDS:
        raise ValueError(f"entropy={entropy!r}: unknown word. Use one of {', '.join(ENTROPY_WORDS)}.")
