"""KL to a reference policy as a penalty in the return (a reward of −β·KL, never differentiated itself).

Legend: N agents, M nodes, K generations, J joints, S sequences, T tokens of all sequences one after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .returns import credit, returns_to_go


def sequence_kl(old_logprobs_T: Tensor, reference_logprobs_T: Tensor, lengths_S: Tensor) -> Tensor:
    """KL_k = Σ_tokens (log π_old − log π_ref) on the sampled tokens, in nats: the unbiased k1 estimate.

    Single values may be negative; their expectation under π_old is the KL divergence of the two policies over whole
    responses. Both arguments are log-probabilities at the sampling temperature.

    Returns:
        kl_S: float64, no gradient.
    """
    log_ratio_T = (old_logprobs_T.detach() - reference_logprobs_T.detach()).to(torch.float64)
    if int(lengths_S.sum()) != log_ratio_T.shape[0]:
        raise ValueError(
            f"lengths_S sum to {int(lengths_S.sum())}: there are {log_ratio_T.shape[0]} log-probabilities."
        )
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths_S), device=lengths_S.device), lengths_S)
    return log_ratio_T.new_zeros(len(lengths_S)).index_add_(0, sequence_T, log_ratio_T)


def kl_to_go(kl_NMK, child_means_NMJ, joints_JN, num_generations: int, discount: float) -> Tensor:
    """KL_k + γ · credited mean of the children's KL-to-go, for each agent on its own responses.

    Partners' penalties do not enter: agent i maximises E Σ_t γ^t (r_t − β·KL_{i,t}). Work from the last turn to the
    first: a child's mean is `kl_to_go(child).mean(-1)`, one number an agent.

    Args:
        kl_NMK: `sequence_kl` of each response.
        child_means_NMJ: for each agent and joint the mean over the child's K KL-to-go, NaN where the branch ended.
        joints_JN: [J, N] generation indices.
        num_generations: K.
        discount: γ in [0, 1].

    Returns:
        kl_to_go_NMK: float64.
    """
    child_means_NMJ = torch.as_tensor(child_means_NMJ, dtype=torch.float64)
    future_NMJ = returns_to_go(torch.zeros_like(child_means_NMJ), child_means_NMJ, discount)
    return torch.as_tensor(kl_NMK, dtype=torch.float64) + credit(future_NMJ, joints_JN, num_generations)
