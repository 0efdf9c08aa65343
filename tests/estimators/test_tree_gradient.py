"""The gradient that estimators, weights and loss give on rollout trees is the exact policy gradient."""

import pytest
import torch

from mlrl.estimators.returns import credit, joint_indices
from tests.estimators.toy_game import all_trees, exact_gradient, make_game, sampled_trees, tree_gradients

NUM_TREES = 10_000
UNBIASED = ("raw", "rloo", "mean", "greedy")


def scale(mode: str, num_generations: int) -> float:
    """`mean` is the exact gradient × (K−1)/K."""
    return num_generations / (num_generations - 1) if mode == "mean" else 1.0


def expected_gradient(game, num_generations, joint_mode, mode, **settings):
    draw, num_trees = all_trees(len(game.rewards), num_generations, joint_mode)
    gradients, log_probabilities = tree_gradients(game, draw, num_trees, num_generations, joint_mode, mode, **settings)
    assert log_probabilities.exp().sum().item() == pytest.approx(1.0)
    return log_probabilities.exp() @ gradients


def standard_scores(game, joint_mode, mode, num_generations=2, seed=1, **settings):
    """(sample mean − exact) / standard error for every parameter, over 10⁴ independent trees; and the sample mean."""
    draw = sampled_trees(num_generations, seed)
    gradients, _ = tree_gradients(game, draw, NUM_TREES, num_generations, joint_mode, mode, **settings)
    gradients = gradients * scale(mode, num_generations)
    mean = gradients.mean(0)
    return (mean - exact_gradient(game)) / (gradients.std(0) / NUM_TREES**0.5), mean


def test_exact_gradient_itself_against_finite_differences():
    game = make_game(2)
    gradient = exact_gradient(game)

    def objective():
        # by trajectories: every pair of joint actions, one after the other
        total = 0.0
        for first in range(4):
            for second in range(4):
                probability, path = 1.0, [first, second]
                for t, joint in enumerate(path):
                    history = 0 if t == 0 else path[0]
                    for i in range(2):
                        probability *= torch.softmax(game.logits[t][i], -1)[
                            game.own_histories[t][i][history], joint >> (1 - i) & 1
                        ]
                total += probability * (game.rewards[0][first] + game.discount * game.rewards[1][4 * first + second])
        return total

    parameter = 0
    for table in game.logits:
        for index in range(table.numel()):
            value = table.view(-1)[index].item()
            sides = []
            for shift in (1e-5, -1e-5):
                table.view(-1)[index] = value + shift
                sides.append(objective())
            table.view(-1)[index] = value
            assert gradient[parameter].item() == pytest.approx(((sides[0] - sides[1]) / 2e-5).item(), abs=1e-8)
            parameter += 1


@pytest.mark.parametrize(
    ("horizon", "joint_mode", "num_generations"),
    [(1, "aligned", 2), (1, "aligned", 3), (1, "cross", 2), (1, "cross", 3), (2, "aligned", 2)],
)
@pytest.mark.parametrize("mode", UNBIASED)
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_expectation_over_all_trees_is_the_exact_gradient(horizon, joint_mode, num_generations, mode, kl_coef):
    game = make_game(horizon, kl_coef=kl_coef)
    expected = expected_gradient(game, num_generations, joint_mode, mode) * scale(mode, num_generations)
    torch.testing.assert_close(expected, exact_gradient(game), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("mode", ["raw", "greedy"])
def test_one_generation_is_enough_without_siblings(mode):
    game = make_game(2, kl_coef=0.3)
    torch.testing.assert_close(
        expected_gradient(game, 1, "aligned", mode), exact_gradient(game), atol=1e-6, rtol=1e-5
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["raw", "rloo", "mean"])
def test_branches_that_end_early_count_as_zeros(mode):
    game = make_game(2, kl_coef=0.3, stop_above=0.0)
    assert 0 < int((game.rewards[0] > 0).sum()) < 4  # some branches end, some go on
    expected = expected_gradient(game, 2, "aligned", mode) * scale(mode, 2)
    torch.testing.assert_close(expected, exact_gradient(game), atol=1e-6, rtol=1e-5)
    assert not torch.allclose(expected, exact_gradient(make_game(2, kl_coef=0.3)), atol=1e-2)


@pytest.mark.parametrize("horizon", [1, 2, 3])
@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
@pytest.mark.parametrize("mode", ["raw", "rloo", "mean"])
def test_sampled_trees_agree_with_the_exact_gradient(horizon, joint_mode, mode):
    scores, _ = standard_scores(make_game(horizon), joint_mode, mode)
    assert scores.abs().max() < 3.0


@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
def test_sampled_trees_agree_with_reference_kl(joint_mode):
    scores, _ = standard_scores(make_game(2, kl_coef=0.3), joint_mode, "rloo")
    assert scores.abs().max() < 3.0


@pytest.mark.parametrize("horizon", [2, 3])
@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
def test_a_flat_mean_over_nodes_is_another_direction(horizon, joint_mode):
    game = make_game(horizon)
    scores, mean = standard_scores(game, joint_mode, "rloo", turn_weighting="node")
    assert scores.abs().max() > 20.0
    exact = exact_gradient(game)
    assert torch.cosine_similarity(mean, exact, dim=0) < 0.98
    _, mean = standard_scores(game, joint_mode, "rloo")
    assert torch.cosine_similarity(mean, exact, dim=0) > 0.99


@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
@pytest.mark.parametrize("num_generations", [2, 3])
def test_max_follows_the_expected_return_minus_a_share_of_the_best(joint_mode, num_generations):
    # ∇(E R − E[max_k R_k]/K), R_k the credited return; scale exactly 1, and only at one turn
    game = make_game(1)
    draw, num_trees = all_trees(1, num_generations, joint_mode)
    actions_NBMK = draw(0, None)
    joints = torch.tensor(joint_indices(2, num_generations, joint_mode))
    first, second = (actions_NBMK[i, :, 0][:, joints[:, i]] for i in range(2))
    credited_NBK = credit(game.rewards[0][2 * first + second], joints, num_generations)
    logits = game.logits[0].clone().requires_grad_()
    scores_N2 = torch.log_softmax(logits[:, 0], -1)
    probability_B = sum(scores_N2[i][actions_NBMK[i, :, 0]].sum(-1) for i in range(2)).exp()
    assert len(probability_B) == num_trees
    best_N = [
        torch.autograd.grad(probability_B @ credited_NBK[i].amax(-1), logits, retain_graph=True) for i in range(2)
    ]
    best = torch.cat([best_N[i][0][i].flatten() for i in range(2)])
    expected = expected_gradient(game, num_generations, joint_mode, "max")
    torch.testing.assert_close(expected, exact_gradient(game) - best / num_generations, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(expected, exact_gradient(game), atol=1e-2)
