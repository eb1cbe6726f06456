"""What a checkpoint gives on each rank: its tensors, and the logits of the model that they make."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_models import training_logits

from megatron_dcp import parallel_state
from megatron_dcp.checkpoint import load_model, open_source
from megatron_dcp.checkpoint.names import shard
from megatron_dcp.checkpoint.source import Source
from models import hf_model

TOKENS = [(7 * i * i + 3 * i) % 100 for i in range(90)]


def groups(world: int, **sizes: Any) -> Any:
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(**{"tensor_model_parallel_size": world, **sizes})
    return parallel_state.get_process_group_collection()


def wrong_tensors(model: torch.nn.Module, source: Source, pgs: Any) -> list[str]:
    """Parameters and persistent buffers that are not this rank's part of what ``source`` holds."""
    state = {name: value for name, value in model.state_dict().items() if not name.endswith("_extra_state")}
    expected = {}
    for name, spec in source.specs.items():
        match = re.fullmatch(r"(.*local_experts\.)(\d+)(\..*)", name)
        if match is None:
            expected[name] = shard(source.read(name), spec, pgs.tp.size(), pgs.tp.rank())
            continue
        rank, local = divmod(int(match[2]), source.config.moe.num_experts // pgs.ep.size())
        if rank == pgs.ep.rank():
            part = shard(source.read(name), spec, pgs.expt_tp.size(), pgs.expt_tp.rank())
            expected[f"{match[1]}{local}{match[3]}"] = part
    assert state.keys() == expected.keys()
    return [name for name, value in state.items() if not torch.equal(value, expected[name])]


def whole_logits(model: torch.nn.Module, vocab_size: int, tp: Any) -> torch.Tensor:
    mine = training_logits(model, TOKENS).contiguous()
    parts = [torch.empty_like(mine) for _ in range(tp.size())]
    dist.all_gather(parts, mine, group=tp)
    return torch.cat(parts, dim=-1)[:, :vocab_size]


def load_on_rank(
    rank: int, world: int, jobs: list[tuple[Path, bool]], sizes: dict[str, int] | None = None
) -> list[tuple[torch.Tensor | None, list[str]]]:
    """Of every checkpoint: logits if asked for, and the tensors that are not this rank's part of what it holds."""
    pgs = groups(world, **(sizes or {}))
    results = []
    for path, forward in jobs:
        model, config = load_model(path, pgs)
        source = open_source(path)
        if source.config != config:
            source.repad(config.padded_vocab_size)
        assert not model.training
        wrong = wrong_tensors(model, source, pgs)
        results.append((whole_logits(model, config.vocab_size, pgs.tp) if forward else None, wrong))
    return results


def assert_logits(logits: torch.Tensor, original: Path, tolerance: float = 1e-5) -> None:
    with torch.no_grad():
        expected = hf_model(original)(torch.tensor([TOKENS])).logits[0]
    assert (logits - expected).abs().max() <= tolerance * (expected.max() - expected.min())
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
