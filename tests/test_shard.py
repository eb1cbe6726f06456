"""8-bit keys and values: what is lost, and that nothing else is."""

from __future__ import annotations

import pytest
import torch

from megatron_dcp.shard import LARGEST, dequantise, is_quantised, quantise, widen

DTYPES = list(LARGEST)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_error_is_bounded_by_the_dtype(dtype: torch.dtype, size: float, source: torch.dtype) -> None:
    torch.manual_seed(0)
    x_tKH = (torch.randn(200, 3, 64) * size).to(source)
    stored, scale = quantise(x_tKH, dtype)
    assert stored.dtype == dtype and stored.shape == x_tKH.shape
    assert scale.dtype == torch.float32 and scale.shape == (200, 3)
    back = dequantise(stored, scale)
    error, peak = (back - x_tKH.float()).abs(), x_tKH.float().abs().amax(-1, keepdim=True)
    if dtype == torch.int8:  # half a step of 127
        assert (error <= peak / 127 * 0.5001).all()
    else:  # three bits of mantissa, and the steps around 0
        assert (error <= torch.maximum(x_tKH.float().abs() * 2**-4, peak / 448 * 2**-10) * 1.0001).all()
    assert torch.equal(back.abs().amax(-1, keepdim=True), scale.unsqueeze(-1) * LARGEST[dtype]), "the peak is exact"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_depend_on_others(dtype: torch.dtype) -> None:
    x_tKH = torch.randn(5, 2, 16) * torch.tensor([1e-3, 1.0, 1e3, 1.0, 7.0])[:, None, None]
    stored, scale = quantise(x_tKH, dtype)
    for token in range(5):
        for head in range(2):
            one, its = quantise(x_tKH[token : token + 1, head : head + 1], dtype)
            assert torch.equal(one.view(torch.uint8)[0, 0], stored.view(torch.uint8)[token, head])
            assert its == scale[token, head]


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros(dtype: torch.dtype) -> None:
    assert (dequantise(*quantise(torch.zeros(2, 1, 8), dtype)) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_not_hidden(dtype: torch.dtype, wrong: float) -> None:
    x_tKH = torch.ones(2, 2, 8)
    x_tKH[0, 1, 3] = wrong
    back = dequantise(*quantise(x_tKH, dtype))
    assert not back[0, 1].isfinite().any()
    assert back[0, 0].isfinite().all() and back[1].isfinite().all()


def test_which_dtypes_have_scales() -> None:
    assert [is_quantised(d) for d in (torch.float8_e4m3fn, torch.int8, torch.bfloat16)] == [True, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_widened_exactly(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype).view(16, 16).t()
    wide = widen(every, torch.empty(16, 16))
    known = every.float().isfinite()
    assert torch.equal(wide[known], every.float()[known]) and known.sum() >= 254
