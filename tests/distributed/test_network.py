"""launch.sh on two machines: one command a machine, one group of processes."""

import json
import subprocess

import pytest

from tests.distributed.launching import ROOT, launch
from tests.distributed.network import INTERFACE, launch_on, two_machines
from tests.tiny import save_tiny

SUM = """
import os, torch.distributed as dist, torch
dist.init_process_group("gloo")
total = torch.tensor(dist.get_rank() + 1.0)
dist.all_reduce(total)
print("rank", dist.get_rank(), "local", os.environ["LOCAL_RANK"], "of", dist.get_world_size(), "total", total.item(),
      "by", os.environ["GLOO_SOCKET_IFNAME"], flush=True)
dist.destroy_process_group()
"""

TASK = """
from mlrl import Task

def reward(first, second):
    return [len(set(a)) / 10 + len(set(b)) / 20 for a, b in zip(first, second)]

rows = [{"prompt": prompt} for prompt in ("The sea", "a town", "Why?", "go", "x y z", "home")]
task = Task(train_dataset=rows, reward_func=reward)
"""


@pytest.fixture
def machines():
    with two_machines() as both:
        yield both


@pytest.mark.slow
def test_processes_of_two_machines_form_one_group(machines, tmp_path):
    (tmp_path / "probe.py").write_text(SUM)
    finished = launch_on(machines, ["probe.py"], tmp_path, processes=1, timeout=300)
    for rank, machine in enumerate(finished):
        assert machine.returncode == 0, machine
        # 1 + 2; the interface is found from the route to the first machine
        assert machine.stdout.strip() == f"rank {rank} local 0 of 2 total 3.0 by {INTERFACE}"


@pytest.mark.slow
def test_two_machines_train_as_one_does(machines, tmp_path):
    """Each agent sharded by ZeRO-3 over the two ranks of its machine; one run folder, the numbers of one process."""
    model = save_tiny(tmp_path / "model")
    (tmp_path / "task.py").write_text(TASK)
    small = "--max_new_tokens 8 --num_generations 2 --rollout_batch_size 2 --eval_interval 0 --agent_learning_rate 1e-3"
    flags = ["--task", str(tmp_path / "task.py"), "--agent_model", model, *small.split()]
    alone = launch("train/magrpo.py", [*flags, "--output_dir", str(tmp_path / "alone")], 1, options=["--cpu"])
    assert alone.returncode == 0, alone
    shared = tmp_path / "disk"
    shared.mkdir()
    command = ["--config_file", ROOT / "accelerate_configs/cpu_zero3.yaml", "train/magrpo.py", *flags]
    finished = launch_on(machines, [*command, "--placement", "split", "--output_dir", "runs"], shared, 2, timeout=240)
    for machine in finished:
        assert machine.returncode == 0, machine
    assert "4 ranks" in finished[0].stdout and "ZeRO-3" in finished[0].stdout
    assert "algorithm" in finished[0].stdout and "algorithm" not in finished[1].stdout  # one process speaks for all
    [expected], [found] = (list(place.glob("*/metrics.jsonl")) for place in (tmp_path / "alone", shared / "runs"))
    rows, right = ([json.loads(line) for line in file.read_text().splitlines()] for file in (found, expected))
    assert len(rows) == len(right) == 3
    for row, other in zip(rows, right, strict=True):
        for name in other:
            if not name.startswith(("time/", "memory/", "throughput/")):
                assert row[name] == pytest.approx(other[name], rel=1e-4, abs=1e-4), name
    assert sorted(path.name for path in (found.parent / "agents").iterdir()) == ["agent_0", "agent_1"]


def test_namespaces_are_gone_afterwards():
    with two_machines() as both:
        names = {machine.namespace for machine in both}
        assert names <= namespaces()
        ping = f"exec 3<>/dev/tcp/{both[1].address}/9"  # nobody listens: refused by the other side, so it was reached
        command = ["ip", "netns", "exec", both[0].namespace, "bash", "-c", ping]
        assert "refused" in subprocess.run(command, capture_output=True, text=True, timeout=10).stderr
    assert not names & namespaces()


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return {line.split()[0] for line in listed.splitlines()}
