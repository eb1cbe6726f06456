"""Back ends over libraries, held to the contract with stand-ins that have the libraries' signatures and conventions.

What only a GPU shows: that a library's kernel computes what its stand-in does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import standins.flash_attn
import standins.flash_attn_interface
import standins.flash_mla
import standins.flashinfer
import standins.te
import torch
from attention_contract import CASES, LATENT, Case, check, make_sequences, make_shard
from standins import paged

from megatron_dcp.attention import AttentionBatch, flashinfer, libraries
from megatron_dcp.attention.flash import FlashBackend
from megatron_dcp.attention.flash_mla import FlashMLABackend
from megatron_dcp.attention.flashinfer import FlashInferBackend
from megatron_dcp.attention.libraries import LibraryBackend
from megatron_dcp.attention.te import TEBackend
from megatron_dcp.shard import Shard, is_quantised

MODULES = {
    "transformer_engine": None,
    "transformer_engine.pytorch": None,
    "transformer_engine.pytorch.cpp_extensions": None,
    "transformer_engine.pytorch.cpp_extensions.fused_attn": standins.te,
    "flash_attn_interface": standins.flash_attn_interface,
    "flash_attn": standins.flash_attn,
    "flash_mla": standins.flash_mla,
    "flashinfer": standins.flashinfer,
    "flashinfer.mla": standins.flashinfer.mla,
}
ROUNDING = 2**-7  # outputs up to 4 in bfloat16: half a unit in the last place is 4 * 2 ** -9


@dataclass(frozen=True)
class Machine:
    """A library on a GPU.

    Attributes:
        fit: Makes a case one that the library can serve, where only sizes stand in the way.
        serves: Which of these it must then serve.
    """

    name: str
    backend: type[LibraryBackend]
    modules: tuple[str, ...]
    fit: Callable[[Case], Case]
    serves: Callable[[Case], bool]
    capability: tuple[int, int] = (9, 0)

    def __str__(self) -> str:
        return self.name


def half(case: Case) -> Case:
    return replace(case, order="slots_first", dtype=torch.bfloat16 if case.dtype == torch.float32 else case.dtype)


def plain_heads(case: Case) -> bool:
    """Neither a window nor 8 bits nor a latent, and one head dim."""
    return not (case.window or is_quantised(case.dtype) or case.v_in_k) and case.v_dim in (None, case.head_dim)


def fit_flashinfer(case: Case) -> Case:
    sizes = {16: 64, 17: 64, 32: 64, 80: 128} if not case.v_in_k else {}
    return replace(half(case), head_dim=sizes.get(case.head_dim, case.head_dim))


def latent(case: Case) -> Case:
    """With the one pair of head dims that latents have."""
    case = half(case)
    if not case.v_in_k:
        return case
    return replace(case, head_dim=576, v_dim=512, group={4: 4, 16: 16, 128: 128}[case.group])


MACHINES = (
    Machine(
        "te",
        TEBackend,
        ("transformer_engine",),
        half,
        lambda case: plain_heads(case) and case.head_dim % 8 == 0 and case.head_dim <= 256,
    ),
    Machine(
        "flash3",
        FlashBackend,
        ("flash_attn_interface",),
        latent,
        lambda case: (
            (
                plain_heads(case)
                or (case.v_in_k and not is_quantised(case.dtype))
                or (case.head_dim, case.v_dim) == (24, 16)
                or (case.head_dim, case.v_dim) in ((16, 24), (64, 32))
            )
            and case.head_dim % 8 == 0
            and case.window is None
            and not is_quantised(case.dtype)
        ),  # fmt: skip
    ),
    Machine(
        "flash2",
        FlashBackend,
        ("flash_attn",),
        lambda case: replace(half(case), block_size=256),
        lambda case: plain_heads(case) and case.head_dim % 8 == 0,
        (8, 0),
    ),
    Machine(
        "flashinfer",
        FlashInferBackend,
        ("flashinfer",),
        lambda case: fit_flashinfer(latent(case)),
        lambda case: (
            case.window is None
            and (case.head_dim, case.v_dim or case.head_dim) in ((64, 64), (128, 128), (256, 256), (576, 512))
            and case.dtype != torch.int8
            and case.v_in_k == (case.head_dim == 576)
            and not (case.v_in_k and is_quantised(case.dtype))
        ),
    ),
    Machine(
        "flash_mla",
        FlashMLABackend,
        ("flash_mla",),
        lambda case: replace(latent(case), block_size=64),
        lambda case: case.v_in_k and not is_quantised(case.dtype),
    ),
)
by_machine = pytest.mark.parametrize("machine", MACHINES, ids=str)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Machine], LibraryBackend]]:
    """Puts a machine's library where the back end finds it, exact to fp32, and a GPU; returns the back end."""

    def installed(machine: Machine) -> LibraryBackend:
        for name, module in MODULES.items():
            there = name.partition(".")[0] in machine.modules
            monkeypatch.setitem(sys.modules, name, (module or package(name)) if there else None)
        monkeypatch.setattr(libraries, "capability", lambda device: machine.capability)
        monkeypatch.setattr(libraries, "cudnn_version", lambda: 91300)
        monkeypatch.setattr(paged, "ROUNDED", False)
        return machine.backend()

    def package(name: str) -> object:
        made = type(sys)(name)
        if name.endswith("cpp_extensions"):
            made.fused_attn = standins.te
        return made

    yield installed


@by_machine
@pytest.mark.parametrize("case", CASES, ids=str)
def test_contract(machine: Machine, case: Case, install: Callable[[Machine], LibraryBackend]) -> None:
    """Every case is served, or refused with the name of a back end that serves it."""
    backend, case = install(machine), machine.fit(case)
    refusal = backend.supports(case.spec())
    assert (refusal is None) == machine.serves(case), refusal
    if refusal is None:
        # queries of an 8-bit pool are rounded to bfloat16: each score is off by about 2 ** -9 / 3 ** 0.5
        check(backend, case, atol=ROUNDING if is_quantised(case.dtype) else 5e-6)
        return
    assert "sdpa" in refusal.rpartition("(")[2] or "flash" in refusal.rpartition("(")[2]
    reads_8_bits = machine.name == "flashinfer" and case.dtype == torch.float8_e4m3fn and not case.v_in_k
    if case.window is not None:
        assert "window" in refusal
    elif is_quantised(case.dtype) and not reads_8_bits:
        assert str(case.dtype) in refusal
    else:
        assert str(case.head_dim) in refusal or "latent" in refusal


@by_machine
def test_every_library_serves_many_cases(machine: Machine) -> None:
    assert sum(machine.serves(machine.fit(case)) for case in CASES) >= (11 if machine.name == "flash_mla" else 40)


@by_machine
def test_rounded_outputs(
    machine: Machine, install: Callable[[Machine], LibraryBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As libraries return them."""
    backend = install(machine)
    monkeypatch.setattr(paged, "ROUNDED", True)
    case = machine.fit(LATENT if machine.name == "flash_mla" else CASES[0])
    check(backend, replace(case, dcp_size=2), atol=ROUNDING)


def decode_case(machine: Machine, lengths: tuple[int, ...]) -> Case:
    base = LATENT if machine.name == "flash_mla" else CASES[0]
    return machine.fit(replace(base, sequences=tuple((1, n) for n in lengths), dcp_size=2))


def run(backend: LibraryBackend, case: Case, plan: object, batch: AttentionBatch, shard: Shard) -> tuple:
    q_TNH = torch.cat([s.q_TNH for s in make_sequences(case)])
    return backend.attend(q_TNH, shard, plan, scale=0.1)  # type: ignore[arg-type]


@by_machine
@pytest.mark.parametrize("kind", ["heads", "latent"])
def test_refreshed_plan_is_as_a_new_one(
    machine: Machine, kind: str, install: Callable[[Machine], LibraryBackend]
) -> None:
    backend = install(machine)
    base = LATENT if kind == "latent" else CASES[0]

    def decode(lengths: tuple[int, ...]) -> Case:
        return machine.fit(replace(base, sequences=tuple((1, n) for n in lengths), dcp_size=2))

    first, second = decode((9, 300, 1, 40)), decode((200, 1, 33, 1))
    if backend.supports(first.spec()) is not None:
        assert not machine.serves(first)
        return
    blocks = 160
    batch, shard = make_shard(first, make_sequences(first), 1)
    assert 0 in batch.visible, "one shard is empty"
    plan = backend.plan(batch, first.spec(), blocks=blocks)
    addresses = [x.data_ptr() for x in plan.sets[0].tensors if x is not None]
    expected = run(backend, first, backend.plan(batch, first.spec()), batch, shard)
    assert all(map(torch.equal, run(backend, first, plan, batch, shard), expected))
    for case, rank in ((second, 1), (first, 0), (second, 0)):
        batch, shard = make_shard(case, make_sequences(case), rank)
        backend.refresh(plan, batch)
        expected = run(backend, case, backend.plan(batch, case.spec()), batch, shard)
        got = run(backend, case, plan, batch, shard)
        assert all(map(torch.equal, got, expected))
        blind = torch.tensor(batch.visible) == 0
        assert (got[0][blind] == 0).all() and (got[1][blind] == -torch.inf).all()
        assert not got[0].isnan().any()
    assert [x.data_ptr() for x in plan.sets[0].tensors if x is not None] == addresses


@by_machine
def test_what_a_library_makes_of_a_token_without_keys_is_dropped(
    machine: Machine, install: Callable[[Machine], LibraryBackend]
) -> None:
    """Block 0, of which such a token reads one key, is poisoned."""
    backend = install(machine)
    case = decode_case(machine, (9, 9, 9))
    spec = case.spec()
    pool = torch.full((4 * spec.block_size, spec.kv_heads, spec.head_dim), torch.nan, dtype=spec.dtype)
    shard = Shard(pool, pool[..., : spec.v_dim])
    batch = AttentionBatch(
        q_lens=(1, 1, 1), visible=(0, 0, 0), block_tables=((), (2**40,), ()), block_size=spec.block_size
    )
    q_TNH = torch.randn(3, spec.heads, spec.head_dim, dtype=spec.dtype)
    for blocks in (0, 3):
        out, lse = backend.attend(q_TNH, shard, backend.plan(batch, spec, blocks=blocks), scale=0.1)
        assert out.is_contiguous() and lse.is_contiguous()
        assert out.shape == (3, spec.heads, spec.v_dim) and out.dtype == lse.dtype == torch.float32
        assert (out == 0).all() and (lse == -torch.inf).all()


@by_machine
def test_nan_in_a_visible_key_is_not_hidden(machine: Machine, install: Callable[[Machine], LibraryBackend]) -> None:
    backend = install(machine)
    case = decode_case(machine, (9, 300))
    batch, shard = make_shard(case, make_sequences(case), 0)
    shard.k_SKH.fill_(torch.nan)
    for blocks in (0, 160):
        out, lse = run(backend, case, backend.plan(batch, case.spec(), blocks=blocks), batch, shard)
        assert out.isnan().all() and lse.isnan().all()


@pytest.mark.parametrize("ragged", [True, False])
def test_te_reads_either_form_of_statistics(
    ragged: bool, install: Callable[[Machine], LibraryBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = install(MACHINES[0])
    monkeypatch.setattr(standins.te, "RAGGED_STATS", ragged)
    check(backend, half(CASES[4]))


def test_flash_mla_does_not_keep_a_schedule_in_a_refreshed_plan(install: Callable[[Machine], LibraryBackend]) -> None:
    """A CUDA graph would replay it with other lengths."""
    machine = MACHINES[-1]
    backend = install(machine)
    case = decode_case(machine, (9, 300))
    batch, _ = make_shard(case, make_sequences(case), 0)
    ((_, schedule),) = backend.plan(batch, case.spec(), blocks=160).states
    assert schedule is None
    ((_, schedule),) = backend.plan(batch, case.spec()).states
    assert schedule is not None


def test_flashinfer_has_few_wrappers_however_many_plans(
    install: Callable[[Machine], LibraryBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = MACHINES[3]
    monkeypatch.setattr(flashinfer, "MAX_WRAPPERS", 3)
    backend = install(machine)
    assert isinstance(backend, FlashInferBackend)
    cases = [decode_case(machine, (9, 300 + n)) for n in range(5)]
    shards = [make_shard(case, make_sequences(case), 0) for case in cases]
    expected = [
        run(backend, case, backend.plan(batch, case.spec()), batch, shard)
        for case, (batch, shard) in zip(cases, shards, strict=True)
    ]
    (wrappers,) = backend._wrappers.values()
    assert len(wrappers) == 1, "no plan was alive beside another"
    plans = [backend.plan(batch, case.spec()) for case, (batch, _) in zip(cases, shards, strict=True)]
    for _ in range(2):
        for case, plan, (batch, shard), one in zip(cases, plans, shards, expected, strict=True):
            for _layer in range(2):
                assert all(map(torch.equal, run(backend, case, plan, batch, shard), one))
    assert len(wrappers) == 3
    assert len(backend._workspaces) == 1


def test_flashinfer_plans_again_for_another_scale(install: Callable[[Machine], LibraryBackend]) -> None:
    machine = MACHINES[3]
    backend = install(machine)
    case = decode_case(machine, (9, 300))
    batch, shard = make_shard(case, make_sequences(case), 0)
    q_TNH = torch.cat([s.q_TNH for s in make_sequences(case)])
    for blocks in (0, 160):
        plan = backend.plan(batch, case.spec(), blocks=blocks)
        for scale in (0.1, 0.3, 0.1):
            fresh = backend.attend(q_TNH, shard, backend.plan(batch, case.spec()), scale=scale)
            assert all(map(torch.equal, backend.attend(q_TNH, shard, plan, scale=scale), fresh))
