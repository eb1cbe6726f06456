"""Which back end serves a pool, what is said about it, and libraries that are missing or broken."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import standins.te
import torch
from attention_contract import LATENT, Case

from megatron_dcp.attention import BACKENDS, VARIABLE, AttentionSpec, choose_backend, libraries
from megatron_dcp.attention.flash import FlashBackend
from megatron_dcp.attention.flash_mla import FlashMLABackend
from megatron_dcp.attention.flashinfer import FlashInferBackend
from megatron_dcp.attention.sdpa import SDPABackend
from megatron_dcp.attention.te import TEBackend
from megatron_dcp.config import BackendName, EngineConfig

TOP = ("transformer_engine", "flash_attn_interface", "flash_attn", "flash_mla", "flashinfer")
HEADS = Case(sequences=(), head_dim=128, dtype=torch.bfloat16, block_size=64).spec()
MLA = replace(LATENT, head_dim=576, v_dim=512, group=16, dtype=torch.bfloat16, block_size=64).spec()


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A GPU that has libraries, which a test names; the others are not installed."""

    def made(*present: str, capability: tuple[int, int] = (9, 0), cudnn: int = 91300) -> None:
        for name in TOP:
            monkeypatch.setitem(sys.modules, name, None)
        for module, name in (("te", "TE"), ("flash", "3"), ("flash_mla", "MLA"), ("flashinfer", "FlashInfer")):
            if module in present:
                home = sys.modules[f"megatron_dcp.attention.{module}"]
                function = "library_3" if name == "3" else "library"
                monkeypatch.setattr(home, function, lambda: libraries.Library(object(), None))
        monkeypatch.setattr(libraries, "capability", lambda device: capability)
        monkeypatch.setattr(libraries, "cudnn_version", lambda: cudnn)

    return made


def test_names() -> None:
    assert [backend.name for backend in BACKENDS if backend.name != "triton"] == [
        "te",
        "flash",
        "flashinfer",
        "flash_mla",
        "sdpa",
    ]


def test_on_a_cpu_it_is_sdpa_and_why() -> None:
    chosen = choose_backend("auto", HEADS)
    assert chosen.backend.name == "sdpa" and chosen.spec is HEADS
    assert chosen.reason.startswith("te: it runs on GPUs, not on cpu (sdpa does), skipped; flash: it runs on GPUs")
    assert chosen.reason.endswith("; sdpa: chosen")
    assert choose_backend("sdpa", HEADS).reason == "sdpa: chosen by the configuration"


def test_the_best_library_that_is_there(gpu: Callable[..., None]) -> None:
    gpu("te", "flash", "flashinfer", "flash_mla")
    assert choose_backend("auto", HEADS).reason == "te: chosen"
    reason = choose_backend("auto", MLA).reason
    assert reason == (
        "te: head dim 576 > 256 (flash, flashinfer, flash_mla, triton and sdpa serve it), skipped; flash: chosen"
    )


def test_a_latent_goes_past_what_is_not_installed(gpu: Callable[..., None]) -> None:
    gpu("te", "flashinfer")
    reason = choose_backend("auto", MLA).reason
    assert "flash: version 3: flash_attn_interface is not installed; build it from" in reason
    assert reason.endswith("; flashinfer: chosen")


@pytest.mark.parametrize(
    ("spec", "kind", "words"),
    [
        (replace(HEADS, windows=True), TEBackend, "sliding window"),
        (replace(HEADS, dtype=torch.float32), TEBackend, "torch.float32 pools are not read"),
        (replace(HEADS, dtype=torch.int8), FlashBackend, "torch.int8 pools with scales"),
        (replace(HEADS, dtype=torch.int8), FlashInferBackend, "torch.int8 pools with scales"),
        (replace(MLA, dtype=torch.float8_e4m3fn), FlashInferBackend, "torch.float8_e4m3fn pools with scales"),
        (replace(HEADS, head_dim=260, v_dim=260), TEBackend, "head dim 260 > 256"),
        (replace(HEADS, head_dim=100, v_dim=100), TEBackend, "no multiple of 8"),
        (replace(HEADS, head_dim=192), TEBackend, "192 and 128 of keys and values differ"),
        (replace(MLA, head_dim=64, v_dim=32), TEBackend, "values inside of keys"),
        (replace(HEADS, head_dim=80, v_dim=80), FlashInferBackend, "80 and 80 are none that it compiles for"),
        (replace(MLA, heads=24), FlashInferBackend, "24 heads"),
        (replace(MLA, head_dim=320, v_dim=256), FlashInferBackend, "only 576 and 512"),
        (replace(MLA, head_dim=640, v_dim=512), FlashBackend, "640 and 512"),
        (replace(MLA, block_size=32), FlashMLABackend, "block_size=32 is not 64"),
        (HEADS, FlashMLABackend, "512 . 64 dims and nothing else"),
    ],
)
def test_what_no_library_does_is_refused(spec: AttentionSpec, kind: type, words: str, gpu: Callable[..., None]) -> None:
    gpu("te", "flash", "flashinfer", "flash_mla")
    with pytest.raises(ValueError, match=f"backend='{kind.name}' cannot serve .*{words}"):  # type: ignore[attr-defined]
        choose_backend(kind.name, spec)  # type: ignore[attr-defined]
    refusal = kind().supports(spec)
    assert any(name in refusal.rpartition("(")[2] for name in ("sdpa", "flashinfer", "flash"))


def test_whatever_the_libraries_refuse_sdpa_serves(gpu: Callable[..., None]) -> None:
    gpu()
    for spec in (HEADS, MLA, replace(HEADS, windows=True), replace(HEADS, dtype=torch.int8)):
        assert choose_backend("auto", spec).backend.name in ("sdpa", "triton")
        assert SDPABackend().supports(spec) is None


@pytest.mark.parametrize(
    ("capability", "cudnn", "head_dim", "words"),
    [
        ((8, 0), 91300, 128, "compute capability 8.0 is not 9.x to 11.x"),
        ((12, 0), 91300, 128, "compute capability 12.0 is not 9.x to 11.x"),
        ((9, 0), 90600, 128, "cuDNN 90600"),
        ((9, 0), 91001, 128, "cuDNN 91001"),
        ((10, 0), 90900, 256, "head dim 256 > 128 needs cuDNN 9.10.2"),
        ((10, 0), 91300, 256, None),
        ((9, 0), 90700, 256, None),
    ],
)
def test_te_knows_what_cudnn_can(
    capability: tuple[int, int], cudnn: int, head_dim: int, words: str | None, gpu: Callable[..., None]
) -> None:
    gpu("te", capability=capability, cudnn=cudnn)
    refusal = TEBackend().supports(replace(HEADS, head_dim=head_dim, v_dim=head_dim))
    assert refusal is None if words is None else words in (refusal or "")


def test_flash_2_where_there_is_no_3(gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu()
    flash = sys.modules["megatron_dcp.attention.flash"]
    monkeypatch.setattr(flash, "library_2", lambda: libraries.Library(object(), None))
    assert FlashBackend().supports(replace(HEADS, block_size=256)) is None
    refusal = FlashBackend().supports(HEADS)
    assert refusal is not None and "version 2: block_size=64 is no multiple of 256" in refusal


def test_the_environment_names_a_back_end(gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu("te", "flashinfer")
    monkeypatch.setenv(VARIABLE, "flashinfer")
    assert choose_backend("auto", HEADS).reason == "flashinfer: chosen by MEGATRON_DCP_BACKEND"
    assert choose_backend("te", HEADS).reason == "te: chosen by the configuration", "which wins"
    assert choose_backend("auto", HEADS, environment=False).backend.name == "te"
    with pytest.raises(ValueError, match="MEGATRON_DCP_BACKEND='flashinfer' cannot serve .*sliding window"):
        choose_backend("auto", replace(HEADS, windows=True))
    monkeypatch.setenv(VARIABLE, "auto")
    assert choose_backend("auto", HEADS).backend.name == "te"
    monkeypatch.setenv(VARIABLE, "")
    assert choose_backend("auto", HEADS).reason == "te: chosen"


def test_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"backend='none' is not known; use one of auto, te, flash, flashinfer, .*sdpa$"
    ):
        choose_backend("none", HEADS)
    monkeypatch.setenv(VARIABLE, "flash4")
    with pytest.raises(ValueError, match=r"MEGATRON_DCP_BACKEND='flash4' is not known; use one of auto, te, .*sdpa$"):
        choose_backend("auto", HEADS)


def test_a_pool_that_nobody_reads() -> None:
    for name in ("auto", "sdpa"):
        with pytest.raises(ValueError, match=r"cannot serve .*dtype=torch.int16 .*only float32, bfloat16"):
            choose_backend(name, replace(HEADS, dtype=torch.int16))


@pytest.mark.parametrize(
    ("name", "install"),
    [("te", r"megatron-dcp\[te\]"), ("flash", r"megatron-dcp\[flash\]"), ("flashinfer", r"megatron-dcp\[flashinfer\]")],
)
def test_a_missing_library_says_what_to_install(name: str, install: str, gpu: Callable[..., None]) -> None:
    gpu()
    with pytest.raises(ValueError, match=f"is not installed; pip install .{install}"):
        choose_backend(name, replace(HEADS, block_size=256))


@pytest.mark.parametrize(
    "error", [ImportError("undefined symbol: _ZN2at"), OSError("libcudart.so.12:\n no such file"), AssertionError()]
)
def test_a_library_that_does_not_import_is_a_reason(error: Exception) -> None:
    def importer() -> None:
        raise error

    found = libraries.load("flashinfer", importer, "install it")
    assert found.module is None and found.missing is not None
    assert found.missing.startswith(f"flashinfer is installed but does not import ({type(error).__name__}: ")
    assert "\n" not in found.missing


def test_a_library_that_misses_another_one() -> None:
    def importer() -> None:
        raise ModuleNotFoundError("No module named 'einops'", name="einops")

    assert libraries.load("flash_attn", importer, "x").missing == "flash_attn needs einops, which is not installed; x"


def test_an_old_library_is_told_to_be_old(gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu()
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.cpp_extensions"):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    home = sys.modules["transformer_engine.pytorch.cpp_extensions"]
    old = type(sys)("fused_attn")
    old.fused_attn_fwd = lambda is_training, max_seqlen_q: None  # type: ignore[attr-defined]
    monkeypatch.setattr(home, "fused_attn", old, raising=False)
    assert "transformer_engine is older than 2.15; pip install" in (TEBackend().supports(HEADS) or "")
    monkeypatch.setattr(home, "fused_attn", standins.te)
    assert TEBackend().supports(HEADS) is None
    flashinfer = type(sys)("flashinfer")
    flashinfer.mla = type(sys)("flashinfer.mla")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", flashinfer.mla)
    assert "flashinfer is older than 0.7.4; pip install" in (FlashInferBackend().supports(HEADS) or "")


def test_the_configuration_knows_every_back_end() -> None:
    assert get_args(BackendName) == ("auto", *(kind.name for kind in BACKENDS))


@pytest.mark.parametrize("name", ["TE", " sdpa", "nonsense", "", None, 5, ["sdpa"]])
def test_a_wrong_name_is_refused_where_it_is_given(name: object) -> None:
    with pytest.raises(ValueError, match="backend=.* is not known; use one of auto, te, flash"):
        EngineConfig(backend=name)  # type: ignore[arg-type]
