"""Exact interval means, metrics.jsonl, and real trackers (W&B offline, TensorBoard, trackio) read back."""

import json
import math
import os
import struct
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from mlrl import tracking, tracking_settings
from mlrl.completions_table import completions_table
from mlrl.errors import ConfigError
from mlrl.interval_means import LoggingInterval, MetricAverager
from mlrl.run_folder import RunFolder, append_jsonl, default_run_name
from mlrl.tracking import Tracking
from mlrl.tracking_settings import check_report_to, check_wandb_config, is_verbose


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "runs", "first")


RECORD = {  # of a node
    "step": 4, "item": 7, "path": [1], "prompts": ["go", [{"role": "user", "content": "say"}]],
    "responses": [["a", "b"], ["c", "d"]], "joints": [[0, 0], [1, 1]],
    "rewards": [0.5, [0.0, 1.0]], "returns": [1.0, 2.0], "advantages": [[0.5, 0.25], [-0.25, -0.5]],
}  # fmt: skip


def read_jsonl(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


# ---- means over an interval -------------------------------------------------------------------------------------


def test_mean_of_unequal_parts_is_exact():
    averager = MetricAverager()
    averager.add("reward", 6.0, 3)  # three samples that sum to 6
    averager.add_value("reward", 10.0)  # one sample of 10: (6 + 10)/4 = 4, and not the mean of means (2 + 10)/2 = 6
    averager.add_value("length", 5.0, count=2)  # two samples with mean 5
    averager.update({"length": (torch.tensor(8.0, requires_grad=True), np.int64(1)), "never": (0.0, 0)})
    assert averager.flush() == {"length": (10 + 8) / 3, "reward": 4.0}  # a count of 0 has no mean and no row
    assert averager.flush() == {}


def test_reduce_sums_over_processes_before_dividing():
    averager = MetricAverager()
    averager.add("reward", 1.0, 1)
    other = {"reward": (9.0, 4.0), "loss": (3.0, 2.0)}

    def reduce(pairs):
        names = sorted({*pairs, *other})
        zero = (0.0, 0.0)
        return {name: tuple(map(sum, zip(pairs.get(name, zero), other.get(name, zero), strict=True))) for name in names}

    assert averager.flush(reduce) == {"loss": 1.5, "reward": 2.0}  # (1 + 9)/(1 + 4)
    assert averager.flush(reduce) == {"loss": 1.5, "reward": 2.25}  # called with nothing added here, too


def test_nothing_before_the_gate_is_lost():
    averager, interval, rows = MetricAverager(), LoggingInterval(32), []
    for step in range(1, 7):  # env_steps 12, 24, …, 72
        averager.add_value("reward", float(step))
        if interval.due(12 * step):
            rows.append((12 * step, averager.flush()["reward"]))
    # 36 is the first at least 32 past 0, 72 the first at least 32 past 36: means of 1..3 and of 4..6
    assert rows == [(36, 2.0), (72, 5.0)]


# ---- the run folder ---------------------------------------------------------------------------------------------


def test_run_folder_is_made_once(tmp_path):
    folder = RunFolder.create(tmp_path / "a" / "runs", "first")
    assert folder.path.is_dir() and folder.name == "first"
    with pytest.raises(ConfigError, match="run_name='first'.*exists already.*Give another"):
        RunFolder.create(tmp_path / "a" / "runs", "first")
    names = [RunFolder.create(tmp_path, default_name="magrpo-x").name for _ in range(3)]
    assert names == ["magrpo-x", "magrpo-x-2", "magrpo-x-3"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "a\\b"])
def test_run_name_is_one_folder(tmp_path, name):
    with pytest.raises(ConfigError, match="run_name=.*without slashes"):
        RunFolder.create(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_output_dir_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="output_dir=.*file.*folder that can be written"):
        RunFolder.create(tmp_path / "file", "first")


def test_default_run_name_has_no_path_in_it():
    name = default_run_name("train/magrpo.py", "my tasks/ra tio.py:task", now=0)
    assert name.startswith("magrpo-ra_tio-19") and "/" not in name
    assert default_run_name("magrpo", "length_ratio", now=0).startswith("magrpo-length_ratio-")


def test_completions_are_one_object_a_line_that_any_reader_takes(folder):
    record = {
        "step": 10,
        "responses": [["é\n\u2028", "\ud800"]],  # line separators, a lone surrogate
        "token_counts": torch.tensor([[3, 4]]),
        "rewards": np.array([0.5, math.nan]),
        "path": (0, 1),
        "truncated": [[np.bool_(True), False]],
        "item": {"prompt": "x", "image": object()},
    }
    path = folder.write_completions([record, {"step": 10}], split="train", step=10)
    folder.write_completions([{"step": 11}], split="train", step=10)
    assert path == folder.completions / "train-000010.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")
    assert len(lines) == 4 and lines[-1] == ""
    first = json.loads(lines[0])
    assert first["responses"] == record["responses"] and first["path"] == [0, 1]
    assert (
        first["token_counts"] == [[3, 4]] and first["rewards"] == [0.5, None] and first["truncated"] == [[True, False]]
    )
    assert first["item"]["image"].startswith("<object")


# ---- metrics.jsonl ----------------------------------------------------------------------------------------------


def test_metrics_are_written_at_once_in_a_fixed_order(folder):
    log = Tracking(folder).log
    log({"b": torch.tensor(0.5), "a": math.nan, "c": np.float32(0.25), "d": -math.inf}, step=1, env_step=32, epoch=0.5)
    text = folder.metrics.read_text()
    assert text == '{"env_step": 32, "step": 1, "epoch": 0.5, "a": null, "b": 0.5, "c": 0.25, "d": null}\n'
    log({"eval/x": 3}, step=1, env_step=32, epoch=1)  # an evaluation at the same env_step
    assert read_jsonl(folder.metrics)[1] == {"env_step": 32, "step": 1, "epoch": 1.0, "eval/x": 3}


def test_env_step_never_decreases_and_metrics_are_numbers(folder):
    tracker = Tracking(folder)
    tracker.log({"x": 1.0}, step=1, env_step=8, epoch=0)
    with pytest.raises(ValueError, match="env_step=7: it was 8"):
        tracker.log({"x": 1.0}, step=2, env_step=7, epoch=0)
    with pytest.raises(ValueError, match="'epoch', 'step'"):
        tracker.log({"step": 1, "epoch": 2}, step=2, env_step=8, epoch=0)
    for wrong in ("high", [1.0], torch.zeros(2)):
        with pytest.raises(TypeError, match="x=.*one number"):
            tracker.log({"x": wrong}, step=2, env_step=8, epoch=0)
    assert len(read_jsonl(folder.metrics)) == 1


def test_only_the_main_process_writes(folder, monkeypatch):
    monkeypatch.setattr(tracking, "LOGGER_TYPE_TO_CLASS", {"tensorboard": None})  # starting it would fail
    tracker = Tracking(folder, ["tensorboard"], is_main=False)
    tracker.log({"x": 1.0}, step=1, env_step=8, epoch=0)
    tracker.finish()
    assert list(folder.path.iterdir()) == []


# ---- settings ---------------------------------------------------------------------------------------------------


def test_report_to_is_checked_before_anything_runs(monkeypatch):
    assert check_report_to("none") == check_report_to([]) == []
    assert check_report_to(["tensorboard", "wandb", "tensorboard"]) == ["tensorboard", "wandb"]
    with pytest.raises(ConfigError, match="report_to='wandbb': unknown.*none.*wandb.*Did you mean 'wandb'"):
        check_report_to(["wandbb"])
    with pytest.raises(ConfigError, match="'none' beside"):
        check_report_to(["none", "wandb"])
    monkeypatch.setattr(tracking_settings, "get_available_trackers", lambda: ["tensorboard"])
    with pytest.raises(ConfigError, match="report_to='wandb': .*not installed.*pip install wandb"):
        check_report_to(["wandb"])


def test_wandb_config_and_flags_become_one_setting():
    settings = check_wandb_config({"run_name": "r", "project": "p", "id": None}, project="p", tags=["a"], entity=None)
    assert settings == {"name": "r", "project": "p", "tags": ["a"]}
    with pytest.raises(ConfigError, match="'projct': unknown key.*Did you mean 'project'"):
        check_wandb_config({"projct": "p"})
    with pytest.raises(ConfigError, match=r"\['project'\]='p': another place says 'q'"):
        check_wandb_config({"project": "p"}, project="q")
    with pytest.raises(ConfigError, match=r"\['name'\]='a': another place says 'b'"):
        check_wandb_config({"name": "a", "run_name": "b"})
    for sections in ([], {"output": True}):
        with pytest.raises(ConfigError, match="not a mapping"):
            check_wandb_config({"config_sections": sections})


def test_verbose_comes_from_the_output_section():
    assert is_verbose(None) and is_verbose({"project": "p"}) and is_verbose({"config_sections": {"output": {}}})
    assert not is_verbose({"config_sections": {"output": {"verbose": False}}})


def test_wandb_settings_without_wandb_are_not_ignored_in_silence(folder):
    with pytest.warns(UserWarning, match="nothing goes to W&B"):
        Tracking(folder, "none", {"project": "p"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Tracking(folder, "none", {"config_sections": {"output": {"verbose": False}}})


# ---- real trackers ----------------------------------------------------------------------------------------------

CONFIG = {"num_agents": 2, "agents": ["a", "b"], "max_steps": None, "nested": {"lr": 1e-4}}
ROWS = [(0, 0, {"eval/reward": 0.25}), (1, 32, {"loss": 0.5}), (1, 32, {"eval/reward": 0.5}), (2, 64, {"loss": 0.125})]


def log_rows(tracker, failed=False):
    for step, env_step, metrics in ROWS:
        tracker.log(metrics, step=step, env_step=env_step, epoch=step / 2)
    tracker.log_histograms({"rewards": [0.0, 1.0, 1.0]}, step=2, env_step=64, epoch=1)
    tracker.finish(failed)


def read_wandb(path):
    """Records of an offline W&B file: a 7-byte header, then LevelDB log blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, position, parts, records = Path(path).read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:  # a header never crosses a block's end
            position += room
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            records.append(record)
            parts = b""
    return records


def test_wandb_offline_run_holds_every_metric_over_env_step(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    PartialState(cpu=True)
    sections = {"output": {"verbose": False}, "trainer": {"kind": "magrpo"}}
    settings = {"project": "teams", "entity": "lab", "tags": ["x", "y"], "id": "abc123", "config_sections": sections}
    tracking_run = Tracking(folder, ["wandb"], settings, CONFIG)
    tracking_run.log_completions([RECORD], "train", env_step=0)
    log_rows(tracking_run, failed=True)
    (path,) = folder.path.glob("wandb/offline-run-*/run-abc123.wandb")  # inside the run folder by default
    deadline = time.monotonic() + 60  # W&B's own process may write on after finish has returned
    while (records := read_wandb(path))[-1:] == [] or records[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < deadline, "the offline run was never finished"
        time.sleep(0.2)
    assert records[-1].exit.exit_code == 1

    (run,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    assert (run.project, run.entity, run.display_name, run.run_id) == ("teams", "lab", "first", "abc123")
    assert list(run.tags) == ["x", "y"]
    updates = [update for record in records for update in record.config.update]
    assert {update.key: json.loads(update.value_json) for update in updates} == {**CONFIG, **sections}
    metrics = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    assert [(metric.name, metric.glob_name, metric.step_metric) for metric in metrics] == [
        ("env_step", "", ""),
        ("", "*", "env_step"),
    ]
    history = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    rows = [{key: value for key, value in row.items() if key not in ("_timestamp", "_runtime")} for row in history]
    kind, counts, _ = (rows[-1].pop(f"rewards/{part}") for part in ("_type", "values", "bins"))
    assert kind == "histogram" and (counts[0], counts[-1], sum(counts)) == (1, 2, 3)
    drawn = {name: rows[0].pop(name) for name in list(rows[0]) if name.startswith("completions/train/")}
    assert (drawn["completions/train/_type"], drawn["completions/train/nrows"]) == ("table-file", 2)
    table = json.loads((path.parent / "files" / drawn["completions/train/path"]).read_text())
    assert table["columns"][:3] == ["step", "item", "path"] and table["data"][1][-4:] == ["b", "d", 0.25, -0.5]
    assert rows == [
        {"_step": 0, "env_step": 0, "step": 0, "epoch": 0, "eval/reward": 0.25},
        {"_step": 32, "env_step": 32, "step": 1, "epoch": 0.5, "loss": 0.5, "eval/reward": 0.5},
        {"_step": 64, "env_step": 64, "step": 2, "epoch": 1, "loss": 0.125},
    ]


def test_a_table_of_completions_has_a_row_a_joint_response(monkeypatch):
    columns, rows = completions_table([RECORD])
    assert columns == [
        "step", "item", "path", "reward", "return", "agent_0/prompt", "agent_1/prompt", "agent_0/response",
        "agent_1/response", "agent_0/advantage", "agent_1/advantage",
    ]  # fmt: skip
    assert rows == [
        [4, 7, "1.0", 0.5, 1.0, "go", "[user]\nsay", "a", "c", 0.5, -0.25],
        [4, 7, "1.1", 0.5, 2.0, "go", "[user]\nsay", "b", "d", 0.25, -0.5],  # (0 + 1)/2
    ]
    monkeypatch.setattr("mlrl.completions_table.MOST_ROWS", 1)
    cross = RECORD | {"joints": [[1, 0]], "advantages": None}
    assert completions_table([cross, RECORD])[1] == [[4, 7, "1.0", 0.5, 1.0, "go", "[user]\nsay", "b", "c", None, None]]


def test_tensorboard_events_read_back(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    PartialState(cpu=True)
    log_rows(Tracking(folder, ["tensorboard"], None, CONFIG))
    events = EventAccumulator(str(folder.path / "tensorboard")).Reload()
    loss = [(event.step, event.value) for event in events.Scalars("loss")]
    assert loss == [(32, 0.5), (64, 0.125)]
    assert [(event.step, event.value) for event in events.Scalars("eval/reward")] == [(0, 0.25), (32, 0.5)]
    assert [event.value for event in events.Scalars("step")] == [0, 1, 1, 2]
    [rewards] = events.Histograms("rewards")
    assert (rewards.step, rewards.histogram_value.num, rewards.histogram_value.sum) == (64, 3, 2)
    (hparams,) = folder.path.glob("tensorboard/*/hparams.yml")
    assert "nested.lr: 0.0001" in hparams.read_text() and "num_agents: 2" in hparams.read_text()


def test_trackio_database_reads_back_without_a_network(tmp_path):
    # trackio reads TRACKIO_DIR when it is imported, so it gets a process of its own
    code = """
        import json, socket, sys
        from pathlib import Path
        def refuse(*arguments):
            raise AssertionError("no network")
        socket.socket.connect = socket.getaddrinfo = refuse
        sys.path.insert(0, str(Path(sys.argv[1])))
        from accelerate import PartialState
        from test_tracking import CONFIG, log_rows
        from mlrl.run_folder import RunFolder
        from mlrl.tracking import Tracking
        PartialState(cpu=True)
        log_rows(Tracking(RunFolder.create(sys.argv[2], "first"), ["trackio"], {"project": "teams"}, CONFIG))
        import trackio
        from trackio.sqlite_storage import SQLiteStorage
        (run,) = trackio.Api().runs("teams")
        found = [run.name, run.config, SQLiteStorage.get_logs("teams", "first")]
        Path(sys.argv[2], "found.json").write_text(json.dumps(found))
    """
    tests = str(Path(__file__).parent)
    environment = {
        **os.environ,
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(tracking.__file__).parents[1]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(code), tests, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    name, config, logs = json.loads((tmp_path / "found.json").read_text())
    assert name == "first" and config["nested"] == {"lr": 1e-4} and config["agents"] == ["a", "b"]
    rows = [{key: value for key, value in row.items() if key != "timestamp"} for row in logs]
    drawn = rows.pop()
    assert (drawn["env_step"], drawn["rewards"]["_type"]) == (64, "trackio.histogram")
    assert sum(drawn["rewards"]["values"]) == 3
    assert rows == [
        {"step": env_step, "env_step": env_step, "epoch": step / 2, **metrics} for step, env_step, metrics in ROWS
    ]


class Faulty(GeneralTracker):
    """A tracker that fails where it is told to."""

    name = "faulty"
    requires_logging_directory = False
    fails: tuple[str, ...] = ()
    logged: ClassVar[list[int]] = []

    def __init__(self, run_name, **arguments):
        super().__init__()

    def start(self):
        self._maybe("start")

    @property
    def tracker(self):
        return None

    def log(self, values, step=None, **arguments):
        self._maybe("log")
        self.logged.append(step)

    def finish(self):
        self._maybe("finish")

    def _maybe(self, what):
        if what in self.fails:
            raise OSError("no route to host")


@pytest.mark.parametrize("fails", [("start",), ("log", "finish"), ("finish",)])
def test_a_failing_tracker_warns_once_and_training_goes_on(folder, monkeypatch, fails):
    PartialState(cpu=True)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "faulty", Faulty)
    monkeypatch.setattr(Faulty, "fails", fails)
    monkeypatch.setattr(Faulty, "logged", [])
    with pytest.warns(UserWarning) as caught:
        log_rows(Tracking(folder, ["faulty"]))
    (message,) = [str(warning.message) for warning in caught]
    assert "report_to='faulty'" in message and "no route to host" in message and "metrics.jsonl" in message
    assert len(read_jsonl(folder.metrics)) == len(ROWS)
    assert Faulty.logged == ([0, 32, 32, 64] if fails == ("finish",) else [])


def test_rows_after_the_end_still_reach_the_file(folder):
    tracker = Tracking(folder)
    tracker.finish()
    tracker.finish()
    tracker.log({"eval/x": 1.0}, step=3, env_step=96, epoch=1.0)
    assert read_jsonl(folder.metrics)[0]["eval/x"] == 1.0


def test_append_jsonl_makes_its_folder(tmp_path):
    append_jsonl(tmp_path / "deep" / "file.jsonl", [{"a": 1}])
    append_jsonl(tmp_path / "deep" / "file.jsonl", [])
    assert read_jsonl(tmp_path / "deep" / "file.jsonl") == [{"a": 1}]
