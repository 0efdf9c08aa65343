"""A frozen layer with its adapter as one autograd function gives what PEFT's own forward gives, and keeps no more."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from mlrl.models import lora
from mlrl.models.lora import AdapterRouter

T, IN, OUT, RANK = 7, 12, 20, 4
CLOSE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2e-2}


class Scaled(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x):
        return super().forward(x) * 3


def adapted(linear: nn.Module, dropout: float = 0.0, scale: int = 3) -> nn.Module:
    """A model of one layer, `linear`, with an adapter `first` whose both sides are random."""
    config = LoraConfig(r=RANK, lora_alpha=RANK * scale, target_modules=["linear"], lora_dropout=dropout)
    model = get_peft_model(nn.ModuleDict({"linear": linear}), config, adapter_name="first").base_model.model
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(generator=torch.Generator().manual_seed(len(name)))
    return model


def linear(dtype: torch.dtype = torch.float32, bias: bool = True, kind: type = nn.Linear) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(IN, OUT, bias=bias, dtype=dtype)


def run(model: nn.Module, route: bool, dtype: torch.dtype, x_grad: bool = True, checkpointing: bool = False):
    """Output of (1, T, in) random tokens, the gradient of x if it has one, and those of the weights by name."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, T, IN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(x_grad)
    upstream = torch.randn(1, T, OUT, generator=generator, dtype=torch.float64).to(dtype)
    router = AdapterRouter(model)
    layer = model["linear"]
    try:
        if route:
            with router.use("first"):
                out = checkpoint(layer, x, use_reentrant=False) if checkpointing else layer(x)
                out.backward(upstream)
        else:
            out = layer(x)
            out.backward(upstream)
    finally:
        router.release()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return out.detach(), {**gradients, **({"x": x.grad} if x.grad is not None else {})}


def assert_same(ours, theirs, tolerance: float) -> None:
    assert ours[1].keys() == theirs[1].keys()
    for one, other in ((ours[0], theirs[0]), *((ours[1][name], theirs[1][name]) for name in theirs[1])):
        assert one.dtype == other.dtype
        assert (one - other).norm() <= tolerance * other.norm() > 0


@pytest.fixture
def calls(monkeypatch):
    """The layers that went through the function."""
    seen = []
    real = lora.lora_linear
    monkeypatch.setattr(lora, "lora_linear", lambda x, layer, *rest: (seen.append(layer), real(x, layer, *rest))[1])
    return seen


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_peft(dtype, bias, checkpointing, calls):
    model = adapted(linear(dtype, bias))
    model["linear"].lora_A.float(), model["linear"].lora_B.float()  # as PEFT keeps them under a bfloat16 base
    if dtype == torch.float64:
        model.double()
    ours = run(copy.deepcopy(model), True, dtype, checkpointing=checkpointing)
    assert len(calls) == 1 + checkpointing
    assert len(ours[1]) == 3
    assert_same(ours, run(model, False, dtype), CLOSE[dtype])


@pytest.mark.parametrize("frozen", ["x", "lora_A", "lora_B", "x lora_A", "x lora_B", "lora_A lora_B"])
def test_only_what_is_trained_gets_a_gradient(frozen, calls):
    model = adapted(linear())
    for name, weight in model.named_parameters():
        if any(part in name for part in frozen.split()):
            weight.requires_grad_(False)
    ours = run(copy.deepcopy(model), True, torch.float32, "x" not in frozen.split())
    assert len(calls) == 1
    assert len(ours[1]) == 3 - len(frozen.split())
    assert_same(ours, run(model, False, torch.float32, "x" not in frozen.split()), 1e-6)


def trainable(model):
    model["linear"].base_layer.weight.requires_grad_(True)


def trainable_bias(model):
    model["linear"].base_layer.bias.requires_grad_(True)


def hooked(model):
    model["linear"].base_layer.register_forward_hook(lambda module, args, out: out * 2)


def hooked_before(model):
    model["linear"].base_layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def sharded(model):
    """As DeepSpeed marks a weight of which every rank holds a part."""
    model["linear"].base_layer.weight.ds_tensor = None


@pytest.mark.parametrize("change", [trainable, trainable_bias, hooked, hooked_before, sharded])
def test_other_layers_run_their_own_forward(change, calls):
    model = adapted(linear())
    change(model)
    twin = adapted(linear())
    change(twin)
    ours = run(model, True, torch.float32)
    assert not calls
    assert_same(ours, run(twin, False, torch.float32), 1e-6)


def test_a_subclass_runs_its_own_forward(calls):
    ours = run(adapted(linear(kind=Scaled)), True, torch.float32)
    assert not calls
    assert_same(ours, run(adapted(linear(kind=Scaled)), False, torch.float32), 1e-6)


def test_active_dropout_is_applied(calls):
    model = adapted(linear(), dropout=0.5)
    results = []
    for route, twin in ((True, copy.deepcopy(model)), (False, model)):
        torch.manual_seed(0)
        results.append(run(twin.train(), route, torch.float32))
    assert not calls
    assert_same(*results, 1e-6)
    run(model.eval(), True, torch.float32)
    assert len(calls) == 1


@pytest.mark.parametrize("frozen", [(), ("lora_A",), ("lora_B",), ("lora_A", "lora_B")])
def test_no_more_is_kept(frozen, monkeypatch):
    """Beside the weights: x and x·Aᵀ, each only for the side that is trained."""
    counts = []
    for plain in (True, False):
        model = adapted(linear())
        weights = {weight.data_ptr() for weight in model.parameters()}
        for name, weight in model.named_parameters():
            if any(part in name for part in frozen):
                weight.requires_grad_(False)
        kept = {}

        def keep(tensor, kept=kept, weights=weights):
            if tensor.data_ptr() not in weights:
                kept[tensor.data_ptr()] = tensor
            return tensor

        if not plain:
            monkeypatch.setattr(lora, "is_plain", lambda layer: False)
        x = torch.randn(1, T, IN, requires_grad=True)
        with AdapterRouter(model).use("first"), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = model["linear"](x)
        assert out.requires_grad
        counts.append(sum(tensor.numel() for tensor in kept.values()))
    assert counts[0] == T * IN * ("lora_A" not in frozen) + T * RANK * ("lora_B" not in frozen)
    assert counts[0] <= counts[1]


def test_a_second_backward_pass_gives_the_same_again():
    model = adapted(linear())
    x = torch.randn(1, T, IN, requires_grad=True)
    weights = [x, *(p for p in model.parameters() if p.requires_grad)]
    with AdapterRouter(model).use("first"):
        loss = model["linear"](x).square().sum()
        first = torch.autograd.grad(loss, weights, retain_graph=True)
        again = torch.autograd.grad(loss, weights)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_what_changes_after_the_forward_pass_is_an_error_not_a_wrong_gradient():
    model = adapted(linear())
    x = torch.randn(1, T, IN)
    with AdapterRouter(model).use("first"):
        loss = model["linear"](x).sum()
        x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
