"""Training on responses that a server drew: checked before, corrected in every step, refused where they are wrong."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mlrl.agents import Agent
from mlrl.checkpoint import damage
from mlrl.cli import config_errors
from mlrl.errors import ConfigError, RolloutError
from mlrl.parallel.group import Group
from mlrl.parallel.mesh import Mesh
from mlrl.rollout.collect import Collector
from mlrl.rollout.sampler import Request
from mlrl.rollout.vllm import VLLMSampler
from mlrl.sources import Source
from mlrl.trainers import IACConfig, IACTrainer, MAGRPOConfig, MAGRPOTrainer
from mlrl.trainers.mismatch import correct_mismatch
from mlrl.trainers.rollout_setup import base_numbers
from tests.rollout.fake_vllm import FakeVLLM
from tests.rollout.fakes import fake_team

ROWS = [{"prompt": "the sea"}, {"prompt": "a town"}]
SETTINGS = {
    **{"rollout_backend": "vllm", "max_new_tokens": 3, "num_generations": 2, "rollout_batch_size": 1, "lora_rank": 2},
    **{"agent_learning_rate": 0.05, "max_steps": 2, "eval_interval": 0, "save_steps": 1, "completions_steps": 1},
    **{"run_name": "mine", "vllm_max_retries": 0},
}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def reward(*completions):
    return [float(sum(map(ord, text)) % 7) for text in completions[0]]


def make(model, *servers, trainer=MAGRPOTrainer, config=MAGRPOConfig, num_agents=2, **settings):
    arguments = {"agents": model} if isinstance(model, list) else {"agent_model": model, "num_agents": num_agents}
    settings = SETTINGS | {"vllm_url": [server.url for server in servers]} | settings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = config(**settings)
    return trainer(**arguments, reward_func=reward, train_dataset=ROWS, args=args)


def logged(run="mine"):
    return [json.loads(line) for line in Path(f"runs/{run}/metrics.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------------------------------------------------- training
def test_steps_on_a_server_agree_with_the_trainer_at_every_sync(tiny_llama):
    with FakeVLLM(tiny_llama) as server:
        make(tiny_llama, server, num_generations=3, profile=True).train()
        loads = [body["lora_name"].split(".")[0] for body in server.of("/v1/load_lora_adapter") if body]
        assert loads == ["agent_0@1", "agent_1@1", "agent_0@2", "agent_1@2"] and server.adapters == {}
    for line in logged():
        for agent in (0, 1):
            assert line[f"agent_{agent}/rollout_ratio_mean"] == pytest.approx(1.0, abs=1e-3)
            assert 0 <= line[f"agent_{agent}/rollout_kl"] < 1e-6
            assert line[f"agent_{agent}/rollout_truncated_fraction"] == 0.0
    for line in Path("runs/mine/profile/rank_0.jsonl").read_text().splitlines()[:2]:
        assert {"sampling/servers", "sampling/weights to servers"} <= json.loads(line)["seconds"].keys()
    assert not any(Path("runs/mine/sampling").glob("agent_*"))
    for agent in (0, 1):  # and something was learned
        weights = load_file(f"runs/mine/agents/agent_{agent}/adapter_model.safetensors")
        assert any(float(w.abs().max()) > 0 for name, w in weights.items() if "lora_B" in name)


def test_swapped_adapters_are_caught_and_not_trained_on(tiny_llama, monkeypatch):
    with FakeVLLM(tiny_llama) as server:
        trainer = make(tiny_llama, server)
        for agent in trainer.team.agents:
            generator = torch.Generator().manual_seed(agent.index)
            for parameter in agent.parameters:
                parameter.data.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
        before = [parameter.clone() for agent in trainer.team.agents for parameter in agent.parameters]
        own = Agent.save_weights
        monkeypatch.setattr(
            Agent, "save_weights", lambda agent, folder: own(trainer.team.agents[1 - agent.index], folder)
        )
        with pytest.raises(RolloutError, match=r"rollout_kl_limit=0.1: the responses of agent 0 .* other weights"):
            trainer.train()
    after = [parameter for agent in trainer.team.agents for parameter in agent.parameters]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_one_freak_token_ends_no_run(tiny_llama):
    def freak(route, answer):
        if route == "/v1/completions" and not seen:
            logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
            logprobs[0] -= 9.0  # e^9 − 1 − 9 = 8093
            seen.append(logprobs[0])
        return answer

    seen = []
    with FakeVLLM(tiny_llama, alter=freak) as server:
        make(tiny_llama, server).train()
    assert seen and max(logged()[0][f"agent_{agent}/rollout_kl"] for agent in (0, 1)) > 100


def test_weights_are_the_capped_ratios_and_enter_the_loss(tiny_llama):
    """What the server says is lowered by log 3 for half of the tokens: their ratio is 3, and the cap 2."""

    def lowered(route, answer):
        if route == "/v1/completions":
            logprobs = answer["choices"][0]["logprobs"]
            logprobs["token_logprobs"] = [p - 1.0986123 * (n % 2) for n, p in enumerate(logprobs["token_logprobs"])]
        return answer

    with FakeVLLM(tiny_llama, alter=lowered) as server:
        trainer = make(tiny_llama, server, rollout_kl_limit=None)
        trees = trainer.collector.collect([(0, ROWS[0])], trainer.growth())
        samples = trainer._samples(trees)
        for sample in samples[0] + samples[1]:
            assert sample.token_weights == pytest.approx([1.0, 2.0, 1.0][: sample.length], abs=1e-3)
            said = torch.tensor(sample.response.logprobs)
            assert sample.old_logprobs - said == pytest.approx([0, 1.0986, 0][: sample.length], abs=1e-3)
        pairs = correct_mismatch(trainer.team, samples, trainer.args)
        length = sum(sample.length for sample in samples[0])
        high = sum(sample.length >= 2 for sample in samples[0])
        assert pairs["agent_0/rollout_ratio_mean"] == (pytest.approx(length + 2 * high, abs=1e-2), length)
        assert pairs["agent_0/rollout_kl"][0] == pytest.approx(high * (3 - 1 - 1.0986), abs=1e-2)
        assert pairs["agent_0/rollout_truncated_fraction"] == (high, length)
        trainer.args.rollout_is_cap = None
        correct_mismatch(trainer.team, samples, trainer.args)
        assert samples[0][0].token_weights is None
        trainer.sampler.close()


def test_several_turns_clipping_critics_and_one_set_of_weights(tiny_llama):
    with FakeVLLM(tiny_llama) as server:
        make(
            tiny_llama, server, trainer=IACTrainer, config=IACConfig, share_parameters=True, max_steps=1, save_steps=0,
            clip_range=0.2, num_updates_per_rollout=2, use_separate_critic=False,
        ).train()  # fmt: skip
        assert [body["lora_name"].split(".")[0] for body in server.of("/v1/load_lora_adapter") if body] == ["agent_0@1"]
    [line] = logged()
    assert line["agent_1/rollout_kl"] < 1e-6 and line["agent_0/ratio_max"] > 0


def test_full_tuning_sends_whole_weights_to_a_server_an_agent(tiny_llama):
    with FakeVLLM(tiny_llama, dev_mode=True) as one, FakeVLLM(tiny_llama, dev_mode=True) as two:
        make(tiny_llama, one, two, tuning="full", agent_learning_rate=1e-3, save_steps=0).train()
        for agent, server in enumerate((one, two)):
            versions = [body["new_version"].split(".")[0] for body in server.of("/update_weight_version")]
            assert versions == [f"agent_{agent}@1", f"agent_{agent}@2"]
            assert len(server.of("/reset_prefix_cache")) == 2
            assert server.of("/v1/completions")[0]["model"] == "base"
    for line in logged():
        assert all(line[f"agent_{agent}/rollout_kl"] < 1e-6 for agent in (0, 1))


def test_whole_weights_of_another_version_are_refused(tiny_llama):
    def renamed(route, answer):
        return {"weight_version": "default"} if route == "/weight_info" else answer

    with FakeVLLM(tiny_llama, dev_mode=True, alter=renamed) as server:
        trainer = make(tiny_llama, server, tuning="full", num_agents=1)
        with pytest.raises(RolloutError, match="has the weights 'default' in place of 'agent_0@1"):
            trainer.train()


def test_a_server_that_dies_leaves_the_checkpoint_from_which_the_run_goes_on_alike(tiny_llama, capsys):
    settings = {"lr_scheduler": "constant"}
    with FakeVLLM(tiny_llama) as server:
        make(tiny_llama, server, run_name="whole", **settings).train()

    def dies(number, route, body):
        return (500, "gone") if route == "/v1/completions" and number >= 6 else None  # in the second step

    with FakeVLLM(tiny_llama, fault=dies) as server, pytest.raises(SystemExit) as stop, config_errors("magrpo.py"):
        make(tiny_llama, server, **settings).train()
    said = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1 and said.startswith("magrpo.py: error: vllm_url=") and "status 500" in said
    assert "--resume_from_checkpoint" in said and len(logged()) == 1
    assert damage(Path("runs/mine/checkpoints/checkpoint-1")) is None
    with FakeVLLM(tiny_llama) as server:  # at another address
        make(tiny_llama, server, **settings, resume_from_checkpoint="latest").train()
    assert [line["step"] for line in logged()] == [1, 2]
    for agent in (0, 1):
        one, other = (
            load_file(f"runs/{run}/agents/agent_{agent}/adapter_model.safetensors") for run in ("whole", "mine")
        )
        assert all(torch.equal(one[name], other[name]) for name in one)


# --------------------------------------------------------------------------------------------- before weights are read
def refused(parts, *arguments, **settings):
    with pytest.raises(ConfigError, match=parts):
        make(*arguments, **settings)
    assert not Path("runs").exists()


def test_servers_are_looked_at_before_weights_are_read(tiny_llama, tiny_qwen2, monkeypatch):
    monkeypatch.setattr("mlrl.agents.Team.load", lambda *a, **k: pytest.fail("weights were read"))
    gone = FakeVLLM(tiny_llama)
    gone.close()
    refused(r"vllm_url='http://127.*no connection.*Start a vLLM server there, or correct the address", tiny_llama, gone)
    with FakeVLLM(tiny_llama, lora=False) as server:
        refused("takes no adapters.*--enable-lora", tiny_llama, server)
        refused("takes no weights.*VLLM_SERVER_DEV_MODE", tiny_llama, server, tuning="full", num_agents=1)
        refused("1 server for 2 bases", tiny_llama, server, tuning="full")
    with FakeVLLM(tiny_llama, dev_mode=True, device="cpu") as server:
        refused("vllm_url=.*tied to the embedding.*lora", tiny_llama, server, tuning="full", num_agents=1)
    with FakeVLLM(tiny_llama, max_model_len=8) as server:
        refused("holds 8 tokens.*9 are asked for", tiny_llama, server, max_new_tokens=8)
    with FakeVLLM(tiny_llama, raw_logprobs=True) as server:
        refused("without the temperature.*processed_logprobs", tiny_llama, server, temperature=0.7)
    with FakeVLLM(tiny_llama, alter=lambda route, a: {"tokens": [1]} if route == "/tokenize" else a) as server:
        refused("has other tokens than agent 0", tiny_llama, server)
    with FakeVLLM(tiny_llama, alter=lambda route, answer: "hello") as server:
        refused("does not list its models", tiny_llama, server)


def test_spawning_is_refused_before_weights_are_read(tiny_llama, monkeypatch):
    monkeypatch.setattr("mlrl.agents.Team.load", lambda *a, **k: pytest.fail("weights were read"))
    spawn = {"vllm_url": None, "vllm_spawn": True}
    refused(r"vllm_python='.*': has no vLLM.*pip install vllm", tiny_llama, **spawn)
    refused("3 servers for 2 bases", tiny_llama, **spawn, tuning="full", vllm_devices=["0"] * 3)
    refused("vllm_devices=None: .*tied to the embedding", tiny_llama, **spawn, tuning="full")


def test_a_server_serves_a_base(tiny_llama):
    lora, full = MAGRPOConfig(), MAGRPOConfig(tuning="full")
    a, b = Source("a"), Source("b")
    assert base_numbers(lora, [a, a, Source("a", "adapter")]) == [0, 0, 0]
    assert base_numbers(lora, [a, b, a]) == [0, 1, 0]
    assert base_numbers(full, [a, a]) == [0, 1]
    assert base_numbers(MAGRPOConfig(tuning="full", share_parameters=True), [a, a]) == [0, 0]


def test_only_the_first_rank_of_an_agent_draws():
    team = fake_team(2)
    team.mesh = Mesh(Group((0, 1, 2, 3), 1), (Group((0, 1), 1), Group((2, 3), 1)))
    collector = Collector(team, VLLMSampler(team, lambda folder: None), None)
    requests = [Request(agent, [1, 2], [("key", k) for k in range(3)]) for agent in (0, 1)]
    sequences = [(i, k) for i in (0, 1) for k in range(3)]
    assert collector._owners(requests, sequences, 8) == [0, 0, 0, 2, 2, 2]
