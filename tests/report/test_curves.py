"""The numbers behind the curves."""

import math

import numpy as np
import pytest

from mlrl.report.curves import Line, group_lines, make_charts, mean_over_runs, thin
from mlrl.report.panels import AGENTS, COST, CRITICS, EVALUATION, OTHER, REWARD, make_panels
from mlrl.report.runs import Group, Series, read_runs
from tests.report.runs import write_run


def series(steps, values):
    return Series(np.array(steps, float), 10.0 * np.array(steps), np.array(values, float))


def test_mean_and_deviation_over_runs_where_all_have_got():
    a = series([1, 2, 3, 4], [1.0, 2.0, 3.0, 9.0])
    b = series([1, 3], [3.0, 7.0])
    step, env_step, value, spread = mean_over_runs([a, b])
    assert step.tolist() == [1, 2, 3]  # b stops at 3
    assert env_step.tolist() == [10, 20, 30]
    # b at 2 lies between 3 and 7: 5. Means (1+3)/2, (2+5)/2, (3+7)/2
    assert value.tolist() == [2.0, 3.5, 5.0]
    # of two values the deviation is |difference| / √2: 2/√2, 3/√2, 4/√2
    assert spread == pytest.approx([2 / math.sqrt(2), 3 / math.sqrt(2), 4 / math.sqrt(2)])


def test_no_mean_without_common_steps():
    assert mean_over_runs([series([1, 2], [0, 0]), series([5], [1])]) is None
    assert mean_over_runs([series([1], [0]), series([1], [math.nan])]) is None


def test_lines_of_seeds_and_of_one_run(tmp_path):
    for seed, values in ((0, (1.0, 2.0)), (1, (3.0, 6.0))):
        rows = [{"step": i + 1, "eval/turn_1/reward_mean": v, "e": 0.5} for i, v in enumerate(values)]
        write_run(tmp_path / f"s{seed}", rows, seed=seed)
    runs = read_runs([tmp_path / "s0", tmp_path / "s1"])
    first, second, mean = group_lines(Group("s", runs), 0, "eval/turn_1/reward_mean", "", "e")
    assert [first.run, second.run, mean.run] == ["s0", "s1", ""]
    assert [first.main, second.main, mean.main] == [False, False, True]
    assert first.low is None and mean.value.tolist() == [2.0, 4.0]
    assert mean.high - mean.value == pytest.approx([2 / math.sqrt(2), 4 / math.sqrt(2)])
    (alone,) = group_lines(Group("s", runs[:1]), 0, "eval/turn_1/reward_mean", "", "e")
    assert alone.main and alone.low.tolist() == [0.5, 1.5] and alone.high.tolist() == [1.5, 2.5]  # one standard error


def test_thinned_lines_are_means_of_consecutive_points():
    values = np.array([1.0, 3.0, math.nan, 5.0, math.nan, math.nan, 7.0])
    steps = np.arange(7.0)
    line = Line(0, "", "a", True, steps, 10 * steps, values, values - 1, values + 1)
    thinned, size = thin(line, most=4)
    assert size == 2  # ⌈7/4⌉
    assert thinned.step.tolist() == [0.5, 2.5, 4.5, 6.0] and thinned.env_step.tolist() == [5, 25, 45, 60]
    assert thinned.value.tolist()[:2] == [2.0, 5.0] and math.isnan(thinned.value[2]) and thinned.value[3] == 7.0
    assert thinned.high.tolist()[:2] == [3.0, 6.0]
    assert thin(line, most=7) == (line, 1)


def test_charts_say_what_is_not_a_number(tmp_path):
    write_run(tmp_path / "a", [{"step": 1, "turn_1/agent_0/loss": None}, {"step": 2, "turn_1/agent_0/loss": 1.0}])
    runs = read_runs([tmp_path / "a"])
    (chart,) = make_charts(make_panels(runs[0].metrics), [Group("a", runs)])
    assert chart.notes == ["a · agent 0: 1 of 2 values are NaN or infinite"]


def test_only_shares_of_trouble_that_are_zero_everywhere_are_folded(tmp_path):
    rows = {
        "turn_1/agent_0/truncated_fraction": (0.0, 0.0),
        "turn_1/agent_1/truncated_fraction": (0.0, 0.0),
        "turn_1/agent_0/clip_fraction": (0.0, 0.25),
        "nonfinite_fraction": (0.0, None),  # not known to be 0
        "turn_1/reward_mean": (0.0, 0.0),  # a result
        "eval/solved_fraction": (0.0, 0.0),
    }
    for name, values in rows.items():
        write_run(tmp_path / name.replace("/", "_"), [{"step": i + 1, name: v} for i, v in enumerate(values)])
    runs = read_runs([tmp_path / name.replace("/", "_") for name in rows])
    charts = make_charts(make_panels(rows), [Group("all", [run]) for run in runs])
    assert [chart.panel.title for chart in charts if chart.folded] == ["Truncated responses"]
    write_run(tmp_path / "later", [{"step": 1, "turn_1/agent_0/truncated_fraction": 0.5}])
    groups = [Group("all", [run]) for run in [*runs, *read_runs([tmp_path / "later"])]]
    assert not any(chart.folded for chart in make_charts(make_panels(rows), groups))


def panels(*names):
    return {(p.section, p.title): p.metrics for p in make_panels(names)}


def test_agents_and_parts_share_a_chart_and_turns_do_not():
    found = panels("turn_1/agent_0/loss", "turn_1/agent_1/loss", "turn_2/agent_0/loss", "agent_0/grad_norm")
    assert found == {
        (AGENTS, "Policy loss · turn 1"): [("turn_1/agent_0/loss", "agent 0"), ("turn_1/agent_1/loss", "agent 1")],
        (AGENTS, "Policy loss · turn 2"): [("turn_2/agent_0/loss", "agent 0")],
        (AGENTS, "Gradient norm"): [("agent_0/grad_norm", "agent 0")],
    }
    found = panels("time/step_s", "time/rollout_s", "memory/peak_gb", "eval/characters_agent_1", "eval/in_band")
    assert found[COST, "Seconds a step"] == [("time/rollout_s", "sampling"), ("time/step_s", "step")]
    assert found[EVALUATION, "Characters"] == [("eval/characters_agent_1", "agent 1")]
    assert (COST, "Peak memory") in found and (EVALUATION, "In band") in found


def test_unknown_metrics_have_a_chart_too():
    found = panels("critic/turn_1/critic_0/value_loss", "brand_new", "turn_1/novel", "preference/pairs_kept")
    assert [section for section, _ in found] == [REWARD, CRITICS, "Preferences", OTHER]
    assert (CRITICS, "Value loss") in found and (OTHER, "Brand new") in found


def test_return_is_shown_where_there_are_turns():
    names = ("expected_return", "reward_mean", "reached_fraction")
    assert list(panels(*(f"turn_1/{name}" for name in names))) == [(REWARD, "Reward")]
    assert [title for _, title in panels(*(f"turn_{t}/{name}" for t in (1, 2) for name in names))] == [
        f"{title} · turn {turn}" for title in ("Return", "Reward", "Branches that get here") for turn in (1, 2)
    ]


def test_evaluation_comes_first_with_its_standard_error():
    (panel, *_) = make_panels(["turn_1/reward_mean", "eval/turn_1/reward_mean", "eval/turn_1/reward_stderr"])
    assert panel.section == EVALUATION and panel.metrics == [("eval/turn_1/reward_mean", "")]
    assert panel.stderr == {"eval/turn_1/reward_mean": "eval/turn_1/reward_stderr"}


def test_preferences_are_told_as_what_they_are():
    names = ["preference/loss", "preference/margin", "preference/agent_0/margin", "preference/drift/reward_mean"]
    panels = {panel.title: panel for panel in make_panels(names)}
    assert panels.keys() == {"Reward of the candidates", "Preference loss", "Margin"}
    assert panels["Margin"].metrics == [("preference/agent_0/margin", "agent 0"), ("preference/margin", "team")]
    assert "0.693" in panels["Preference loss"].help
