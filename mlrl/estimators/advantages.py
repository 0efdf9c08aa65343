"""Group-relative advantages: A_k = E(R)_k / σ − β · C(KL)_k, per node and agent over the K credited returns.

| mode   | E(R), on task returns                        | C, on the reference KL-to-go       | known as          |
|--------|----------------------------------------------|------------------------------------|-------------------|
| raw    | R_k                                          | KL_k                               | REINFORCE         |
| mean   | R_k − mean(R)                                | KL_k − mean(KL)                    | GRPO (2402.03300) |
| rloo   | R_k − mean of the other K−1                  | KL_k − mean of the other K−1       | RLOO (2402.14740) |
| max    | R_k − max(R)                                 | as rloo                            |                   |
| greedy | R_k − return of one greedy joint response    | as rloo; KL_k itself when K = 1    | ReMax (2310.10505)|

What they estimate, with normalization `none`: raw, rloo and greedy the exact policy gradient; mean the exact gradient
× (K−1)/K; max the gradient of E[R] − E[max_k R_k]/K, so it penalises best-of-K.
Dividing by a node's own σ optimises something else again: with K = 2 only signs count, and rare large rewards lose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ADVANTAGE_MODES = ("raw", "mean", "rloo", "max", "greedy")
NORMALIZATIONS = ("none", "node", "batch")


@dataclass(frozen=True)
class Advantages:
    """Advantages of one agent, and which of its nodes carried no signal."""

    values_MK: Tensor
    """float32, no gradient."""
    zero_std_M: Tensor
    """bool: the K returns of the node are equal up to noise, or σ was below the floor. False where K = 1."""


@dataclass(frozen=True)
class BatchStatistics:
    """Sums that give the std of E(R) over one agent's whole rollout batch; `+` joins the parts that ranks hold."""

    total: float
    squares: float
    count: float
    largest: float
    """max |R| of the task returns."""

    def __add__(self, other: BatchStatistics) -> BatchStatistics:
        return BatchStatistics(
            self.total + other.total,
            self.squares + other.squares,
            self.count + other.count,
            max(self.largest, other.largest),
        )

    @property
    def std(self) -> float:
        """Population standard deviation; 0 for an empty batch."""
        if not self.count:
            return 0.0
        mean = self.total / self.count
        return max(self.squares / self.count - mean * mean, 0.0) ** 0.5


def centred_returns(task_returns_MK, mode: str, greedy_returns_M=None) -> Tensor:
    """E(R) of the table above, float64 [M, K]."""
    returns_MK = _group("task_returns_MK", task_returns_MK)
    _check_mode(mode, returns_MK.shape[1])
    if mode == "greedy":
        if greedy_returns_M is None:
            raise ValueError("greedy_returns_M=None: mode `greedy` subtracts it. Give one return a node.")
        greedy_M = torch.as_tensor(greedy_returns_M, dtype=torch.float64, device=returns_MK.device)
        return returns_MK - greedy_M.reshape(len(returns_MK), 1)
    if mode == "max":
        return returns_MK - returns_MK.amax(dim=1, keepdim=True) if len(returns_MK) else returns_MK
    return _centred(returns_MK, mode)


def batch_statistics(task_returns_MK, mode: str, greedy_returns_M=None) -> BatchStatistics:
    """Statistics of E(R) over the nodes given; add those of other ranks (and other turns) before use."""
    centred_MK = centred_returns(task_returns_MK, mode, greedy_returns_M)
    largest = float(_group("task_returns_MK", task_returns_MK).abs().amax()) if centred_MK.numel() else 0.0
    return BatchStatistics(float(centred_MK.sum()), float(centred_MK.square().sum()), centred_MK.numel(), largest)


def advantages(
    task_returns_MK,
    kl_to_go_MK=None,
    *,
    mode: str,
    normalization: str = "none",
    kl_coef: float = 0.0,
    greedy_returns_M=None,
    batch: BatchStatistics | None = None,
) -> Advantages:
    """Advantages of one agent's responses from its credited returns.

    A node's σ (or the batch's) below max(1e-4, 1e-6 · max|R|) makes the E part 0 instead of blowing noise up. The KL
    part is never divided by σ, so |A| stays within β·|ΔKL| there.

    Args:
        task_returns_MK: credited task returns; statistics are float64 whatever the input.
        kl_to_go_MK: the agent's own reference KL-to-go in nats; needed when `kl_coef` is not 0.
        mode: raw, mean, rloo, max or greedy. `mean`, `rloo` and `max` need K ≥ 2.
        normalization: `none` (σ = 1), `node` (population std of the K returns of the node; K ≥ 2) or `batch` (std of
            E(R) over the rollout batch). Dividing never re-centres.
        kl_coef: β.
        greedy_returns_M: return of one greedy joint response a node, for mode `greedy`.
        batch: for `batch`; default the statistics of the given nodes alone.

    Raises:
        ValueError: an unknown word, too few generations, a missing or non-finite argument.
    """
    returns_MK = _group("task_returns_MK", task_returns_MK)
    num_nodes, num_generations = returns_MK.shape
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization={normalization!r}: unknown word. Use one of {', '.join(NORMALIZATIONS)}.")
    if normalization != "none" and num_generations < 2:
        raise ValueError(
            f"num_generations={num_generations!r}: normalization `{normalization}` needs a spread of returns. "
            "Use 2 or more, or `none`."
        )
    values_MK = centred_returns(returns_MK, mode, greedy_returns_M)
    node_std_M = (returns_MK - returns_MK.mean(dim=1, keepdim=True)).square().mean(dim=1).sqrt()
    node_floor_M = (1e-6 * returns_MK.abs().amax(dim=1) if num_nodes else node_std_M).clamp(min=1e-4)
    zero_std_M = (node_std_M < node_floor_M) & (num_generations > 1)

    if normalization == "node":
        values_MK = torch.where(zero_std_M[:, None], 0.0, values_MK / node_std_M[:, None])
    elif normalization == "batch":
        batch = batch if batch is not None else batch_statistics(returns_MK, mode, greedy_returns_M)
        if batch.std < max(1e-4, 1e-6 * batch.largest):
            values_MK, zero_std_M = torch.zeros_like(values_MK), torch.ones_like(zero_std_M)
        else:
            values_MK = values_MK / batch.std

    if kl_coef:
        if kl_to_go_MK is None:
            raise ValueError(f"kl_to_go_MK=None: kl_coef={kl_coef!r} multiplies it. Give it, or set kl_coef to 0.")
        kl_MK = _group("kl_to_go_MK", kl_to_go_MK)
        if kl_MK.shape != returns_MK.shape:
            raise ValueError(f"kl_to_go_MK of shape {tuple(kl_MK.shape)}: give {tuple(returns_MK.shape)}.")
        values_MK = values_MK - kl_coef * _centred(kl_MK, mode)
    return Advantages(values_MK.to(torch.float32), zero_std_M)


def _centred(values_MK: Tensor, mode: str) -> Tensor:
    num_generations = values_MK.shape[1]
    # One response has no siblings to subtract, and an uncentred penalty is still unbiased.
    if mode == "raw" or num_generations == 1:
        return values_MK
    deviations_MK = values_MK - values_MK.mean(dim=1, keepdim=True)
    # R_k − mean of the others = (R_k − mean) · K/(K−1)
    return deviations_MK if mode == "mean" else deviations_MK * (num_generations / (num_generations - 1))


def _check_mode(mode: str, num_generations: int) -> None:
    if mode not in ADVANTAGE_MODES:
        raise ValueError(f"advantage_mode={mode!r}: unknown word. Use one of {', '.join(ADVANTAGE_MODES)}.")
    if num_generations < 2 and mode in ("mean", "rloo", "max"):
        raise ValueError(
            f"num_generations={num_generations!r}: advantage_mode `{mode}` compares siblings. "
            "Use 2 or more, or `raw` or `greedy`."
        )


def _group(name: str, values_MK) -> Tensor:
    values_MK = torch.as_tensor(values_MK, dtype=torch.float64).detach()
    if values_MK.dim() != 2 or values_MK.shape[1] < 1:
        raise ValueError(f"{name} of shape {tuple(values_MK.shape)}: one row a node is needed. Give [M, K].")
    if not bool(values_MK.isfinite().all()):
        raise ValueError(f"{name} holds NaN or infinity: no advantage can be computed. Give finite numbers.")
    return values_MK
