"""A norm as one autograd function: the values of its class, its gradients, and no more kept."""

import copy

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from mlrl.models.rms_norm import NormForward, shorten_norms

SHAPE = (2, 5, 48)


class Halved(LlamaRMSNorm):
    """Derived from a known norm, and another one."""

    def forward(self, hidden_states):
        return super().forward(hidden_states) / 2


def run(norm: nn.Module, dtype: torch.dtype = torch.float32, x_grad: bool = True):
    """Its value, the gradients of x and the weight (None without), the elements kept, and the function's name."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(SHAPE, generator=generator) * torch.tensor([0.01, 1, 30, 1e-4, 3])[:, None]).to(dtype)
    upstream = torch.randn(SHAPE, generator=generator).to(dtype)
    x.requires_grad_(x_grad)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        out = norm(x)
    name = type(out.grad_fn).__name__
    if out.requires_grad:
        out.backward(upstream)
    return out.detach(), x.grad, norm.weight.grad, sum(t.numel() for t in kept.values()), name


def pair(kind: type = LlamaRMSNorm, trained: bool = False, dtype: torch.dtype = torch.float32):
    """A norm of random weights as its class has it, and one set up here."""
    plain = kind(SHAPE[-1])
    with torch.no_grad():
        plain.weight.normal_(1, 0.5, generator=torch.Generator().manual_seed(1))
    plain.to(dtype).requires_grad_(trained)
    ours = copy.deepcopy(plain)
    shorten_norms(nn.Sequential(ours))
    return ours, plain


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
def test_values_and_gradients_are_those_of_the_class(kind):
    ours, theirs = (run(norm) for norm in pair(kind))
    assert ours[4] == "_RMSNormBackward" != theirs[4]
    assert torch.equal(ours[0], theirs[0])
    difference = (ours[1] - theirs[1]).norm(dim=-1)
    assert (difference <= 2e-6 * theirs[1].norm(dim=-1)).all()
    assert ours[3] <= theirs[3]


@pytest.mark.parametrize(
    ("trained", "dtype", "x_grad"),
    [(True, torch.float32, True), (False, torch.bfloat16, True), (True, torch.float32, False)],
)
def test_other_cases_run_as_before(trained, dtype, x_grad):
    ours, theirs = (run(norm, dtype, x_grad) for norm in pair(trained=trained, dtype=dtype))
    assert ours[4] == theirs[4]
    for one, other in zip(ours[:3], theirs[:3], strict=True):
        assert (one is None) == (other is None) and (one is None or torch.equal(one, other))


def test_sharded_weights_run_as_before():
    norm, _ = pair()
    norm.weight.ds_tensor = None  # as DeepSpeed marks a weight of which every rank holds a part
    assert run(norm)[4] != "_RMSNormBackward"


def test_hooks_of_a_norm_still_run():
    ours, theirs = pair()
    for norm in (ours, theirs):
        norm.register_forward_hook(lambda module, args, out: out * 2)
    torch.testing.assert_close(run(ours)[1], run(theirs)[1], rtol=1e-4, atol=1e-4)


def test_other_norms_stay_as_they_are_and_copies_run_their_own_weights():
    model = nn.Sequential(LlamaRMSNorm(8), Halved(8), Gemma2RMSNorm(8), nn.RMSNorm(8))
    for _ in range(2):
        shorten_norms(model)
    assert ["forward" in vars(norm) for norm in model] == [True, False, False, False]
    assert isinstance(model[0].forward, NormForward)
    twin = copy.deepcopy(model[0])
    with torch.no_grad():
        twin.weight.zero_()
        assert not twin(torch.ones(8)).any() and model[0](torch.ones(8)).all()
