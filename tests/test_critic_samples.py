"""From trees and values to targets and losses: hand-computed on two agents, two turns, K = 2."""

from types import SimpleNamespace

import pytest
import torch

from mlrl.critic_inputs import CriticInput
from mlrl.critic_samples import agent_rewards, counterfactual_task_advantages, from_values, task_advantages
from mlrl.estimators.returns import joint_indices
from mlrl.estimators.td import WeightedStatistics, actor_advantages
from mlrl.losses.value import ValueLossInputs, ValueLossSettings, value_loss
from mlrl.rollout.tree import Node, Response, RolloutTree, TokenizedPrompt

ALIGNED, CROSS = joint_indices(2, 2, "aligned"), joint_indices(2, 2, "cross")


def node(rewards, joints, parent=None, joint=None):
    """A node without text: numbers are all that counts here."""
    responses = [[Response([5, 2], [0.0, 0.0], "", False) for _ in range(2)] for _ in range(2)]
    path = () if parent is None else (*parent.path, joint)
    made = Node(path, [TokenizedPrompt("", [1])] * 2, parent, responses, list(joints), rewards, rewards)
    if parent is not None:
        parent.children[joint] = made
    return made


def aligned_tree(stop=()):
    """Rewards 1, 2, then 3, 5 below joint 0 and −1, 1 below joint 1."""
    root = node([1.0, 2.0], ALIGNED)
    for joint, rewards in enumerate(([3.0, 5.0], [-1.0, 1.0])):
        if joint not in stop:
            node(rewards, ALIGNED, root, joint)
    return RolloutTree({}, 0, root)


def critic_like(critic_type, agent=None):
    return SimpleNamespace(critic_type=critic_type, reader=SimpleNamespace(agent=agent))


def estimated(trees, values, critic_type="v", agent=None, gae_lambda=0.0, discount=0.5):
    critic = critic_like(critic_type, agent)
    values = torch.tensor(values, dtype=torch.float64)
    inputs = [CriticInput(((number,),)) for number in range(len(values))]
    settings = {"discount": discount, "gae_lambda": gae_lambda, "num_turns": 2}
    return from_values(critic, trees, inputs, values, **settings)


def loss(estimate):
    """The value loss at the values of the estimate."""
    samples = [(s.old_value, target, s.weight) for s in estimate.samples for target in s.targets]
    columns = (torch.tensor(column) for column in zip(*samples, strict=True))
    return float(value_loss(ValueLossInputs(*columns), ValueLossSettings()).loss)


@pytest.mark.parametrize(
    ("gae_lambda", "root", "expected"),
    [
        # Root Y = 4, 1 against V = 2: (4 + 1)/4. Below: (3−6)², (5−6)², (−1+2)², (1+2)² = 9 + 1 + 1 + 9, by 8.
        (0.0, [4.0, 1.0], 5 / 4 + 20 / 8),
        (0.5, [3.5, 1.5], 2.5 / 4 + 20 / 8),
        (1.0, [3.0, 2.0], 1 / 4 + 20 / 8),
    ],
)
def test_v_by_hand(gae_lambda, root, expected):
    estimate = estimated([aligned_tree()], [2.0, 6.0, -2.0], gae_lambda=gae_lambda)
    assert estimate.targets_MJ.tolist() == [root, [3.0, 5.0], [-1.0, 1.0]]
    assert [sample.targets for sample in estimate.samples] == estimate.targets_MJ.tolist()
    # 1/(B·J^t·J·H) = 1/(1·1·2·2), 1/(1·2·2·2)
    assert [sample.weight for sample in estimate.samples] == [1 / 4, 1 / 8, 1 / 8]
    assert [sample.input.token_ids for sample in estimate.samples] == [[0], [1], [2]]
    assert loss(estimate) == pytest.approx(expected)


def test_lambda_1_is_the_return_of_the_tree_minus_v():
    tree = aligned_tree()
    estimate = estimated([tree], [2.0, 6.0, -2.0], gae_lambda=1.0)
    returns = torch.tensor([n.returns(0.5) for n in tree.nodes()], dtype=torch.float64)
    torch.testing.assert_close(estimate.targets_MJ, returns)
    assert (estimate.targets_MJ - estimate.values_MA)[0].tolist() == [1.0, 0.0]


def test_a_branch_that_ended_early():
    estimate = estimated([aligned_tree(stop=(1,))], [2.0, 6.0])
    assert estimate.targets_MJ.tolist() == [[4.0, 2.0], [3.0, 5.0]]
    # its nodes count as zeros: the weights are those of the full tree
    assert [sample.weight for sample in estimate.samples] == [1 / 4, 1 / 8]
    assert loss(estimate) == pytest.approx(4 / 4 + 10 / 8)
    assert estimated([aligned_tree(stop=(0, 1))], [2.0]).targets_MJ.tolist() == [[1.0, 2.0]]


def test_centralized_q_by_hand():
    # means of Q below: 3, −2, so Y = 1 + 1.5, 2 − 1 at the root
    estimate = estimated([aligned_tree()], [2.0, 1.5, 2.0, 4.0, 0.0, -4.0], "q")
    assert estimate.targets_MJ.tolist() == [[2.5, 1.0], [3.0, 5.0], [-1.0, 1.0]]
    assert [(s.old_value, s.targets) for s in estimate.samples[:2]] == [(2.0, [2.5]), (1.5, [1.0])]
    assert [s.weight for s in estimate.samples] == [1 / 4] * 2 + [1 / 8] * 4
    # (0.5² + 0.5²)/4 + (1 + 1 + 1 + 25)/8
    assert loss(estimate) == pytest.approx(0.5 / 4 + 28 / 8)
    for agent in (0, 1):
        advantages = task_advantages(critic_like("q"), estimate, [aligned_tree()], agent)
        assert advantages.tolist() == [[0.5, -0.5], [-2.0, 2.0], [4.0, -4.0]]


def cross_tree():
    """Joints 0 and 3 of the root go on."""
    root = node([1.0, 2.0, 3.0, 4.0], CROSS)
    node([2.0, 2.0, 4.0, 8.0], CROSS, root, 0)
    node([0.0, 0.0, 0.0, 4.0], CROSS, root, 3)
    return RolloutTree({}, 0, root)


def test_cross_by_hand():
    estimate = estimated([cross_tree()], [3.0, 2.0, -1.0])
    assert estimate.targets_MJ[0].tolist() == [1 + 0.5 * 2, 2.0, 3.0, 4 + 0.5 * -1]
    assert [sample.weight for sample in estimate.samples] == [1 / 8, 1 / 32, 1 / 32]  # 1/(4·2), 1/(4·4·2)
    # root: 1 + 1 + 0 + 0.25; below: 0 + 0 + 4 + 36 and 1 + 1 + 1 + 25
    assert loss(estimate) == pytest.approx(2.25 / 8 + 68 / 32)
    for agent, expected in enumerate([[-1.0, 0.25], [-0.5, -0.25]]):
        assert task_advantages(critic_like("v"), estimate, [cross_tree()], agent)[0].tolist() == expected


def test_q_of_one_agent_learns_the_credited_mean():
    # agent 1's own Q: root 1, 2; below 4, 6 (mean 5) and 0, −2 (mean −1)
    estimate = estimated([cross_tree()], [1.0, 2.0, 4.0, 6.0, 0.0, -2.0], "q", agent=1)
    assert estimate.targets_MJ[0].tolist() == [1 + 0.5 * 5, 2.0, 3.0, 4 + 0.5 * -1]  # 3.5, 2, 3, 3.5
    # agent 1's response 0 is in joints 0 and 2, response 1 in 1 and 3
    assert [sample.targets for sample in estimate.samples[:2]] == [[3.25], [2.75]]
    assert [sample.weight for sample in estimate.samples] == [1 / 4] * 2 + [1 / 16] * 4  # 1/(1·2·2), 1/(4·2·2)
    advantages = task_advantages(critic_like("q", 1), estimate, [cross_tree()], 1)
    assert advantages.tolist() == [[-1.0, 1.0], [-2.0, 2.0], [2.0, -2.0]]


def test_centralized_q_in_cross_mode_is_counterfactual():
    # joints (0,0) (0,1) (1,0) (1,1) of the root worth 1, 3, 5, 11
    values = [1.0, 3.0, 5.0, 11.0, *[0.0] * 8]
    estimate = estimated([cross_tree()], values, "q")
    for agent, expected in enumerate([[-6.0, 6.0], [-4.0, 4.0]]):
        assert task_advantages(critic_like("q"), estimate, [cross_tree()], agent)[0].tolist() == expected


def test_a_counterfactual_baseline_keeps_the_partners_words():
    tree = RolloutTree({}, 0, node([1.0, 2.0], ALIGNED))
    # agent 0: (0, 0) against (1, 0), (1, 1) against (0, 1); agent 1: (0, 0) against (0, 1), (1, 1) against (1, 0)
    for agent, expected in ((0, [0.0 - 10.0, 11.0 - 1.0]), (1, [0.0 - 1.0, 11.0 - 10.0])):
        # an action's input is its choice, and its value is 10·(agent 0's) + (agent 1's): 0, 1, 10, 11
        reader = SimpleNamespace(agent=None, action=lambda _, choice: tuple(choice))
        worth = lambda inputs, _: torch.tensor([10.0 * a + b for a, b in inputs])  # noqa: E731
        critic = SimpleNamespace(critic_type="q", reader=reader, values=worth)
        assert counterfactual_task_advantages(critic, [tree], agent, 100).tolist() == [expected]


def own_rewards_tree():
    root = node([[1.0, 0.0], [2.0, 4.0]], ALIGNED)
    node([[3.0, 2.0], [5.0, 2.0]], ALIGNED, root, 0)
    return RolloutTree({}, 0, root)


def test_rewards_of_an_agents_own():
    trees = [own_rewards_tree()]
    for agent, root, below in ((0, [1 + 0.5 * 4, 2.0], [3.0, 5.0]), (1, [0 + 0.5 * 4, 4.0], [2.0, 2.0])):
        estimate = estimated(trees, [0.0, 4.0], agent=agent)
        assert estimate.targets_MJ.tolist() == [root, below]
    # a critic of all gets the mean
    assert agent_rewards(list(trees[0].nodes()), None).tolist() == [[0.5, 3.0], [2.5, 3.5]]


def test_weights_of_a_batch_and_minibatches_of_it():
    whole = estimated([aligned_tree(), aligned_tree()], [2.0, 6.0, -2.0, 1.0, 1.0, 1.0])
    first, second = estimated([aligned_tree()], [2.0, 6.0, -2.0]), estimated([aligned_tree()], [1.0, 1.0, 1.0])
    assert loss(whole) == pytest.approx((loss(first) + loss(second)) / 2)


def test_explained_variance_is_against_the_trees_returns():
    trees = [aligned_tree(), aligned_tree(stop=(0, 1))]
    # mean returns of the roots with γ = 0.5: (3 + 2)/2, (1 + 2)/2; values 2, 1: errors 0.5, 0.5
    estimate = estimated(trees, [2.0, 6.0, -2.0, 1.0])
    assert estimate.explained_variance[0].value == pytest.approx(1.0)
    # turn 2: returns 4, 0 (variance 4), values 6, −2: errors −2, 2 (variance 4)
    assert estimate.explained_variance[1].value == pytest.approx(0.0)
    assert estimate.explained_variance[1].count == 2
    # λ, and with it the target, does not enter
    other = estimated(trees, [2.0, 6.0, -2.0, 1.0], gae_lambda=0.7)
    assert other.explained_variance == estimate.explained_variance


def test_the_actors_advantages_of_a_step():
    """All that a trainer does with an estimate, by hand: one root of two joints, V = 2, Y = 4, 1, σ over 3 nodes."""
    estimate = estimated([aligned_tree()], [2.0, 6.0, -2.0])
    task_MK = task_advantages(critic_like("v"), estimate, [aligned_tree()], 0)
    weights_MK = torch.tensor([[1 / 2] * 2, [1 / 8] * 2, [1 / 8] * 2])  # γ^t/(B·J^t·K)
    statistics = WeightedStatistics.of(task_MK, weights_MK, estimate.targets_MJ)
    # Σw = 1.5, Σwx = (2−1)/2 + (−3−1+1+3)/8 = 0.5, Σwx² = (4+1)/2 + (9+1+1+9)/8 = 5
    assert statistics.std == pytest.approx((5 / 1.5 - (0.5 / 1.5) ** 2) ** 0.5)
    advantages = actor_advantages(task_MK, statistics=statistics)
    torch.testing.assert_close(advantages[0], torch.tensor([2.0, -1.0]) / statistics.std)
