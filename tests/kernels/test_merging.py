"""The kernels around the collectives against their twins: the same rules for -inf and NaN, any strides."""

from __future__ import annotations

import pytest
import torch
from interpreted import interpreted
from torch import Tensor

from megatron_dcp.kernels import choice, twins
from megatron_dcp.merge import merge_partials

pytest.importorskip("triton", reason="triton is not installed")

# P, T, N, H: rows that fill no tile, one partial, no token, no head, a latent's width, two rows in a tile, many splits
SHAPES = [
    (1, 3, 5, 7),
    (2, 4, 3, 16),
    (4, 5, 7, 24),
    (8, 3, 2, 512),
    (3, 0, 4, 8),
    (3, 4, 0, 8),
    (2, 100, 3, 16),
    (20, 3, 2, 512),
]
CLOSE = dict(rtol=2e-6, atol=2e-6, equal_nan=True)


def packed_partials(P: int, T: int, N: int, H: int) -> tuple[Tensor, Tensor]:
    """Views of heads-first ``[out, lse]``: empty shards with NaN in them, a token that no shard sees, odd LSEs."""
    generator = torch.Generator().manual_seed(P * 1000 + T)
    packed_PNTH1 = torch.randn(P, N, T, H + 1, generator=generator)
    empty = torch.rand(P, N, T, generator=generator) < 0.3
    if T > 2 and N > 1:
        empty[:, 0, 0] = True
        packed_PNTH1[:, -1, -1, H] = torch.nan
        packed_PNTH1[0, 1, 1, H] = torch.inf
        packed_PNTH1[0, 0, 1, 0] = torch.nan
        empty[0, 0, 1], empty[-1, 0, 2] = False, True
    packed_PNTH1[empty] = torch.nan
    packed_PNTH1[..., H][empty] = -torch.inf
    packed_PTNH1 = packed_PNTH1.transpose(1, 2)
    return packed_PTNH1[..., :H], packed_PTNH1[..., H]


def merge_as_torch_does(shape: tuple[int, int, int, int]) -> None:
    from megatron_dcp.kernels.merging import launch_merge

    out_PTNH, lse_PTN = packed_partials(*shape)
    want_out, want_lse = merge_partials(out_PTNH, lse_PTN)
    out_TNH, lse_TN = launch_merge(out_PTNH, lse_PTN)
    assert out_TNH.is_contiguous() and lse_TN.is_contiguous()
    torch.testing.assert_close(out_TNH, want_out, **CLOSE)
    torch.testing.assert_close(lse_TN, want_lse, **CLOSE)
    if shape == (4, 5, 7, 24):  # the case is what it claims to be
        assert want_lse[0, 0] == -torch.inf and (want_out[0, 0] == 0).all()
        assert want_lse[-1, -1].isnan() and want_out[-1, -1].isnan().all() and want_lse.isfinite().any()


@pytest.mark.parametrize("shape", SHAPES)
def test_merge(shape: tuple[int, int, int, int]) -> None:
    interpreted(merge_as_torch_does, shape)


def share_as_torch_does(shape: tuple[int, int, int, int]) -> None:
    from megatron_dcp.kernels.merging import launch_share

    out_PTNH, lse_PTN = packed_partials(*shape)
    P, T, N, H = shape
    for own in range(P):
        want = twins.share_of(out_PTNH[own], lse_PTN, own)
        heads_first = torch.full((N, T, H), 7.0)
        for share_TNH in (torch.full((T, N, H), 7.0), heads_first.transpose(0, 1)):
            launch_share(out_PTNH[own], lse_PTN, own, share_TNH)
            torch.testing.assert_close(share_TNH, want, **CLOSE)


@pytest.mark.parametrize("shape", SHAPES)
def test_share(shape: tuple[int, int, int, int]) -> None:
    interpreted(share_as_torch_does, shape)


def pack_as_torch_does(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    from megatron_dcp.kernels.merging import launch_pack

    out_PTNH, lse_PTN = packed_partials(*shape)
    out_TNH, lse_TN = out_PTNH[0].to(dtype), lse_PTN[0]
    packed = launch_pack(out_TNH, lse_TN)
    assert packed.is_contiguous()
    torch.testing.assert_close(packed, twins.pack(out_TNH, lse_TN), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pack(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    interpreted(pack_as_torch_does, shape, dtype)


def test_operators() -> None:
    """Their schemas hold, and on a CPU they are the twins."""
    from megatron_dcp.kernels import merging

    torch.manual_seed(0)
    out_PTNH, lse_PTN, share_TNH = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 3), torch.empty(4, 3, 8)
    torch.library.opcheck(merging.merge, (out_PTNH, lse_PTN))
    torch.library.opcheck(merging.pack, (out_PTNH[0], lse_PTN[0]))
    torch.library.opcheck(merging.share, (out_PTNH[1], lse_PTN, 1, share_TNH))
    merging.share(out_PTNH[1], lse_PTN, 1, share_TNH)
    assert torch.equal(share_TNH, choice.share_of(out_PTNH[1], lse_PTN, 1))
    assert torch.equal(merging.pack(out_PTNH[0], lse_PTN[0]), choice.pack(out_PTNH[0], lse_PTN[0]))
    for one, other in zip(merging.merge(out_PTNH, lse_PTN), choice.merge_partials(out_PTNH, lse_PTN), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("heads", [1, 3, 4, 7])
def test_share_by_rank_is_the_share_cut_and_padded(heads: int) -> None:
    torch.manual_seed(0)
    out_TNH, lse_PTN = torch.randn(5, heads, 8), torch.randn(3, 5, heads)
    parts_PnTH = choice.share_by_rank(out_TNH, lse_PTN, 1)
    assert parts_PnTH.shape == (3, -(-heads // 3), 5, 8) and parts_PnTH.is_contiguous()
    flat = parts_PnTH.flatten(0, 1)
    assert torch.equal(flat[:heads], choice.share_of(out_TNH, lse_PTN, 1).transpose(0, 1)) and (flat[heads:] == 0).all()
