"""A two-agent game small enough to enumerate: its exact policy gradient, and the estimator's gradient on sampled trees.

Two agents, two actions, H turns, random reward tables over joint histories. Agents are tabular softmax policies. After
each turn an agent observes its own action and whether both played 1: one of three observations, so that its history is
neither the joint history nor blind to the partner.
Legend: N = 2 agents, B trees, M nodes of a turn in a tree, K generations, J joints.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mlrl.estimators.advantages import advantages
from mlrl.estimators.kl import kl_to_go
from mlrl.estimators.returns import credit, joint_indices, returns_to_go
from mlrl.estimators.weights import sample_weight
from mlrl.losses.policy import PolicyLossInputs, PolicyLossSettings, policy_loss

Draw = Callable[[int, Tensor], Tensor]  # (turn, probabilities_NBM2) → actions_NBMK


@dataclass
class Game:
    """Rewards by turn, one an outcome (joint history, joint action): 4^(t+1); own histories [N, 4^t] of joint ones."""

    rewards: list[Tensor]
    own_histories: list[Tensor]
    logits: list[Tensor]  # [N, 3^t, 2]
    reference: list[Tensor]
    discount: float = 0.9
    stop_above: float = float("inf")
    """A branch ends where its reward exceeds this (early termination in `joint` scope)."""
    kl_coef: float = 0.0


def make_game(horizon: int, seed: int = 0, **settings) -> Game:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    histories = [torch.zeros(2, 1, dtype=torch.long)]
    for _ in range(horizon - 1):
        first, second = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
        observed = torch.stack([first + first * second, second + first * second])  # own action + "both played 1"
        histories.append((histories[-1][:, :, None] * 3 + observed[:, None]).flatten(1))
    logits, reference = ([0.7 * normal(2, 3**t, 2) for t in range(horizon)] for _ in range(2))
    return Game([normal(4 ** (t + 1)) for t in range(horizon)], histories, logits, reference, **settings)


def exact_gradient(game: Game) -> Tensor:
    """∇_i J_i of both agents, J_i = E Σ_t γ^t (r_t − β·KL_{i,t}), through the distribution over joint histories."""
    logits = [table.clone().requires_grad_() for table in game.logits]
    state = torch.ones(1, dtype=torch.float64)
    objective_N = torch.zeros(2, dtype=torch.float64)
    for t, table in enumerate(logits):
        own = [torch.log_softmax(table[i], -1)[game.own_histories[t][i]] for i in range(2)]  # [4^t, 2]
        for i in range(2):
            reference = torch.log_softmax(game.reference[t][i], -1)[game.own_histories[t][i]]
            kl = (own[i].exp() * (own[i] - reference)).sum(-1)
            objective_N = objective_N.index_add(
                0, torch.tensor([i]), -(game.discount**t * game.kl_coef * state @ kl)[None]
            )
        outcome = (state[:, None, None] * own[0].exp()[:, :, None] * own[1].exp()[:, None, :]).flatten()
        objective_N = objective_N + game.discount**t * outcome @ game.rewards[t]
        state = outcome * (game.rewards[t] <= game.stop_above)
    gradients = [torch.autograd.grad(objective_N[i], logits, retain_graph=True) for i in range(2)]
    return torch.cat([torch.stack([gradients[i][t][i] for i in range(2)]).flatten() for t in range(len(logits))])


def greedy_returns(game: Game, turn: int, states: Tensor) -> Tensor:
    """Return of the joint response of each agent's most probable actions, from given joint histories on."""
    if turn == len(game.rewards):
        return torch.zeros(states.shape, dtype=torch.float64)
    first, second = (game.logits[turn][i][game.own_histories[turn][i][states]].argmax(-1) for i in range(2))
    outcomes = 4 * states + 2 * first + second
    return game.rewards[turn][outcomes] + game.discount * greedy_returns(game, turn + 1, outcomes)


def tree_gradients(
    game: Game, draw: Draw, num_trees: int, num_generations: int, joint_mode: str, mode: str, turn_weighting="objective"
) -> tuple[Tensor, Tensor]:
    """The estimator's ascent direction on each of B trees [B, parameters], and log-probabilities of the trees [B]."""
    joints_JN = torch.tensor(joint_indices(2, num_generations, joint_mode))
    num_joints, horizon = len(joints_JN), len(game.rewards)
    # every tree gets its own copy of the parameters, so that one backward pass gives a gradient a tree
    leaves = [table.expand(num_trees, *table.shape).clone().requires_grad_() for table in game.logits]
    states, alive = torch.zeros(num_trees, 1, dtype=torch.long), torch.ones(num_trees, 1, dtype=torch.bool)
    turns, tree = [], torch.arange(num_trees)[:, None]
    for t in range(horizon):
        scores_NBM2 = torch.stack(
            [torch.log_softmax(leaves[t][tree, i, game.own_histories[t][i][states]], -1) for i in range(2)]
        )
        actions_NBMK = draw(t, scores_NBM2.detach().exp())
        reference_NBM2 = torch.stack(
            [torch.log_softmax(game.reference[t][i], -1)[game.own_histories[t][i][states]] for i in range(2)]
        )
        first, second = (actions_NBMK[i][..., joints_JN[:, i]] for i in range(2))
        outcomes = 4 * states[..., None] + 2 * first + second  # [B, M, J]
        rewards_BMJ = game.rewards[t][outcomes]
        logprobs_NBMK = scores_NBM2.gather(-1, actions_NBMK)
        kl_NBMK = logprobs_NBMK.detach() - reference_NBM2.gather(-1, actions_NBMK)
        turns.append((states, alive, rewards_BMJ, logprobs_NBMK, kl_NBMK))
        alive = (alive[..., None] & (rewards_BMJ <= game.stop_above)).flatten(1)
        states = outcomes.flatten(1)

    loss, total_log_probability = 0.0, torch.zeros(num_trees, dtype=torch.float64)
    num_nodes = sum(num_joints**t for t in range(horizon))
    child_means_BMJ = child_kl_NBMJ = None
    for t, (states, alive, rewards_BMJ, logprobs_NBMK, kl_NBMK) in reversed(list(enumerate(turns))):
        num_nodes_t = states.shape[1]
        ended = rewards_BMJ > game.stop_above if child_means_BMJ is not None else torch.ones_like(rewards_BMJ) > 0
        child_means_BMJ = torch.zeros_like(rewards_BMJ) if child_means_BMJ is None else child_means_BMJ
        child_kl_NBMJ = torch.zeros(2, *rewards_BMJ.shape) if child_kl_NBMJ is None else child_kl_NBMJ
        returns_BMJ = returns_to_go(rewards_BMJ, child_means_BMJ.masked_fill(ended, torch.nan), game.discount)
        credited_NMK = credit(returns_BMJ.flatten(0, 1), joints_JN, num_generations)
        penalty_NMK = kl_to_go(
            kl_NBMK.flatten(1, 2), child_kl_NBMJ.masked_fill(ended, torch.nan).flatten(1, 2), joints_JN,
            num_generations, game.discount,
        )  # fmt: skip
        greedy_M = greedy_returns(game, t, states).flatten()
        weight = sample_weight(
            t, num_items=1, num_joints=num_joints, num_generations=num_generations, discount=game.discount,
            turn_weighting=turn_weighting, num_nodes=num_nodes,
        )  # fmt: skip
        weights_S = (weight * alive.to(torch.float64))[..., None].expand(-1, -1, num_generations).flatten()
        for i in range(2):
            estimated = advantages(
                credited_NMK[i], penalty_NMK[i], mode=mode, kl_coef=game.kl_coef, greedy_returns_M=greedy_M
            )
            lengths_S = torch.ones(len(weights_S), dtype=torch.long)
            inputs = PolicyLossInputs(logprobs_NBMK[i].flatten(), lengths_S, estimated.values_MK.flatten(), weights_S)
            loss = loss + policy_loss(inputs, PolicyLossSettings()).loss
        total_log_probability += logprobs_NBMK.detach().sum(dim=(0, 2, 3))
        if t:
            child_means_BMJ = returns_BMJ.mean(-1).view(num_trees, num_nodes_t // num_joints, num_joints)
            child_kl_NBMJ = penalty_NMK.mean(-1).view(2, *child_means_BMJ.shape)
    gradients = torch.autograd.grad(-loss, leaves)
    return torch.cat([gradient.flatten(1) for gradient in gradients], dim=1), total_log_probability


def all_trees(horizon: int, num_generations: int, joint_mode: str) -> tuple[Draw, int]:
    """Every possible tree once, each bit of its number one action; and how many there are."""
    num_joints = len(joint_indices(2, num_generations, joint_mode))
    sizes = [(2, num_joints**t, num_generations) for t in range(horizon)]
    offsets = [sum(a * b * c for a, b, c in sizes[:t]) for t in range(horizon + 1)]
    numbers = torch.arange(2 ** offsets[-1])

    def draw(turn: int, _: Tensor) -> Tensor:
        bits = torch.arange(offsets[turn], offsets[turn + 1])
        return (numbers[:, None] >> bits & 1).view(-1, *sizes[turn]).transpose(0, 1)

    return draw, len(numbers)


def sampled_trees(num_generations: int, seed: int) -> Draw:
    generator = torch.Generator().manual_seed(seed)

    def draw(_: int, probabilities_NBM2: Tensor) -> Tensor:
        flat = probabilities_NBM2.reshape(-1, 2)
        actions = torch.multinomial(flat, num_generations, replacement=True, generator=generator)
        return actions.view(*probabilities_NBM2.shape[:-1], num_generations)

    return draw
