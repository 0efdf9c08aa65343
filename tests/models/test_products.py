"""The layouts of a product agree, and sampling takes one by the number of its rows."""

import pytest
import torch
import torch.nn.functional as F

from mlrl.models import products
from mlrl.models.products import as_columns, by_columns, linear_of_columns
from mlrl.models.projections import PackedProjections, Projections
from tests.models.test_lora import team
from tests.models.test_packing import needs_mkl


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 20, 21, 33, 47])
@pytest.mark.parametrize("bias", [False, True])
def test_columns_give_the_linear_layer(rows, bias):
    x, weight = torch.randn(rows, 8), torch.randn(12, 8)
    b = torch.randn(12) if bias else None
    columns = linear_of_columns(as_columns(x), weight, b)
    assert rows <= columns.shape[1] < rows + 8
    torch.testing.assert_close(columns[:, :rows].t(), F.linear(x, weight, b))


@pytest.mark.parametrize(
    ("columns", "packed"), [(False, False), (True, False), pytest.param(False, True, marks=needs_mkl)]
)
def test_projections_do_not_depend_on_the_number_of_rows(columns, packed, monkeypatch):
    monkeypatch.setattr(products, "columns_pay", lambda: columns)
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


@pytest.mark.parametrize(("capability", "pay"), [("AVX2", True), ("AVX512", False), ("DEFAULT", False)])
def test_the_kind_of_processor_decides(capability, pay, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert products.columns_pay.__wrapped__() == pay
