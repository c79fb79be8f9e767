"""The layer that runs where no native kernel does: oneDNN's products, rounded up to few numbers of rows."""

import pytest
import torch
import torch.nn.functional as F

from corespan.core.models.linear import PackedLinear, rounded_up

pytestmark = pytest.mark.skipif(not PackedLinear.supports(torch.float32), reason="torch was built without oneDNN")


@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_those_of_a_plain_layer_for_any_number_of_rows(with_bias: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(24, 40), torch.randn(24) if with_bias else None
    layer = PackedLinear(weight.clone(), bias)
    for num_tokens in (1, 7, 8, 9, 17, 33, 63, 64, 65, 130):
        x = torch.randn(num_tokens, 40)
        y = layer(x)
        assert y.is_contiguous()
        torch.testing.assert_close(y, F.linear(x, weight, bias))


def test_few_numbers_of_rows_reach_onednn() -> None:
    sizes = {rounded_up(num_tokens) for num_tokens in range(1, 4097)}

    assert len(sizes) == 44
    assert all(num_tokens <= rounded_up(num_tokens) <= 1.25 * num_tokens for num_tokens in range(1, 4097))
