"""Replay: the weights exactly, the frequencies of draws, passes over small rounds, empty rounds."""

from collections import Counter

import numpy as np
import pytest

from mlrl.preference.replay import default_size, draw_pairs, replay, round_weights
from mlrl.preference.rounds import write_round
from tests.preference.build import pair


@pytest.mark.parametrize(
    ("counts", "settings", "expected"),
    [
        ([3, 5, 2], {"mode": "nearest_k", "k": 2}, [0, 1 / 2, 1 / 2]),
        ([3, 5, 2], {"mode": "nearest_k", "k": 9}, [1 / 3, 1 / 3, 1 / 3]),
        ([3, 0, 2, 0], {"mode": "nearest_k", "k": 2}, [1 / 2, 0, 1 / 2, 0]),  # empty rounds are no rounds
        ([3, 0, 2, 0], {"mode": "nearest_k", "k": 1}, [0, 0, 1, 0]),
        ([3, 5, 2], {"mode": "all_history"}, [1 / 3, 1 / 3, 1 / 3]),
        ([3, 0, 2], {"mode": "all_history"}, [1 / 2, 0, 1 / 2]),
        # λ = 1/2 over three rounds: 1 + 1/2 + 1/4 = 7/4, so 4/7, 2/7, 1/7 from the newest
        ([3, 5, 2], {"mode": "lambda_decay", "decay": 0.5}, [1 / 7, 2 / 7, 4 / 7]),
        # ages count non-empty rounds: 1 + 1/2, so 2/3 and 1/3
        ([3, 0, 2, 0], {"mode": "lambda_decay", "decay": 0.5}, [1 / 3, 0, 2 / 3, 0]),
        ([3, 5, 2], {"mode": "lambda_decay", "decay": 0.0}, [0, 0, 1]),  # 0⁰ = 1
        ([3, 5, 2], {"mode": "lambda_decay", "decay": 1.0}, [1 / 3, 1 / 3, 1 / 3]),
        ([0, 0], {"mode": "lambda_decay", "decay": 0.5}, [0, 0]),
        ([], {"mode": "all_history"}, []),
    ],
)
def test_weights_of_rounds(counts, settings, expected):
    assert round_weights(counts, **settings) == pytest.approx(expected)


def test_wrong_settings_are_named():
    for settings, message in [
        ({"mode": "nearest_k"}, "preference_replay_k=None"),
        ({"mode": "nearest_k", "k": 0}, "preference_replay_k=0"),
        ({"mode": "lambda_decay"}, "preference_replay_lambda=None"),
        ({"mode": "lambda_decay", "decay": 1.5}, "preference_replay_lambda=1.5"),
        ({"mode": "latest"}, "preference_replay_mode='latest'.*nearest_k, all_history"),
    ]:
        with pytest.raises(ValueError, match=message):
            round_weights([1], **settings)


def test_default_size():
    assert default_size([3, 5, 2]) == 2
    assert default_size([3, 5, 0, 0]) == 5
    assert default_size([0]) == default_size([]) == 0


def test_frequencies_of_ten_thousand_draws():
    weights, size = [1 / 7, 2 / 7, 4 / 7], 10_000
    places = draw_pairs([3, 50, 20_000], weights, size, np.random.default_rng(5))
    drawn = Counter(round for round, _ in places)
    for round, weight in enumerate(weights):
        sigma = (size * weight * (1 - weight)) ** 0.5  # 35.0, 45.2, 49.5
        assert abs(drawn[round] - size * weight) < 3 * sigma
    # a round of 3 pairs that is drawn n times gives each n // 3 or n // 3 + 1 times
    times = [Counter(places)[0, pair] for pair in range(3)]
    assert sum(times) == drawn[0]
    assert max(times) - min(times) <= 1
    # and the round that is larger than its share repeats none
    assert max(count for (round, _), count in Counter(places).items() if round == 2) == 1
    # shuffled: the first thousand are of all rounds
    assert len({round for round, _ in places[:50]}) == 3


@pytest.mark.parametrize(("size", "least"), [(2, 0), (3, 1), (7, 2), (9, 3)])
def test_a_round_is_cycled_in_whole_passes(size, least):
    counts = Counter(draw_pairs([3], [1.0], size, np.random.default_rng(0)))
    assert sum(counts.values()) == size
    assert {counts[0, pair] for pair in range(3)} <= {least, least + 1}


@pytest.fixture
def rounds(tmp_path):
    """Rounds of 2, 0, 3 and 0 pairs; pair p of round r has item 10r + p."""
    sizes = [2, 0, 3, 0]
    return [
        write_round(tmp_path, r, [pair(item=10 * r + p, round=r) for p in range(size)])
        for r, size in enumerate(sizes, start=1)
    ]


def test_current_takes_the_last_round_whole_and_shuffled(rounds):
    assert sorted(pair.item for pair in replay(rounds[:3], mode="current", seed=0)) == [30, 31, 32]
    orders = {tuple(pair.item for pair in replay(rounds[:3], mode="current", seed=seed)) for seed in range(30)}
    assert len(orders) == 6
    assert replay(rounds, mode="current", seed=0) == []
    assert replay([], mode="all_history", seed=0) == []


def test_replay_reads_what_was_drawn(rounds):
    pairs = replay(rounds, mode="nearest_k", k=1, seed=0)  # the current round is empty: S is that of round 3
    assert sorted(pair.item for pair in pairs) == [30, 31, 32]
    pairs = replay(rounds, mode="all_history", seed=0, sample_size=200)
    shares = Counter(pair.round for pair in pairs)
    assert set(shares) == {1, 3}
    assert abs(shares[1] - 100) < 3 * 7.1  # σ = sqrt(200/4)
    times = Counter(pair.item for pair in pairs)
    assert abs(times[10] - times[11]) <= 1
    assert max(times[item] for item in (30, 31, 32)) - min(times[item] for item in (30, 31, 32)) <= 1


def test_draws_are_keyed_by_seed_and_round(rounds):
    def items(seed, until):
        return [pair.item for pair in replay(rounds[:until], mode="all_history", seed=seed, sample_size=20)]

    assert items(1, 3) == items(1, 3)
    assert items(1, 3) != items(2, 3)
    assert items(1, 3) != items(1, 4)


def test_nothing_anywhere_is_nothing(tmp_path):
    empty = write_round(tmp_path, 1, [])
    for settings in ({"mode": "current"}, {"mode": "all_history"}, {"mode": "nearest_k", "k": 2}):
        assert replay([empty], seed=0, sample_size=5, **settings) == []
