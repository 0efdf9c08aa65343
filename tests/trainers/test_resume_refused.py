"""What a run cannot go on from is one clear error, before any weights are read and with nothing written over."""

from __future__ import annotations

import json
import shutil

import pytest

from mlrl.errors import ConfigError
from mlrl.trainers import MAGRPOTrainer, MARLOOTrainer
from tests.trainers.resuming import ROWS, Crash, StopAt, crash, make, result

FEW = {"logging_steps": 1, "num_turns": 1, "num_train_epochs": 1, "eval_interval": 0, "save_steps": 1}


def other_reward(first: list[str], second: list[str]) -> list[float]:
    return [float(len(a) > len(b)) for a, b in zip(first, second, strict=True)]


def other_formatter(item: dict) -> str:
    return item["prompt"].upper()


@pytest.fixture(scope="module")
def runs(tiny_llama, tmp_path_factory):
    """A run of two checkpoints, stopped after the second."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.raises(Crash):
        make(MAGRPOTrainer, tiny_llama, folder, "run", StopAt(5, crash), **FEW).train()
    return folder


@pytest.fixture(scope="module")
def state_of(runs):
    def state() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in runs.rglob("*") if path.is_file()}

    return state


CHANGED = {
    "seed": ({"seed": 7}, r"seed=7: it was 42 in .*checkpoint-2 \(42 → 7\)\. Set it back .*allow_changed seed"),
    "lora_rank": ({"lora_rank": 4}, "lora_rank=4: it was 2"),
    "num_generations": ({"num_generations": 3}, "num_generations=3: it was 2"),
    "temperature": ({"temperature": 0.5}, "temperature=0.5: it was 1.0"),
    "reference_kl_coef": ({"reference_kl_coef": 0.1}, "reference_kl_coef=0.1: it was 0.0"),
    "rollout_batch_size": ({"rollout_batch_size": 1}, "rollout_batch_size=1: it was 2"),
    "reward": (
        {"reward_func": other_reward},
        "reward_func='other_reward .*: it was 'StopAt.*its code.*say --allow_changed reward_func",
    ),
    "formatter": ({"formatters": other_formatter}, "formatters='other_formatter .*: it was 'as_messages"),
    "rows": ({"train_dataset": ROWS[:4]}, "train_dataset='4 rows.*: it was '5 rows"),
    "a row": ({"train_dataset": [*ROWS[:4], {"prompt": "x"}]}, "train_dataset='5 rows.*: it was '5 rows"),
    "dtype": ({"dtype": "bfloat16"}, "weights_dtype='bfloat16': it was 'float32'"),
    "unknown": ({"allow_changed": ["sead"]}, "allow_changed='sead': there is no such name. Known: .*seed"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_what_matters_must_be_the_same(what, runs, state_of, tiny_llama):
    changes, message = CHANGED[what]
    before = state_of()
    with pytest.raises(ConfigError, match=message):
        make(MAGRPOTrainer, tiny_llama, runs, "run", resume_from_checkpoint="latest", **FEW | changes)
    assert state_of() == before


def test_another_algorithm_or_model(runs, state_of, tiny_llama, tiny_llama_other, tiny_qwen2):
    before = state_of()
    with pytest.raises(ConfigError, match="algorithm='MARLOO': it was 'MAGRPO'"):
        make(MARLOOTrainer, tiny_llama, runs, "run", resume_from_checkpoint="latest", **FEW)
    for model in (tiny_llama_other, tiny_qwen2):
        with pytest.raises(ConfigError, match="models=.*: it was .*allow_changed models"):
            make(MAGRPOTrainer, model, runs, "run", resume_from_checkpoint="latest", **FEW)
    assert state_of() == before


def test_weights_of_another_shape_are_named_even_where_the_change_is_allowed(runs, tiny_llama):
    run = make(
        MAGRPOTrainer, tiny_llama, runs, "branch",
        resume_from_checkpoint=str(runs / "run/checkpoints/checkpoint-2"), allow_changed=["lora_rank"],
        **FEW | {"lora_rank": 4},
    )  # fmt: skip
    with pytest.raises(ConfigError, match="agent_0 has a weight .* and the checkpoint one of"):
        run.train()


@pytest.mark.parametrize(
    ("where", "message"),
    {
        "nowhere": "resume_from_checkpoint='nowhere': there is no such folder. Give a folder checkpoint-N",
        "run/checkpoints/checkpoint-1": "checkpoint-2 of the same run is newer. Resume from that, or give another",
        ".": "resume_from_checkpoint=.*: that is neither a run's folder nor one of checkpoints. Give a folder",
        "run/checkpoints/checkpoint-2/agent_0": "that is neither a run's folder nor one of checkpoints",
        "run/checkpoints/checkpoint-9": "resume_from_checkpoint=.*checkpoint-9': there is no such folder",
    }.items(),
)
def test_where_to_go_on_from(where, message, runs, state_of, tiny_llama):
    before = state_of()
    place = where if where == "nowhere" else str(runs / where)
    with pytest.raises(ConfigError, match=message):
        make(MAGRPOTrainer, tiny_llama, runs, "run", resume_from_checkpoint=place, **FEW)
    with pytest.raises(ConfigError, match="resume_from_checkpoint='latest': of which run"):
        make(MAGRPOTrainer, tiny_llama, runs, None, resume_from_checkpoint="latest", **FEW)
    assert state_of() == before


def test_a_folder_that_is_no_run_is_left_alone(runs, tiny_llama):
    (runs / "mine").mkdir()
    (runs / "mine/thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="run_name='mine': .* is not the folder of a run"):
        make(MAGRPOTrainer, tiny_llama, runs, "mine", resume_from_checkpoint="latest", **FEW)
    assert [path.name for path in (runs / "mine").iterdir()] == ["thesis.tex"]


def test_what_may_change_does(runs, tiny_llama, tmp_path):
    """Also into another run, with nothing of the old one touched, and past a damaged checkpoint."""
    shutil.copytree(runs / "run", tmp_path / "run")
    target = tmp_path / "run/checkpoints/checkpoint-2/agent_0/master.safetensors"
    target.write_bytes(target.read_bytes()[:-3])
    changes = {"agent_learning_rate": 1e-4, "num_train_epochs": 2, "micro_batch_tokens": 64, "save_steps": 3}
    changes |= {"resume_from_checkpoint": str(tmp_path / "run"), "completions_steps": 0}
    make(MAGRPOTrainer, tiny_llama, tmp_path, "branch", **FEW | changes).train()
    metrics = result(tmp_path / "branch")["metrics"]
    assert [row["step"] for row in metrics] == [2, 3, 4, 5, 6]  # checkpoint-1, since checkpoint-2 is damaged
    assert (
        metrics[-1]["agent_0/learning_rate"]
        != json.loads((runs / "run/metrics.jsonl").read_text().splitlines()[0])["agent_0/learning_rate"]
    )


def test_a_seed_that_may_change(runs, tiny_llama, tmp_path):
    shutil.copytree(runs / "run", tmp_path / "run")
    again = {"resume_from_checkpoint": "latest", "seed": 7, "allow_changed": ["seed"]}
    make(MAGRPOTrainer, tiny_llama, tmp_path, "run", **FEW | again).train()
    assert [row["step"] for row in result(tmp_path / "run")["metrics"]] == [1, 2, 3]
    assert (tmp_path / "run/config_until_2.yaml").exists()
    config = (tmp_path / "run/config.yaml").read_text()
    assert "resumed_from" in config and "seed: 7" in config


def test_a_run_by_epochs_into_a_folder_of_its_own(tiny_llama, tmp_path):
    run = make(MAGRPOTrainer, tiny_llama, tmp_path, "run", **FEW | {"num_train_epochs": 3, "save_total_limit": None})
    run.train(checkpoint_dir=tmp_path / "kept", checkpoint_interval=2)
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["checkpoint-6", "checkpoint-9", "latest"]
    assert not (tmp_path / "run/checkpoints").exists()
    more = make(MAGRPOTrainer, tiny_llama, tmp_path, "more", **FEW | {"num_train_epochs": 4})
    more.train(resume_from_checkpoint=tmp_path / "kept/checkpoint-9")
    assert [row["step"] for row in result(tmp_path / "more")["metrics"]] == [10, 11, 12]


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(tiny_llama, tmp_path, monkeypatch, capsys):
    def full(*arguments, **named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with monkeypatch.context() as patch:
        patch.setattr("mlrl.agents.Agent.save", lambda *a: None)
        make(MAGRPOTrainer, tiny_llama, tmp_path, "run", **FEW).train()
    printed = capsys.readouterr().out
    assert "warning: no checkpoint in" in printed and "No space left on device" in printed
    assert "Training goes on" in printed and "finished" in printed
    assert [row["step"] for row in result(tmp_path / "run")["metrics"]] == [1, 2, 3]
