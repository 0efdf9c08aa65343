"""Several ranks and one server: the first rank of each agent speaks to it, and the numbers are those of one process."""

import json

import pytest

from tests.distributed.launching import ROOT, launch
from tests.rollout.fake_vllm import FakeVLLM

pytestmark = pytest.mark.slow

TASK = """
from mlrl import Task

def reward(first, second):
    return [float(sum(map(ord, text)) % 7) for text in first]

task = Task(train_dataset=[{"prompt": "the sea"}, {"prompt": "a town"}], reward_func=reward)
"""
SETTINGS = [
    *("--rollout_backend", "vllm", "--max_new_tokens", "3", "--num_generations", "3", "--rollout_batch_size", "1"),
    *("--lora_rank", "2", "--agent_learning_rate", "0.01", "--eval_interval", "0", "--save_steps", "0"),
]
AHEAD = ["--async_rollouts", "1", "--max_steps", "4", "--num_train_epochs", "2"]
SAME = ["turn_1/reward_mean", "agent_0/grad_norm", "agent_1/grad_norm"]


def run(model, folder, name, processes, config="cpu", placement="shared", more=()):
    """Metrics of two steps, unless `more` says otherwise, and what the server was asked to load and to draw."""
    (folder / "task.py").write_text(TASK)
    places = ["--output_dir", str(folder), "--run_name", name, "--placement", placement]
    with FakeVLLM(model) as server:
        flags = ["--task", str(folder / "task.py"), "--agent_model", model, "--vllm_url", server.url, *places]
        done = launch(
            "train/magrpo.py",
            [*flags, *SETTINGS, *more],
            processes=processes,
            config_file=ROOT / f"accelerate_configs/{config}.yaml",
        )
        assert done.returncode == 0, done
        loads = [body["lora_name"].split(".")[0] for body in server.of("/v1/load_lora_adapter") if body]
        drawn = len(server.of("/v1/completions"))
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()], loads, drawn


@pytest.mark.parametrize(("config", "placement"), [("cpu", "shared"), ("cpu", "split"), ("cpu_zero3", "shared")])
def test_two_ranks_are_one(tiny_llama, tmp_path, config, placement):
    alone, loads, drawn = run(tiny_llama, tmp_path, "alone", 1)
    both, loads_of_both, drawn_of_both = run(tiny_llama, tmp_path, "both", 2, config, placement)
    assert drawn_of_both == drawn == 12  # 2 steps, 2 agents, 3 generations
    assert sorted(loads_of_both) == sorted(loads) == ["agent_0@1", "agent_0@2", "agent_1@1", "agent_1@2"]
    for one, other in zip(alone, both, strict=True):
        assert [other[name] for name in SAME] == pytest.approx([one[name] for name in SAME], rel=1e-3, abs=1e-4)
        assert all(other[f"agent_{agent}/rollout_kl"] < 1e-6 for agent in (0, 1))


@pytest.mark.parametrize(("config", "placement"), [("cpu", "shared"), ("cpu", "split"), ("cpu_zero3", "shared")])
def test_two_ranks_that_draw_one_step_ahead_are_one(tiny_llama, tmp_path, config, placement):
    alone, loads, drawn = run(tiny_llama, tmp_path, "alone", 1, more=AHEAD)
    both, loads_of_both, drawn_of_both = run(tiny_llama, tmp_path, "both", 2, config, placement, more=AHEAD)
    assert drawn_of_both == drawn == 24  # 4 steps, 2 agents, 3 generations
    assert sorted(loads_of_both) == sorted(loads)
    assert loads[-2:] == ["agent_0@3", "agent_1@3"]  # the last batch is drawn from the weights before the last but one
    for line in both:
        assert line["rollout_staleness"] == min(1, line["step"] - 1)
    for one, other in zip(alone, both, strict=True):
        assert [other[name] for name in SAME] == pytest.approx([one[name] for name in SAME], rel=1e-3, abs=1e-4)


def test_an_error_of_the_task_on_one_rank_ends_all(tiny_llama, tmp_path):
    """In its second thread, for which that of the other rank waits; of two ranks the last judges a single node."""
    body = TASK.replace("def reward", "import os\ncalls = []\ndef reward").replace(
        "    return", "    calls.append(1)\n    if os.environ['RANK'] == '1' and len(calls) == 3: 1 / 0\n    return"
    )
    (tmp_path / "task.py").write_text(body)
    places = ["--output_dir", str(tmp_path), "--run_name", "fails"]
    with FakeVLLM(tiny_llama) as server:
        flags = ["--task", str(tmp_path / "task.py"), "--agent_model", tiny_llama, "--vllm_url", server.url, *places]
        done = launch("train/magrpo.py", [*flags, *SETTINGS, *AHEAD], processes=2)
    assert done.returncode not in (0, None) and done.stderr.count("ZeroDivisionError") == 1, done
