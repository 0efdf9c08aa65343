"""The layouts of a product agree, and sampling takes one by the number of its rows."""

import pytest
import torch
import torch.nn.functional as F

from mlrl.models.products import as_columns, few_rows, linear_of_columns
from tests.models.test_lora import team


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 20, 21, 33, 47])
@pytest.mark.parametrize("bias", [False, True])
def test_columns_give_the_linear_layer(rows, bias):
    x, weight = torch.randn(rows, 8), torch.randn(12, 8)
    b = torch.randn(12) if bias else None
    columns = linear_of_columns(as_columns(x), weight, b)
    assert rows <= columns.shape[1] < rows + 8
    torch.testing.assert_close(columns[:, :rows].t(), F.linear(x, weight, b))


def test_mixed_adapters_do_not_depend_on_the_number_of_rows():
    base = team("qwen2")  # with biases in attention
    x = torch.randn(400, 32)
    owner = torch.arange(400) % 3 - 1
    layer = base.router.layers[0]
    assert few_rows(x[:50]) and not few_rows(x)
    with torch.no_grad(), base.router.use_mixed(["agent_0", "agent_1"], owner) as route:
        whole = layer(x)
        for size in (5, 16, 23, 50):  # row-major, as they are, and padded
            for start in range(0, 400, size):
                rows = slice(start, start + size)
                route.set_owner(owner[rows])
                torch.testing.assert_close(layer(x[rows]), whole[rows], rtol=1e-5, atol=1e-6)
