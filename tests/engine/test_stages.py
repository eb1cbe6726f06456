"""A step through pipeline stages: tokens and logits of one stage, whatever else is split, from every format."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exactness import BLOCK, DECODE, TOLERANCE, VOCAB, Reference, reference, worst
from lines import some_with_both
from torch import Tensor

from megatron_dcp import CacheConfig, EngineConfig, load_model, parallel_state
from megatron_dcp.checkpoint import convert
from megatron_dcp.engine.batch import SeqStep, StepBatch
from megatron_dcp.engine.runner import ModelRunner
from megatron_dcp.metrics import Metrics
from workers import run_on_ranks

pytestmark = pytest.mark.mcore_line

CHUNK = 7
SAME = 1e-6  # between pipelines, which compute the same: only the bits of a library's kernel may differ
MODELS: dict[str, dict[str, Any]] = {
    "llama": dict(family="llama", layers=4),
    "tied": dict(family="qwen2", layers=4, tied=True),
    "deepseek": dict(family="deepseek_v3", layers=4),
}
LAYOUTS = {  # ranks, and their sizes; where one stage is compared, the ranks left over are replicas
    "pp 2": (2, dict(pipeline_model_parallel_size=2)),
    "pp 2 x dcp 2": (4, dict(pipeline_model_parallel_size=2, decode_context_parallel_size=2)),
    "pp 2 x tp 2": (4, dict(pipeline_model_parallel_size=2, tensor_model_parallel_size=2)),
    "pp 4": (4, dict(pipeline_model_parallel_size=4)),
}


def make_runner(path: str, sizes: dict[str, Any], metrics: Metrics | None = None) -> ModelRunner:
    parallel_state.initialize_model_parallel(**sizes)
    groups = parallel_state.get_process_group_collection()
    model, config = load_model(path, groups)
    return ModelRunner(
        model,
        groups,
        cache=CacheConfig(block_size=BLOCK, num_blocks=100),
        engine=EngineConfig(prefill="pass_kv"),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        metrics=metrics,
    )


def greedy(runner: ModelRunner, prompts: list[list[int]], count: int) -> tuple[list[list[int]], list[Tensor]]:
    """``count`` tokens after every prompt, and where logits come out those that chose them; prompts go in by chunks.

    All sequences step together. A token that the driver has chosen reaches the others by a broadcast.
    """
    replica, driver = runner.groups.dcp_replica, runner.groups.dcp_driver
    free = iter(range(runner.num_blocks))
    texts, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
    tables = [[next(free) for _ in range(runner.layout.blocks_for(len(text) + count))] for text in texts]
    rows: list[list[Tensor]] = [[] for _ in texts]
    while any(len(text) < len(prompt) + count for text, prompt in zip(texts, prompts, strict=True)):
        ends = [min(at + CHUNK, len(text)) for at, text in zip(done, texts, strict=True)]
        live = [i for i, prompt in enumerate(prompts) if len(texts[i]) < len(prompt) + count]
        sampled = [i for i in live if ends[i] == len(texts[i])]
        steps = [SeqStep(texts[i][done[i] : ends[i]], done[i], tables[i], int(i in sampled)) for i in live]
        logits = runner.step(StepBatch(steps))
        has_logits = makes_logits(runner)
        assert logits.shape == (len(sampled) if has_logits else 0, VOCAB)
        tokens = logits.argmax(-1) if has_logits else torch.zeros(len(sampled), dtype=torch.int64)
        dist.broadcast(tokens, group_src=driver, group=replica)
        for place, i in enumerate(sampled):
            texts[i].append(int(tokens[place]))
            if has_logits:
                rows[i].append(logits[place])
        for i in live:
            done[i] = ends[i]
    new = [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
    return new, [torch.stack(each) for each in rows if each]


def makes_logits(runner: ModelRunner) -> bool:
    return runner.model.post_process and runner.groups.dcp.rank() == 0


def stages_case(rank: int, world: int, theirs: Reference, paths: list[str], sizes: dict[str, Any]) -> list[float]:
    """Logit differences where they come out, to ``transformers`` and to one stage, as a share of the logit range."""
    one_stage = sizes | {"pipeline_model_parallel_size": 1}
    runner = make_runner(theirs.path, one_stage)
    tokens, want = greedy(runner, theirs.prompts, DECODE)
    assert tokens == theirs.tokens
    bytes_of_one = runner.kv_bytes
    parallel_state.destroy_model_parallel()
    errors = []
    for path in paths:
        runner = make_runner(path, sizes)
        tokens, logits = greedy(runner, theirs.prompts, DECODE)
        assert tokens == theirs.tokens, path
        if makes_logits(runner):
            errors += [worst(logits, [torch.from_numpy(each) for each in theirs.logits]), worst(logits, want)]
        own, stage = 4 // runner.groups.pp.size(), runner.groups.pp.rank()
        assert runner.context.cache_index == {stage * own + 1 + layer: (0, layer) for layer in range(own)}
        assert runner.kv_bytes == bytes_of_one // runner.groups.pp.size()
        parallel_state.destroy_model_parallel()
    return errors


def check(model: str, layout: str, paths: list[str] | None = None, **experts: int) -> None:
    world, sizes = LAYOUTS[layout]
    theirs = reference(few=True, dcp_size=2, **MODELS[model])
    by_rank = run_on_ranks(world, stages_case, theirs, paths or [theirs.path], sizes | experts, timeout=240)
    with_logits = world // sizes["pipeline_model_parallel_size"] // sizes.get("decode_context_parallel_size", 1)
    assert sum(map(len, by_rank)) == 2 * len(paths or [0]) * with_logits
    for errors in by_rank:
        assert max(errors[::2], default=0) <= TOLERANCE and max(errors[1::2], default=0) <= SAME, errors


BOTH_LINES = [("llama", "pp 2 x tp 2"), ("tied", "pp 2"), ("deepseek", "pp 2 x dcp 2")]


@pytest.mark.parametrize("model,layout", some_with_both(list(product(MODELS, LAYOUTS)), BOTH_LINES))
def test_tokens_and_logits_are_those_of_one_stage(model: str, layout: str) -> None:
    check(model, layout)


@pytest.mark.parametrize("layout", ["pp 2 x dcp 2", "pp 2 x tp 2"])
def test_experts_are_shared_inside_a_stage(layout: str) -> None:
    check("deepseek", layout, expert_model_parallel_size=2, expert_tensor_parallel_size=1)


@pytest.mark.parametrize("model", MODELS)
def test_megatron_checkpoints_load_by_stages_too(model: str, tmp_path: Any) -> None:
    original = reference(few=True, dcp_size=2, **MODELS[model]).path
    formats = ("torch_dist", "legacy")
    check(model, "pp 2", [str(convert(original, tmp_path / to, to=to)) for to in formats])


def traffic_case(rank: int, world: int, path: str) -> tuple[dict[str, Any], int]:
    metrics = Metrics()
    runner = make_runner(path, dict(pipeline_model_parallel_size=2), metrics)
    runner.step(StepBatch([SeqStep([1, 2, 3], 0, [0], 1), SeqStep([4, 5], 0, [1], 0)]))
    runner.step(StepBatch([SeqStep([6], 3, [0], 1)]))
    return metrics.collectives, runner.model.config.hidden_size


def test_a_step_sends_its_tokens_hidden_states_once() -> None:
    path = reference(few=True, dcp_size=2, **MODELS["llama"]).path
    (first, hidden), (last, _) = run_on_ranks(2, traffic_case, path)
    assert first == {"send": (2, 6 * hidden * 4)} and last == {"receive": (2, 0)}
