"""Exactness of layers with a sliding window, as in test_exactness.py: their cache forgets, and the tokens stay."""

from __future__ import annotations

from typing import Any

import pytest
from exactness import BLOCK, check, reference

# Windows below a logical block, of some, and beyond the shorter prompts.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {}),
    "mistral, wide": ("mistral", dict(sliding_window=30)),
    "gemma3": ("gemma3_text", dict(layers=3, tied=True)),
    "gemma3, scaled": ("gemma3_text", dict(layers=2, rope_scaling=(("rope_type", "linear"), ("factor", 4.0)))),
    "qwen2": ("qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
}


def references(names: Any, dcp_size: int, **model: Any) -> list[Any]:
    return [reference(MODELS[name][0], dcp_size, few=True, decode=24, **MODELS[name][1], **model) for name in names]


@pytest.mark.parametrize(
    "tp,dcp_size", [(1, 1), (1, 2), (1, 3), pytest.param(2, 2, marks=pytest.mark.mcore_line), (1, 4), (2, 3)]
)
def test_orthogonal(tp, dcp_size):
    interleave = {1: 1, 2: BLOCK, 3: 1, 4: 4}[dcp_size]
    names = MODELS if (tp, dcp_size) in ((1, 1), (2, 2)) else list(MODELS)[tp + dcp_size & 1 :: 2]
    check(references(names, dcp_size), tp, dcp_size, "orthogonal", [(interleave, None)])


@pytest.mark.parametrize("tp,dcp_size,kv_heads", [(2, 2, 1), (4, 2, 2)])
def test_within_tp(tp, dcp_size, kv_heads):
    names = ["mistral", "gemma3"]
    check(references(names, dcp_size, kv_heads=kv_heads), tp, dcp_size, "within_tp", [(1, None)])
