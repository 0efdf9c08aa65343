"""What a sampling server and the trainer disagree on: measured before every update, corrected in the loss, bounded.

The trainer scores every response again at its present weights. These log-probabilities are the old ones of PPO's ratios
(`Sample.old_logprobs`); beside them each token gets the truncated ratio to what the server said as a fixed weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mlrl.agents import Team
from mlrl.config import TrainerConfig
from mlrl.errors import RolloutError
from mlrl.estimators.mismatch import mean_without_worst, mismatch, truncated_weights
from mlrl.trainers.estimate import score
from mlrl.trainers.metrics import Pairs
from mlrl.trainers.samples import Sample


def correct_mismatch(
    team: Team, samples: Sequence[Sequence[Sample]], args: TrainerConfig, bounded: bool = True
) -> Pairs:
    """Sets `old_logprobs` and `token_weights` of every sample; the metrics of each agent.

    Args:
        bounded: False for samples of the weights of the step before, which an update has moved since.

    Raises:
        RolloutError: an agent's responses are so unlikely here that they were drawn from other weights.
    """
    pairs: Pairs = {}
    for agent, (own, scores) in enumerate(zip(samples, _scores(team, samples, args), strict=True)):
        ratio_T, kl_T = _mismatch(own, scores)
        weights_T = torch.ones_like(ratio_T) if args.rollout_is_cap is None else ratio_T
        if args.rollout_is_cap is not None:
            weights_T = truncated_weights(ratio_T, args.rollout_is_cap)
            cut = int((ratio_T > args.rollout_is_cap).sum())
            pairs[f"agent_{agent}/rollout_truncated_fraction"] = (cut, len(ratio_T))
        lengths = [sample.length for sample in own]
        for sample, logprobs, weights in zip(own, scores, weights_T.split(lengths), strict=True):
            sample.old_logprobs = logprobs
            sample.token_weights = None if args.rollout_is_cap is None else weights
        pairs[f"agent_{agent}/rollout_ratio_mean"] = (float(ratio_T.sum()), len(ratio_T))
        pairs[f"agent_{agent}/rollout_kl"] = (float(kl_T.sum()), len(kl_T))
        if bounded:
            _check(agent, kl_T, lengths, args)
    return pairs


def has_limit(args: TrainerConfig) -> bool:
    """Whether the mismatch KL is bounded."""
    cut_off = args.top_p < 1 or args.top_k > 0  # then the server's log-probabilities are those of what was left
    return args.rollout_kl_limit is not None and not cut_off


def check_sampler(team: Team, samples: Sequence[Sequence[Sample]], args: TrainerConfig) -> None:
    """Raises RolloutError as `correct_mismatch` does, and changes nothing."""
    for agent, (own, scores) in enumerate(zip(samples, _scores(team, samples, args), strict=True)):
        _, kl_T = _mismatch(own, scores)
        _check(agent, kl_T, [sample.length for sample in own], args)


def _scores(team: Team, samples: Sequence[Sequence[Sample]], args: TrainerConfig) -> list[list[torch.Tensor]]:
    """Log-probabilities of every agent's tokens at its present weights."""
    work = [(a.policy, team.mesh.agents[a.index], own) for a, own in zip(team.agents, samples, strict=True)]
    return score(work, team.mesh.world, args)


def _mismatch(samples: Sequence[Sample], scores: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    said = torch.tensor([logprob for sample in samples for logprob in sample.response.logprobs])
    return mismatch(said, torch.cat(list(scores)))


def _check(agent: int, kl_T: torch.Tensor, lengths: Sequence[int], args: TrainerConfig) -> None:
    if not has_limit(args) or not bool(kl_T.isfinite().all()):  # weights that have diverged are told by their gradients
        return
    kl = mean_without_worst(kl_T, lengths)
    if kl <= args.rollout_kl_limit:
        return
    raise RolloutError(
        f"rollout_kl_limit={args.rollout_kl_limit!r}: the responses of agent {agent} have a mismatch KL of {kl:.3g} a "
        "token to its weights here (the response with most of it aside), so the server that drew them holds other "
        "weights: of another agent, of an earlier step, or of another model. Nothing was trained on them. Start the "
        "server anew on the same base model, and go on with --resume_from_checkpoint; where the two only compute in "
        "different precisions, raise the limit"
    )
