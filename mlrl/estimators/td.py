"""Temporal-difference targets on rollout trees, and the actor's advantages from a critic.

For joint g of a node h, with reward r_g and child node h'_g,

    V:  Y_g = r_g + γ [(1−λ) V(h'_g) + λ · mean over the child's Y]             tree λ-return; Y_g − V(h) is tree GAE
    Q:  Y_g = r_g + γ · mean over the child's joints of [(1−λ) Q(h'_g, a) + λ Y]           expected SARSA, on-policy

and Y_g = r_g where there is no child, at the last turn as where an episode was stopped: nothing is bootstrapped there.
λ = 0 is TD(0), λ = 1 the Monte-Carlo return of the tree whatever the critic says. (GAE: 1506.02438; counterfactual
baselines, COMA: 1705.08926.)

Nodes of all trees of a batch lie on one axis, parents before children. Everything is float64 and without gradient.
Legend: N agents, M nodes, K generations, J joints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def child_indices(places: Sequence[tuple[int, tuple[int, ...]]], num_joints: int) -> Tensor:
    """Where the child of every joint stands among the nodes.

    Args:
        places: (item, path) of each node; parents stand before their children.
        num_joints: J of a node.

    Returns:
        children_MJ: int64 indices of nodes, −1 where a joint has no child.
    """
    index = {place: number for number, place in enumerate(places)}
    rows = [[index.get((item, (*path, joint)), -1) for joint in range(num_joints)] for item, path in places]
    return torch.tensor(rows, dtype=torch.long).reshape(len(rows), num_joints)


def v_targets(rewards_MJ, values_M, children_MJ, discount: float, gae_lambda: float) -> Tensor:
    """Tree λ-returns Y of every joint, from the values V(h) of the nodes.

    Args:
        rewards_MJ: [..., M, J] processed rewards; leading dimensions are critics with rewards of their own.
        values_M: [..., M] values at the weights before the update, with the same leading dimensions.
        children_MJ: [M, J] indices of child nodes, −1 for none (`child_indices`).
        discount: γ in [0, 1].
        gae_lambda: λ in [0, 1].

    Returns:
        targets_MJ: float64, of the shape of `rewards_MJ`.
    """
    rewards_MJ, values_M = _double(rewards_MJ), _double(values_M)
    children_MJ = _checked_children(children_MJ, rewards_MJ)
    if values_M.shape != rewards_MJ.shape[:-1]:
        raise ValueError(f"values_M of shape {tuple(values_M.shape)}: give one a node, {tuple(rewards_MJ.shape[:-1])}.")
    for name, value in (("discount", discount), ("gae_lambda", gae_lambda)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name}={value!r}: is out of range. Give a number from 0 to 1.")
    targets_MJ = rewards_MJ.clone()
    for rows in _parents_by_depth(children_MJ):
        child_RJ = children_MJ[rows]
        future_RJ = (1 - gae_lambda) * values_M[..., child_RJ] + gae_lambda * targets_MJ.mean(-1)[..., child_RJ]
        targets_MJ[..., rows, :] += discount * torch.where(child_RJ >= 0, future_RJ, 0.0)
    return targets_MJ


def q_targets(rewards_MJ, values_MA, children_MJ, discount: float, gae_lambda: float) -> Tensor:
    """Expected-SARSA λ-targets Y of every joint, from the action values of the nodes.

    Args:
        rewards_MJ, children_MJ, discount, gae_lambda: as for `v_targets`.
        values_MA: [..., M, A] action values: Q(h, a) of the J joints, or Q_i(h_i, a_i) of the K responses of the one
            agent that a critic serves. Each response is in equally many joints, so that its mean is the same one.

    Returns:
        targets_MJ: float64, of the shape of `rewards_MJ`. A critic of one agent takes their `credit`.
    """
    return v_targets(rewards_MJ, _double(values_MA).mean(-1), children_MJ, discount, gae_lambda)


def leave_one_out(values_MK) -> Tensor:
    """Each response's value minus the mean of the agent's other K−1 at the same node: the weight of the actor from Q.

    Of values credited over all K^N joints (cross mode) this is a counterfactual baseline that leaves the response
    itself out: the partners' responses are the same on both sides.

    Args:
        values_MK: [..., K], K ≥ 2: `credit` of Q over the joints, or Q_i itself.
    """
    values_MK = _double(values_MK)
    num_generations = values_MK.shape[-1]
    if num_generations < 2:
        raise ValueError(f"num_generations={num_generations!r}: a Q critic compares siblings. Use 2 or more.")
    # x_k − mean of the others = (x_k − mean) · K/(K−1)
    return (values_MK - values_MK.mean(-1, keepdim=True)) * (num_generations / (num_generations - 1))


def counterfactual_advantages(values_MKK) -> Tensor:
    """Q(a_i^k, a_−i^k) minus the mean over k' ≠ k of Q(a_i^k', a_−i^k): the partners keep what they said.

    Args:
        values_MKK: [..., k, k']: action values of the partners' k-th responses with the agent's own k'-th, K ≥ 2.

    Returns:
        advantages_MK: [..., k], float64.
    """
    # of row k, the entry k of the leave-one-out deviations
    return leave_one_out(values_MKK).diagonal(dim1=-2, dim2=-1)


@dataclass(frozen=True)
class WeightedStatistics:
    """Sums for the weighted std of one agent's advantages over a whole rollout batch; `+` joins parts of it."""

    weight: float
    total: float
    squares: float
    largest: float
    """max |target|: differences of targets below 1e-6 of it are noise."""

    @classmethod
    def of(cls, values, weights, targets) -> WeightedStatistics:
        """From values, their weights (equal shapes), and the targets or action values that they are differences of."""
        values, weights, targets = _double(values), _double(weights), _double(targets)
        if values.shape != weights.shape:
            raise ValueError(f"weights of shape {tuple(weights.shape)}: give one a value, {tuple(values.shape)}.")
        largest = float(targets.abs().amax()) if targets.numel() else 0.0
        return cls(
            float(weights.sum()), float((weights * values).sum()), float((weights * values.square()).sum()), largest
        )

    def __add__(self, other: WeightedStatistics) -> WeightedStatistics:
        return WeightedStatistics(
            self.weight + other.weight,
            self.total + other.total,
            self.squares + other.squares,
            max(self.largest, other.largest),
        )

    @property
    def std(self) -> float:
        """Weighted population standard deviation; 0 without weight."""
        if self.weight <= 0:
            return 0.0
        mean = self.total / self.weight
        return max(self.squares / self.weight - mean * mean, 0.0) ** 0.5

    @property
    def is_noise(self) -> bool:
        """Whether the spread is too small to divide by."""
        return self.std < max(1e-4, 1e-6 * self.largest)


def actor_advantages(
    task_MK,
    *,
    statistics: WeightedStatistics | None = None,
    kl_to_go_MK=None,
    turns_M: Sequence[int] | None = None,
    kl_coef: float = 0.0,
) -> Tensor:
    """A = task part / σ − β · (KL-to-go − mean over the agent's other samples of that turn), of one agent.

    Dividing does not re-centre, and the KL part is never divided. Where σ is noise the task part is 0.

    Args:
        task_MK: credited Y − V(h), `leave_one_out` or `counterfactual_advantages`.
        statistics: of the whole rollout batch; None: σ = 1.
        kl_to_go_MK: the agent's own reference KL-to-go in nats; needed when `kl_coef` is not 0.
        turns_M: turn of each node; needed with it.
        kl_coef: β.

    Returns:
        advantages_MK: float32.
    """
    advantages_MK = _double(task_MK)
    if statistics is not None:
        advantages_MK = torch.zeros_like(advantages_MK) if statistics.is_noise else advantages_MK / statistics.std
    if kl_coef:
        if kl_to_go_MK is None or turns_M is None:
            raise ValueError(f"kl_to_go_MK=None: kl_coef={kl_coef!r} multiplies it. Give it with turns_M, or set 0.")
        advantages_MK = advantages_MK - kl_coef * _centred_by_turn(_double(kl_to_go_MK), torch.as_tensor(turns_M))
    if not bool(advantages_MK.isfinite().all()):
        raise ValueError("advantages hold NaN or infinity: no policy can be trained on them. Give finite numbers.")
    return advantages_MK.to(torch.float32)


def _centred_by_turn(values_MK: Tensor, turns_M: Tensor) -> Tensor:
    """Each value minus the mean of all others of its turn; a lone one stays as it is."""
    centred_MK = values_MK.clone()
    for turn in turns_M.unique():
        own_RK = values_MK[turns_M == turn]
        count = own_RK.numel()
        if count > 1:
            centred_MK[turns_M == turn] = (own_RK - own_RK.mean()) * (count / (count - 1))
    return centred_MK


def _double(values) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64).detach()


def _checked_children(children_MJ, rewards_MJ: Tensor) -> Tensor:
    children_MJ = torch.as_tensor(children_MJ, dtype=torch.long, device=rewards_MJ.device)
    if rewards_MJ.dim() < 2 or children_MJ.shape != rewards_MJ.shape[-2:]:
        raise ValueError(
            f"children_MJ of shape {tuple(children_MJ.shape)}: rewards have the shape {tuple(rewards_MJ.shape)}. "
            "The last two dimensions must be [M, J] in both."
        )
    own_M1 = torch.arange(len(children_MJ), device=children_MJ.device).unsqueeze(1)
    if bool(((children_MJ >= 0) & (children_MJ <= own_M1)).any()):
        raise ValueError("children_MJ: a child stands before its parent. Give nodes turn after turn.")
    return children_MJ


def _parents_by_depth(children_MJ: Tensor) -> list[Tensor]:
    """Nodes that have children, the deepest level first."""
    depths = [0] * len(children_MJ)
    for number, row in enumerate(children_MJ.tolist()):
        for child in row:
            if child >= 0:
                depths[child] = depths[number] + 1
    levels: dict[int, list[int]] = {}
    for number, has_child in enumerate((children_MJ >= 0).any(1).tolist()):
        if has_child:
            levels.setdefault(depths[number], []).append(number)
    return [torch.tensor(levels[depth], device=children_MJ.device) for depth in sorted(levels, reverse=True)]
