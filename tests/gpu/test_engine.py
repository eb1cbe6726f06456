"""Whole models on GPUs: the tokens of the CPU, with every mode of CUDA graphs, and over several GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from models import tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and this machine has none")

PROMPTS = [[(7 * n + i) % 100 for i in range(n)] for n in (1, 9, 16, 17, 30, 200)]
SCRIPT = """
import json, sys
import torch
given = json.loads(sys.argv[1])
if given["cpu"]:
    torch.cuda.is_available = lambda: False
from megatron_dcp import LLM, CacheConfig, EngineConfig, SamplingParams
llm = LLM(given["path"], **given["sizes"], cache=CacheConfig(block_size=16), engine=EngineConfig(**given["engine"]))
outputs = llm.generate(given["prompts"], SamplingParams(max_tokens=24, ignore_eos=True))
if torch.distributed.get_rank() == 0:
    print("TOKENS", json.dumps([output.token_ids for output in outputs]))
"""


def tokens_of(
    path: Path, tmp_path: Path, *, ranks: int = 1, cpu: bool = False, engine=None, **sizes
) -> list[list[int]]:
    """In processes of their own: of all that ran before, nothing is left on the GPU."""
    script = tmp_path / "generate.py"
    script.write_text(SCRIPT)
    given = dict(path=str(path), cpu=cpu, sizes=sizes, engine=engine or {}, prompts=PROMPTS)
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    done = subprocess.run([*start, str(script), json.dumps(given)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("TOKENS"))
    return json.loads(line.removeprefix("TOKENS"))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
def test_one_gpu_says_what_the_cpu_says(family: str, tmp_path: Path) -> None:
    path = tiny_model(family)
    expected = tokens_of(path, tmp_path, cpu=True)
    for backend in ("triton", "sdpa"):
        assert tokens_of(path, tmp_path, engine={"backend": backend}) == expected, backend
    for graphs in ["piecewise"] if family == "deepseek_v3" else ["piecewise", "full"]:
        engine = {"backend": "triton", "cuda_graphs": graphs}
        assert tokens_of(path, tmp_path, engine=engine) == expected, graphs


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"exchange": "a2a"},
        {"symmetric_memory": True},
        {"cuda_graphs": "piecewise"},
        {"cuda_graphs": "full"},
        {"cuda_graphs": "full", "symmetric_memory": True},
    ],
    ids=str,
)
def test_two_gpus_say_what_the_cpu_says(engine: dict[str, object], tmp_path: Path) -> None:
    path = tiny_model("llama")
    expected = tokens_of(path, tmp_path, cpu=True)
    engine = {"backend": "triton", **engine}
    assert tokens_of(path, tmp_path, ranks=2, engine=engine, decode_context_parallel_size=2) == expected
