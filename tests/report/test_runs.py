"""Reading run folders in whatever state they are."""

import json
import math

import pytest

from mlrl.errors import ConfigError
from mlrl.report.runs import differing_settings, group_runs, read_run, read_runs
from tests.report.runs import write_run


def test_metrics_by_name_with_their_places(tmp_path):
    write_run(tmp_path / "a", [{"step": 1, "x": 2.0}, {"step": 2, "x": None, "eval/y": 3}, {"step": 3, "x": 4.0}])
    run = read_run(tmp_path / "a")
    x = run.metrics["x"]
    assert x.step.tolist() == [1, 2, 3] and x.env_step.tolist() == [10, 20, 30]
    assert x.value.tolist()[::2] == [2.0, 4.0] and math.isnan(x.value[1])  # null is a NaN that the run had
    assert x.finite.value.tolist() == [2.0, 4.0]
    assert run.metrics["eval/y"].step.tolist() == [2]  # a metric absent from a row has no value there
    assert (run.last_step, run.last_env_step, run.finished, run.notes) == (3, 30, False, [])
    (tmp_path / "a" / "agents").mkdir()
    assert read_run(tmp_path / "a").finished


def test_killed_in_the_middle_of_a_line(tmp_path):
    folder = write_run(tmp_path / "a", [{"step": 1, "x": 1.0}, {"step": 2, "x": 2.0}])
    with folder.metrics.open("a") as file:
        file.write('not json\n{"env_step": 30, "step": 3, "x"')
    run = read_run(folder.path)
    assert run.metrics["x"].value.tolist() == [1.0, 2.0]
    assert run.notes == [
        "metrics.jsonl: the last line is only half written",
        "metrics.jsonl: unreadable and left out: line 3",
    ]


def test_rows_that_a_resumed_run_logged_again(tmp_path):
    rows = [{"step": step, "x": value} for step, value in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0))]
    write_run(tmp_path / "a", rows)
    x = read_run(tmp_path / "a").metrics["x"]
    # env_step fell from 30 to 20: step 3 is void. The row at 20 itself stays, since an evaluation may share an env_step
    assert x.step.tolist() == [1, 2, 2] and x.value.tolist() == [1.0, 2.0, 20.0]


def test_missing_files_are_notes(tmp_path):
    folder = write_run(tmp_path / "a", [])
    folder.metrics.unlink(missing_ok=True)
    assert read_run(folder.path).notes == ["metrics.jsonl is missing", "no metrics yet"]
    folder.metrics.write_text('{"env_step": 1, "step": 1, "x": 1}\n')
    folder.config.write_text("a: [")
    assert read_run(folder.path).notes == ["config.yaml cannot be read"]
    folder.config.unlink()
    assert read_run(folder.path).notes == ["config.yaml is missing"]


def test_not_a_run_folder(tmp_path):
    write_run(tmp_path / "runs" / "a", [])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no such folder"):
        read_run(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"^runs='.*empty': not a run folder .* Give a folder that a trainer wrote"):
        read_run(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"Give its runs, e\.g\. .*runs/a"):
        read_run(tmp_path / "runs")


def test_seeds_make_a_group_and_settings_do_not(tmp_path):
    for name, settings in {
        "team-s0": {"seed": 0},
        "team-s1": {"seed": 1, "output_dir": "elsewhere"},
        "other": {"discount": 0.5},
        "bare-0": {},
        "bare-1": {},
    }.items():
        write_run(tmp_path / name, [], **settings)
    for name in ("bare-0", "bare-1"):
        (tmp_path / name / "config.yaml").unlink()  # nothing says that these belong together
        (tmp_path / name / "metrics.jsonl").touch()
    groups = group_runs(read_runs(sorted(tmp_path.iterdir(), reverse=True)))
    assert [(g.label, [r.name for r in g.runs]) for g in groups] == [
        ("team (2 runs)", ["team-s1", "team-s0"]),
        ("other", ["other"]),
        ("bare-1", ["bare-1"]),
        ("bare-0", ["bare-0"]),
    ]
    assert differing_settings(groups[:2]) == {"discount": [None, 0.5]}


def test_runs_of_one_name_are_told_apart_and_each_counts_once(tmp_path):
    for parent in ("x", "y"):
        write_run(tmp_path / parent / "same", [])
    runs = read_runs([tmp_path / "x" / "same", tmp_path / "y" / "same", tmp_path / "x" / ".." / "x" / "same"])
    assert [run.name for run in runs] == ["x/same", "y/same"]


def test_config_as_a_run_writes_it(tmp_path):
    run = read_run(write_run(tmp_path / "a", [], seed=3).path)
    assert run.settings["seed"] == 3 and "record" not in run.settings
    assert run.record == {"algorithm": "MAGRPO", "task": "demo"}
    assert json.dumps(run.experiment, sort_keys=True) == json.dumps(
        {"num_agents": 2, "num_turns": 1, "num_generations": 2, "algorithm": "MAGRPO", "task": "demo"}, sort_keys=True
    )
