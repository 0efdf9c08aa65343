"""The layouts of a product agree, and sampling takes one by the number of its rows."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from mlrl.models import products
from mlrl.models.products import as_columns, by_columns, linear_of_columns
from mlrl.models.projections import PackedProjections, Projections
from tests.models.test_lora import team
from tests.models.test_packing import needs_mkl, needs_onednn


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 20, 21, 33, 47])
@pytest.mark.parametrize("bias", [False, True])
def test_columns_give_the_linear_layer(rows, bias):
    x, weight = torch.randn(rows, 8), torch.randn(12, 8)
    b = torch.randn(12) if bias else None
    columns = linear_of_columns(as_columns(x), weight, b)
    assert rows <= columns.shape[1] < rows + 8
    torch.testing.assert_close(columns[:, :rows].t(), F.linear(x, weight, b))


@pytest.mark.parametrize(
    ("columns", "packed", "onednn"),
    [
        (False, False, False),
        (True, False, False),
        pytest.param(False, True, False, marks=needs_mkl),
        pytest.param(False, False, True, marks=needs_onednn),
        pytest.param(False, True, True, marks=needs_onednn),
    ],
)
def test_projections_do_not_depend_on_the_number_of_rows(columns, packed, onednn, monkeypatch):
    monkeypatch.setattr(products, "columns_pay", lambda: columns)
    for module in ("packing", "products", "projections"):
        monkeypatch.setattr(f"mlrl.models.{module}.onednn_pays", lambda: onednn)
    base = team("qwen2")  # with biases in attention
    attention = base.language_model.backbone.layers[0].self_attn
    linears = [attention.q_proj, attention.k_proj, attention.v_proj]
    x = torch.randn(400, 32)
    owner = torch.arange(400) % 3 - 1
    assert by_columns(x[:50]) == columns and not by_columns(x)
    with torch.no_grad(), base.router.use_mixed(["agent_0", "agent_1"], owner) as route:
        whole = [linear(x) for linear in linears]
        projections = (PackedProjections if packed else Projections)(linears, route)
        for size in (5, 16, 23, 50, 400):  # row-major, as they are, and padded
            for start in range(0, 400, size):
                rows = slice(start, start + size)
                route.set_owner(owner[rows])
                for ours, expected in zip(projections(x[rows]), whole, strict=True):
                    torch.testing.assert_close(ours, expected[rows], rtol=1e-5, atol=1e-6)
                joined = torch.cat([expected[rows] for expected in whole], 1)
                torch.testing.assert_close(projections.joined(x[rows]), joined, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("amd", [False, True])
@pytest.mark.parametrize("capability", ["AVX2", "AVX512", "DEFAULT"])
def test_the_kind_of_processor_decides(capability, amd, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, **({"sse4a": amd} if amd else {})})
    assert products.onednn_pays.__wrapped__() == (amd and capability != "DEFAULT")
    monkeypatch.setattr(products, "onednn_pays", products.onednn_pays.__wrapped__)
    assert products.columns_pay.__wrapped__() == (capability == "AVX2" and not amd)


def test_no_onednn_in_this_build_of_pytorch(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"sse4a": True})
    assert not products.onednn_pays.__wrapped__()


@needs_onednn
def test_kernels_do_not_pile_up():
    """In a process of its own, whose first products these are."""
    program = """
import torch
from mlrl.models import products
torch.cpu.get_capabilities = lambda: {"sse4a": True}
torch.backends.cpu.get_cpu_capability = lambda: "AVX2"
assert products.onednn_pays()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
weight = torch.randn(512, 512)
grown = []
for start in (64, 664):
    before = resident()
    for rows in range(start, start + 600, 2):
        products.linear(torch.randn(rows, 512), weight)
    grown.append(resident() - before)
print(grown[1])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert float(done.stdout) < 50, "MiB for 300 more numbers of rows"


@pytest.fixture
def onednn(monkeypatch):
    """Products by oneDNN on any processor, and the number of them."""
    calls = []
    product = products.onednn_product
    monkeypatch.setattr(products, "onednn_pays", lambda: True)
    monkeypatch.setattr(products, "onednn_product", lambda *a: calls.append(a) or product(*a))
    return calls


def layouts(tensor):
    """The same numbers in memory row after row, column after column, with gaps, and in every other place."""
    rows, columns = tensor.shape
    gaps, sparse = torch.randn(rows, columns + 5), torch.randn(rows, 2 * columns)
    gaps[:, 2 : columns + 2], sparse[:, ::2] = tensor, tensor
    return [tensor, tensor.t().contiguous().t(), gaps[:, 2 : columns + 2], sparse[:, ::2]]


@needs_onednn
@pytest.mark.parametrize(("rows", "inner", "columns"), [(96, 128, 192), (192, 1024, 16), (16, 1024, 192)])
def test_onednn_multiplies_operands_of_any_layout(rows, inner, columns, onednn):
    a, b, bias = torch.randn(rows, inner), torch.randn(inner, columns), torch.randn(columns)
    expected = a.double() @ b.double()
    operands = [(x, y) for x in layouts(a) for y in layouts(b)]
    for x, y in operands:
        torch.testing.assert_close(products.matmul(x, y).double(), expected, rtol=1e-4, atol=1e-3)
        with_bias = products.linear(x, y.t(), bias).double()
        torch.testing.assert_close(with_bias, expected + bias, rtol=1e-4, atol=1e-3)
    assert len(onednn) == 2 * len(operands)
    weights = [weight for _, weight, _ in onednn]
    assert all(w.is_contiguous() or w.t().is_contiguous() for w in weights)  # others take a thousand times as long


def test_what_onednn_is_not_asked(onednn):
    big = torch.randn(256, 256)
    trained = big.clone().requires_grad_()
    assert products.linear(big, trained).requires_grad  # it has no derivative
    assert products.matmul(trained, big).requires_grad
    small, empty = torch.randn(4, 256), torch.empty(0, 256)
    torch.testing.assert_close(products.linear(small, big), small @ big.t())
    assert products.matmul(empty, big).shape == products.linear(empty, big).shape == (0, 256)
    double = big.double()
    torch.testing.assert_close(products.matmul(double, double), double @ double)
    products.matmul(big.bfloat16(), big.bfloat16())
    products.linear(big[None], big)  # (1, rows, in)
    assert not onednn
    with torch.no_grad():
        products.linear(big, trained)
    assert len(onednn) == 1
