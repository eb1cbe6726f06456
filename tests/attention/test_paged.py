"""The Triton back end: the contract under the interpreter, its launches, and what a refreshed plan computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_contract import CASES, LATENT, MIXED, Case, check, make_sequences, make_shard
from interpreted import interpreted

from megatron_dcp import kernels
from megatron_dcp.attention import AttentionBatch, choose_backend, paged
from megatron_dcp.attention.paged import PagedBackend, _splits
from megatron_dcp.attention.sdpa import SDPABackend
from megatron_dcp.shard import Shard

pytest.importorskip("triton", reason="triton is not installed")


def cost(case: Case) -> int:
    """About how many products the interpreter makes, one after the other."""
    heads = case.kv_heads * case.group
    return case.dcp_size * sum(q_len * heads * (8 + length // 16) for q_len, length in case.sequences)


def features(case: Case) -> set[object]:
    """What a case is there for: each setting that is not the default; with dtypes, what they are combined with."""
    default = Case(sequences=())
    settings = {(k, str(v)) for k, v in vars(case).items() if v != getattr(default, k)}
    kind = {(str(case.dtype), k) for k, _ in settings if k in ("v_in_k", "window", "v_dim")}
    lengths = {("many tokens", any(q > 1 for q, _ in case.sequences))}
    return {*settings, *kind, *lengths}


def cover(cases: list[Case]) -> list[Case]:
    """The interpreter takes milliseconds for a product: of all cases, cheapest first, those that show something new."""
    seen: set[object] = set()
    chosen = []
    for case in sorted(cases, key=cost):
        if not features(case) <= seen:
            seen.update(features(case))
            chosen.append(case)
    return chosen


# All of a model's shapes with fewer tokens than in CASES.
OWN = [
    replace(LATENT, sequences=((1, 40), (2, 9)), group=128, head_dim=576, v_dim=512, dtype=torch.bfloat16),
    Case(sequences=((40, 90), (1, 70)), window=24, group=8, head_dim=128, kv_heads=1, dtype=torch.bfloat16),
    Case(sequences=((1, 400), (1, 333)), dcp_size=2, kv_heads=1, group=4, head_dim=128, dtype=torch.float8_e4m3fn),
]
OWN += [replace(LATENT, sequences=((1, 90), (2, 30)), dtype=torch.float16, head_dim=80, v_dim=64)]
OWN += [
    Case(sequences=((40, 90), (1, 70)), group=8, head_dim=64, kv_heads=1, dtype=t, query_dtype=torch.float32)
    for t in (torch.bfloat16, torch.int8)
]
LIMIT = 9_000  # two of CASES take a minute each; what is cut off with them is in OWN
CHOSEN = [*cover([case for case in CASES if cost(case) < LIMIT]), *OWN]


MANY_SPLITS = [
    Case(sequences=MIXED),
    Case(sequences=((1, 300), (1, 4), (1, 90)), dcp_size=2, window=64, block_size=16),
    replace(LATENT, sequences=((1, 200), (2, 90)), dcp_size=3, order="slots_first"),
    Case(sequences=((1, 150), (3, 130)), dtype=torch.int8, head_dim=64, v_dim=32),
]


def hold(case: Case) -> None:
    """Float16 is multiplied as on a GPU: weights are then sums of two numbers of 11 bits in small tiles, else one."""
    rows = max(q_len for q_len, _ in case.sequences) * case.group
    one_term = case.dtype == torch.float16 and rows > 16
    check(PagedBackend(), case, atol=5e-4 if one_term else 5e-6)


def hold_with_short_steps(case: Case) -> None:
    """Steps of the fewest keys, and as many splits as there are steps."""
    from megatron_dcp.kernels import attention

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "STEP_BYTES", 1)
        patch.setattr(paged, "STEPS_PER_SPLIT", 1)
        batch, _ = make_shard(case, make_sequences(case), 0)
        assert PagedBackend().plan(batch, case.spec()).splits > 1
        check(PagedBackend(), case)


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_contract(case: Case) -> None:
    interpreted(hold, case)


@pytest.mark.parametrize("case", MANY_SPLITS, ids=str)
def test_contract_with_many_splits(case: Case) -> None:
    interpreted(hold_with_short_steps, case)


def refresh_to_other_lengths(dtype: torch.dtype, window: int | None) -> None:
    """Shorter, longer and empty contexts, other blocks; nothing that a captured launch holds moves."""
    backend = PagedBackend()
    old = Case(sequences=((1, 30), (1, 1), (1, 400)), dcp_size=2, dtype=dtype, window=window)
    new = replace(old, sequences=((1, 500), (1, 90), (1, 1)))
    batch, _ = make_shard(old, make_sequences(old), 1)
    plan = backend.plan(batch, old.spec(), blocks=600)
    assert plan.splits > 1
    addresses = [x.data_ptr() for x in (*plan.tensors, plan.tiles) if x is not None]
    sequences = make_sequences(new)
    batch, shard = make_shard(new, sequences, 1)
    q_TNH = torch.cat([s.q_TNH for s in sequences])
    fresh = backend.attend(q_TNH, shard, backend.plan(batch, new.spec()), scale=0.3)
    backend.refresh(plan, batch)
    out, lse = backend.attend(q_TNH, shard, plan, scale=0.3)
    assert addresses == [x.data_ptr() for x in (*plan.tensors, plan.tiles) if x is not None]
    assert batch.visible[2] == 0 and lse[2].max() == -torch.inf and out[2].abs().max() == 0
    torch.testing.assert_close(out, fresh[0], rtol=0, atol=2e-6)
    torch.testing.assert_close(lse, fresh[1], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("window", [None, 50])
def test_refresh(dtype: torch.dtype, window: int | None) -> None:
    interpreted(refresh_to_other_lengths, dtype, window)


def leave_a_gap() -> None:
    """Keys between the windows of two tokens that no token sees: NaN, in a block that is not there any more."""
    case = Case(sequences=((2, 12),), kv_heads=1, group=2, block_size=2, window=2)
    k_SKH, v_SKV, q_TNH = torch.randn(20, 1, 16), torch.randn(20, 1, 16), torch.randn(2, 2, 16)
    k_SKH[:2], v_SKV[:2] = torch.nan, torch.nan  # where an unneeded entry of the table points to
    batch = AttentionBatch((2,), (4, 12), ((-1, 5, -1, -1, -1, 9),), 2, hidden=(2, 10))
    backend, shard = PagedBackend(), Shard(k_SKH, v_SKV)
    out, lse = backend.attend(q_TNH, shard, backend.plan(batch, case.spec()), scale=0.3)
    for token, block in ((0, 5), (1, 9)):
        keys, values = (x[2 * block : 2 * block + 2, 0] for x in (k_SKH, v_SKV))
        scores = 0.3 * q_TNH[token] @ keys.t()
        torch.testing.assert_close(out[token], scores.softmax(-1) @ values, rtol=0, atol=2e-6)
        torch.testing.assert_close(lse[token], scores.logsumexp(-1), rtol=0, atol=2e-6)


def test_what_no_token_of_a_tile_sees_is_not_read() -> None:
    interpreted(leave_a_gap)


def test_splits_fill_the_device_and_no_more() -> None:
    assert _splits(8, 396, 1) == 1, "few keys"
    assert 40 <= _splits(8, 396, 128) <= 49, "one wave, nearly full"
    assert _splits(396, 396, 128) == 1
    assert 116 <= _splits(1, 396, 128) <= 128
    assert _splits(200, 396, 128) * 200 / 396 > 0.9, "half a device is not left idle"
    assert _splits(0, 396, 5) == 1, "no query tokens"


def test_without_a_gpu_it_is_refused_and_the_next_one_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Case(sequences=()).spec()
    kernels.unusable.cache_clear()
    refusal = PagedBackend().supports(spec)
    assert refusal is not None and "no kernels for cpu" in refusal
    chosen = choose_backend("auto", spec)
    assert isinstance(chosen.backend, SDPABackend) and refusal in chosen.reason
    monkeypatch.setenv("MEGATRON_DCP_TRITON", "0")
    kernels.unusable.cache_clear()
    assert PagedBackend().supports(spec) == "turned off by MEGATRON_DCP_TRITON=0"
    kernels.unusable.cache_clear()


def what_is_supported() -> list[str | None]:
    spec = Case(sequences=(), head_dim=64).spec()
    others = (
        {"dtype": torch.float64},
        {"head_dim": 640, "v_dim": 64},
        {"dtype": torch.float8_e4m3fn},
        {"head_dim": 576, "v_dim": 512},
    )
    return [PagedBackend().supports(replace(spec, **other)) for other in others]


def test_supports() -> None:
    no_fp64, too_wide, *fine = interpreted(what_is_supported)
    assert (
        "float64 pools are not read" in no_fp64 and too_wide == "head dims 640, 64 > 576, 512" and fine == [None, None]
    )
