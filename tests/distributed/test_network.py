"""launch.sh on two machines: one command a machine, one group of processes."""

import subprocess

import pytest

from tests.distributed.network import INTERFACE, launch_on, two_machines

SUM = """
import os, torch.distributed as dist, torch
dist.init_process_group("gloo")
total = torch.tensor(dist.get_rank() + 1.0)
dist.all_reduce(total)
print("rank", dist.get_rank(), "local", os.environ["LOCAL_RANK"], "of", dist.get_world_size(), "total", total.item(),
      "by", os.environ["GLOO_SOCKET_IFNAME"], flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def machines():
    with two_machines() as both:
        yield both


def test_processes_of_two_machines_form_one_group(machines, tmp_path):
    (tmp_path / "probe.py").write_text(SUM)
    finished = launch_on(machines, ["probe.py"], tmp_path, processes=1, timeout=300)
    for rank, machine in enumerate(finished):
        assert machine.returncode == 0, machine
        # 1 + 2; the interface is found from the route to the first machine
        assert machine.stdout.strip() == f"rank {rank} local 0 of 2 total 3.0 by {INTERFACE}"


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
