"""The two orientations of a product agree, and sampling takes either by the number of its rows."""

import pytest
import torch
import torch.nn.functional as F

from mlrl.models.products import few_rows, linear_of_columns
from tests.models.test_lora import team


@pytest.mark.parametrize("bias", [False, True])
def test_columns_give_the_linear_layer(bias):
    x, weight = torch.randn(5, 8), torch.randn(12, 8)
    b = torch.randn(12) if bias else None
    torch.testing.assert_close(linear_of_columns(x.t(), weight, b).t(), F.linear(x, weight, b))


def test_mixed_adapters_do_not_depend_on_the_number_of_rows():
    base = team("qwen2")  # with biases in attention
    x = torch.randn(400, 32)
    owner = torch.arange(400) % 3 - 1
    layer = base.router.layers[0]
    assert few_rows(x[:50]) and not few_rows(x)
    with torch.no_grad(), base.router.use_mixed(["agent_0", "agent_1"], owner) as route:
        whole = layer(x)
        for start in range(0, 400, 50):
            route.set_owner(owner[start : start + 50])
            torch.testing.assert_close(layer(x[start : start + 50]), whole[start : start + 50], rtol=1e-5, atol=1e-6)
