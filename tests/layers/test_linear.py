"""The product of the linear layers, in every form that it takes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_dcp.layers.linear import product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs,inputs", [(64, 48), (192, 40), (100, 48), (128, 0)])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 12, 13, 64])
def test_product(tokens, outputs, inputs, dtype):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, inputs, generator=generator).to(dtype)
    weight = torch.randn(outputs, inputs + 5, generator=generator).to(dtype)[
        :, 2 : 2 + inputs
    ]  # columns of a larger one
    want = x.double() @ weight.double().t()
    tolerance = 1e-4 if dtype == torch.float32 else 0.3
    for shaped in (x, x.unsqueeze(1), F.pad(x, (0, 3))[:, :inputs]):
        got = product(shaped, weight)
        assert got.shape == (*shaped.shape[:-1], outputs)
        assert got.dtype == dtype
        assert torch.allclose(got.double().view(tokens, outputs), want, rtol=0, atol=tolerance)
