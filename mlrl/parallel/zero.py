"""DeepSpeed ZeRO for one entity over its own ranks (2010.02054 offloads; stages as in 1910.02054).

`ZeroEngine` optimizes weights: stage 1 shards the optimizer's states and float32 masters, stage 2 the gradients too,
stage 3 the weights as well. `ShardedBase` shards a network that is not trained itself, as the frozen base under LoRA
adapters at stage 3; the adapters, which are small, then lie whole on every rank under a data-parallel `Engine`.

Engines are made directly, over the entity's process group, from the ZeRO settings of the launch configuration alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mlrl.parallel.engine import OptimizerSettings
from mlrl.parallel.group import Group
from mlrl.profiling import span


class ZeroEngine:
    """Weights under DeepSpeed ZeRO; the interface of `mlrl.parallel.engine.Engine`.

    Args:
        parameters: those trained.
        module: what owns them all; its forward passes then go through `forward`, and at stage 3 its parts fetch their
            weights as they run. None: they are part of something that is not trained, as adapters are.
        zero: `zero_optimization` settings.
        group: the ranks that hold this entity.
    """

    lockstep = True

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        settings: OptimizerSettings,
        zero: dict[str, Any],
        group: Group,
        module: nn.Module | None = None,
    ):
        self.parameters, self.settings, self.group, self.updates = list(parameters), settings, group, 0
        self._passes_losses = module is None
        self.stage = zero["stage"]
        optimizer = settings.make_optimizer(self.parameters)
        config = _config(zero, self.parameters[0].dtype, settings.max_grad_norm)
        self.engine = _initialize(module or _Weights(self.parameters), config, group, optimizer)
        self.optimizer = self.engine.optimizer

    @property
    def forward(self) -> nn.Module:
        """What to call in place of the module."""
        return self.engine

    def backward(self, loss: torch.Tensor, last: bool = True) -> None:
        """Adds a loss's gradients; on the `last` of an update they are complete and sharded over the ranks."""
        self.engine.set_gradient_accumulation_boundary(last)
        loss = loss * self.group.size  # DeepSpeed takes means over ranks, losses here are sums
        self.engine.backward(self.engine(loss) if self._passes_losses else loss)
        if not last:
            self.engine.step()  # counts a micro-batch

    def grad_norm(self) -> float:
        """L2 norm of the gradients of all ranks; inf where one is not finite."""
        if self.stage == 3:
            from deepspeed.runtime.utils import combine_grad_norm_groups

            norm = float(combine_grad_norm_groups(self.optimizer._get_norm_groups()))
        else:
            norm = float(self.optimizer.scaled_global_norm())
        self._norm = norm if norm >= 0 else math.inf  # DeepSpeed's word for NaN and inf is -1
        return self._norm

    def step(self, grad_norm: float) -> None:
        """Clips by `grad_norm` (as measured before, perhaps with that of others) and updates the weights."""
        limit = self.settings.max_grad_norm
        # DeepSpeed compares its own norm with this
        self.optimizer.clip_grad = limit * self._norm / grad_norm if limit and grad_norm > limit else 0.0
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        with span("ZeRO step"):
            self.engine.step()
        self.updates += 1

    def zero_grad(self) -> None:
        """Drops what has accumulated, by the way DeepSpeed itself takes when a gradient is not finite."""
        for gradients in self.optimizer.averaged_gradients.values():
            for gradient in gradients or []:
                gradient.fill_(math.inf)
        norms = getattr(self.optimizer, "norm_for_param_grads", {})  # what it looks at where gradients are offloaded
        for key, norm in norms.items():
            norms[key] = torch.full_like(norm, math.inf) if torch.is_tensor(norm) else math.inf
        self.engine.step()

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return self.settings.rate(self.updates)

    def state(self, kind: str) -> Iterator[torch.Tensor]:
        """As of `mlrl.parallel.engine.Engine`: put together from the ranks, one parameter after another."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        held = self.optimizer.optimizer.state.get(self._flat_masters()[0], {})
        for parameter in self.parameters:
            if kind == "master":
                yield safe_get_full_fp32_param(parameter)
            elif kind == "step":
                yield torch.as_tensor(held.get("step", 0.0), dtype=torch.float32).clone()
            elif held:
                yield safe_get_full_optimizer_state(parameter, kind)
            else:
                yield torch.zeros(getattr(parameter, "ds_shape", parameter.shape))

    @torch.no_grad()
    def load_state(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """As of `mlrl.parallel.engine.Engine`: every rank keeps its part."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if kind == "step":
            self._make_moments(max(float(tensor) for tensor in tensors))
            return
        if kind != "master" and not self.optimizer.optimizer.state:
            return
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            value = tensor.to(self._flat_masters()[0].device)
            if kind == "master":
                safe_set_full_fp32_param(parameter, value)
                if self.stage < 3:
                    parameter.data.copy_(tensor)
            else:
                safe_set_full_optimizer_state(parameter, value, kind)
        if kind == "master" and self.stage == 3:
            self._write_back()

    def _flat_masters(self) -> list[torch.Tensor]:
        """This rank's part of the float32 masters, as DeepSpeed keeps it."""
        name = "fp32_partitioned_groups_flat" if self.stage == 3 else "single_partition_of_fp32_groups"
        return getattr(self.optimizer, name)

    def _make_moments(self, step: float) -> None:
        """AdamW's state as after `step` updates, its moments still zero; DeepSpeed makes it in the first step only."""
        states = self.optimizer.optimizer.state
        states.clear()
        if step == 0:
            return
        for master in self._flat_masters():
            moments = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
            states[master] = {"step": torch.tensor(step), **moments}
        if self.stage < 3:
            self.optimizer._hp_optimizer_states_linked = False
            for parameter in self.parameters:
                if parameter._hp_mapping is not None:
                    parameter._hp_mapping.optim_fragment = None
            self.optimizer._lazy_init_hp_params_optimizer_state()

    def _write_back(self) -> None:
        """Stage 3: the weights from their masters, as after a step."""
        optimizer = self.optimizer
        optimizer._partition_all_parameters()
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)

    @property
    def shard(self) -> Shard | None:
        """The weights as they are sharded; None below stage 3, where every rank has them whole."""
        return (
            Shard(list(self.engine.module.parameters()), self.optimizer.parameter_offload) if self.stage == 3 else None
        )


class _Weights(nn.Module):
    """Weights that are used elsewhere; a loss passes through, which for DeepSpeed is the forward pass."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        super().__init__()
        self.weights = nn.ParameterList(parameters)

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        return loss


class Shard:
    """Weights of which every rank holds a part."""

    def __init__(self, parameters: Sequence[nn.Parameter], offload: Any):
        self.parameters, self.offload = list(parameters), offload

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Every rank has all weights inside; a call of all ranks together.

        The hooks that fetch and release a layer's weights as it runs sleep meanwhile: they would release what the next
        token needs, and sampling would leave a trace of fetches that the training pass does not follow.
        """
        import deepspeed
        from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

        self.offload.release_backward_leftovers()
        self.offload.get_param_coordinator()._clean_inflight_param_registry()
        for parameter in self.parameters:
            parameter.ds_active_sub_modules.clear()
        self.offload.pre_sub_module_forward_function = FWD_MODULE_STACK.append  # which a hook pops afterwards
        self.offload.post_sub_module_forward_function = lambda module: None
        try:
            with deepspeed.zero.GatheredParameters(self.parameters):
                yield
        finally:
            del self.offload.pre_sub_module_forward_function, self.offload.post_sub_module_forward_function


def shard_frozen(module: nn.Module, zero: dict[str, Any], group: Group) -> Shard:
    """Shards a network that is not trained; parts added to it afterwards (adapters) stay whole on every rank."""
    parameters = list(module.parameters())
    engine = _initialize(module, _config(zero, parameters[0].dtype, None), group, None)
    return Shard(parameters, engine.optimizer)


def fetch_with(module: nn.Module, parameter: nn.Parameter) -> None:
    """A module reads a weight of another one in its own forward (a head whose weight is used by itself)."""
    import deepspeed

    deepspeed.zero.register_external_parameter(module, parameter)


def count(parameter: nn.Parameter) -> int:
    """Elements of a weight over all ranks."""
    return parameter.ds_numel if hasattr(parameter, "ds_numel") else parameter.numel()


def own_part(parameter: nn.Parameter) -> torch.Tensor:
    """What this rank keeps of a weight: its part where it is sharded, else all of it."""
    return parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter


@torch.no_grad()
def set_own_part(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Puts back what `own_part` gave, of this weight or of another of its shape that is sharded alike."""
    if hasattr(parameter, "ds_tensor"):
        parameter.partition()  # a whole copy that is kept here would hide the new value
        parameter.ds_tensor.copy_(value)
    else:
        parameter.copy_(value)


def whole_of_parts(parameter: nn.Parameter, part: torch.Tensor, group: Group) -> torch.Tensor:
    """The whole weight from what `own_part` gave on each rank; all ranks of the group call it."""
    if not hasattr(parameter, "ds_tensor"):
        return part
    flat = torch.cat([one.flatten() for one in group.gather(part)])
    return flat[: parameter.ds_numel].view(parameter.ds_shape)


def part_of_whole(parameter: nn.Parameter, whole: torch.Tensor, group: Group) -> torch.Tensor:
    """What `own_part` would give of a whole weight."""
    if not hasattr(parameter, "ds_tensor"):
        return whole
    size = parameter.ds_tensor.numel()
    flat = torch.zeros(size * group.size, dtype=whole.dtype)
    flat[: whole.numel()] = whole.flatten()
    return flat[group.index * size : (group.index + 1) * size].view(parameter.ds_tensor.shape)


class _Ranks:
    """The entity's ranks, in the words that DeepSpeed asks."""

    def __init__(self, group: Group):
        self.group = group

    def get_data_parallel_group(self):
        return self.group.tensors

    def get_data_parallel_group_ranks(self) -> list[int]:
        return list(self.group.ranks)

    def get_data_parallel_world_size(self) -> int:
        return self.group.size

    def get_data_parallel_rank(self) -> int:
        return self.group.index

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_group(self):
        return None


def _config(zero: dict[str, Any], dtype: torch.dtype, max_grad_norm: float | None) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "gradient_clipping": max_grad_norm or 0.0,
        "bf16": {"enabled": dtype == torch.bfloat16, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


def _initialize(module: nn.Module, config: dict[str, Any], group: Group, optimizer: Any):
    import deepspeed
    from deepspeed import comm
    from deepspeed.runtime.zero import partitioned_param_coordinator

    # a check that all processes run the same layers, of all of the launch: agents on ranks of their own do not
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda ints: None
    if not comm.is_initialized():
        # compiled on first use for reductions between CPU processes, which hangs where a compile was cut short before
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        comm.init_distributed(auto_mpi_discovery=False)
    mpu = _Ranks(group) if group.tensors is not None else None
    with _barriers_within(group):
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, mpu=mpu)
    return engine


@contextmanager
def _barriers_within(group: Group) -> Iterator[None]:
    """DeepSpeed's set-up waits for all processes of the launch; other ranks may have other things to set up."""
    from deepspeed import comm

    everyone = comm.barrier
    comm.barrier = lambda *args, **kwargs: group.barrier()
    try:
        yield
    finally:
        comm.barrier = everyone
