"""Three steps of two agents on a real vLLM server and SmolLM2-135M, and what goes wrong there. Minutes.

VLLM_PYTHON=/path/to/vllm-env/bin/python ./launch.sh test -m vllm -n 0 -s
"""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from mlrl.agents import Agent
from mlrl.checkpoint import damage
from mlrl.embedded import embedded_model_path
from mlrl.errors import RolloutError
from mlrl.rollout.vllm_client import VLLMClient
from mlrl.rollout.vllm_server import ServerSettings, SpawnedServer, start_servers
from mlrl.trainers import MAGRPOConfig, MAGRPOTrainer
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.vllm

ROWS = [{"prompt": "Tell me about the sea."}, {"prompt": "What is rain?"}, {"prompt": "Who bakes bread?"}]
SETTINGS = {
    **{"rollout_backend": "vllm", "max_new_tokens": 12, "num_generations": 2, "rollout_batch_size": 1},
    **{"dtype": "float32", "eval_interval": 0, "save_steps": 1, "vllm_max_retries": 1, "agent_learning_rate": 1e-3},
}


class Running:
    """The server of the tests; one that was killed is started again."""

    def __init__(self, folder: Path):
        self.folder, self.count = folder, 0
        self.start()

    def start(self) -> None:
        settings = ServerSettings(
            model=embedded_model_path(),
            dtype="float32",
            device=os.environ.get("VLLM_DEVICE", "cpu"),
            adapters=2,
            arguments={"max_model_len": 256},
            python=os.environ.get("VLLM_PYTHON", sys.executable),
        )
        [self.server] = start_servers([settings], self.folder / str(self.count), 1200.0)
        self.count += 1

    def kill(self) -> None:
        """With all that belongs to it, as when memory runs out."""
        watchdog = self.server.process.pid
        [server] = Path(f"/proc/{watchdog}/task/{watchdog}/children").read_text().split()
        os.killpg(int(server), signal.SIGKILL)
        self.server.process.wait()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    running = Running(tmp_path_factory.mktemp("server"))
    yield running
    running.server.close()


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def as_chat(item):
    return [{"role": "user", "content": item["prompt"]}]


def reward(*completions):
    return [float(len(texts[-1]) - len(texts[0])) for texts in zip(*completions, strict=True)]


def make(server: SpawnedServer | None, num_agents=2, model="embedded", **settings) -> MAGRPOTrainer:
    url = {} if server is None else {"vllm_url": [server.url]}
    args = MAGRPOConfig(**SETTINGS | url | {"run_name": "run"} | settings)
    agents = {"agents": model} if isinstance(model, list) else {"agent_model": model, "num_agents": num_agents}
    return MAGRPOTrainer(
        **agents,
        formatters=as_chat,
        reward_func=reward if num_agents > 1 else lambda texts: [float(len(text)) for text in texts],
        train_dataset=ROWS,
        args=args,
    )


def assert_agree(num_agents: int, steps: list[int]) -> None:
    lines = [json.loads(line) for line in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == steps
    for line in lines:
        for agent in range(num_agents):
            ratio, kl = line[f"agent_{agent}/rollout_ratio_mean"], line[f"agent_{agent}/rollout_kl"]
            print(f"step {line['step']} agent {agent}: ratio {ratio:.7f}, mismatch KL {kl:.2e}")
            assert ratio == pytest.approx(1.0, abs=1e-3) and 0 <= kl < 1e-5


def test_three_steps_of_two_agents(running):
    make(running.server).train()
    assert_agree(2, [1, 2, 3])
    client = VLLMClient(running.server.url)
    assert [card["id"] for card in client.models()] == ["base"]  # nothing is left behind
    log = running.server.log.read_text()
    for name in ("agent_0@1", "agent_1@1", "agent_0@3", "agent_1@3"):
        assert f"Loaded new LoRA adapter: name '{name}." in log


def test_one_step_ahead(running):
    """The limit is far below what an update does: the first responses of each batch are of the version they name."""
    make(running.server, async_rollouts=1, rollout_kl_limit=1e-5, num_train_epochs=2).train()
    lines = [json.loads(line) for line in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    assert [line["rollout_staleness"] for line in lines] == [0, 1, 1, 1, 1, 1]
    for line in lines:
        kl, waited, took = (line[name] for name in ("agent_0/rollout_kl", "time/rollout_wait_s", "time/rollout_s"))
        print(f"step {line['step']}: mismatch KL {kl:.2e}, waited {waited:.2f} s for {took:.2f} s of sampling")
    assert [card["id"] for card in VLLMClient(running.server.url).models()] == ["base"]


def test_swapped_adapters_are_caught(running, monkeypatch):
    trainer = make(running.server)
    for agent in trainer.team.agents:
        generator = torch.Generator().manual_seed(agent.index)
        for parameter in agent.parameters:
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    own = Agent.save_weights
    monkeypatch.setattr(Agent, "save_weights", lambda agent, to: own(trainer.team.agents[1 - agent.index], to))
    with pytest.raises(RolloutError, match="rollout_kl_limit=0.1: the responses of agent 0 .* other weights") as caught:
        trainer.train()
    print(caught.value)


def test_a_server_killed_in_the_middle_of_a_rollout(running, monkeypatch):
    own, calls = VLLMClient.complete, []

    def complete(client, drawing, stop=None):
        calls.append(1)
        if len(calls) == 4 + 3:  # a step draws four sequences: the third of the second step
            running.kill()
        return own(client, drawing, stop)

    monkeypatch.setattr(VLLMClient, "complete", complete)
    with pytest.raises(RolloutError, match=r"no connection.*go on with --resume_from_checkpoint") as caught:
        make(running.server).train()
    print(caught.value)
    assert damage(Path("runs/run/checkpoints/checkpoint-1")) is None
    running.start()
    make(running.server, resume_from_checkpoint="latest").train()
    assert_agree(2, [1, 2, 3])


def test_a_server_a_base(tmp_path):
    """Two models that have nothing in common, tokens included, each on a server of its own."""
    tokenizer = tiny_tokenizer("qwen2")
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    small = AutoModelForCausalLM.from_config(Qwen2Config(vocab_size=len(tokenizer), num_hidden_layers=2, **sizes))
    small.save_pretrained("small")
    tokenizer.save_pretrained("small")
    make(
        None, model=["embedded", str(tmp_path / "small")], lora_target_modules=["q_proj", "v_proj"], vllm_spawn=True,
        vllm_python=os.environ.get("VLLM_PYTHON", sys.executable), vllm_args={"max_model_len": 256},
        vllm_start_timeout=1200.0,
    ).train()  # fmt: skip
    assert_agree(2, [1, 2, 3])
    logs = [log.read_text() for log in sorted(Path("runs/run").rglob("server_*.log"))]
    assert len(logs) == 2
    for agent, log in enumerate(logs):
        assert f"name 'agent_{agent}@3" in log and f"agent_{1 - agent}@" not in log


def test_whole_weights(tmp_path):
    """A large step, of every weight; the output layer apart from the embedding, as a server on a CPU wants it."""
    model = AutoModelForCausalLM.from_pretrained(embedded_model_path())
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained("untied")
    AutoTokenizer.from_pretrained(embedded_model_path()).save_pretrained("untied")
    spawned = {"vllm_url": None, "vllm_spawn": True, "vllm_python": os.environ.get("VLLM_PYTHON", sys.executable)}
    trainer = make(
        None, 1, model=str(tmp_path / "untied"), tuning="full", agent_learning_rate=1e-3, max_steps=2, save_steps=0,
        vllm_args={"max_model_len": 256}, vllm_start_timeout=1200.0, **spawned,
    )  # fmt: skip
    before = [parameter.detach().clone() for parameter in trainer.team.agents[0].parameters]
    trainer.train()
    assert_agree(1, [1, 2])
    changes = [(p - q).abs().max() for p, q in zip(trainer.team.agents[0].parameters, before, strict=True)]
    assert min(changes) > 5e-4  # a step is 1e-3
