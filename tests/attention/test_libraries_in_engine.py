"""A library's back end under the whole engine: its pool order, its plans of chunks, slabs and decode tokens over ranks.

In fp32, which the library itself refuses, so that what differs is not rounding.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import standins.flash_attn_interface
import torch
from standins import paged

from megatron_dcp import LLM, CacheConfig, EngineConfig, SamplingParams
from megatron_dcp.attention import libraries
from megatron_dcp.attention.flash import FlashBackend
from models import tiny_model
from workers import run_on_ranks

PROMPTS = [list(range(1, 80)), [5, 6, 7], list(range(90, 40, -1))]


def generate(
    rank: int, world: int, path: str, sizes: dict[str, Any], prefill: str, backend: str
) -> tuple[list[list[int]], list[Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn_interface", standins.flash_attn_interface)
        patch.setattr(libraries, "capability", lambda device: (9, 0))
        patch.setattr(FlashBackend, "supports", lambda self, spec: None)
        patch.setattr(paged, "HALF", (torch.float32,))
        llm = LLM(
            path,
            **sizes,
            cache=CacheConfig(block_size=8, kv_interleave_size=2),
            engine=EngineConfig(backend=backend, prefill=prefill, prefill_chunk_size=64),  # type: ignore[arg-type]
        )
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=True))
    prompts = [one for output in outputs for one in (output.prompt_logprobs or [])[1:]]
    return [output.token_ids for output in outputs], prompts


@pytest.mark.parametrize(
    ("world", "sizes", "prefill"),
    [
        (1, dict(), "auto"),
        (2, dict(decode_context_parallel_size=2), "pass_kv"),
        (2, dict(decode_context_parallel_size=2), "pass_q"),
        (2, dict(decode_context_parallel_size=2), "replicated"),
    ],
)
def test_flash_gives_what_sdpa_gives(world: int, sizes: dict[str, Any], prefill: str) -> None:
    path = str(tiny_model("llama", kv_heads=2, heads=4, hidden=32))
    expected, found = (run_on_ranks(world, generate, path, sizes, prefill, name)[0] for name in ("sdpa", "flash"))
    assert len(expected[1]) == sum(map(len, PROMPTS)) - 3
    assert found[1] == pytest.approx(expected[1], abs=1e-4)
    assert found[0] == expected[0]
