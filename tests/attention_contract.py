"""What every attention back end must hold to: cases, and a check of one back end on one case.

A case is a batch of sequences over dcp ranks. Every rank's pool holds the keys that belong there and NaN in all other
slots; block tables end in block ids that no pool has. The check compares every rank's partial, and their merge, with
the oracle. A later back end runs ``check(backend, case, ...)`` over ``CASES`` with the tolerance of its arithmetic.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.attention import AttentionBackend, AttentionBatch, AttentionSpec
from megatron_dcp.merge import merge_partials
from megatron_dcp.shard import Shard, dequantise, is_quantised, quantise
from reference import full_attention, shard_attention, shard_positions

ABSENT_BLOCK = 2**40


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sequences as ``(query tokens, tokens after them in all)``; the queries are each sequence's last tokens."""

    sequences: tuple[tuple[int, int], ...]
    dcp_size: int = 1
    interleave: int = 1
    block_size: int = 4
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    v_dim: int | None = None
    v_in_k: bool = False
    dtype: torch.dtype = torch.float32
    query_dtype: torch.dtype | None = None
    order: str = "heads_first"
    scattered: bool = True  # blocks lie anywhere in the pool, rather than one after the other
    score_size: float = 1.0
    window: int | None = None

    def spec(self, device: str = "cpu") -> AttentionSpec:
        return AttentionSpec(
            heads=self.kv_heads * self.group,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            v_dim=self.v_dim or self.head_dim,
            v_in_k=self.v_in_k,
            dtype=self.dtype,
            query_dtype=self.query_dtype,
            device=torch.device(device),
            block_size=self.block_size,
            windows=self.window is not None,
        )

    def __str__(self) -> str:
        default = Case(sequences=())
        parts = [f"{k}={v}" for k, v in vars(self).items() if k == "sequences" or v != getattr(default, k)]
        return " ".join(parts).replace("torch.", "")


MIXED = ((1, 9), (3, 3), (1, 1), (5, 20), (1, 40), (2, 17), (1, 2))

CASES = [
    *(Case(sequences=MIXED, dcp_size=d, interleave=i) for d in (1, 2, 3, 4) for i in (1, 2, 4)),
    Case(sequences=MIXED, scattered=False),
    Case(sequences=MIXED, dcp_size=2, order="slots_first"),
    Case(sequences=MIXED, dcp_size=2, order="slots_first", scattered=False),
    # one token each, and contexts on either side of any bound: units are not made in the order of the tokens
    Case(sequences=((1, 3), (1, 40), (1, 30)), scattered=False),
    Case(sequences=((1, 40), (1, 3), (1, 200), (1, 4)), dcp_size=2, scattered=False, block_size=64),
    Case(sequences=((1, 1),), dcp_size=4),  # three shards are empty
    Case(sequences=((1, 2), (1, 1), (1, 3)), dcp_size=4, interleave=2),  # the batch's first shard is empty
    Case(sequences=((6, 6),), dcp_size=4, interleave=4),  # all ranks but two see none of the whole chunk
    Case(sequences=((30, 30), (30, 31), (17, 90)), dcp_size=3, interleave=2),
    Case(sequences=((30, 200),), dcp_size=2, block_size=64, scattered=False),
    *(Case(sequences=MIXED, dcp_size=2, kv_heads=k, group=g) for k, g in ((1, 1), (1, 8), (3, 5), (8, 1), (2, 7))),
    *(Case(sequences=MIXED, dcp_size=2, head_dim=h) for h in (17, 32, 80, 128, 256)),
    *(Case(sequences=MIXED, dcp_size=2, head_dim=h, v_dim=v) for h, v in ((24, 16), (16, 24), (576, 512))),
    *(Case(sequences=((1, n),) * n, dcp_size=2) for n in (2, 5, 16)),
    *(Case(sequences=MIXED, dcp_size=3, dtype=t, head_dim=64) for t in (torch.bfloat16, torch.float16)),
    Case(sequences=MIXED, dcp_size=3, dtype=torch.bfloat16, head_dim=64, v_dim=32),
    *(Case(sequences=((1, 700), (1, 650)), block_size=b, scattered=s) for b in (1, 16, 512) for s in (True, False)),
    Case(sequences=((1, 700), (1, 650), (4, 300)), dtype=torch.bfloat16, scattered=False),
    Case(sequences=((1, 300), (9, 300)), dcp_size=2, score_size=1e4),
]

CASES += [
    *(Case(sequences=MIXED, dcp_size=d, interleave=i, window=w) for d, i in ((1, 1), (3, 2), (4, 4)) for w in (1, 5)),
    Case(sequences=MIXED, window=100),
    Case(sequences=((1, 300), (1, 4), (1, 90)), dcp_size=2, window=64, block_size=16),
    *(Case(sequences=((60, 100), (50, 50)), dcp_size=2, window=w) for w in (7, 20, 40, 90)),
    Case(sequences=((300, 900),), window=256, block_size=64, scattered=False, group=8),
    Case(sequences=((30, 90), (1, 300)), dcp_size=3, window=20, dtype=torch.bfloat16, head_dim=64),
    Case(sequences=((30, 90), (1, 300)), dcp_size=3, window=20, head_dim=24, v_dim=16),
]

# MLA's latent: one KV head, values that are the first dims of the keys.
LATENT = Case(sequences=MIXED, dcp_size=2, kv_heads=1, group=4, head_dim=24, v_dim=16, v_in_k=True)
CASES += [
    *(replace(LATENT, dcp_size=d, interleave=i) for d in (1, 3, 4) for i in (1, 4)),
    replace(LATENT, order="slots_first", scattered=False),
    replace(LATENT, sequences=((1, 700), (4, 300)), block_size=512),
    replace(LATENT, sequences=((1, 200), (20, 90)), group=128, head_dim=576, v_dim=512),
    replace(LATENT, v_dim=24),
    *(replace(LATENT, dtype=t, scattered=s) for t in (torch.bfloat16, torch.float16) for s in (True, False)),
]

# 8 bits with scales.
CASES += [
    replace(case, dtype=dtype)
    for dtype in (torch.float8_e4m3fn, torch.int8)
    for case in (
        Case(sequences=MIXED, dcp_size=3, head_dim=64),
        Case(sequences=MIXED, dcp_size=2, order="slots_first", scattered=False, head_dim=32, v_dim=16),
        Case(sequences=((1, 700), (1, 650), (4, 300)), scattered=False),
        Case(sequences=((30, 90), (1, 300)), dcp_size=2, window=20, interleave=4),
        replace(LATENT, sequences=((1, 200), (20, 90)), group=16, head_dim=576, v_dim=512),
    )
]


@dataclass(frozen=True)
class Sequence:
    """One sequence's queries, keys and values over all ranks, as a pool gives them back that stores them."""

    q_TNH: Tensor
    k_SKH: Tensor
    v_SKV: Tensor

    @property
    def positions(self) -> list[int]:
        return list(range(len(self.k_SKH) - len(self.q_TNH), len(self.k_SKH)))


def make_sequences(case: Case, seed: int = 0) -> list[Sequence]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, stored: bool = True) -> Tensor:
        drawn = torch.randn(shape, generator=generator)
        if not stored and case.query_dtype is not None:
            return drawn.to(case.query_dtype)
        if not is_quantised(case.dtype):
            return drawn.to(case.dtype)
        return dequantise(*quantise(drawn, case.dtype)) if stored else drawn

    heads, v_dim = case.kv_heads * case.group, case.v_dim or case.head_dim
    sequences = []
    for q_len, length in case.sequences:
        q_TNH = normal(q_len, heads, case.head_dim, stored=False)
        k_SKH = normal(length, case.kv_heads, case.head_dim)
        v_SKV = k_SKH[..., :v_dim] if case.v_in_k else normal(length, case.kv_heads, v_dim)
        sequences.append(Sequence(q_TNH, k_SKH, v_SKV))
    return sequences


def make_shard(case: Case, sequences: list[Sequence], rank: int) -> tuple[AttentionBatch, Shard]:
    """What one rank attends with: every slot that no key is in holds NaN."""
    shards = [shard_positions(len(s.k_SKH), rank, case.dcp_size, case.interleave) for s in sequences]
    needed = [-(-len(shard) // case.block_size) for shard in shards]
    free = list(range(sum(needed) + 3))
    if case.scattered:
        random.Random(rank).shuffle(free)
    tables = [[free.pop(0) for _ in range(n)] for n in needed]
    slots = (sum(needed) + 3) * case.block_size
    k_SKH, k_scale = poisoned(slots, case.kv_heads, case.head_dim, case)
    v_dim = case.v_dim or case.head_dim
    v_SKV, v_scale = (k_SKH[..., :v_dim], k_scale) if case.v_in_k else poisoned(slots, case.kv_heads, v_dim, case)
    visible, hidden = [], []
    for sequence, shard, table in zip(sequences, shards, tables, strict=True):
        own = [table[i // case.block_size] * case.block_size + i % case.block_size for i in range(len(shard))]
        store(k_SKH, k_scale, own, sequence.k_SKH[shard])
        if not case.v_in_k:
            store(v_SKV, v_scale, own, sequence.v_SKV[shard])
        visible += [sum(p <= q for p in shard) for q in sequence.positions]
        if case.window is not None:
            hidden += [sum(p <= q - case.window for p in shard) for q in sequence.positions]
            gone = hidden[-len(sequence.positions)] // case.block_size
            table[:gone] = [-1] * gone
    batch = AttentionBatch(
        q_lens=tuple(len(s.q_TNH) for s in sequences),
        visible=tuple(visible),
        block_tables=tuple((*table, ABSENT_BLOCK, ABSENT_BLOCK + 1) for table in tables),
        block_size=case.block_size,
        hidden=tuple(hidden),
    )
    return batch, Shard(k_SKH, v_SKV, k_scale, v_scale)


def poisoned(slots: int, kv_heads: int, dim: int, case: Case) -> tuple[Tensor, Tensor | None]:
    """Keys or values, and the scales of a quantised pool."""
    heads_first = torch.full((kv_heads, slots, dim), torch.nan).to(case.dtype).transpose(0, 1)
    scale = torch.full((kv_heads, slots), torch.nan).t() if is_quantised(case.dtype) else None
    if case.order == "slots_first":
        return heads_first.contiguous(), None if scale is None else scale.contiguous()
    return heads_first, scale


def store(pool: Tensor, scale: Tensor | None, slots: list[int], x: Tensor) -> None:
    if scale is None:
        pool[slots] = x
    else:  # quantising what was quantised gives the same again
        stored, scale[slots] = quantise(x, pool.dtype)
        pool.view(torch.uint8)[slots] = stored.view(torch.uint8)


def on_device(shard: Shard, device: str, *, v_in_k: bool) -> Shard:
    """The shard there; values that are part of the keys stay that."""
    k, v, k_scale, v_scale = (None if x is None else x.to(device) for x in shard)
    assert k is not None and v is not None
    return Shard(k, k[..., : v.shape[-1]] if v_in_k else v, k_scale, k_scale if v_in_k else v_scale)


def check(
    backend: AttentionBackend[Any], case: Case, *, device: str = "cpu", atol: float = 5e-6, rtol: float = 2e-6
) -> None:
    """Hold a back end to the contract on every rank of a case, and the merge of the ranks to full attention.

    Args:
        atol: Largest difference of outputs, for values of size 1; of LSEs of size 1.
        rtol: Largest relative difference of LSEs. Outputs get ``score_size * rtol`` on top, the effect of rounded
            scores.
    """
    sequences = make_sequences(case)
    scale = case.score_size * case.head_dim**-0.5
    out_tolerance = atol + case.score_size * rtol
    outs, lses = [], []
    for rank in range(case.dcp_size):
        batch, shard = make_shard(case, sequences, rank)
        shard = on_device(shard, device, v_in_k=case.v_in_k)
        plan = backend.plan(batch, case.spec(device))
        q_TNH = torch.cat([s.q_TNH for s in sequences]).to(device)
        out, lse = (x.cpu() for x in backend.attend(q_TNH, shard, plan, scale=scale))
        again = backend.attend(q_TNH, shard, plan, scale=scale)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(again, (out, lse), strict=True)), "a plan serves all layers"
        assert out.dtype == lse.dtype == torch.float32
        expected = [
            shard_attention(
                s.q_TNH,
                s.k_SKH,
                s.v_SKV,
                s.positions,
                rank=rank,
                dcp_size=case.dcp_size,
                interleave=case.interleave,
                scale=scale,
                window=case.window,
            )  # fmt: skip
            for s in sequences
        ]
        compare(out, lse, expected, f"rank {rank}", out_tolerance, atol, rtol)
        blind = torch.tensor(batch.visible) == torch.tensor(batch.hidden or 0)
        assert (out[blind] == 0).all() and (lse[blind] == -torch.inf).all(), "0, -inf where no key is seen"
        outs.append(out)
        lses.append(lse)
    whole = [full_attention(s.q_TNH, s.k_SKH, s.v_SKV, s.positions, scale=scale, window=case.window) for s in sequences]
    compare(*merge_partials(torch.stack(outs), torch.stack(lses)), whole, "merged", out_tolerance, atol, rtol)


def compare(
    out: Tensor, lse: Tensor, expected: list[tuple[Tensor, Tensor]], what: str, out_tol: float, atol: float, rtol: float
) -> None:
    want_out, want_lse = (torch.cat(x) for x in zip(*expected, strict=True))
    torch.testing.assert_close(out.double(), want_out, rtol=0, atol=out_tol, msg=lambda m: f"{what}, out: {m}")
    torch.testing.assert_close(lse.double(), want_lse, rtol=rtol, atol=atol, msg=lambda m: f"{what}, lse: {m}")


def with_dtype(cases: list[Case], dtype: torch.dtype) -> list[Case]:
    """The same cases over pools of another dtype."""
    return [replace(case, dtype=dtype) for case in cases]
