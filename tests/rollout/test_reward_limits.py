"""Reward and transition calls that fail while trees grow: what is said, and what stands for them."""

import os
import signal
import time

import pytest

from mlrl.errors import TaskError
from mlrl.trainers.evaluation import reward_metrics
from mlrl.trainers.metrics import rollout_metrics
from tests.rollout.fakes import growth, scripted

ITEMS = [(0, {"prompt": "quick"}), (7, {"prompt": "slow"}), (8, {"prompt": "quick too"})]
PLACES = pytest.mark.parametrize("processes", [0, 2], ids=["thread", "processes"])


def say(ordinal, path, agent, k):
    return f"{agent}{k}"


def waits(first, second, *, batch_items):
    if batch_items[0]["prompt"] == "slow":
        time.sleep(30)
    return [1.0, 2.0][: len(first)]


def dies(first, second, *, batch_items):
    if batch_items[0]["prompt"] == "slow":
        os.kill(os.getpid(), signal.SIGKILL)
    return [1.0, 2.0][: len(first)]


def collect(reward_func, timeout=None, fallback=None, processes=0, num_turns=1, **task):
    collector = scripted(2, num_turns, say, reward_func, **task)
    collector.environment.limit_calls(timeout, fallback, processes)
    return collector, collector.collect(ITEMS, growth(num_turns, 2))


@PLACES
def test_a_late_reward_is_an_error_that_names_limit_item_and_remedy(processes):
    started = time.monotonic()
    with pytest.raises(TaskError) as caught:
        collect(waits, timeout=0.3, processes=processes)
    assert time.monotonic() - started < 5
    assert str(caught.value) == (
        "reward_timeout=0.3: reward_func has not returned after 0.3 s (item 7 {'prompt': 'slow'}, turn 0). "
        "Make it faster, raise reward_timeout, or set reward_fallback, the score of a call that fails."
    )


@PLACES
def test_a_late_transition_is_an_error_whatever_the_fallback(processes):
    def transition(prompt, num_agents):
        time.sleep(30 * (prompt == "slow"))
        return ["next"] * num_agents

    with pytest.raises(TaskError) as caught:
        collect(
            lambda first, second: [0.0] * len(first), 0.3, -1.0, processes, num_turns=2, external_transition=transition
        )
    assert str(caught.value) == (
        "reward_timeout=0.3: external_transition has not returned after 0.3 s (item 7 {'prompt': 'slow'}, turn 0). "
        "Make it faster, raise reward_timeout."
    )


def test_a_dead_process_is_an_error_that_names_the_item():
    started = time.monotonic()
    with pytest.raises(TaskError) as caught:
        collect(dies, processes=2)  # no time limit: nothing hangs without one
    assert time.monotonic() - started < 5
    assert str(caught.value) == (
        "reward_processes=2: reward_func has no result, because its process was killed by SIGKILL, maybe for lack of "
        "memory (item 7 {'prompt': 'slow'}, turn 0). See what ended it, set fewer processes, or set reward_fallback, "
        "the score of a call that fails."
    )


@pytest.mark.parametrize(("reward_func", "processes"), [(waits, 0), (waits, 2), (dies, 1)])
def test_the_fallback_stands_for_a_failed_call_and_its_rate_is_known(reward_func, processes):
    with pytest.warns(UserWarning) as caught:
        collector, trees = collect(reward_func, 0.3, -0.5, processes, reward_processor=lambda reward: 10 * reward)
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith("reward_fallback=-0.5: is the reward of item 7 {'prompt': 'slow'}, turn 0, since")
    assert [tree.root.raw_rewards for tree in trees] == [[1.0, 2.0], [-0.5, -0.5], [1.0, 2.0]]
    assert [tree.root.rewards for tree in trees] == [[10.0, 20.0], [-5.0, -5.0], [10.0, 20.0]]  # in the mean, too
    assert rollout_metrics(trees, collector.cost, 1.0, 1)["reward_failure_fraction"] == (1, 3)
    assert reward_metrics(trees, growth(1, 2), False)["eval/reward_failure_fraction"] == pytest.approx(1 / 3)


def test_one_warning_tells_of_many_failures():
    with pytest.warns(UserWarning) as caught:
        _, trees = collect(lambda first, second: time.sleep(30), 0.05, 0.0)
    assert len(caught) == 1 and all(tree.root.reward_failed for tree in trees)


@pytest.mark.parametrize("value", [None, [1.0], [1.0, float("nan")], "ab"])
def test_a_wrong_result_is_no_failed_call(value):
    """A fallback stands for calls without result; a result out of contract is a mistake in the function."""
    with pytest.raises(TaskError, match="reward_func returned"):
        collect(lambda first, second: value, 60.0, 0.0)


@PLACES
def test_the_users_own_error_passes_the_limits(processes):
    def breaks(first, second):
        raise KeyError("score")

    with pytest.raises(KeyError, match="score"):
        collect(breaks, 60.0, 0.0, processes)


def test_what_cannot_be_sent_to_a_process_has_no_fallback():
    with pytest.raises(TaskError) as caught:
        collect(lambda first, second: lambda: 0, 60.0, 0.0, 1)
    assert "reward_processes=1: reward_func returned something that cannot be sent" in str(caught.value)
    assert "item 0" in str(caught.value) and "set reward_processes to 0" in str(caught.value)


@PLACES
def test_limits_change_no_number(processes):
    def reward(first, second, *, episode_seed, turn, prompts, response_history):
        told = f"{turn} {prompts} {response_history} {episode_seed}"
        return [len(a + b) + hash_of(told) for a, b in zip(first, second, strict=True)]

    def trees(*limits):
        return [(n.path, n.rewards) for t in collect(reward, *limits, num_turns=2)[1] for n in t.nodes()]

    assert trees(60.0, None, processes) == trees()


def hash_of(text: str) -> float:
    return sum(map(ord, text)) % 97 / 97
