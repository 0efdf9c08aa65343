"""One step ahead: the next batch is drawn while a step learns, from the weights before it, and nothing else changes."""

import functools
import json
import threading
import time
import traceback
import warnings
from pathlib import Path

import pytest
import torch

from mlrl.agents import Agent
from mlrl.checkpoint import read_checkpoint_metadata
from mlrl.errors import ConfigError, RolloutError
from mlrl.parallel.signals import Stopped
from mlrl.trainers import IACTrainer, MAGRPOConfig, MAGRPOTrainer, MARLHFTrainer
from tests.rollout.fake_vllm import FakeVLLM, slow
from tests.trainers.resuming import Crash, StopAt, assert_same, crash, make, result, terminate

ROWS = [{"prompt": "the sea"}, {"prompt": "a town"}, {"prompt": "one story"}, {"prompt": "rain"}]
SETTINGS = {
    **{"rollout_backend": "vllm", "async_rollouts": 1, "max_new_tokens": 3, "num_generations": 2, "lora_rank": 2},
    **{"rollout_batch_size": 1, "agent_learning_rate": 0.01, "eval_interval": 0, "save_steps": 0, "num_turns": 1},
    **{"vllm_max_retries": 0, "completions_steps": 1, "lr_scheduler": "constant", "lora_target_modules": ["q_proj"]},
}
COMPLETIONS = "/v1/completions"


def runs(model, server, folder, name="run", trainer=MAGRPOTrainer, reward=None, **changes):
    """A trainer on a server, over four rows in four steps."""
    settings = SETTINGS | {"vllm_url": [server.url], "train_dataset": ROWS} | changes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(trainer, model, folder, name, reward or StopAt(None, crash), base={}, **settings)


def logged(folder, name="run"):
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def versions(server):
    """Of agent 0, in the order in which they were asked for: [(version, requests)]."""
    asked = [body["model"].split(".")[0] for body in server.of(COMPLETIONS) if body["model"].startswith("agent_0")]
    return [(name, asked.count(name)) for name in dict.fromkeys(asked)]


def no_thread_is_left():
    deadline = time.monotonic() + 5
    while any(thread.name == "mlrl-rollouts" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return True


# ------------------------------------------------------------------------------------------------------------- sampling
def test_a_batch_is_drawn_from_the_weights_before_with_the_streams_it_always_has(tiny_llama, tmp_path):
    most = []
    drawn = {}
    for ahead in (0, 1):
        with FakeVLLM(tiny_llama, fault=lambda *_: most.append(len(server.adapters))) as server:
            runs(tiny_llama, server, tmp_path, f"ahead_{ahead}", async_rollouts=ahead).train()
            assert server.adapters == {}
            drawn[ahead] = versions(server), [(b["seed"], b["prompt"]) for b in server.of(COMPLETIONS)]
    assert drawn[0][0] == [(f"agent_0@{n}", 2) for n in (1, 2, 3, 4)]  # K = 2 in each of four steps
    assert drawn[1][0] == [("agent_0@1", 4), ("agent_0@2", 2), ("agent_0@3", 2)]
    assert sorted(drawn[0][1]) == sorted(drawn[1][1])
    assert max(most) <= 4  # two agents, each with the version before while the next is loaded
    plain, lines = logged(tmp_path, "ahead_0"), logged(tmp_path, "ahead_1")
    assert [line["rollout_staleness"] for line in lines] == [0, 1, 1, 1] and "rollout_staleness" not in plain[0]
    assert lines[0]["turn_1/reward_mean"] == plain[0]["turn_1/reward_mean"]
    assert lines[1]["agent_0/rollout_kl"] > 1e-5 > lines[0]["agent_0/rollout_kl"]  # the update in between
    assert all("time/rollout_wait_s" in line for line in lines)
    assert no_thread_is_left()


def test_servers_draw_while_a_step_learns(tiny_llama, tmp_path):
    """Every update waits until the next batch is drawn; if that began after the update, it would wait in vain."""
    seen = []
    with FakeVLLM(tiny_llama) as server:
        trainer = runs(tiny_llama, server, tmp_path)
        own = trainer.update

        def update(samples):
            wanted = 4 * min(trainer.step_number + 2, 4)  # two agents, two generations
            deadline = time.monotonic() + 10
            while len(server.of(COMPLETIONS)) < wanted and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(len(server.of(COMPLETIONS)))
            own(samples)

        trainer.update = update
        trainer.train()
    assert seen == [8, 12, 16, 16]


def test_waiting_is_told_apart_from_sampling(tiny_llama, tmp_path):
    """Four answers a batch of 0.1 s at least, one after another, and updates of 1 s."""
    with FakeVLLM(tiny_llama, fault=lambda n, route, body: slow(0.1) if route == COMPLETIONS else None) as server:
        trainer = runs(tiny_llama, server, tmp_path, vllm_max_concurrency=1, max_steps=2, profile=True)
        own = trainer.update
        trainer.update = lambda samples: (own(samples), time.sleep(1.0))
        trainer.train()
    first, second = logged(tmp_path)
    assert first["time/rollout_s"] > 0.4 and first["time/rollout_wait_s"] > 0.4
    assert second["time/rollout_s"] > 0.4 and second["time/rollout_wait_s"] < 0.2
    profile = [json.loads(line) for line in (tmp_path / "run/profile/rank_0.jsonl").read_text().splitlines()]
    drawing, waiting = (
        sum(seconds for name, seconds in step["seconds"].items() if name.startswith("sampling")) for step in profile[:2]
    )
    assert drawing > 0.4 and waiting < 0.4


# ------------------------------------------------------------------------------------------------------- wrong adapters
def spread(trainer):
    """Adapters that differ widely."""
    for agent in trainer.team.agents:
        generator = torch.Generator().manual_seed(agent.index)
        for parameter in agent.parameters:
            parameter.data.copy_(0.5 * torch.randn(parameter.shape, generator=generator))


def test_swapped_adapters_are_caught_and_not_trained_on(tiny_llama, tmp_path, monkeypatch):
    with FakeVLLM(tiny_llama) as server:
        trainer = runs(tiny_llama, server, tmp_path)
        spread(trainer)
        own, calls = Agent.save_weights, []

        def swapped(agent, folder):
            calls.append(agent)
            own(trainer.team.agents[1 - agent.index] if len(calls) > 2 else agent, folder)  # from the second version on

        monkeypatch.setattr(Agent, "save_weights", swapped)
        with pytest.raises(RolloutError, match=r"rollout_kl_limit=0.1: the responses of agent 0 .* other weights"):
            trainer.train()
    assert trainer.step_number == 2  # of the batches of the first version; the third batch is of swapped ones
    assert no_thread_is_left()


def test_a_long_step_is_no_wrong_adapter(tiny_llama, tmp_path):
    """The same limit that an update of this size passes far: the server has the very weights of the step before."""
    with FakeVLLM(tiny_llama) as server:
        trainer = runs(tiny_llama, server, tmp_path, agent_learning_rate=0.3, rollout_kl_limit=1e-4)
        spread(trainer)
        trainer.train()
    lines = logged(tmp_path)
    assert len(lines) == 4 and max(line["agent_0/rollout_kl"] for line in lines) > 0.1


# ------------------------------------------------------------------------------------------------------------ going on
DEEP = {
    **{"num_turns": 2, "max_new_tokens": 2, "save_steps": 1, "eval_interval": 2, "eval_num_samples": 1},
    **{"rollout_batch_size": 1, "logging_steps": 3},
}


@pytest.mark.parametrize("trainer", [MAGRPOTrainer, pytest.param(IACTrainer, marks=pytest.mark.slow)])
def test_a_run_goes_on_with_the_trees_of_its_checkpoint(trainer, tiny_llama, tmp_path):
    run = functools.partial(runs, tiny_llama, folder=tmp_path, trainer=trainer, **DEEP)
    counted = StopAt(None, crash)
    with FakeVLLM(tiny_llama) as server:
        run(server=server, name="whole", reward=counted).train()
    for part, act, error in ((0.4, terminate, Stopped), (0.3, crash, Crash)):
        with FakeVLLM(tiny_llama) as server, pytest.raises(error):
            stop = StopAt(int(part * counted.seen), act)
            run(server=server, name="parts", reward=stop, resume_from_checkpoint="latest").train()
    newest = max((tmp_path / "parts/checkpoints").glob("checkpoint-*"))
    held = json.loads(read_checkpoint_metadata(newest)["progress"]["next_trees"])
    assert held["trees"][0]["drawn_at"] == int(newest.name[-1]) - 1 and "the sea" not in json.dumps(held["cost"])
    with FakeVLLM(tiny_llama) as server:
        again = run(server=server, name="parts", resume_from_checkpoint="latest")
        again.train()
    assert_same(result(tmp_path / "whole"), result(tmp_path / "parts"))
    steps = [line["rollout_staleness"] for line in logged(tmp_path, "parts") if "rollout_staleness" in line]
    assert steps == [0, 1, 1, 1]


def test_trees_of_other_settings_are_not_gone_on_with(tiny_llama, tmp_path):
    with FakeVLLM(tiny_llama) as server, pytest.raises(Crash):
        runs(tiny_llama, server, tmp_path, reward=StopAt(4, crash), save_steps=1).train()
    changed = {"resume_from_checkpoint": "latest", "temperature": 0.7, "allow_changed": ["temperature"]}
    with FakeVLLM(tiny_llama) as server:
        runs(tiny_llama, server, tmp_path, save_steps=1, **changed).train()
    assert [line["rollout_staleness"] for line in logged(tmp_path)] == [0, 1, 0, 1]


# --------------------------------------------------------------------------------------------------------------- errors
def test_an_error_of_the_task_in_the_other_thread_ends_the_run_with_it(tiny_llama, tmp_path):
    with FakeVLLM(tiny_llama) as server:
        trainer = runs(tiny_llama, server, tmp_path, reward=StopAt(3, crash))
        with pytest.raises(Crash) as caught:
            trainer.train()
        assert server.adapters == {}
    assert [line["step"] for line in logged(tmp_path)] == [1, 2]
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "crash"  # the user's own line
    assert no_thread_is_left()


def test_a_server_that_fails_ends_the_run_with_one_error(tiny_llama, tmp_path, capsys):
    def dies(number, route, body):
        return (500, "gone") if route == COMPLETIONS and number >= 9 else None  # in the third batch

    with FakeVLLM(tiny_llama, fault=dies) as server, pytest.raises(RolloutError, match="status 500"):
        runs(tiny_llama, server, tmp_path, save_steps=1).train()
    assert "Traceback" not in capsys.readouterr().err
    # the second step was taken; its checkpoint would have held the trees that there are not
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("checkpoint-*")] == ["checkpoint-1"]
    assert no_thread_is_left()
    with FakeVLLM(tiny_llama) as server:
        runs(tiny_llama, server, tmp_path, save_steps=1, resume_from_checkpoint="latest").train()
        runs(tiny_llama, server, tmp_path, "whole", save_steps=1).train()
    assert_same(result(tmp_path / "whole"), result(tmp_path / "run"))


@pytest.mark.parametrize("error", [Crash, KeyboardInterrupt])
def test_an_error_of_the_step_ends_what_is_being_drawn(error, tiny_llama, tmp_path):
    def fault(number, route, body):
        return slow(0.2) if route == COMPLETIONS and number >= 6 else None

    def fails(samples):
        raise error

    with FakeVLLM(tiny_llama, fault=fault) as server:
        trainer = runs(tiny_llama, server, tmp_path, num_generations=3, vllm_max_concurrency=1)
        trainer.update = fails
        with pytest.raises(error):
            trainer.train()
        asked = len(server.of(COMPLETIONS))
        assert asked < 6 + 4 and server.adapters == {}  # all of the first batch, and not those of the second
        time.sleep(0.5)
        assert len(server.of(COMPLETIONS)) == asked
    assert no_thread_is_left()


def test_a_preference_trainer_refuses_it(tmp_path):
    with pytest.raises(ConfigError, match=r"async_rollouts=1: MARLHF .* Set it to 0"):
        MARLHFTrainer.config_class(async_rollouts=1, rollout_backend="vllm", vllm_url=["http://a:1"])
    assert MAGRPOConfig().async_rollouts == 0 and not list(Path(tmp_path).iterdir())
