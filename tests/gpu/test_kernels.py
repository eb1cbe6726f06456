"""Our kernels on a GPU, against their twins in torch."""

from __future__ import annotations

import pytest
import torch

from megatron_dcp.cache.pool import KVPool
from megatron_dcp.kernels import choice, twins, unusable
from megatron_dcp.merge import merge_partials

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and this machine has none")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8]


def test_kernels_are_used() -> None:
    assert unusable(torch.device("cuda")) is None


@pytest.mark.parametrize("order", ["slots_first", "heads_first"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("v_in_k", [False, True])
def test_what_is_written_is_what_torch_writes(order: str, dtype: torch.dtype, v_in_k: bool) -> None:
    torch.manual_seed(0)
    sizes = dict(v_in_k=v_in_k, dtype=dtype, order=order)
    pool, oracle = (KVPool(1, 9, 64, 3, 72, 64, device=device, **sizes) for device in ("cuda", "cpu"))
    for each in (pool, oracle):
        each.clear()
    slot_t = torch.randperm(9 * 64)[:200]
    slot_t[::7] = -1
    k, v = torch.randn(200, 3, 72).bfloat16(), None if v_in_k else torch.randn(200, 3, 64).bfloat16()
    pool.write(0, slot_t.cuda(), k.cuda(), None if v is None else v.cuda())
    oracle.write(0, slot_t, k, v)
    for one, other in zip(pool.layer(0), oracle.layer(0), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert torch.equal(one.cpu().float(), other.float())


@pytest.mark.parametrize("shape", [(2, 1, 32, 128), (8, 64, 32, 128), (3, 5, 7, 24), (8, 1, 128, 512)])
def test_merge_share_and_pack(shape: tuple[int, int, int, int]) -> None:
    torch.manual_seed(0)
    P, T, N, H = shape
    out_PTNH, lse_PTN = torch.randn(shape), torch.randn(shape[:3]) * 20
    lse_PTN[torch.rand(P, T, N) < 0.3] = -torch.inf
    out_PTNH[lse_PTN == -torch.inf] = torch.nan
    on_gpu = out_PTNH.cuda(), lse_PTN.cuda()
    for one, other in zip(choice.merge_partials(*on_gpu), merge_partials(out_PTNH, lse_PTN), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=2e-6, atol=2e-6)
    share = choice.share_of(on_gpu[0][1], on_gpu[1], 1).cpu()
    torch.testing.assert_close(share, twins.share_of(out_PTNH[1], lse_PTN, 1), rtol=2e-6, atol=2e-6)
    packed = choice.pack(on_gpu[0][0], on_gpu[1][0]).cpu()
    torch.testing.assert_close(packed, twins.pack(out_PTNH[0], lse_PTN[0]), rtol=0, atol=0, equal_nan=True)
