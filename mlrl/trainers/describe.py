"""What a run says about itself before its first step, and what it costs in memory."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import mlrl
from mlrl.config import TaskArguments, TrainingConfig
from mlrl.run_folder import RunFolder
from mlrl.wording import counted

if TYPE_CHECKING:
    from mlrl.trainers.base import Trainer


def describe_run(trainer: Trainer) -> dict[str, Any]:
    """The lines of the header that all algorithms share."""
    trained, every = trainer.team.num_parameters()
    names = list(dict.fromkeys(agent.source.name for agent in trainer.team.agents))
    dtype = str(trainer.dtype).removeprefix("torch.")
    steps = "until the data ends" if trainer.total_steps is None else f"{trainer.total_steps:,}"
    args = trainer.args
    adapters = {"adapters": _adapters(args)} if args.tuning == "lora" else {}
    return {
        "algorithm": trainer.algorithm,
        "task": trainer.task.name or "task",
        "agents": f"{trainer.num_agents} × {', '.join(names)}",
        "trained": f"{trained:,} of {every:,} parameters ({args.tuning}, {dtype})",
        **adapters,
        "device": _devices(trainer),
        "steps": steps,
        "run folder": trainer.run_folder.path,
    }


def _adapters(args: TrainingConfig) -> str:
    """What LoRA adapts."""
    owner = "one for all agents" if args.share_parameters else "one an agent"
    given = args.lora_target_modules
    targets = given if isinstance(given, str) else ", ".join(given)
    return f"{owner}, rank {args.lora_rank}, alpha {args.lora_alpha:g}, on {targets}"


def next_commands(args: TrainingConfig, folder: RunFolder) -> dict[str, str]:
    """How to look at a run and how to play its agents again, as typed in the present folder."""
    python = _shown(sys.executable)
    commands = {"report": [python, "-m", "mlrl.report", str(folder.path)]}
    script = Path(mlrl.__file__).parents[1] / "train/evaluate.py"
    if isinstance(args, TaskArguments) and script.is_file():  # a task that was made in Python has no name
        agents = ["--config", str(folder.config), "--agents_dir", str(folder.agents)]
        commands["evaluate"] = [python, _shown(script), *agents]
    return {name: shlex.join(words) for name, words in commands.items()}


def _shown(path: str | Path) -> str:
    """A path as seen from here, where it lies below; symbolic links are left as they are."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _devices(trainer: Trainer) -> str:
    launch, world = trainer.launch, trainer.world
    device = f"{launch.device.type}, {counted(torch.get_num_threads(), 'thread')}"
    if world.size == 1:
        return device
    sharding = f", ZeRO-{launch.zero_stage}" if launch.zero_stage else ""
    return f"{world.size} ranks ({device}), {trainer.args.placement}{sharding}"


def summarize_run(trainer: Trainer) -> dict[str, Any]:
    """What a run took, for its last lines; all ranks call it together."""
    peak = max(trainer.world.gather(peak_memory_gb(trainer.launch.device)))
    summary = {"peak memory": f"{peak:.2f} GB" + (" a rank" if trainer.world.size > 1 else "")}
    return summary if trainer.profile is None else summary | {"time": trainer.profile.shares()}


def peak_memory_gb(device: torch.device) -> float:
    """Most memory used so far, in GB: of the GPU, or of this process where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
