"""From rollout trees to advantages: where the pure estimators meet trees and samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mlrl.agents import Team
from mlrl.config import TrainerConfig
from mlrl.estimators.advantages import advantages, batch_statistics
from mlrl.estimators.kl import kl_to_go, sequence_kl
from mlrl.estimators.returns import credit
from mlrl.models.base import Policy
from mlrl.parallel.group import Group
from mlrl.rollout.tree import Node, RolloutTree
from mlrl.trainers.samples import Sample, rank_micro_batches, stand_in


def estimate_advantages(
    trees: Sequence[RolloutTree], samples: Sequence[Sequence[Sample]], args: TrainerConfig
) -> list[dict[int, bool]]:
    """Sets the advantage of every sample, and `Node.advantages`.

    Returns:
        For each agent: whether a node (by its place among all nodes) had returns without spread.
    """
    nodes = [node for tree in trees for node in tree.nodes()]
    joints = nodes[0].joints
    num_generations = len(nodes[0].responses[0])
    credited_NMK = credit([node.returns(args.discount) for node in nodes], joints, num_generations)
    greedy_M = [node.greedy_return for node in nodes] if args.advantage_mode == "greedy" else None
    mode, normalization = args.advantage_mode, _word(args.advantage_normalization)
    for node in nodes:
        node.advantages = []
    zero_std = []
    for agent, own in enumerate(samples):
        kl_MK = kl_to_go_of_agent(trees, nodes, own, agent, args.discount) if args.reference_kl_coef > 0 else None
        batch = batch_statistics(credited_NMK[agent], mode, greedy_M) if normalization == "batch" else None
        estimated = advantages(
            credited_NMK[agent],
            kl_MK,
            mode=mode,
            normalization=normalization,
            kl_coef=args.reference_kl_coef,
            greedy_returns_M=greedy_M,
            batch=batch,
        )
        values = estimated.values_MK.flatten().tolist()
        for sample, value in zip(own, values, strict=True):  # samples are in node order, generations within
            sample.advantage = value
        for node, row in zip(nodes, estimated.values_MK.tolist(), strict=True):
            node.advantages.append(row)
        zero_std.append(estimated.zero_std_M.tolist())
    return zero_std


def reference_kl(
    team: Team, samples: Sequence[Sequence[Sample]], args: TrainerConfig, sampling_is_exact: bool = False
) -> None:
    """Sets the KL of every sample: Σ over its tokens of log π_old − log π_ref at the sampling temperature.

    Args:
        sampling_is_exact: log π_old is what sampling kept, except of an agent that still is about its reference, where
            roundings would be all there is. Else it comes from the same kind of forward as log π_ref, so that the two
            differ by the weights alone.
    """
    agents, mesh = team.agents, team.mesh
    then = [(a.reference, mesh.reference(a.index), own) for a, own in zip(agents, samples, strict=True)]
    now = [(a.policy, mesh.agents[a.index], own) for a, own in zip(agents, samples, strict=True)]
    known = known_logprobs(samples, sampling_is_exact)
    if known is None:
        scores = score(then + now, mesh.world, args)
        reference, policy = scores[: len(then)], scores[len(then) :]
    else:
        reference, policy = score(then, mesh.world, args), known
    for own, new, old in zip(samples, policy, reference, strict=True):
        _set_kl(own, new, old)
    if sampling_is_exact:
        close = [number for number, own in enumerate(samples) if _is_close(own)]
        scores = score([now[number] for number in close], mesh.world, args) if close else []
        for number, new in zip(close, scores, strict=True):
            _set_kl(samples[number], new, reference[number])


def _set_kl(samples: Sequence[Sample], new: Sequence[torch.Tensor], old: Sequence[torch.Tensor]) -> None:
    lengths_S = torch.tensor([len(logprobs) for logprobs in new])
    for sample, kl in zip(samples, sequence_kl(torch.cat(list(new)), torch.cat(list(old)), lengths_S), strict=True):
        sample.kl = float(kl)


def _is_close(samples: Sequence[Sample]) -> bool:
    """Whether an agent's samples are about as likely under its reference: KLs that a rounding may be a part of."""
    return sum(abs(sample.kl) for sample in samples) <= 1e-3 * sum(sample.length for sample in samples)


def known_logprobs(samples: Sequence[Sequence[Sample]], sampling_is_exact: bool) -> list[list[torch.Tensor]] | None:
    """log π_old of every token where no forward is needed for it."""
    if sampling_is_exact:
        return [[torch.tensor(sample.response.logprobs) for sample in own] for own in samples]
    if samples[0][0].old_logprobs is not None:  # of responses that a server drew, scored here since
        return [[sample.old_logprobs for sample in own] for own in samples]
    return None


Work = tuple[Policy | None, Group, Sequence[Sample]]


@torch.no_grad()
def score(work: Sequence[Work], world: Group, args: TrainerConfig) -> list[list[torch.Tensor]]:
    """Log-probabilities (L,) of samples' tokens, on the CPU of every rank.

    Args:
        work: a policy (None on ranks that do not hold it), the ranks that hold it, and the samples to score.
    """
    mine: dict[int, torch.Tensor] = {}
    numbers = {(w, id(sample)): n for n, (w, sample) in enumerate((w, s) for w, job in enumerate(work) for s in job[2])}
    for w, (policy, group, samples) in enumerate(work):
        if policy is None or not group.member:
            continue
        lockstep = policy.base.shard is not None
        [micros] = rank_micro_batches([samples], group, args.micro_batch_tokens, lockstep)
        with policy.use():
            for micro in micros:
                tree = stand_in() if micro is None else micro.tree
                scored, lengths = policy.logprobs(tree, args.temperature)
                if micro is not None:
                    for sample, logprobs in zip(micro.samples, scored.logprobs_L.split(lengths), strict=True):
                        mine[numbers[w, id(sample)]] = logprobs.cpu()
    scored = iter(world.collect(mine, len(numbers)))
    return [[next(scored) for _ in samples] for _, _, samples in work]


def kl_to_go_of_agent(
    trees: Sequence[RolloutTree], nodes: list[Node], samples: Sequence[Sample], agent: int, discount: float
) -> list[list[float]]:
    """KL-to-go (M, K) of one agent: its own KL, plus the discounted credited mean of what follows."""
    own: dict[int, list[float]] = {}
    for sample in samples:
        own.setdefault(id(sample.node), []).append(sample.kl)
    to_go: dict[int, list[float]] = {}
    for node in sorted(nodes, key=lambda n: -n.turn):
        below = [
            math.fsum(to_go[id(node.children[j])]) / len(own[id(node)]) if j in node.children else math.nan
            for j in range(len(node.joints))
        ]
        # one agent's column of joints is all that credit needs
        column = [(joint[agent],) for joint in node.joints]
        to_go[id(node)] = kl_to_go([[own[id(node)]]], [[below]], column, len(own[id(node)]), discount)[0, 0].tolist()
    return [to_go[id(node)] for node in nodes]


def _word(normalization: str | bool) -> str:
    return {True: "node", False: "none"}.get(normalization, normalization)
