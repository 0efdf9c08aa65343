"""Activations are made again in the backward pass: less is kept, and no gradient changes by a bit."""

import copy
import weakref

import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config
from transformers.activations import LinearActivation, SiLUActivation
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.llama.modeling_llama import LlamaMLP

from mlrl.models import language_model
from mlrl.models.base import Base, Policy
from mlrl.models.prefix_tree import PrefixTree
from mlrl.models.recompute import GatedForward, RemadeGated, remake_activations
from mlrl.preference.dropout import adapter_dropout
from tests.tiny import tiny_model

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def policy(kind: str, tuning: str, monkeypatch=None, dropout: float = 0.0) -> Policy:
    """A policy; with `monkeypatch`, of a model that keeps everything."""
    if monkeypatch is not None:
        monkeypatch.setattr(language_model, "remake_activations", lambda model: None)
    base = Base(tiny_model(kind), kind)
    if tuning == "full":
        return Policy(base, None)
    base.add_adapter("agent_0", LoraConfig(**LORA, lora_dropout=dropout), seed=0)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(7)
        for parameter in base.adapter_parameters("agent_0"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return Policy(base, "agent_0")


def backward(policy: Policy) -> tuple[list[torch.Tensor], int]:
    """Gradients of a tree's log-probabilities, and the bytes that the forward pass kept for them."""
    tree = PrefixTree()
    root = tree.add(range(20, 32))
    for k in range(3):
        tree.add([40 + k, *range(50, 60 + k)], root, scored=True, key=k)
    own = {p.untyped_storage().data_ptr() for p in policy.base.model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with policy.use():
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logprobs = policy.logprobs(tree, 0.9)[0].logprobs_L
        (logprobs * torch.linspace(-1, 2, len(logprobs))).sum().backward()
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    return gradients, sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize(("tuning", "most"), [("lora", 0.85), ("full", 0.95)])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_less_is_kept_and_gradients_are_the_same(kind, tuning, most, monkeypatch):
    ours, our_bytes = backward(policy(kind, tuning))
    theirs, their_bytes = backward(policy(kind, tuning, monkeypatch))
    assert our_bytes <= most * their_bytes
    assert len(ours) == len(theirs) > 10
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert all(one.abs().sum() > 0 for one in ours)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_nothing_outlives_its_use(checkpointing):
    made = policy("llama", "lora")
    if checkpointing:
        made.base.enable_gradient_checkpointing()
    wide = []
    for layer in made.base.language_model.backbone.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda module, args, out: wide.append(weakref.ref(out)))
    tree = PrefixTree()
    tree.add([40, 41, 42], tree.add(range(20, 32)), scored=True)
    with made.use():
        loss = made.logprobs(tree, 1.0)[0].logprobs_L.sum()
        kept = [one() is not None for one in wide]
        assert not any(kept) if checkpointing else all(kept)
        loss.backward()
    assert not any(one() is not None for one in wide)  # though the loss still holds its graph
    assert all(p.grad.abs().sum() > 0 for p in made.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_checkpointing_gives_the_same(dtype, monkeypatch):
    results = []
    for plain in (None, monkeypatch):
        made = policy("llama", "lora", plain)
        made.base.model.to(dtype)
        made.base.enable_gradient_checkpointing()
        results.append(backward(made)[0])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_with_dropout_what_the_adapter_saw_is_kept(monkeypatch):
    results = []
    for plain in (None, monkeypatch):
        made = policy("llama", "lora", plain, dropout=0.3)
        with adapter_dropout(made, seed=5):
            results.append(backward(made)[0])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    without, _ = backward(policy("llama", "lora"))
    assert not torch.equal(results[0][0], without[0])


def test_a_second_backward_pass_gives_the_same_again():
    made = policy("llama", "lora")
    tree = PrefixTree()
    tree.add([40, 41, 42], tree.add(range(20, 32)), scored=True)
    with made.use():
        loss = made.logprobs(tree, 1.0)[0].logprobs_L.sum()
        first = torch.autograd.grad(loss, made.parameters(), retain_graph=True)
        partly = torch.autograd.grad(loss, made.parameters()[:3], retain_graph=True)
        last = torch.autograd.grad(loss, made.parameters()[-2:], retain_graph=True)  # of `down` alone
        again = torch.autograd.grad(loss, made.parameters())
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(first, partly, strict=False))
    assert all(torch.equal(one, other) for one, other in zip(first[-2:], last, strict=True))


def test_what_changes_after_the_forward_pass_is_an_error_not_a_wrong_gradient():
    made = policy("llama", "lora")
    given = {}
    mlp = made.base.language_model.backbone.layers[0].mlp
    mlp.gate_proj.register_forward_hook(lambda module, args, out: given.update(gate=out))
    tree = PrefixTree()
    tree.add([40, 41, 42], tree.add(range(20, 32)), scored=True)
    with made.use():
        loss = made.logprobs(tree, 1.0)[0].logprobs_L.sum()
        with torch.no_grad():
            given["gate"].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_product_that_somebody_changed_is_kept_as_it_is(monkeypatch):
    results = []
    for plain in (None, monkeypatch):
        made = policy("llama", "lora", plain)
        for layer in made.base.language_model.backbone.layers:
            layer.mlp.down_proj.register_forward_pre_hook(lambda module, args: (args[0].mul_(1.5),))
        results.append(backward(made)[0])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_product_that_is_used_elsewhere_too_has_both_gradients(monkeypatch):
    results = []
    for plain in (None, monkeypatch):
        made = policy("llama", "lora", plain)
        products = []
        for layer in made.base.language_model.backbone.layers:
            layer.mlp.down_proj.register_forward_hook(lambda module, args, out, kept=products: kept.append(args[0]))
        tree = PrefixTree()
        tree.add([40, 41, 42], tree.add(range(20, 32)), scored=True)
        with made.use():
            loss = made.logprobs(tree, 1.0)[0].logprobs_L.sum()
            results.append(torch.autograd.grad(loss + sum(p.square().sum() for p in products), made.parameters()))
        assert len(products) == 2
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


class Calls(TorchDispatchMode):
    """Counts calls of the operators of one name."""

    def __init__(self, name: str):
        super().__init__()
        self.name, self.count = name, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket is getattr(torch.ops.aten, self.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_the_backward_pass_runs_an_activation_once_more(tuning):
    made = policy("llama", tuning)
    with Calls("silu") as calls:
        backward(made)
    assert calls.count == 2 * len(made.base.language_model.backbone.layers)


class Doubled(nn.SiLU):
    """Derived from a known activation, and another one."""

    def forward(self, x):
        return 2 * super().forward(x)


def hooked_silu() -> nn.Module:
    act = nn.SiLU()
    act.register_forward_hook(lambda module, args, out: out * 3)
    return act


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("make", [nn.SiLU, SiLUActivation, nn.GELU, LinearActivation, Doubled, hooked_silu])
def test_gradients_of_a_remade_product_are_those_of_autograd(make, overwrite, dtype):
    generator = torch.Generator().manual_seed(0)
    gate, up, upstream = (torch.randn(5, 8, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))
    gate, up, act, given = gate.requires_grad_(), up.requires_grad_(), make(), upstream.clone()
    product = act(gate) * up
    expected = torch.autograd.grad(product, (gate, up), upstream)
    with torch.no_grad():
        remade = RemadeGated(act, gate, up)
        assert torch.equal(remade.value(), product)
        assert all(map(torch.equal, remade.gradients(given, overwrite), expected))
    assert overwrite or torch.equal(given, upstream)


class ClampedMLP(LlamaMLP):
    """Has the parts of a gated MLP, and does something of its own with them."""

    def forward(self, x):
        return self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(max=7.0))


def test_other_mlps_stay_as_they_are():
    config = tiny_model("llama").config
    model = nn.Sequential(ClampedMLP(config), LlamaMLP(config), Gemma2MLP(Gemma2Config(hidden_size=8, head_dim=4)))
    remake_activations(model)
    assert ["forward" in vars(mlp) for mlp in model] == [False, True, True]


def test_a_model_is_set_up_once_and_a_copy_runs_its_own_weights():
    model = tiny_model("llama")
    for _ in range(2):
        remake_activations(model)
    assert isinstance(model.model.layers[0].mlp.forward, GatedForward)
    assert isinstance(model.model.layers[0].mlp.forward.mlp, LlamaMLP)
    twin = copy.deepcopy(model)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        twin.model.layers[0].mlp.down_proj.weight.zero_()
        assert not torch.equal(twin(ids).logits, model(ids).logits)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_query_heads_as_queries_of_their_key_head(groups):
    """Values and gradients of a tree's attention equal those of its paths, one at a time, with keys repeated."""
    generator = torch.Generator().manual_seed(0)
    tree = PrefixTree()
    root = tree.add(range(4))
    inner = tree.add(range(10, 13), root)
    leaves = [tree.add([20 + k, *range(30, 30 + k)], parent, key=k) for k, parent in enumerate((root, inner, inner))]
    packed = tree.pack("cpu")
    tokens = packed.input_ids.shape[1]
    states = [
        torch.randn(1, heads, tokens, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (2 * groups, 2, 2)
    ]
    upstream = torch.randn(tokens, 2 * groups, 8, generator=generator, dtype=torch.float64)
    ours = packed.attention.attend(0, *states, 0.3, None)[0]
    our_gradients = torch.autograd.grad((ours * upstream).sum(), states)
    total = 0.0
    for leaf in [*leaves, inner, root]:
        path = torch.tensor(packed.paths[leaf])
        query, key, value = (x[:, :, path] for x in states)
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3)
        own = len(tree.segments[leaf].token_ids)  # each token once, in its own segment
        theirs = out[0].transpose(0, 1)[-own:]
        torch.testing.assert_close(ours[path[-own:]], theirs, rtol=1e-12, atol=1e-12)
        total = total + (theirs * upstream[path[-own:]]).sum()
    for one, other in zip(our_gradients, torch.autograd.grad(total, states), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
