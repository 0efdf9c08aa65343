"""Which ranks hold what, and how work is spread over them: pure functions of counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlrl.errors import ConfigError
from mlrl.parallel.group import Group, spread
from mlrl.parallel.mesh import Mesh, plan_ranks


@pytest.mark.parametrize(
    ("costs", "size", "owners"),
    [
        ([1, 1, 1, 1], 2, [0, 0, 1, 1]),
        ([1, 1, 1], 4, [0, 2, 3]),  # middles 0.5/3, 1.5/3, 2.5/3 of 4 stretches: 0.67, 2, 3.33
        ([10, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], 2, [0] + [1] * 10),  # one long piece against ten short ones
        ([5], 3, [1]),
        ([0, 0], 2, [0, 0]),
        ([], 2, []),
    ],
)
def test_pieces_go_to_the_stretch_that_holds_their_middle(costs, size, owners):
    assert spread(costs, size) == owners


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=60), st.integers(1, 9))
def test_no_rank_has_more_than_its_share_and_one_piece(costs, size):
    owners = spread(costs, size)
    assert owners == sorted(owners) and owners[0] >= 0 and owners[-1] < size
    for rank in range(size):
        load = sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank)
        assert load <= sum(costs) / size + max(costs) + 1e-6


def test_shared_agents_live_everywhere():
    assert plan_ranks(4, 2) == ([range(4), range(4)], {})
    assert plan_ranks(4, 2, extras={"reference": 1}) == ([range(3), range(3)], {"reference": range(3, 4)})


def test_split_agents_have_blocks_in_agent_order():
    assert plan_ranks(4, 2, "split") == ([range(0, 2), range(2, 4)], {})
    assert plan_ranks(4, 3, "split", [2, 1, 1]) == ([range(0, 2), range(2, 3), range(3, 4)], {})
    agents, extras = plan_ranks(8, 2, "split", [1, 3], {"reference": 2, "critic": 2})
    assert agents == [range(0, 1), range(1, 4)]
    assert extras == {"reference": range(4, 6), "critic": range(6, 8)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 2, "split"), r"num_processes=3: 3 ranks do not divide among 2 agents.*multiple of 2"),
        ((4, 2, "split", None, {"reference": 1}), r"num_processes=4, 1 of them for reference_ranks: 3 ranks"),
        ((4, 2, "split", [2, 1]), r"ranks_per_agent=\[2, 1\], num_processes=4: adds up to 3 of 4 ranks"),
        ((4, 2, "split", [4]), r"ranks_per_agent=\[4\]: has 1 value for 2 agents"),
        ((2, 2, "shared", [1, 1]), r"ranks_per_agent=\[1, 1\]: placement 'shared'"),
        ((2, 2, "shared", None, {"reference": 2}), r"num_processes=2, 2 of them for reference_ranks: no rank is left"),
    ],
)
def test_ranks_that_do_not_come_out_even(arguments, message):
    with pytest.raises(ConfigError, match=message):
        plan_ranks(*arguments)


def test_one_process_is_a_group_of_its_own():
    group = Group.alone()
    assert (group.size, group.index, group.is_first, group.member) == (1, 0, True, True)
    assert group.gather("x") == ["x"] and group.from_first(lambda: 3) == 3
    assert group.map(lambda n: n * n, [1, 2, 3]) == [1, 4, 9]
    mesh = Mesh.create(0, 1, [range(1), range(1)], {})
    assert mesh.holds(0) and mesh.holds(1) and mesh.reference(1).size == 1
