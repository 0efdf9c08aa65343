"""Joint responses, returns, credit, KL-to-go and sample weights against hand-computed numbers and loops."""

import itertools
import math

import pytest
import torch

from mlrl.estimators.kl import kl_to_go, sequence_kl
from mlrl.estimators.returns import credit, joint_indices, returns_to_go
from mlrl.estimators.weights import sample_weight

NAN = math.nan


def test_joints_of_a_node():
    assert joint_indices(3, 2, "aligned") == [(0, 0, 0), (1, 1, 1)]
    # the last agent fastest
    assert joint_indices(2, 2, "cross") == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert joint_indices(1, 3, "cross") == joint_indices(1, 3, "aligned") == [(0,), (1,), (2,)]
    assert len(joint_indices(4, 3, "cross")) == 81
    assert joint_indices(4, 1, "cross") == [(0, 0, 0, 0)]
    for arguments, message in [
        ((2, 2, "crossed"), "joint_mode='crossed'.*aligned, cross"),
        ((0, 2, "cross"), "num_agents=0"),
        ((2, 0, "cross"), "num_generations=0"),
    ]:
        with pytest.raises(ValueError, match=message):
            joint_indices(*arguments)


def test_returns_to_go():
    # 1 + 0.9·4, 2 (ended), −1 + 0.9·(−2)
    actual = returns_to_go([1.0, 2.0, -1.0], [4.0, NAN, -2.0], 0.9)
    torch.testing.assert_close(actual, torch.tensor([4.6, 2.0, -2.8], dtype=torch.float64))
    assert returns_to_go([1.0, 2.0], [5.0, 5.0], 0.0).tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="child_means_J of shape"):
        returns_to_go([1.0, 2.0], [1.0], 0.9)


def test_credit_by_hand():
    # aligned: each response its own joint's value
    assert credit([[1.0, 5.0]], joint_indices(2, 2, "aligned"), 2).tolist() == [[[1.0, 5.0]], [[1.0, 5.0]]]
    # cross, joints (0,0) (0,1) (1,0) (1,1) worth 1, 3, 5, 11:
    # agent 0: (1+3)/2, (5+11)/2; agent 1: (1+5)/2, (3+11)/2: means, not sums
    actual = credit([[1.0, 3.0, 5.0, 11.0]], joint_indices(2, 2, "cross"), 2)
    assert actual.tolist() == [[[2.0, 8.0]], [[3.0, 7.0]]]


@pytest.mark.parametrize(("num_agents", "num_generations"), list(itertools.product([1, 2, 3], [1, 2, 3])))
@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
@pytest.mark.parametrize("own", [False, True])
def test_credit_equals_the_loop(num_agents, num_generations, joint_mode, own):
    joints = joint_indices(num_agents, num_generations, joint_mode)
    shape = (num_agents, 4, len(joints)) if own else (4, len(joints))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    actual_NMK = credit(values, joints, num_generations)
    assert actual_NMK.shape == (num_agents, 4, num_generations)
    for agent, node, k in itertools.product(range(num_agents), range(4), range(num_generations)):
        row = values[agent, node] if own else values[node]
        members = [row[j].item() for j, joint in enumerate(joints) if joint[agent] == k]
        assert actual_NMK[agent, node, k].item() == pytest.approx(sum(members) / len(members))


@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
def test_equal_joints_are_credited_equally(joint_mode):
    joints = joint_indices(3, 3, joint_mode)
    credited = credit([[1e5 + 0.1] * len(joints)], joints, 3)
    torch.testing.assert_close(credited, torch.full_like(credited, 1e5 + 0.1), rtol=1e-15, atol=0)


def test_credit_names_what_is_wrong():
    with pytest.raises(ValueError, match=r"values of shape \(1, 3\)"):
        credit([[1.0, 2.0, 3.0]], joint_indices(2, 2, "aligned"), 2)
    with pytest.raises(ValueError, match="num_generations=3"):
        credit([[1.0, 2.0]], joint_indices(2, 2, "aligned"), 3)


def test_sequence_kl():
    # −1 + 2 + (−3 + 3.5) = 1.5; −1 + 0.5 = −0.5: single values may be negative
    old = torch.tensor([-1.0, -3.0, -1.0], requires_grad=True)
    actual = sequence_kl(old, torch.tensor([-2.0, -3.5, -0.5]), torch.tensor([2, 1]))
    assert actual.tolist() == [1.5, -0.5]
    assert not actual.requires_grad
    with pytest.raises(ValueError, match="lengths_S sum to 2"):
        sequence_kl(old, old, torch.tensor([2]))


def test_kl_to_go_by_hand():
    # one node, two agents, cross, γ 0.5; joints (0,0) (0,1) (1,0) (1,1), the last one ended
    kl_NMK = [[[1.0, 2.0]], [[10.0, 20.0]]]
    child_means_NMJ = [[[4.0, 8.0, 2.0, NAN]], [[0.0, 40.0, 80.0, NAN]]]
    actual = kl_to_go(kl_NMK, child_means_NMJ, joint_indices(2, 2, "cross"), 2, 0.5)
    # agent 0: 1 + 0.5·(4+8)/2, 2 + 0.5·(2+0)/2; agent 1 (its own): 10 + 0.5·(0+80)/2, 20 + 0.5·(40+0)/2
    assert actual.tolist() == [[[4.0, 2.5]], [[30.0, 30.0]]]


def test_sample_weight():
    arguments = {"num_items": 5, "num_joints": 4, "num_generations": 2, "discount": 0.9}
    # γ²/(5 · 4² · 2) = 0.81/160
    assert sample_weight(2, **arguments) == pytest.approx(0.0050625)
    assert sample_weight(2, turn_weighting="undiscounted", **arguments) == pytest.approx(1 / 160)
    assert sample_weight(2, turn_weighting="node", num_nodes=21, **arguments) == pytest.approx(1 / 42)
    # a full tree: turn t holds B·J^t·K responses, so its weights add up to γ^t
    for t in range(3):
        assert 5 * 4**t * 2 * sample_weight(t, **arguments) == pytest.approx(0.9**t)
    assert sample_weight(0, **(arguments | {"discount": 0.0})) == 0.1
    assert sample_weight(1, **(arguments | {"discount": 0.0})) == 0.0
    with pytest.raises(ValueError, match="turn_weighting='flat'.*objective, undiscounted, node"):
        sample_weight(0, turn_weighting="flat", **arguments)
    with pytest.raises(ValueError, match="num_nodes=None"):
        sample_weight(0, turn_weighting="node", **arguments)
