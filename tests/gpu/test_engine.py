"""Whole models on GPUs: the tokens of the CPU, with every mode of CUDA graphs, and over several GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from models import tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and this machine has none")

PROMPTS = [[(7 * n + i) % 100 for i in range(n)] for n in (1, 9, 16, 17, 30, 200)]
FAMILIES = ("llama", "gemma3_text", "deepseek_v3")
ONE_GPU: list[dict[str, Any]] = [
    {"backend": "sdpa"},
    {"backend": "triton"},
    {"backend": "triton", "cuda_graphs": "piecewise"},
    {"backend": "triton", "cuda_graphs": "full"},
]
TWO_GPUS: list[dict[str, Any]] = [
    {"backend": "triton", **more}
    for more in (
        {},
        {"exchange": "a2a"},
        {"symmetric_memory": True},
        {"cuda_graphs": "piecewise"},
        {"cuda_graphs": "full"},
        {"cuda_graphs": "full", "symmetric_memory": True},
    )
]
SCRIPT = """
import json, sys
import torch
given = json.loads(sys.argv[1])
if given["cpu"]:
    torch.cuda.is_available = lambda: False
from megatron_dcp import LLM, CacheConfig, EngineConfig, SamplingParams, parallel_state
for path, engine in given["runs"]:
    llm = LLM(path, **given["sizes"], cache=CacheConfig(block_size=16), engine=EngineConfig(**engine))
    outputs = llm.generate(given["prompts"], SamplingParams(max_tokens=24, ignore_eos=True))
    if torch.distributed.get_rank() == 0:
        print("TOKENS", json.dumps([output.token_ids for output in outputs]), flush=True)
    parallel_state.destroy_model_parallel()
"""


def tokens_of(
    runs: list[tuple[str, dict[str, Any]]], folder: Path, *, ranks: int = 1, cpu: bool = False, **sizes: int
) -> list[list[list[int]]]:
    """Of each run; all of them in one set of processes, as starting these takes longest."""
    script = folder / "generate.py"
    script.write_text(SCRIPT)
    given = dict(runs=runs, cpu=cpu, sizes=sizes, prompts=PROMPTS)
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    done = subprocess.run([*start, str(script), json.dumps(given)], capture_output=True, text=True, timeout=200)
    lines = [line.removeprefix("TOKENS") for line in done.stdout.splitlines() if line.startswith("TOKENS")]
    assert done.returncode == 0, f"after {len(lines)} of {len(runs)} runs: {done.stderr[-3000:]}"
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """What the CPU says, by family."""
    runs = [(str(tiny_model(family)), {}) for family in FAMILIES]
    return dict(zip(FAMILIES, tokens_of(runs, tmp_path_factory.mktemp("cpu"), cpu=True), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_one_gpu_says_what_the_cpu_says(family: str, expected: dict[str, list[list[int]]], tmp_path: Path) -> None:
    path = str(tiny_model(family))
    experts = family == "deepseek_v3"
    engines = [engine for engine in ONE_GPU if not (experts and engine.get("cuda_graphs") == "full")]
    for engine, tokens in zip(engines, tokens_of([(path, each) for each in engines], tmp_path), strict=True):
        assert tokens == expected[family], engine


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_say_what_the_cpu_says(expected: dict[str, list[list[int]]], tmp_path: Path) -> None:
    runs = [(str(tiny_model("llama")), engine) for engine in TWO_GPUS]
    for engine, tokens in zip(
        TWO_GPUS, tokens_of(runs, tmp_path, ranks=2, decode_context_parallel_size=2), strict=True
    ):
        assert tokens == expected["llama"], engine
