"""Hand-computed distances and histograms of rewards."""

import pytest

from mlrl.preference.drift import drift_metrics, ks_distance, pair_digest, reward_histograms
from tests.preference.build import pair


@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [
        ([1, 2, 3], [1, 2, 3], 0.0),
        ([0, 1], [2, 3], 1.0),
        # at 1: 2/4 of the first and 1/4 of the second; at 2: 3/4 and 1/4; at 3: all and 2/4
        ([0, 1, 2, 3], [1, 3, 4, 5], 0.5),
        ([1, 1, 1, 2], [1, 2], 0.25),  # at 1: 3/4 and 1/2
    ],
)
def test_ks_distance(first, second, distance):
    assert ks_distance(first, second) == ks_distance(second, first) == distance


def test_drift_of_a_round():
    old, new = pair(item=1), pair(item=2)
    metrics = drift_metrics([0.0, 2.0], [0.0, 0.0], [old, new, new], {pair_digest(old)})
    assert metrics == {
        "preference/drift/reward_mean": 1.0,
        "preference/drift/reward_std": 1.0,
        "preference/drift/ks_distance": 0.5,
        "preference/drift/repeated_pairs_fraction": pytest.approx(1 / 3),
    }
    assert set(drift_metrics([1.0], [], [])) == {"preference/drift/reward_mean", "preference/drift/reward_std"}
    assert drift_metrics([], [1.0], []) == {}


def test_a_pair_is_known_by_its_item_and_tokens():
    digests = {pair_digest(pair(item=1)), pair_digest(pair(item=2)), pair_digest(pair(item=1, tokens=[9]))}
    assert len(digests) == 3
    assert pair_digest(pair(5.0, 1.0, item=1, round=7)) in digests


def test_histograms_share_their_bins():
    histograms = reward_histograms({"policy": [0.0, 0.04, 1.0], "comparator": [1.0]})
    # twenty bins of 0.05 from 0 to 1
    assert histograms["bin_edges"] == pytest.approx([b / 20 for b in range(21)])
    assert histograms["policy"] == [2] + [0] * 18 + [1]
    assert histograms["comparator"] == [0] * 19 + [1]
    assert reward_histograms({"policy": [], "comparator": []}) == {}
    assert sum(reward_histograms({"policy": [3.0, 3.0]})["policy"]) == 2
