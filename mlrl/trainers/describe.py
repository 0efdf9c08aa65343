"""What a run says about itself before its first step, and what it costs in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mlrl.trainers.base import Trainer


def describe_run(trainer: Trainer) -> dict[str, Any]:
    """The lines of the header that all algorithms share."""
    trained, every = trainer.team.num_parameters()
    names = list(dict.fromkeys(agent.source.name for agent in trainer.team.agents))
    dtype = str(trainer.dtype).removeprefix("torch.")
    steps = "until the data ends" if trainer.total_steps is None else f"{trainer.total_steps:,}"
    return {
        "algorithm": trainer.algorithm,
        "task": trainer.task.name or "task",
        "agents": f"{trainer.num_agents} × {', '.join(names)}",
        "trained": f"{trained:,} of {every:,} parameters ({trainer.args.tuning}, {dtype})",
        "device": _devices(trainer),
        "steps": steps,
        "run folder": trainer.run_folder.path,
    }


def _devices(trainer: Trainer) -> str:
    launch, world = trainer.launch, trainer.world
    device = f"{launch.device.type}, {torch.get_num_threads()} threads"
    if world.size == 1:
        return device
    sharding = f", ZeRO-{launch.zero_stage}" if launch.zero_stage else ""
    return f"{world.size} ranks ({device}), {trainer.args.placement}{sharding}"


def peak_memory_gb(device: torch.device) -> float:
    """Most memory used so far, in GB: of the GPU, or of this process where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
