"""Command lines in a worker's process and under torchrun, on a tiny model that has a tokenizer."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from models import tiny_model

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = [{"prompt": "h\u00e9llo"}, {"token_ids": [1, 2, 3]}, {"prompt": "x" * 40}]


def model() -> Path:
    return tiny_model("llama", tokenizer=True, positions=64)


def write_prompts(tmp_path: Path, prompts: list[dict[str, Any]] = PROMPTS) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return str(path)


def lines_of(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def run_main(rank: int, world: int, commands: list[list[list[str]]]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of command lines; each is one for all ranks, or one for each.

    Without what a run says of itself once, which has tests of its own.
    """
    from megatron_dcp import parallel_state
    from megatron_dcp.cli import main

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    results = []
    for command in commands:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = main(command[rank % len(command)])
        parallel_state.destroy_model_parallel()
        lines = err.getvalue().splitlines(keepends=True)
        stderr = "".join(line for line in lines if not line.startswith(("megatron_dcp: ", "  ")))
        results.append((code, out.getvalue(), stderr))
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    return results


def torchrun(*args: str, ranks: int = 2) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *args]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    environment.pop("WORLD_SIZE", None)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def kill_rank_1(rank: int, ranks: int, argv: list[str]) -> None:
    """In place of a command, in a process that was started for it."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
