"""Returns of joint responses on a rollout tree, and the share of them that each single response is credited with.

Legend: N agents, M nodes, K generations, J joints. Everything here is float64: rewards are few, and group statistics
are differences of nearly equal numbers.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

JOINT_MODES = ("aligned", "cross")


def joint_indices(num_agents: int, num_generations: int, joint_mode: str) -> list[tuple[int, ...]]:
    """The joint responses of a node, each as one generation index an agent.

    `aligned`: K joints, the g-th made of every agent's g-th response. `cross`: all K^N combinations in
    `itertools.product` order, the last agent's index running fastest.
    """
    if num_agents < 1:
        raise ValueError(f"num_agents={num_agents!r}: a joint response needs an agent. Use 1 or more.")
    if num_generations < 1:
        raise ValueError(f"num_generations={num_generations!r}: a node needs a response. Use 1 or more.")
    if joint_mode == "aligned":
        return [(g,) * num_agents for g in range(num_generations)]
    if joint_mode == "cross":
        return list(product(range(num_generations), repeat=num_agents))
    raise ValueError(f"joint_mode={joint_mode!r}: unknown word. Use one of {', '.join(JOINT_MODES)}.")


def returns_to_go(rewards_J, child_means_J, discount: float) -> Tensor:
    """R_g = r_g + γ · (mean return of the child node of joint g), and R_g = r_g where there is no child.

    Args:
        rewards_J: processed rewards of the joints; any leading dimensions (array, list or tensor).
        child_means_J: for each joint the mean over its child's J returns, NaN where the branch ended.
        discount: γ in [0, 1].

    Returns:
        float64 tensor of the shape of `rewards_J`.
    """
    rewards_J = torch.as_tensor(rewards_J, dtype=torch.float64)
    child_means_J = torch.as_tensor(child_means_J, dtype=torch.float64, device=rewards_J.device)
    if child_means_J.shape != rewards_J.shape:
        raise ValueError(
            f"child_means_J of shape {tuple(child_means_J.shape)}: one number a joint is needed. "
            f"Give the shape of rewards_J, {tuple(rewards_J.shape)}, with NaN where a joint has no child."
        )
    return rewards_J + discount * torch.where(child_means_J.isnan(), 0.0, child_means_J)


def credit(values_MJ, joints_JN, num_generations: int) -> Tensor:
    """Each response's share of joint values: the mean over the joints of its node that contain it.

    In aligned mode that is the value of its one joint. In cross mode it is the marginal over the partners' responses;
    a sum instead would scale the gradient by K^(N-1).

    Args:
        values_MJ: [M, J] values shared by the agents, or [N, M, J] values of each agent's own.
        joints_JN: [J, N] generation indices (what `joint_indices` returns).
        num_generations: K.

    Returns:
        credited_NMK: float64.
    """
    values_MJ = torch.as_tensor(values_MJ, dtype=torch.float64)
    joints_JN = torch.as_tensor(joints_JN, dtype=torch.long, device=values_MJ.device)
    num_joints, num_agents = joints_JN.shape
    if values_MJ.shape[-1] != num_joints or values_MJ.dim() not in (2, 3):
        raise ValueError(
            f"values of shape {tuple(values_MJ.shape)}: the last of 2 or 3 dimensions counts the joints. "
            f"Give [M, {num_joints}] or [{num_agents}, M, {num_joints}]."
        )
    values_NMJ = values_MJ.expand(num_agents, *values_MJ.shape[-2:])
    member_NJK = torch.nn.functional.one_hot(joints_JN.T, num_generations).to(torch.float64)
    counts_NK = member_NJK.sum(dim=1)
    if bool((counts_NK == 0).any()):
        raise ValueError(f"num_generations={num_generations!r}: some response is in no joint. Each must be in one.")
    return values_NMJ @ member_NJK / counts_NK.unsqueeze(1)
