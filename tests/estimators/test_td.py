"""TD targets, counterfactual baselines and the actor's advantages, by hand and against loops."""

import itertools
import random

import pytest
import torch

from mlrl.estimators.returns import credit, joint_indices
from mlrl.estimators.td import (
    WeightedStatistics,
    actor_advantages,
    child_indices,
    counterfactual_advantages,
    leave_one_out,
    q_targets,
    v_targets,
)

# Two agents, two turns, K = 2, aligned, γ = 0.5: a root and the children of its two joints.
ALIGNED = [(0, ()), (0, (0,)), (0, (1,))]
REWARDS = [[1.0, 2.0], [3.0, 5.0], [-1.0, 1.0]]
V = [2.0, 6.0, -2.0]
Q = [[2.5, 1.0], [2.0, 4.0], [0.0, -4.0]]
# The same in cross mode: joints 1 and 2 of the root have ended.
CROSS = [(0, ()), (0, (0,)), (0, (3,))]
CROSS_REWARDS = [[1.0, 2.0, 3.0, 4.0], [2.0, 2.0, 4.0, 8.0], [0.0, 0.0, 0.0, 4.0]]
CROSS_V = [3.0, 2.0, -1.0]


def test_children_are_found_by_item_and_path():
    assert child_indices(ALIGNED, 2).tolist() == [[1, 2], [-1, -1], [-1, -1]]
    two = [(0, ()), (0, (1,)), (7, ()), (7, (0,)), (7, (0, 1))]
    assert child_indices(two, 2).tolist() == [[-1, 1], [-1, -1], [3, -1], [-1, 4], [-1, -1]]
    assert child_indices([], 3).shape == (0, 3)


@pytest.mark.parametrize(
    ("gae_lambda", "root", "advantages"),
    [
        (0.0, [1 + 0.5 * 6, 2 + 0.5 * -2], [2.0, -1.0]),  # Y = 4, 1; minus V = 2
        (0.5, [1 + 0.5 * (3 + 2), 2 + 0.5 * (-1 + 0)], [1.5, -0.5]),  # children's Y have the means 4 and 0
        (1.0, [1 + 0.5 * 4, 2 + 0.5 * 0], [1.0, 0.0]),  # Monte-Carlo returns 3, 2
    ],
)
def test_v_targets_by_hand(gae_lambda, root, advantages):
    targets = v_targets(REWARDS, V, child_indices(ALIGNED, 2), 0.5, gae_lambda)
    assert targets.tolist() == [root, REWARDS[1], REWARDS[2]]
    assert (targets[0] - V[0]).tolist() == advantages
    assert (targets[1] - V[1]).tolist() == [-3.0, -1.0]


def test_a_branch_that_ended_has_its_reward_and_no_bootstrap():
    for gae_lambda in (0.0, 0.5, 1.0):
        targets = v_targets(REWARDS[:2], V[:2], child_indices(ALIGNED[:2], 2), 0.5, gae_lambda)
        assert targets[0, 1] == 2.0
        assert q_targets(REWARDS[:2], Q[:2], child_indices(ALIGNED[:2], 2), 0.5, gae_lambda)[0, 1] == 2.0


@pytest.mark.parametrize(
    ("gae_lambda", "root"),
    [
        (0.0, [1 + 0.5 * 3, 2 + 0.5 * -2]),  # means of Q below: 3, −2
        (0.5, [1 + 0.5 * (1.5 + 2), 2 + 0.5 * (-1 + 0)]),
        (1.0, [3.0, 2.0]),
    ],
)
def test_q_targets_by_hand(gae_lambda, root):
    targets = q_targets(REWARDS, Q, child_indices(ALIGNED, 2), 0.5, gae_lambda)
    assert targets.tolist() == [root, REWARDS[1], REWARDS[2]]


@pytest.mark.parametrize(
    ("gae_lambda", "root"),
    [
        (0.0, [1 + 0.5 * 2, 2.0, 3.0, 4 + 0.5 * -1]),
        (0.5, [1 + 0.5 * (1 + 2), 2.0, 3.0, 4 + 0.5 * (-0.5 + 0.5)]),  # children's Y have the means 4 and 1
        (1.0, [1 + 0.5 * 4, 2.0, 3.0, 4 + 0.5 * 1]),
    ],
)
def test_cross_targets_by_hand(gae_lambda, root):
    children = child_indices(CROSS, 4)
    assert children[0].tolist() == [1, -1, -1, 2]
    targets = v_targets(CROSS_REWARDS, CROSS_V, children, 0.5, gae_lambda)
    assert targets[0].tolist() == root
    if gae_lambda == 0:
        # Y − V = −1, −1, 0, 0.5; agent 0: (−1−1)/2, (0+0.5)/2; agent 1: (−1+0)/2, (−1+0.5)/2
        credited = credit((targets - torch.tensor(CROSS_V)[:, None])[:1], joint_indices(2, 2, "cross"), 2)
        assert credited.tolist() == [[[-1.0, 0.25]], [[-0.5, -0.25]]]


def test_agents_with_rewards_of_their_own_come_as_a_leading_dimension():
    rewards = torch.tensor([REWARDS, [[0.0, 1.0], [1.0, 1.0], [2.0, 4.0]]])
    values = torch.tensor([V, [0.0, 2.0, 4.0]])
    both = v_targets(rewards, values, child_indices(ALIGNED, 2), 0.5, 0.5)
    assert both[0].tolist() == v_targets(REWARDS, V, child_indices(ALIGNED, 2), 0.5, 0.5).tolist()
    # agent 1: 0 + 0.5·(0.5·2 + 0.5·1), 1 + 0.5·(0.5·4 + 0.5·3)
    assert both[1, 0].tolist() == [0.75, 2.75]


def random_tree(rng, num_joints, turns, stop):
    """Places of two trees, parents first, some branches cut."""
    places = []
    for item in (3, 8):
        level = [()]
        for turn in range(turns):
            places += [(item, path) for path in level]
            deeper = [(*path, j) for path in level for j in range(num_joints) if rng.random() > stop]
            level = deeper if turn + 1 < turns else []
    return places


def looped(places, rewards, bootstraps, discount, gae_lambda):
    """Targets by recursion over the tree."""
    index = {place: m for m, place in enumerate(places)}

    def target(m, j):
        item, path = places[m]
        child = index.get((item, (*path, j)))
        if child is None:
            return rewards[m][j]
        below = [target(child, g) for g in range(len(rewards[child]))]
        future = (1 - gae_lambda) * bootstraps[child] + gae_lambda * sum(below) / len(below)
        return rewards[m][j] + discount * future

    return [[target(m, j) for j in range(len(rewards[m]))] for m in range(len(places))]


@pytest.mark.parametrize(("num_joints", "turns"), [(1, 4), (2, 3), (4, 3), (3, 1)])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("stop", [0.0, 0.4])
def test_targets_equal_the_loop(num_joints, turns, gae_lambda, stop):
    rng = random.Random(5)
    places = random_tree(rng, num_joints, turns, stop)
    rewards = [[rng.gauss(0, 1) for _ in range(num_joints)] for _ in places]
    values = [rng.gauss(0, 1) for _ in places]
    action_values = [[rng.gauss(0, 1) for _ in range(num_joints)] for _ in places]
    children = child_indices(places, num_joints)
    expected = torch.tensor(looped(places, rewards, values, 0.9, gae_lambda), dtype=torch.float64)
    torch.testing.assert_close(v_targets(rewards, values, children, 0.9, gae_lambda), expected)
    means = [sum(row) / len(row) for row in action_values]
    expected = torch.tensor(looped(places, rewards, means, 0.9, gae_lambda), dtype=torch.float64)
    torch.testing.assert_close(q_targets(rewards, action_values, children, 0.9, gae_lambda), expected)


def test_wrong_arguments_are_named():
    children = child_indices(ALIGNED, 2)
    for arguments, message in [
        ((REWARDS, V[:2], children, 1.0, 1.0), "values_M of shape"),
        ((REWARDS, V, children[:2], 1.0, 1.0), "children_MJ of shape"),
        ((REWARDS, V, children, 1.1, 1.0), "discount=1.1"),
        ((REWARDS, V, children, 1.0, -0.1), "gae_lambda=-0.1"),
        ((REWARDS, V, torch.tensor([[-1, -1], [0, -1], [-1, -1]]), 1.0, 1.0), "before its parent"),
    ]:
        with pytest.raises(ValueError, match=message):
            v_targets(*arguments)
    with pytest.raises(ValueError, match="num_generations=1"):
        leave_one_out([[1.0]])


def test_the_actor_weight_of_q_is_the_value_against_the_others():
    # 1 − (4+7)/2, 4 − (1+7)/2, 7 − (1+4)/2
    assert leave_one_out([[1.0, 4.0, 7.0]]).tolist() == [[-4.5, 0.0, 4.5]]
    # cross, joints (0,0) (0,1) (1,0) (1,1) worth 1, 3, 5, 11: agent 0 has 2, 8, agent 1 has 3, 7
    credited = credit([[1.0, 3.0, 5.0, 11.0]], joint_indices(2, 2, "cross"), 2)
    assert leave_one_out(credited).tolist() == [[[-6.0, 6.0]], [[-4.0, 4.0]]]


def test_in_cross_mode_it_is_coma_without_the_response_itself():
    """Mean over the partners of Q(a_i, a_−i) minus Q with the agent's other responses, partners as they are."""
    generations = 3
    joints = joint_indices(2, generations, "cross")
    values = torch.randn(1, len(joints), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    actual = leave_one_out(credit(values, joints, generations))
    q = {joint: float(values[0, number]) for number, joint in enumerate(joints)}
    for k in range(generations):
        others = [o for o in range(generations) if o != k]
        first = [q[k, p] - sum(q[o, p] for o in others) / len(others) for p in range(generations)]
        second = [q[p, k] - sum(q[p, o] for o in others) / len(others) for p in range(generations)]
        assert actual[0, 0, k] == pytest.approx(sum(first) / generations)
        assert actual[1, 0, k] == pytest.approx(sum(second) / generations)


def test_counterfactual_advantages():
    # row k: the partners' k-th responses with the own 0th and 1st: 5 − 1 and 2 − 7, of the diagonal 5, 2
    assert counterfactual_advantages([[[5.0, 1.0], [7.0, 2.0]]]).tolist() == [[4.0, -5.0]]
    values = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    actual = counterfactual_advantages(values)
    assert actual.shape == (2, 4, 3)
    for agent, node, k in itertools.product(range(2), range(4), range(3)):
        row = values[agent, node, k].tolist()
        others = [q for number, q in enumerate(row) if number != k]
        assert actual[agent, node, k] == pytest.approx(row[k] - sum(others) / 2)


def test_normalization_is_weighted_and_does_not_centre():
    task, weights = [[1.0, 3.0], [5.0, 5.0]], [[0.5, 0.5], [0.25, 0.25]]
    statistics = WeightedStatistics.of(task, weights, task)
    # mean (0.5 + 1.5 + 1.25 + 1.25) / 1.5 = 3, variance (0.5·4 + 0 + 0.5·4) / 1.5 = 8/3
    assert statistics.std == pytest.approx((8 / 3) ** 0.5)
    actual = actor_advantages(task, statistics=statistics)
    torch.testing.assert_close(actual, torch.tensor(task) / (8 / 3) ** 0.5)
    assert actual.dtype == torch.float32
    assert actor_advantages(task).tolist() == task
    parts = [WeightedStatistics.of(task[m : m + 1], weights[m : m + 1], task[m : m + 1]) for m in range(2)]
    assert (parts[0] + parts[1]).std == pytest.approx(statistics.std)


def test_noise_is_not_blown_up():
    task = [[0.03, -0.02]]
    # differences of targets of 1e5 in the seventh digit are rounding
    statistics = WeightedStatistics.of(task, [[0.5, 0.5]], [[1e5, 1e5]])
    assert actor_advantages(task, statistics=statistics).tolist() == [[0.0, 0.0]]
    assert actor_advantages([[5e-5, 0.0]], statistics=WeightedStatistics.of([[5e-5, 0.0]], [[1.0, 1.0]], [[1.0, 1.0]]))[
        0
    ].tolist() == [0.0, 0.0]
    assert WeightedStatistics.of([[1.0]], [[0.0]], [[1.0]]).std == 0.0


def test_kl_is_centred_over_the_turn_and_not_divided():
    task, kl = [[2.0, 0.0], [0.0, 2.0], [4.0, 0.0]], [[1.0, 2.0], [3.0, 6.0], [5.0, 5.0]]
    statistics = WeightedStatistics.of(task, [[1.0, 1.0]] * 3, task)
    actual = actor_advantages(task, statistics=statistics, kl_to_go_MK=kl, turns_M=[0, 1, 1], kl_coef=0.1)
    # turn 0: 1 − 2, 2 − 1; turn 1: 3 − 16/3, 6 − 13/3, 5 − 14/3 twice
    centred = torch.tensor([[-1.0, 1.0], [3 - 16 / 3, 6 - 13 / 3], [5 - 14 / 3, 5 - 14 / 3]])
    torch.testing.assert_close(actual, torch.tensor(task) / statistics.std - 0.1 * centred)
    # alone in its turn, a penalty stays as it is
    assert actor_advantages([[1.0]], kl_to_go_MK=[[2.0]], turns_M=[0], kl_coef=0.5).tolist() == [[0.0]]
    with pytest.raises(ValueError, match="kl_to_go_MK=None"):
        actor_advantages(task, kl_coef=0.1)
    with pytest.raises(ValueError, match="NaN"):
        actor_advantages([[float("nan")]])
