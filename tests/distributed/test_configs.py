"""accelerate_configs: every file is one that accelerate knows, does what its name says, and starts."""

import re
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from tests.distributed.launching import ROOT, launch
from tests.distributed.network import launch_on, two_machines

FOLDER = ROOT / "accelerate_configs"
STAGES = {"cpu": 0, "cpu_zero2": 2, "cpu_zero3": 3, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "zero3_offload": 3}
STAGES["multi_node_zero3"] = 3

# Two AdamW steps of a tiny network on two ranks, from the settings that the file brings; prints the losses and how many
# weights this rank holds.
PROBE = """
import os, torch
from accelerate import PartialState
from mlrl.parallel.gloo_threads import let_gloo_threads_rest
state = PartialState(cpu=not torch.cuda.is_available())  # first: under DEEPSPEED it would else report one process
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
data = torch.randn(4, 8)[state.process_index * 2 :][:2]
optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
    import deepspeed
    from accelerate.utils import DeepSpeedPlugin
    zero = DeepSpeedPlugin().hf_ds_config.config["zero_optimization"]
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled on first use
    deepspeed.comm.init_distributed(auto_mpi_discovery=False)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    config["zero_force_ds_cpu_optimizer"] = False
    model, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
else:
    zero = {"stage": 0}
    model = torch.nn.parallel.DistributedDataParallel(module)
losses = []
for _ in range(2):
    loss = model(data).square().mean()
    model.backward(loss) if zero["stage"] else loss.backward()
    model.step() if zero["stage"] else optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
held = sum(getattr(p, "ds_tensor", p).numel() for p in module.parameters())
offload = zero.get("offload_param", {}).get("device")
words = ("PROBE", state.process_index, state.num_processes, zero["stage"], offload, held, *losses)
os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # in one piece, since ranks share the pipe
state.destroy_process_group()
let_gloo_threads_rest()
"""


def reference() -> list[list[float]]:
    """Losses of the two ranks at the two steps, in one process: the gradient is the mean of theirs."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    parts = torch.randn(4, 8).split(2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    losses = []
    for _ in range(2):
        per_rank = torch.stack([module(part).square().mean() for part in parts])
        per_rank.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(per_rank.tolist())
    return [list(pair) for pair in zip(*losses, strict=True)]


def check(stdout: str, name: str, rank: int) -> None:
    lines = [line.split()[1:] for line in re.findall(r"PROBE [^P\n]*", stdout)]
    index, world, stage, offload, held, *losses = next(line for line in lines if line[0] == str(rank))
    assert (index, world, stage) == (str(rank), "2", str(STAGES[name]))
    assert (offload == "cpu") == (name == "zero3_offload")
    # 8·8 + 8 + 8 + 1 = 81 weights; halves of each tensor under ZeRO-3: 32 + 4 + 4 + 1 (padded)
    assert held == ("41" if STAGES[name] == 3 else "81")
    assert list(map(float, losses)) == pytest.approx(reference()[rank], rel=1e-5)


def test_files_are_those_named():
    assert {file.stem for file in FOLDER.glob("*.yaml")} == set(STAGES)
    assert set(re.findall(r"^\| `(\w+)\.yaml`", (FOLDER / "README.md").read_text(), re.M)) == set(STAGES)


@pytest.mark.parametrize("name", STAGES)
def test_accelerate_knows_every_key(name):
    config = load_config_from_file(str(FOLDER / f"{name}.yaml"))  # refuses unknown keys
    options = vars(launch_command_parser().parse_args(["job.py"]))
    assert set(config.deepspeed_config) <= set(options), "accelerate drops unknown keys of this block without a word"
    assert config.use_cpu == name.startswith("cpu")
    assert config.mixed_precision == ("no" if name.startswith("cpu") else "bf16")
    assert (config.num_machines > 1) == (name == "multi_node_zero3")
    assert config.num_processes % config.num_machines == 0
    if STAGES[name]:
        assert config.distributed_type.value == "DEEPSPEED"
        assert config.deepspeed_config["zero_stage"] == STAGES[name]
        # any other starts the processes of all machines from the first, over ssh
        assert config.deepspeed_config["deepspeed_multinode_launcher"] == "standard"
        # accumulation and clipping come from the flags of a script
        assert not {"gradient_accumulation_steps", "gradient_clipping"} & set(config.deepspeed_config)
    else:
        assert config.distributed_type.value == "MULTI_GPU"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in STAGES if name != "multi_node_zero3"])
def test_two_processes_train_under_every_file(name, tmp_path):
    (tmp_path / "probe.py").write_text(PROBE)
    env = {"CUDA_VISIBLE_DEVICES": ""}  # the files for GPUs too: what they shard is the same
    finished = launch(tmp_path / "probe.py", processes=2, config_file=FOLDER / f"{name}.yaml", env=env, timeout=300)
    assert finished.returncode == 0, finished
    for rank in (0, 1):
        check(finished.stdout, name, rank)


@pytest.mark.slow
def test_two_machines_train_under_the_file_for_several(tmp_path: Path):
    (tmp_path / "probe.py").write_text(PROBE)
    words = ["--config_file", "accelerate_configs/multi_node_zero3.yaml", "probe.py"]
    with two_machines() as machines:
        finished = launch_on(machines, words, tmp_path, timeout=400)
    for rank, machine in enumerate(finished):
        assert machine.returncode == 0, machine
        check(machine.stdout, "multi_node_zero3", rank)
