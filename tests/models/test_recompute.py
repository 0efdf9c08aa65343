"""Activations are made again in the backward pass: less is kept, and no gradient changes by a bit."""

import copy

import pytest
import torch
from peft import LoraConfig
from torch import nn

from mlrl.models import language_model
from mlrl.models.attention import SegmentGroup, scaled_dot_product
from mlrl.models.base import Base, Policy
from mlrl.models.prefix_tree import PrefixTree
from mlrl.models.recompute import _GatedForward, recipe_of, remake_activations
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


@pytest.mark.parametrize(("tuning", "most"), [("lora", 0.75), ("full", 0.95)])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_less_is_kept_and_gradients_are_the_same(kind, tuning, most, monkeypatch):
    ours, our_bytes = backward(policy(kind, tuning))
    theirs, their_bytes = backward(policy(kind, tuning, monkeypatch))
    assert our_bytes <= most * their_bytes
    assert len(ours) == len(theirs) > 10
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert all(one.abs().sum() > 0 for one in ours)


def test_layer_norms_are_made_again_too(monkeypatch):
    ours, our_bytes = backward(policy("gpt2", "lora"))
    theirs, their_bytes = backward(policy("gpt2", "lora", monkeypatch))
    assert our_bytes < their_bytes
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


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
        again = torch.autograd.grad(loss, made.parameters())
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(first, partly, strict=False))


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


class ClampedMLP(nn.Module):
    """Has the parts of a gated MLP, and does something of its own with them."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 16), nn.Linear(8, 16)
        self.down_proj, self.act_fn = nn.Linear(16, 8), nn.SiLU()

    def forward(self, x):
        return self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(max=0.05))


def test_other_mlps_stay_as_they_are():
    model = nn.Sequential(ClampedMLP())
    remake_activations(model)
    assert "forward" not in vars(model[0])


def test_a_model_is_set_up_once_and_a_copy_runs_its_own_weights():
    model = tiny_model("llama")
    for _ in range(2):
        remake_activations(model)
    layer = model.model.layers[0]
    assert isinstance(layer.mlp.forward, _GatedForward)
    assert len(layer.input_layernorm._forward_hooks) == 1
    twin = copy.deepcopy(model)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        twin.model.layers[0].mlp.down_proj.weight.zero_()
        assert not torch.equal(twin(ids).logits, model(ids).logits)
        hidden = twin.model.layers[0].input_layernorm(torch.ones(1, 64))
    assert recipe_of(hidden) is None  # nothing is to be remembered without gradients


@pytest.mark.parametrize("groups", [1, 3])
def test_query_heads_as_queries_of_their_key_head(groups):
    generator = torch.Generator().manual_seed(0)
    group = SegmentGroup.build([(4, 7, [0, 1, 2, 4, 5, 6]), (7, 9, [0, 1, 2, 3, 7, 8])], "cpu")
    n, queries, keys = group.shape
    q = torch.randn(n, 2 * groups, queries, 8, generator=generator)
    k, v = (torch.randn(n, 2, keys, 8, generator=generator) for _ in range(2))
    folded = scaled_dot_product(
        q.reshape(n, 2, groups * queries, 8), k, v, group.bias(groups, q.dtype), False, 0.3
    ).reshape(q.shape)
    plain = scaled_dot_product(q, k, v, group.mask, False, 0.3, eager=True)
    torch.testing.assert_close(folded.transpose(1, 2).reshape(-1, 2 * groups, 8)[group.rows],
                               plain.transpose(1, 2).reshape(-1, 2 * groups, 8)[group.rows])  # fmt: skip
