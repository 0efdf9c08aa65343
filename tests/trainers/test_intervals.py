import math

import pytest

from mlrl.trainers.intervals import jackknife_intervals, student_quantile


@pytest.mark.parametrize(
    ("degrees", "confidence", "value"),
    [
        (1, 0.95, 12.7062),
        (2, 0.95, 4.3027),
        (3, 0.95, 3.1824),
        (10, 0.95, 2.2281),
        (100, 0.95, 1.9840),
        (5, 0.9, 2.0150),
        (1000, 0.95, 1.9623),
        (1001, 0.95, 1.9623),
        (10**6, 0.95, 1.95997),  # 1.959964 + (1.959964³ + 1.959964)/4e6
        (10**9, 0.95, 1.95996),
        (10**9, 0.99, 2.57583),
    ],
)
def test_student_quantiles(degrees, confidence, value):
    assert student_quantile(degrees, confidence) == pytest.approx(value, abs=1e-4)


def test_the_interval_of_a_mean_is_the_textbook_one():
    values = [1.0, 2.0, 4.0, 5.0]
    intervals = jackknife_intervals(lambda items: {"mean": sum(values[i] for i in items) / len(items)}, 4)
    # mean 3; deviations −2 −1 1 2, squares 10, variance 10/3, standard error √(10/3/4) = 0.912871; t of 3 is 3.182446
    assert intervals["mean"] == pytest.approx((3 - 2.905163, 3 + 2.905163), abs=1e-4)


def test_the_interval_of_a_ratio():
    hits, tries = [1, 0, 3], [2, 1, 3]
    statistic = lambda items: {"a_try": sum(hits[i] for i in items) / sum(tries[i] for i in items)}  # noqa: E731
    # 4/6; without one each: 3/4, 4/5, 1/3, mean 0.627778; squares .014938 .029660 .086698, sum .131296
    # standard error √(2/3 · .131296) = .295855; t of 2 degrees 4.302653
    low, high = jackknife_intervals(statistic, 3)["a_try"]
    assert (low, high) == pytest.approx((4 / 6 - 1.272961, 4 / 6 + 1.272961), abs=1e-4)


def test_metrics_without_an_interval():
    def statistic(items):
        own = {"same": 2.0, "undefined": math.nan}
        return own | ({"rare": 1.0} if 0 in items else {})

    assert jackknife_intervals(statistic, 3) == {}  # of the same value too: it would be (2, 2)
    assert jackknife_intervals(statistic, 1) == {}
    tenths = [0.1, 0.3 - 0.2, 0.1]  # the same but for rounding, which is no spread
    assert tenths[0] != tenths[1]
    assert jackknife_intervals(lambda items: {"mean": sum(tenths[i] for i in items) / len(items)}, 3) == {}


def test_rates_end_at_0_and_1_and_nothing_else_does():
    values = [1.0, 1.0, 1.0, 0.0]
    names = ("eval/pass@1", "eval/final/pass_rate", "eval/turn_2/reached_fraction", "solved", "eval/in_band")
    others = ("eval/turn_1/reward_mean", "eval/unsolved", "eval/turn_1/generate", "eval/pass@1_seconds")
    intervals = jackknife_intervals(
        lambda items: dict.fromkeys((*names, *others), sum(values[i] for i in items) / len(items)), 4
    )
    # mean 3/4, variance (3 · 1/16 + 9/16)/3 = 1/4, standard error 1/4; t of 3 degrees 3.182446: 0.75 ± 0.795612
    for name in names:
        assert intervals[name] == (0.0, 1.0)
    for name in others:
        assert intervals[name] == pytest.approx((-0.045612, 1.545612), abs=1e-5)


def test_of_many_items_groups_are_left_out():
    values = [float(i % 7) for i in range(12)]
    calls = []

    def statistic(items):
        calls.append(list(items))
        return {"mean": sum(values[i] for i in items) / len(items)}

    low, high = jackknife_intervals(statistic, 12, max_groups=4)["mean"]
    assert calls[1] == [1, 2, 3, 5, 6, 7, 9, 10, 11] and len(calls) == 5  # items 0, 4 and 8 left out
    # four groups of three: the interval of the mean of their means
    means = [sum(values[i] for i in range(g, 12, 4)) / 3 for g in range(4)]
    mean = sum(means) / 4
    half = 3.182446 * math.sqrt(sum((m - mean) ** 2 for m in means) / 3 / 4)
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=1e-4)


def test_a_percentage_that_is_called_a_rate_is_cut_nowhere():
    rows = [80.0, 90.0, 70.0, 100.0]
    mean = lambda items: {"pass_rate": sum(rows[i] for i in items) / len(items)}  # noqa: E731
    low, high = jackknife_intervals(mean, 4)["pass_rate"]
    # mean 85, deviations −5 5 −15 15, squares 500, standard error √(500/3/4) = 6.454972; t of 3 is 3.182446
    assert (low, high) == pytest.approx((85 - 20.5426, 85 + 20.5426), abs=1e-3)
