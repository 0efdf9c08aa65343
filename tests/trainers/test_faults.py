"""What goes wrong while a run trains: said once and clearly, with everything that was written before it whole."""

import json
import time
import warnings
from pathlib import Path

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from mlrl import TaskError
from mlrl.cli import config_errors
from mlrl.errors import ConfigError, StorageError
from mlrl.report.runs import read_run
from mlrl.report.summary import overview
from mlrl.tracking import Tracking
from mlrl.trainers import MAGRPOConfig, MAGRPOTrainer
from tests.bad_input.table import BrokenRow

ROWS = [{"prompt": "Tell me about the sea."}, {"prompt": "Tell me about the town."}]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def reward(first, second):
    return [float(len(a) > len(b)) for a, b in zip(first, second, strict=True)]


def make(model: str, settings: dict | None = None, **arguments) -> MAGRPOTrainer:
    """A trainer of one item a step, without evaluation, whose run is runs/mine."""
    arguments = {"agent_model": model, "reward_func": reward, "train_dataset": ROWS} | arguments
    defaults = {"max_new_tokens": 4, "num_generations": 2, "rollout_batch_size": 1, "eval_interval": 0, "save_steps": 0}
    return MAGRPOTrainer(**arguments, args=MAGRPOConfig(**defaults | {"run_name": "mine"} | (settings or {})))


def metrics() -> list[dict]:
    return [json.loads(line) for line in Path("runs/mine/metrics.jsonl").read_text().splitlines()]


# -------------------------------------------------------------------------------------------------------------- rewards
@pytest.mark.parametrize(  # all kinds are in tests/test_rewards.py
    ("value", "parts"),
    [
        ([1.0], ["1 reward for 2 joint responses"]),
        (None, ["returned=None"]),
        ([1.0, float("nan")], ["returned[1]=nan", "not a finite number"]),
        (["1.0", "0.0"], ["returned[0]='1.0'", "not a number"]),
    ],
    ids=str,
)
def test_reward_faults_name_item_turn_and_value(tiny_llama, value, parts):
    trainer = make(tiny_llama, reward_func=lambda first, second: value)
    with pytest.raises(TaskError) as caught:
        trainer.train()
    wanted = [*parts, "reward_func returned", "item 0", "turn 0", "Right is 2 finite numbers"]
    assert [part for part in wanted if part not in str(caught.value)] == []


def test_a_type_error_of_the_users_own_code_reaches_the_user(tiny_llama):
    calls = []

    def broken(first, second):
        calls.append(1)
        return len(first) + "s"

    with pytest.raises(TypeError, match="unsupported operand"):
        make(tiny_llama, reward_func=broken).train()
    assert calls == [1]  # not called again in another way


def test_a_transition_that_returns_too_few_prompts(tiny_llama):
    trainer = make(tiny_llama, {"num_turns": 2}, external_transition=lambda agent_completions: ["only one"])
    with pytest.raises(TaskError, match="external_transition returned=.*only one.*1 prompt for num_agents=2 .item 0"):
        trainer.train()


def test_a_late_reward_ends_the_run_or_has_the_fallback(tiny_llama):
    def slow(first, second, *, batch_items):
        time.sleep(30 * (batch_items[0] == ROWS[1]))
        return reward(first, second)

    limits = {"reward_timeout": 0.3, "reward_processes": 1}
    with pytest.raises(TaskError, match="reward_timeout=0.3: reward_func has not returned .*item 1.*sea|town.*turn 0"):
        make(tiny_llama, limits, reward_func=slow).train()
    (first,) = metrics()
    assert first["step"] == 1

    with pytest.warns(UserWarning, match="reward_fallback=-2.0"):
        make(tiny_llama, limits | {"reward_fallback": -2.0, "run_name": "again"}, reward_func=slow).train()
    lines = [json.loads(line) for line in Path("runs/again/metrics.jsonl").read_text().splitlines()]
    assert [line["reward_failure_fraction"] for line in lines] == [0.0, 1.0]
    assert lines[1]["turn_1/reward_mean"] == -2.0


# ----------------------------------------------------------------------------------------------------------------- data
def test_an_unreadable_row_is_named_and_what_was_done_stays(tiny_llama):
    class Stream:
        def __iter__(self):
            yield from ROWS
            raise ValueError("bad image")

    with pytest.raises(TaskError) as caught:
        make(tiny_llama, train_dataset=Stream()).train()
    assert str(caught.value) == (
        "train_dataset[2]: the row cannot be read (ValueError: bad image). Correct it, or take it out."
    )
    assert [line["step"] for line in metrics()] == [1, 2]


def test_a_row_that_is_none_is_named(tiny_llama):
    class Stream:
        def __iter__(self):
            yield from [ROWS[0], None]

    with pytest.raises(TaskError, match="train_dataset.1.=None: a row of type NoneType. Right is a dict"):
        make(tiny_llama, train_dataset=Stream()).train()


def test_an_unreadable_evaluation_row_is_named(tiny_llama):
    with pytest.raises(TaskError, match="eval_dataset.1.: the row cannot be read .ValueError: bad image"):
        make(tiny_llama, eval_dataset=BrokenRow(1)).evaluate()


# ----------------------------------------------------------------------------------------------------------------- disk
def test_a_disk_that_is_full_names_the_file_and_leaves_the_rest(tiny_llama, capsys):
    calls = []

    def fills_the_disk(first, second):
        calls.append(1)
        if len(calls) == 2:
            Path("runs/mine/metrics.jsonl").rename("before.jsonl")
            Path("runs/mine/metrics.jsonl").symlink_to("/dev/full")
        return reward(first, second)

    with pytest.raises(SystemExit) as stop, config_errors("magrpo.py"):
        make(tiny_llama, reward_func=fills_the_disk).train()
    assert stop.value.code == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("magrpo.py: error: runs/mine/metrics.jsonl: cannot be written (No space left on device).")
    assert "Make room on that disk" in message
    assert [json.loads(line)["step"] for line in Path("before.jsonl").read_text().splitlines()] == [1]


PLACES = [("completions", "completions/train-000001.jsonl"), ("agents", "agents/agent_0"), ("metrics.jsonl", "")]


@pytest.mark.parametrize(("blocked", "named"), PLACES, ids=[blocked for blocked, _ in PLACES])
def test_a_place_that_cannot_be_written_is_named(tiny_llama, blocked, named):
    trainer = make(tiny_llama, {"completions_steps": 1})

    def block(first, second):
        place = Path("runs/mine") / blocked
        if not place.exists():
            place.mkdir() if blocked == "metrics.jsonl" else place.write_text("a file, or a folder, in the way")
        return reward(first, second)

    trainer.environment._reward.func = lambda values, named: block(*values)
    with pytest.raises(StorageError, match=f"runs/mine/{named or blocked}: cannot be written"):
        trainer.train()
    if blocked == "agents":
        assert [line["step"] for line in metrics()] == [1, 2]


def test_a_run_whose_settings_cannot_be_written_leaves_no_half_file(tiny_llama, monkeypatch):
    def refuse(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("mlrl.storage.os.replace", refuse)
    with pytest.raises(StorageError, match="runs/mine/config.yaml: cannot be written .Permission denied"):
        make(tiny_llama).train()
    assert list(Path("runs/mine").iterdir()) == []


# ------------------------------------------------------------------------------------------------------------- trackers
@pytest.mark.parametrize(
    ("name", "fails_at"), [("wandb", "start"), ("wandb", "log"), ("tensorboard", "__init__"), ("trackio", "log")]
)
def test_a_tracker_outage_costs_one_warning_and_no_number(tiny_llama, monkeypatch, name, fails_at):
    pytest.importorskip(name)
    tracker = LOGGER_TYPE_TO_CLASS[name]

    def outage(self, *arguments, **named):
        raise ConnectionError("no route to host")

    for method in ("start", "store_init_configuration", "log", "finish"):
        monkeypatch.setattr(tracker, method, lambda self, *arguments, **named: None)
    monkeypatch.setattr(tracker, "tracker", type("Run", (), {"define_metric": lambda *arguments, **named: None})())
    monkeypatch.setattr(tracker, fails_at, outage)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(tiny_llama, {"report_to": [name]}).train()
    said = [str(warning.message) for warning in caught if "report_to" in str(warning.message)]
    assert len(said) == 1 and said[0].startswith(f"report_to={name!r}: the tracker ")
    assert "ConnectionError: no route to host" in said[0] and "runs/mine/metrics.jsonl" in said[0]
    assert [line["step"] for line in metrics()] == [1, 2]
    assert (Path("runs/mine") / "agents" / "agent_1").is_dir()


# --------------------------------------------------------------------------------------------------------------- losses
def test_losses_that_stay_non_finite_end_the_run_with_one_line(tiny_llama, capsys, monkeypatch):
    """Every gradient is NaN: no agent steps, each skipped update is logged, and the third in a row ends the run."""
    trainer = make(tiny_llama, {"max_nonfinite_steps": 3, "num_train_epochs": 5})
    estimate = trainer.estimate

    def poisoned(trees):
        samples = estimate(trees)
        samples[0][0].advantage = float("nan")
        return samples

    monkeypatch.setattr(trainer, "estimate", poisoned)
    before = [parameter.detach().clone() for agent in trainer.team.agents for parameter in agent.parameters]
    with pytest.raises(SystemExit) as stop, config_errors("magrpo.py"):
        trainer.train()
    assert stop.value.code == 1
    shown = capsys.readouterr()
    assert "warning: step 1: 1 of 1 update skipped, for a NaN or infinite gradient" in shown.out
    message = shown.err.splitlines()[-1]
    assert message.startswith("magrpo.py: error: max_nonfinite_steps=3: ") and "Lower the learning rate" in message
    after = [parameter for agent in trainer.team.agents for parameter in agent.parameters]
    assert all(bool((a == b).all()) for a, b in zip(before, after, strict=True))
    assert [(line["step"], line["nonfinite_fraction"]) for line in metrics()] == [(1, 1.0), (2, 1.0), (3, 1.0)]


def test_the_run_folder_says_what_ended_a_run_until_it_goes_on(tiny_llama, monkeypatch):
    def fails(first, second, batch_items):
        if Path("broken").exists() and batch_items[0] == ROWS[1]:
            raise ZeroDivisionError("no words\nto divide by")
        return reward(first, second)

    ended = []
    Path("broken").touch()
    monkeypatch.setattr(Tracking, "finish", lambda self, failed=False: ended.append(failed))
    with pytest.raises(ZeroDivisionError):
        make(tiny_llama, {"save_steps": 1}, reward_func=fails).train()
    assert ended[0]  # before the clean-up
    error, traceback = Path("runs/mine/error.txt").read_text().split("\n\n", 1)
    assert error == "ZeroDivisionError: no words to divide by" and "in fails" in traceback
    run = read_run("runs/mine")
    assert ("state", "ended by an error") in overview(run, []).facts
    assert overview(run, []).warnings[0] == "the run ended by an error: ZeroDivisionError: no words to divide by"

    ended.clear()
    Path("broken").unlink()
    make(tiny_llama, {"resume_from_checkpoint": "latest"}, reward_func=fails).train()
    assert ended == [False] and ("state", "finished") in overview(read_run("runs/mine"), []).facts
    assert not Path("runs/mine/error.txt").exists()


def test_an_error_that_cannot_be_printed_is_kept_all_the_same(tiny_llama):
    class Unprintable(Exception):
        def __str__(self):
            return None

    def fails(first, second):
        raise Unprintable

    with pytest.raises(Unprintable):
        make(tiny_llama, reward_func=fails).train()
    assert Path("runs/mine/error.txt").read_text().startswith("Unprintable: (has no message that could be shown)\n\n")


def test_a_name_that_the_command_line_made_gives_way_to_another_run_of_that_second(tiny_llama, tmp_path):
    for expected in ("magrpo-task-1", "magrpo-task-1-2"):
        args = MAGRPOConfig(
            run_name="magrpo-task-1", max_steps=1, max_new_tokens=2, num_generations=2, eval_interval=0, save_steps=0
        )
        args.sources["run_name"] = "derived"
        rows = [{"prompt": "The sea"}]
        trainer = MAGRPOTrainer(tiny_llama, reward_func=reward, train_dataset=rows, args=args)
        trainer.train()
        assert trainer.run_folder.name == expected
    args.sources["run_name"] = "flag"
    with pytest.raises(ConfigError, match="exists already"):
        MAGRPOTrainer(tiny_llama, reward_func=reward, train_dataset=rows, args=args)
