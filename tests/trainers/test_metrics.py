"""Metrics of trees and advantages, as sums and counts, by hand."""

import warnings

import pytest

from mlrl.config import MAGRPOConfig
from mlrl.rollout.collect import CollectionCost
from mlrl.rollout.tree import Node, Response, RolloutTree, TokenizedPrompt
from mlrl.trainers import MAGRPOTrainer
from mlrl.trainers.metrics import advantage_metrics, mean_return, reward_correlation, rollout_metrics
from mlrl.trainers.samples import Sample


def response(length: int, truncated: bool = False) -> Response:
    return Response([5] * length, [-1.0] * length, "", truncated)


def node(rewards, lengths, path=(), parent=None, raw=None) -> Node:
    made = Node(path, [TokenizedPrompt("", [3])], parent)
    made.responses = [[response(n, truncated=n == 9) for n in lengths]]
    made.joints, made.rewards, made.raw_rewards = [(0,), (1,)], rewards, raw or rewards
    if parent is not None:
        parent.children[path[-1]] = made
    return made


def trees(raw=None) -> list[RolloutTree]:
    first, second = node([1.0, 3.0], (2, 4), raw=raw), node([5.0, 5.0], (9, 1))
    node([2.0, 6.0], (3, 9), (1,), first)
    return [RolloutTree({}, 0, first), RolloutTree({}, 1, second)]


def test_rollouts_by_hand():
    """Returns of the first turn at γ = 0.5: 1, 3 + 0.5·4 = 5, 5, 5."""
    cost = CollectionCost(rollout_s=2.0, reward_s=0.5, generated_tokens=28, truncated_prompts=1)
    pairs = rollout_metrics(trees(), cost, discount=0.5, num_turns=2)
    assert pairs["turn_1/reward_mean"] == (14, 4) and pairs["turn_2/reward_mean"] == (8, 2)
    assert pairs["turn_1/reward_std"] == (pytest.approx((11 / 4) ** 0.5), 1)  # 1 3 5 5: squares 6.25 0.25 2.25 2.25
    assert pairs["turn_1/within_node_std"] == (1, 2) and pairs["turn_2/within_node_std"] == (2, 1)
    assert pairs["turn_1/expected_return"] == (16, 4) and pairs["turn_2/expected_return"] == (8, 2)
    assert pairs["turn_1/reached_fraction"] == (2, 2) and pairs["turn_2/reached_fraction"] == (1, 4)
    assert pairs["turn_1/agent_0/completion_tokens_mean"] == (16, 4)
    assert pairs["turn_1/agent_0/truncated_fraction"] == (1, 4)
    assert pairs["turn_1/agent_0/empty_fraction"] == (4, 4)  # no text at all in this test
    assert pairs["turn_2/agent_0/truncated_fraction"] == (1, 2)
    assert pairs["throughput/generated_tokens_per_s"] == (28, 2.0)
    assert (pairs["time/rollout_s"], pairs["time/reward_s"]) == ((2.0, 1), (0.5, 1))
    assert pairs["truncated_prompt_fraction"] == (1, 3)
    assert not any("raw_reward" in name for name in pairs)
    assert mean_return(trees(), 0.5) == 4.0 and mean_return(trees(), 0.0) == 3.5


def test_raw_rewards_are_told_of_every_step_or_of_none():
    """A step whose rewards the processor left as they were counts too, or a mean over steps would leave it out."""
    pairs = rollout_metrics(trees(raw=[10.0, 30.0]), CollectionCost(), 1.0, 2, raw_rewards=True)
    assert pairs["turn_1/raw_reward_mean"] == (50, 4) and pairs["turn_1/reward_mean"] == (14, 4)
    pairs = rollout_metrics(trees(), CollectionCost(), 1.0, 2, raw_rewards=True)
    assert pairs["turn_1/raw_reward_mean"] == (14, 4)


def test_a_turn_that_nobody_reached_is_told_as_such():
    cut = trees()
    cut[0].root.children.clear()
    pairs = rollout_metrics(cut, CollectionCost(), 1.0, 2)
    assert pairs["turn_2/reached_fraction"] == (0, 4) and "turn_2/reward_mean" not in pairs


def test_advantages_by_hand():
    nodes = [n for tree in trees() for n in tree.nodes()]  # root, its child, the other root
    values = iter([-1.0, 1.0, -2.0, 3.0, 0.0, 0.0])
    own = [Sample(n, 0, k, 1.0, advantage=next(values), kl=0.5 * (k + 1)) for n in nodes for k in (0, 1)]
    pairs = advantage_metrics([own], [[False, False, True]], MAGRPOConfig(reference_kl_coef=0.1))
    assert pairs["turn_1/agent_0/advantage_abs_mean"] == (2.0, 4) and pairs["turn_2/agent_0/advantage_abs_mean"] == (
        5,
        2,
    )
    assert pairs["turn_1/zero_std_fraction"] == (1, 2) and pairs["turn_2/zero_std_fraction"] == (0, 1)
    assert pairs["turn_1/agent_0/reference_kl_mean"] == (3.0, 4)
    assert pairs["turn_1/agent_0/reference_kl_penalty_mean"] == (pytest.approx(0.3), 4)


@pytest.mark.parametrize(("reward", "times"), [(1.0, 1), (-1.0, 0)])
def test_ending_early_on_a_positive_reward_warns_once(tiny_llama, tmp_path, reward, times):
    trainer = MAGRPOTrainer(
        agent_model=tiny_llama,
        num_agents=2,
        reward_func=lambda a, b: [reward] * len(a),
        external_transition=lambda agent_completions: list(agent_completions),
        train_dataset=[{"prompt": "a"}] * 4,
        args=MAGRPOConfig(
            num_turns=2,
            num_generations=2,
            max_new_tokens=2,
            rollout_batch_size=2,
            eval_interval=0,
            early_termination_threshold=-2.0,
            output_dir=str(tmp_path),
        ),
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.train()
    assert sum("forfeits" in str(w.message) for w in seen) == times


def test_correlation_of_learned_rewards_by_hand():
    """Centred: task −1 1 and 0 0 at the first turn, −2 2 at the second; learned −2 2 and 3 −3, then 1 −1."""
    nodes = [node for tree in trees() for node in tree.nodes()]
    learned = {(1.0, 3.0): [7.0, 11.0], (5.0, 5.0): [3.0, -3.0], (2.0, 6.0): [0.5, -1.5]}
    pairs = reward_correlation(nodes, [learned[tuple(node.rewards)] for node in nodes])
    first = (2 + 2) / ((1 + 1) * (4 + 4 + 9 + 9)) ** 0.5
    assert pairs == {
        "turn_1/task_reward_correlation": (pytest.approx(first), 1),
        "turn_2/task_reward_correlation": (pytest.approx(-1.0), 1),
    }


def test_correlation_needs_rewards_that_differ():
    tied = [node([0.1, 0.1], (2, 4)), node([0.7, 0.7], (2, 4))]
    assert reward_correlation(tied, [[1.0, 2.0], [0.1, 0.1]]) == {}
    assert reward_correlation([node([1.0, 2.0], (2, 4))], [[0.1, 0.1]]) == {}
