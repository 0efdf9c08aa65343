"""Linear layers with products of their own give the values and gradients of PyTorch's."""

import copy

import pytest
import torch
from torch import nn

from mlrl.models import products
from mlrl.models.linear import LinearForward, quicken_linears
from mlrl.models.lora_linear import is_plain
from tests.models.test_packing import needs_onednn


@pytest.fixture(autouse=True)
def onednn(monkeypatch):
    monkeypatch.setattr(products, "onednn_pays", lambda: True)
    monkeypatch.setattr(products, "_LEAST_WORK", 1)


def layers(bias, frozen):
    plain = nn.Sequential(nn.Linear(24, 40, bias=bias), nn.SiLU(), nn.Linear(40, 16, bias=bias)).requires_grad_(
        not frozen
    )
    quick = copy.deepcopy(plain)
    quicken_linears(quick)
    assert all(isinstance(vars(quick[i])["forward"], LinearForward) for i in (0, 2))
    return plain, quick


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("frozen", "needs_x"), [(False, True), (False, False), (True, True)])
@pytest.mark.parametrize("shape", [(7, 24), (2, 3, 24), (24,), (0, 24)])
def test_values_and_gradients(bias, frozen, needs_x, shape):
    plain, quick = layers(bias, frozen)
    x = torch.randn(shape)
    results = []
    for model in (plain, quick):
        own = x.clone().requires_grad_(needs_x)
        out = model(own)
        (out**2).sum().backward()
        results.append([out, *([own.grad] if needs_x else []), *[p.grad for p in model.parameters() if not frozen]])
    for ours, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@needs_onednn
def test_nothing_is_kept_that_no_gradient_needs():
    kept = []
    _, quick = layers(bias=False, frozen=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        quick[0](torch.randn(7, 24))
        quick[0](torch.randn(7, 24, requires_grad=True))
    assert kept == [quick[0].weight.shape]


def test_a_wrong_width_is_said_as_pytorch_says_it():
    plain, quick = layers(bias=True, frozen=False)
    for x in (torch.randn(30, 25), torch.randn(2, 3, 23)):
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied") as right:
            plain(x)
        with pytest.raises(RuntimeError) as found:
            quick(x)
        assert str(found.value) == str(right.value)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        products.matmul(torch.randn(3, 4), torch.randn(5, 6))


def test_autocast_and_compilation_are_left_to_pytorch():
    plain, quick = layers(bias=True, frozen=False)
    x = torch.randn(3, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert quick(x).dtype == torch.bfloat16
        assert torch.equal(quick(x), plain(x))
    compiled = torch.compile(quick, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), plain(x))


def test_other_dtypes_and_sharded_weights_stay_with_pytorch(monkeypatch):
    def refuse(*_):
        raise AssertionError("not by oneDNN")

    monkeypatch.setattr(products, "onednn_product", refuse)
    _, quick = layers(bias=True, frozen=False)
    quick.double()(torch.randn(3, 24, dtype=torch.float64)).sum().backward()
    quick.bfloat16()(torch.randn(3, 24, dtype=torch.bfloat16)).sum().backward()
    quick.float()[0].weight.ds_tensor = None  # as ZeRO-3 marks it
    quick[0](torch.randn(3, 24)).sum().backward()


@needs_onednn
def test_a_copy_runs_its_own_weights():
    _, quick = layers(bias=False, frozen=True)
    other = copy.deepcopy(quick)
    with torch.no_grad():
        other[0].weight.zero_()
    assert not other(torch.randn(3, 24)).any()
    assert quick(torch.randn(3, 24)).any()


def test_only_where_it_pays_and_nobody_was_there_before(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].forward = own = lambda x: x
    quicken_linears(model)
    assert model[1].forward is own
    assert is_plain(model[0].requires_grad_(False)) and not is_plain(model[1].requires_grad_(False))
    monkeypatch.setattr(products, "onednn_pays", lambda: False)
    other = nn.Linear(4, 4)
    quicken_linears(other)
    assert "forward" not in vars(other)
