"""Every second of a run is counted once, under its phase and kind."""

import json
import threading

import pytest

from mlrl import profiling
from mlrl.profiling import Profile, phase, span
from mlrl.profiling import profiling as opened
from mlrl.trainers import MAGRPOConfig, MAGRPOTrainer


class Clock:
    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(profiling.time, "perf_counter", lambda: self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_seconds_belong_to_the_phase_and_to_the_innermost_span(clock, tmp_path):
    profile = Profile(tmp_path / "rank_0.jsonl")
    with opened(profile):
        clock.wait(1)
        phase("sampling")
        clock.wait(2)
        with span("reward"):
            clock.wait(3)
            with span("communication"):
                clock.wait(4)
            clock.wait(5)
        clock.wait(6)
        phase("update")
        clock.wait(7)
        profile.end_step(1)
        clock.wait(8)
        phase("sampling")
        clock.wait(9)
        profile.end_step(2)
    first, second = map(json.loads, (tmp_path / "rank_0.jsonl").read_text().splitlines())
    parts = {"sampling": 2 + 6, "sampling/reward": 3 + 5, "sampling/communication": 4, "update": 7, "between steps": 1}
    assert first == {"step": 1, "wall_s": 28, "seconds": parts}
    assert second == {"step": 2, "wall_s": 17, "seconds": {"between steps": 8, "sampling": 9}}
    assert profile.totals["sampling"] == 17
    assert profile.shares().startswith("sampling 38 %, between steps 20 %, sampling/reward 18 %, update 16 %")  # of 45


def test_a_span_that_fails_gives_its_time_back_to_the_phase(clock, tmp_path):
    profile = Profile(tmp_path / "rank_0.jsonl")
    with opened(profile):
        phase("sampling")
        with pytest.raises(ValueError), span("reward"):
            clock.wait(1)
            raise ValueError
        clock.wait(2)
        profile.end_step(1)
    assert profile.totals == {"sampling/reward": 1, "sampling": 2, "between steps": 0}


def test_another_thread_takes_no_time_out_of_a_phase(clock, tmp_path):
    profile = Profile(tmp_path / "rank_0.jsonl")
    inside, done = threading.Event(), threading.Event()

    def beside():
        with span("reward"):
            inside.set()
            done.wait(10)

    with opened(profile):
        phase("update")
        other = threading.Thread(target=beside)
        other.start()
        assert inside.wait(10)
        clock.wait(3)
        with span("communication"):
            clock.wait(1)
        done.set()
        other.join()
        profile.end_step(1)
    assert profile.totals == {"update": 3, "update/communication": 1, "between steps": 0}


def test_nothing_is_measured_without_a_profile(clock, tmp_path):
    with opened(None):
        phase("sampling")
        with span("reward"):
            clock.wait(1)
    with span("reward"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_run_says_where_its_time_went(tiny_llama, tmp_path):
    trainer = MAGRPOTrainer(
        agent_model=tiny_llama,
        num_agents=2,
        reward_func=lambda first, second: [float(len(text)) for text in first],
        train_dataset=[{"prompt": "The sea is"}, {"prompt": "A city"}] * 2,
        args=MAGRPOConfig(
            **{"output_dir": str(tmp_path), "run_name": "run", "profile": True, "max_new_tokens": 4},
            **{"rollout_batch_size": 2, "num_generations": 2, "eval_interval": 0, "save_steps": 1},
        ),
    )
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "profile" / "rank_0.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, None]
    assert lines.pop()["seconds"]["saving"] > 0  # and the last checkpoint, after the last step
    for line, measured in zip(lines, metrics, strict=True):
        seconds = line["seconds"]
        assert sum(seconds.values()) == pytest.approx(line["wall_s"], abs=1e-4)
        in_step = sum(
            value for name, value in seconds.items() if name.split("/")[0] not in ("between steps", "checkpoint")
        )
        assert in_step == pytest.approx(measured["time/step_s"], abs=0.05)
        assert {"sampling", "sampling/reward", "advantages", "update"} <= set(seconds)
    assert {"checkpoint", "between steps/files"} <= set(lines[1]["seconds"])  # of the first step
