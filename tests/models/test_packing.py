"""Packed weights give the linear layer, for any number of rows; whether to pack goes by the machine and the model."""

import pytest
import torch
import torch.nn.functional as F

from mlrl.models import decoding, packing
from mlrl.models.packing import PackedLinear, packing_pays
from tests.models.test_lora import team

needs_mkl = pytest.mark.skipif(not packing.mkl_packs(), reason="PyTorch was built without MKL")
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")
LIBRARIES = [pytest.param("mkl", marks=needs_mkl), pytest.param("onednn", marks=needs_onednn)]


@pytest.fixture(params=LIBRARIES)
def library(request, monkeypatch):
    monkeypatch.setattr(packing, "onednn_pays", lambda: request.param == "onednn")


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("bias", [False, True])
def test_any_number_of_rows(bias):
    x, weight = torch.randn(300, 160), torch.randn(97, 160)
    b = torch.randn(97) if bias else None
    packed = PackedLinear(weight, b)
    for count in (0, 1, 2, 5, 17, 64, 65, 300):
        torch.testing.assert_close(packed(x[:count]), F.linear(x[:count], weight, b), rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("library")
def test_operands_of_any_layout():
    x, weight = torch.randn(160, 24), torch.randn(160, 97)
    packed = PackedLinear(weight.t(), None)
    expected = F.linear(x.t().contiguous(), weight.t().contiguous())
    torch.testing.assert_close(packed(x.t()), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(packed(x.t()[::3]), expected[::3], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(packed(x.t().view(4, 6, 160)), expected.view(4, 6, 97), rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("library")
def test_the_weight_itself_is_left_alone():
    weight = torch.randn(8, 16)
    packed = PackedLinear(weight, None)
    x = torch.randn(4, 16)
    before = packed(x)
    weight.zero_()
    assert torch.equal(packed(x), before)


def test_what_decides(monkeypatch):
    weight = torch.empty(4, 4)
    monkeypatch.setattr(packing, "can_pack", lambda: True)
    monkeypatch.setattr(packing, "memory_limit", lambda: 1600)
    assert packing_pays(weight, 100, rows=3, steps=16)
    assert not packing_pays(weight, 101, rows=3, steps=16)  # more than a sixteenth of the memory
    assert not packing_pays(weight, 100, rows=2, steps=16)
    assert not packing_pays(weight, 100, rows=3, steps=15)
    assert not packing_pays(weight.bfloat16(), 100, rows=3, steps=16)
    assert not packing_pays(weight.to("meta"), 100, rows=3, steps=16)
    monkeypatch.setattr(packing, "can_pack", lambda: False)
    assert not packing_pays(weight, 1, rows=3, steps=16)


@needs_mkl
@needs_onednn
@pytest.mark.parametrize(
    ("capability", "onednn", "packs"),
    [
        ("AVX512", False, True),
        ("AVX2", False, False),
        ("DEFAULT", False, False),
        ("AVX512", True, True),
        ("AVX2", True, True),
    ],
)
def test_the_kind_of_processor_decides(capability, onednn, packs, monkeypatch):
    monkeypatch.setattr(packing, "onednn_pays", lambda: onednn)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert packing.can_pack.__wrapped__() is packs


def test_the_size_is_that_of_the_weights_multiplied_with(monkeypatch):
    asked = []
    monkeypatch.setattr(decoding, "packing_pays", lambda weight, size, rows, steps: asked.append((size, rows, steps)))
    model = team("llama").language_model
    decoding.DecodeStep(model, None, 5, 7)
    linears = {n: p for n, p in model.model.named_parameters() if "norm" not in n and "lora" not in n}
    tied = "lm_head.weight" not in linears
    count = sum(p.numel() for n, p in linears.items() if tied or "embed_tokens" not in n)
    assert asked == [(4 * count, 5, 7)]
