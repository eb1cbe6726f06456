"""Every attention back end that this GPU and its libraries have, held to the contract."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_contract import CASES, LATENT, MIXED, Case, check, make_sequences, make_shard, on_device

from megatron_dcp.attention import BACKENDS, AttentionBatch
from megatron_dcp.attention.libraries import LibraryBackend
from megatron_dcp.shard import is_quantised

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and this machine has none")

BLOCKS = (64, 256)  # FlashMLA takes pages of 64, FlashAttention 2 multiples of 256
LONG = ((1, 900), (1, 3), (70, 700), (1, 64))
# What models have, in the dtypes that libraries take.
MODELS = [
    replace(case, block_size=block_size, order="slots_first")
    for block_size in BLOCKS
    for case in (
        *(Case(sequences=MIXED, dcp_size=d, interleave=i, head_dim=128) for d, i in ((1, 1), (2, 1), (4, 4), (8, 1))),
        Case(sequences=LONG, dcp_size=2, kv_heads=8, group=4, head_dim=128),
        Case(sequences=LONG, dcp_size=3, kv_heads=1, group=8, head_dim=64, interleave=16),
        Case(sequences=LONG, dcp_size=2, kv_heads=4, group=1, head_dim=192, v_dim=128),
        Case(sequences=LONG, dcp_size=2, window=100, head_dim=128),
        *(replace(LATENT, sequences=s, group=16, head_dim=576, v_dim=512) for s in (LONG, ((1, 900), (1, 1), (1, 64)))),
    )
]
MODELS = [replace(case, dtype=dtype) for dtype in (torch.bfloat16, torch.float16) for case in MODELS]
# Of half-precision outputs the last bit, for values of size 1; scores are in fp32.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-9}


@pytest.mark.parametrize("kind", BACKENDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("case", [*CASES, *MODELS], ids=str)
def test_contract(case: Case, kind: type) -> None:
    backend = kind()
    refusal = backend.supports(case.spec("cuda"))
    if refusal is not None:
        pytest.skip(f"{kind.name}: {refusal}")
    case = replace(case, order=backend.pool_order)
    if case.dtype == torch.float32 or (is_quantised(case.dtype) and not isinstance(backend, LibraryBackend)):
        # queries of a quantised pool are fp32 here, which libraries round; products may be in another order
        check(backend, case, device="cuda", atol=2e-5, rtol=4e-6)
    else:
        check(backend, case, device="cuda", atol=TOLERANCE.get(case.dtype, 2**-7), rtol=2e-3)


@pytest.mark.parametrize("kind", [kind for kind in BACKENDS if kind.refreshable], ids=lambda kind: kind.name)
@pytest.mark.parametrize("latent", [False, True])
def test_a_captured_graph_computes_the_batch_that_the_plan_is_refreshed_with(kind: type, latent: bool) -> None:
    lengths = ((1, 900), (1, 1), (1, 64), (1, 300))
    case = Case(sequences=lengths, kv_heads=8, group=4, head_dim=128, block_size=256, dtype=torch.bfloat16)
    if latent:
        case = replace(
            LATENT, sequences=lengths, group=16, head_dim=576, v_dim=512, block_size=64, dtype=torch.bfloat16
        )
    backend, spec = kind(), case.spec("cuda")
    if (refusal := backend.supports(spec)) is not None:
        pytest.skip(f"{kind.name}: {refusal}")
    sequences = make_sequences(case)
    batch, shard = make_shard(replace(case, order=backend.pool_order), sequences, 0)
    shard = on_device(shard, "cuda", v_in_k=case.v_in_k)
    q_TNH = torch.cat([s.q_TNH for s in sequences]).cuda()
    nobody = AttentionBatch(q_lens=(1,) * 4, visible=(0,) * 4, block_tables=((),) * 4, block_size=case.block_size)
    plan = backend.plan(nobody, spec, blocks=20)
    backend.attend(q_TNH, shard, plan, scale=0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_TNV, lse_TN = backend.attend(q_TNH, shard, plan, scale=0.1)
    for visible in (batch.visible, (5, 0, 63, 1), (900, 1, 0, 300)):
        some = AttentionBatch(batch.q_lens, visible, batch.block_tables, case.block_size)
        backend.refresh(plan, some)
        graph.replay()
        fresh_out, fresh_lse = backend.attend(q_TNH, shard, backend.plan(some, spec), scale=0.1)
        torch.testing.assert_close(out_TNV, fresh_out, rtol=0, atol=2**-7)
        torch.testing.assert_close(lse_TN, fresh_lse, rtol=1e-3, atol=1e-3)
        blind = torch.tensor(visible) == 0
        assert (out_TNV[blind] == 0).all() and (lse_TN[blind] == -torch.inf).all()
