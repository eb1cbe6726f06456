"""The SDPA back end: the contract, with real and with tiny limits, and what it promises about copies and work space."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attention_contract import CASES, LATENT, Case, check, make_sequences, make_shard

from megatron_dcp.attention import AttentionBatch, sdpa
from megatron_dcp.attention.pieces import Unit
from megatron_dcp.attention.sdpa import SDPABackend, efficient, fused, pick_kernel, plain
from megatron_dcp.shard import Shard

CPU = torch.device("cpu")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bound that takes long contexts to reach is reached by short ones."""
    monkeypatch.setattr(sdpa, "WORK_BYTES", 5 << 10)
    monkeypatch.setattr(sdpa, "COPY_BYTES", 1 << 10)
    monkeypatch.setattr(sdpa, "MAX_ROWS", 8)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_contract(case: Case) -> None:
    check(SDPABackend(), case)


@pytest.mark.usefixtures("tiny_limits")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_contract_with_tiny_limits(case: Case) -> None:
    check(SDPABackend(), case)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_few_kv_heads_split_their_keys_over_threads(kv_heads: int, dtype: torch.dtype) -> None:
    case = Case(sequences=((1, 1025), (1, 2000)), kv_heads=kv_heads, dtype=dtype, scattered=False, head_dim=64)
    check(SDPABackend(), case)
    batch, _ = make_shard(case, make_sequences(case), 0)
    plan = _plan(SDPABackend(), case, batch)
    assert any(piece.parts == 2 for unit in _units(plan) for piece in unit.pieces)


@pytest.mark.parametrize("masked", [False, True])
def test_kernels_agree(masked: bool) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 8, 32), torch.randn(2, 3, 40, 32), torch.randn(2, 3, 40, 32)
    mask = None
    if masked:
        mask = torch.zeros(2, 1, 1, 40)
        mask[0, ..., 17:] = -torch.inf
    for one, other in zip(fused(q, k, v, mask, 0.3), plain(q, k, v, mask, 0.3), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=5e-6)


def cuda_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, with_lse: bool, *, scale: float
) -> tuple[torch.Tensor | None, ...]:
    """Torch's memory-efficient CUDA kernel: what it insists on, and the form of its LSE."""
    assert with_lse and q.dtype == k.dtype == v.dtype == torch.float32
    for x in (q, k, v):
        assert x.stride(-1) == 1 and all(stride % 4 == 0 for stride in x.stride()[:-1]) and x.shape[-1] % 4 == 0
        assert x.storage_offset() % 4 == 0
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.shape[2]) and bias.dtype == q.dtype
        assert bias.stride(-1) == 1 and all(stride % 4 == 0 for stride in bias.stride()[:-1])
    out, lse = plain(q, k, v, bias, scale)
    padded = torch.full((*q.shape[:2], -(-q.shape[2] // 32) * 32), torch.nan)
    padded[..., : q.shape[2]] = lse
    return out, padded, None, None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_contract_with_the_cuda_kernel(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if pick_kernel(replace(case.spec(), device=torch.device("cuda"))) is plain:
        assert case.head_dim % 4 or (case.v_dim or 0) % 4
        return
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_efficient_attention", cuda_kernel)
    monkeypatch.setattr(sdpa, "pick_kernel", lambda spec: efficient)
    check(SDPABackend(), case)


def test_cuda_kernel_is_called_as_torch_defines_it() -> None:
    q, k, v = (torch.empty(2, 3, *shape, device="meta") for shape in ((5, 8), (7, 8), (7, 12)))
    out, lse = efficient(q, k, v, torch.empty(2, 1, 1, 7, device="meta"), 0.3)
    assert (out.shape, lse.shape) == ((2, 3, 5, 12), (2, 3, 5)) and lse.dtype == torch.float32


def test_kernel_of_a_device() -> None:
    on_cpu, on_gpu = Case(sequences=()).spec(), Case(sequences=()).spec("cuda")
    assert pick_kernel(on_cpu) is fused and pick_kernel(replace(on_cpu, v_dim=8)) is plain
    assert pick_kernel(on_gpu) is efficient and pick_kernel(replace(on_gpu, v_dim=8)) is efficient
    assert pick_kernel(replace(on_gpu, head_dim=18)) is plain


def _plan(backend: SDPABackend, case: Case, batch: AttentionBatch) -> sdpa.SDPAPlan:
    return backend.plan(batch, case.spec())


def _units(plan: sdpa.SDPAPlan) -> list[Unit]:
    return [*plan.singles, *plan.chunks, *plan.padded]


def _run(backend: SDPABackend, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    sequences = make_sequences(case)
    batch, shard = make_shard(case, sequences, 0)
    q_TNH = torch.cat([s.q_TNH for s in sequences])
    return backend.attend(q_TNH, shard, _plan(backend, case, batch), scale=0.1)


def _work_bytes(backend: SDPABackend) -> int:
    return sum(work.nbytes for work in backend._work.values())


def test_contiguous_fp32_shard_is_not_copied() -> None:
    backend = SDPABackend()
    _run(backend, Case(sequences=((1, 2000), (70, 1500)), scattered=False, head_dim=64))
    assert _work_bytes(backend) == 0


def test_a_latent_is_copied_once_and_not_at_all_where_it_lies_together() -> None:
    backend = SDPABackend()
    case = replace(LATENT, sequences=((1, 2000), (70, 1500)), dcp_size=1, scattered=False)
    _run(backend, case)
    assert _work_bytes(backend) == 0
    case = replace(case, sequences=((1, 300),), block_size=1, scattered=True)
    _run(backend, case)
    assert _work_bytes(backend) == 300 * case.head_dim * 4


def test_long_runs_between_gaps_are_not_copied() -> None:
    backend = SDPABackend()
    case = Case(sequences=((1, 4096),), block_size=1024, head_dim=64)
    batch, _ = make_shard(case, make_sequences(case), 0)
    (unit,) = _units(_plan(backend, case, batch))
    assert len(unit.pieces) > 1, "the shuffled blocks should not have come out in order"
    assert all(isinstance(piece.keys, tuple) for piece in unit.pieces)


@pytest.mark.usefixtures("tiny_limits")
@pytest.mark.parametrize("v_dim", [16, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_work_space_stays_within_its_bound(dtype: torch.dtype, v_dim: int) -> None:
    backend = SDPABackend()
    case = Case(sequences=((1, 600), (40, 600), (1, 3), (1, 7)), dtype=dtype, v_dim=v_dim)
    batch, _ = make_shard(case, make_sequences(case), 0)
    _run(backend, case)
    assert 0 < _work_bytes(backend) <= sdpa.WORK_BYTES
    masks = 0
    for unit in _units(_plan(backend, case, batch)):
        for piece in unit.pieces:
            masks += 0 if piece.mask is None else piece.mask.nbytes
            scores = case.kv_heads * case.group * (unit.stop - unit.first) * piece.length * 4
            assert v_dim == case.head_dim or unit.tokens is not None or scores <= sdpa.WORK_BYTES
    assert masks <= batch.num_tokens * 8 * sdpa.MAX_ROWS


@pytest.mark.parametrize("count", [2, 16])
def test_short_sequences_share_a_call(count: int) -> None:
    case = Case(sequences=tuple((1, 3 + n) for n in range(count)))
    batch, _ = make_shard(case, make_sequences(case), 0)
    assert len(_units(_plan(SDPABackend(), case, batch))) == 1


def test_work_space_made_in_inference_mode_serves_outside() -> None:
    backend = SDPABackend()
    case = Case(sequences=((1, 9), (1, 12)))
    with torch.inference_mode():
        inside = _run(backend, case)
    assert _work_bytes(backend) > 0
    assert torch.equal(inside[0], _run(backend, case)[0])


def test_no_graph_is_kept() -> None:
    case = Case(sequences=((1, 9),))
    sequences = make_sequences(case)
    batch, shard = make_shard(case, sequences, 0)
    backend = SDPABackend()
    q_TNH = sequences[0].q_TNH.clone().requires_grad_()
    out, lse = backend.attend(q_TNH, shard, _plan(backend, case, batch), scale=0.1)
    assert not out.requires_grad and not lse.requires_grad


def test_queries_of_any_dtype_and_strides() -> None:
    case = Case(sequences=((2, 9), (1, 12)), head_dim=32)
    sequences = make_sequences(case)
    batch, shard = make_shard(case, sequences, 0)
    backend = SDPABackend()
    plan = _plan(backend, case, batch)
    q_TNH = torch.cat([s.q_TNH for s in sequences]).bfloat16()
    expected = backend.attend(q_TNH.float(), shard, plan, scale=0.1)
    strided = q_TNH.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    for q in (q_TNH, strided, strided.float()):
        assert all(map(torch.equal, backend.attend(q, shard, plan, scale=0.1), expected))


def test_batch_where_nobody_sees_a_key() -> None:
    backend = SDPABackend()
    batch = AttentionBatch(q_lens=(1, 2), visible=(0, 0, 0), block_tables=((), (7,)), block_size=4)
    plan = backend.plan(batch, Case(sequences=()).spec())
    nothing = torch.full((4, 2, 16), torch.nan)
    out, lse = backend.attend(torch.randn(3, 4, 16), Shard(nothing, nothing), plan, scale=0.1)
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_queries_finer_than_the_pool() -> None:
    check(SDPABackend(), Case(sequences=((3, 9), (1, 40)), dtype=torch.bfloat16, query_dtype=torch.float32))


@pytest.mark.parametrize("keys", [1, 7, 8, 15, 16, 17, 40])
def test_nan_in_a_visible_key_is_never_swallowed(keys: int) -> None:
    """The fused kernel answers ``out = 0, lse = 0`` where all of fewer than 16 scores are NaN."""
    q_TNH, k_SKH, v_SKH = torch.randn(1, 2, 16), torch.full((keys, 1, 16), torch.nan), torch.randn(keys, 1, 16)
    batch = AttentionBatch(q_lens=(1,), visible=(keys,), block_tables=((0,),), block_size=keys)
    backend = SDPABackend()
    plan = backend.plan(batch, Case(sequences=(), kv_heads=1, block_size=keys).spec())
    out_TNH, lse_TN = backend.attend(q_TNH, Shard(k_SKH, v_SKH), plan, scale=0.25)
    assert out_TNH.isnan().all() and lse_TN.isnan().all()
