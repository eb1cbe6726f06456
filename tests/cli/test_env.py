"""``megatron-dcp env``, on machines with and without GPUs and libraries."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from types import SimpleNamespace

import pytest
import standins.flashinfer
import torch

from megatron_dcp.attention import BACKENDS, VARIABLE, libraries
from megatron_dcp.cli import env, main

POOLS = ["GQA bf16", "MLA bf16", "GQA fp8", "windows bf16"]


@pytest.fixture(autouse=True)
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU and no library, whatever this machine has."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in ("transformer_engine", "flash_attn_interface", "flash_attn", "flash_mla", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, None)
    versions = {"megatron-core": "0.16.1"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


def show(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["env", *options]) == 0
    return capsys.readouterr().out


def test_on_a_machine_without_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(show(capsys, "--json"))
    assert found["torch"] == torch.__version__ and found["megatron_core"] == "0.16.1" and found["gpus"] == []
    assert list(found["backends"]) == [kind.name for kind in BACKENDS]
    assert all(list(row) == POOLS for row in found["backends"].values())
    assert found["backends"]["sdpa"] == dict.fromkeys(POOLS)
    assert set(found["chosen"].values()) <= {"sdpa", "triton"}
    assert "it runs on GPUs, not on cpu" in found["backends"]["te"]["GQA bf16"]
    assert "head dim 576 > 256" in found["backends"]["te"]["MLA bf16"]
    assert "sliding window" in found["backends"]["flash"]["windows bf16"]
    assert "float8_e4m3fn" in found["backends"]["flash"]["GQA fp8"]
    assert found["libraries"]["FlashInfer"]["version"] is None
    assert 'pip install "megatron-dcp[flashinfer]"' in found["libraries"]["FlashInfer"]["problem"]


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    out = show(capsys)
    lines = out.splitlines()
    assert "TransformerEngine  not installed" in lines and "GPU            none" in lines
    header = next(line for line in lines if line.startswith("back end"))
    assert header.split("  ")[0] == "back end" and all(pool in header for pool in POOLS)
    assert next(line for line in lines if line.startswith("sdpa ")).split()[1:] == ["yes"] * 4
    assert next(line for line in lines if line.startswith("te ")).split()[1:] == ["no"] * 4
    assert any(line.startswith("  te: head dim 576 > 256") and line.endswith("[MLA bf16]") for line in lines)
    assert max(map(len, lines)) < 200


def test_with_a_gpu_and_a_library(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=139 << 30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(libraries, "capability", lambda device: (9, 0))
    monkeypatch.setattr(libraries, "cudnn_version", lambda: 91300)
    monkeypatch.setitem(sys.modules, "flashinfer", standins.flashinfer)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", standins.flashinfer.mla)
    found = env.collect()
    assert found["chosen"]["GQA bf16"] == found["chosen"]["MLA bf16"] == found["chosen"]["GQA fp8"] == "flashinfer"
    assert found["chosen"]["windows bf16"] in ("sdpa", "triton")
    assert found["libraries"]["FlashInfer"] == {"version": None, "problem": None}
    out = show(capsys)
    assert "NVIDIA H200 (9.0, 139 GiB)" in out and "FlashInfer         unknown" in out
    monkeypatch.setenv(VARIABLE, "te")
    out = show(capsys)
    assert "MEGATRON_DCP_BACKEND=te" in out.splitlines()
    assert "GQA bf16: MEGATRON_DCP_BACKEND='te' cannot serve" in out
    assert next(line for line in out.splitlines() if line.startswith("chosen")).split()[1:] == ["none"] * 4


def test_a_broken_library_is_shown_with_its_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "flash_attn":
                raise ImportError("undefined symbol: _ZNK3c106SymInt")

    monkeypatch.delitem(sys.modules, "flash_attn")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.8.3")
    line = next(line for line in show(capsys).splitlines() if line.startswith("FlashAttention 2"))
    assert line.endswith(
        "2.8.3: flash_attn is installed but does not import (ImportError: undefined symbol: _ZNK3c106SymInt)"
    )
