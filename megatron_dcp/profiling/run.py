"""``profile``: run a workload once to warm up and once by the clock, and say where the time went."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from megatron_dcp import parallel_state
from megatron_dcp.cache import KVLayout
from megatron_dcp.comm.collectives import gather_objects
from megatron_dcp.config import EngineConfig, check_at_least
from megatron_dcp.engine.llm import LLM
from megatron_dcp.engine.loading import on_all_ranks
from megatron_dcp.engine.params import SamplingParams
from megatron_dcp.profiling.advice import Facts, advise
from megatron_dcp.profiling.clock import Clock, ClockMetrics
from megatron_dcp.profiling.measure import KVMoment, measured, new_clock, ranges_here, switch_cost_s
from megatron_dcp.profiling.report import PHASES, KVPoint, PhaseReport, ProfileReport, RankRun, phase_report

TRACED_TOKENS = 4
"""Tokens per prompt of the run that is traced: a trace takes a megabyte for every few steps."""


def profile(
    model: str | os.PathLike[str] | torch.nn.Module,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int = 32,
    trace: str | None = None,
    **llm: Any,
) -> ProfileReport:
    """Generate greedily, without end-of-text tokens, and measure every step. All ranks call it together.

    The workload runs twice: to warm up, and by the clock. With ``trace`` a third and shorter time under
    `torch.profiler`, which costs too much to measure with.

    Args:
        model: A checkpoint or a live model, as `LLM` takes it.
        prompts: Texts or lists of token ids.
        max_new_tokens: Tokens to generate after each of them.
        trace: File of a Chrome trace; with several ranks each writes its own, ``trace.rank1.json`` and so on.
        llm: Arguments of `LLM`: parallel sizes, layout, cache, engine, dtype.

    Returns:
        The same report on every rank.

    Raises:
        ValueError: On every rank: more ranks than one replica, CUDA graphs, and all that `LLM` raises.
    """
    check_at_least("max_new_tokens", max_new_tokens, 1)
    if (llm.get("engine") or EngineConfig()).cuda_graphs != "none":
        raise ValueError(
            "a CUDA graph hides the parts of its steps; profile without --cuda-graphs, which shows what they would save"
        )
    clock = Clock()
    generator = LLM(model, metrics=ClockMetrics(clock), **llm)
    groups = generator.groups
    if groups.dcp_replica.size() != distributed.get_world_size():
        raise ValueError(
            f"profile runs one replica, of {groups.dcp_replica.size()} ranks here, but {distributed.get_world_size()} "
            "were started"
        )
    device = next(generator.model.parameters()).device
    clock.use(new_clock(device))
    params = SamplingParams(max_tokens=max_new_tokens, ignore_eos=True)
    outputs = generator.generate(list(prompts), params)
    lengths = [output.prompt_token_ids for output in outputs]
    before = generator.stats() if generator.is_driver else None
    generator.weights_changed()  # the prefixes that the warm-up has left in the cache would be found
    distributed.barrier(groups.dcp_replica)
    clock.restart()
    with measured(generator, clock, ranges_here(tracing=False)) as moments:
        generator.generate(list(prompts), params)
    counts = None
    if before is not None:
        after = generator.stats()
        names = ("preemptions", "prefix_query_tokens", "prefix_hit_tokens")
        counts = {name: getattr(after, name) - getattr(before, name) for name in names}
    own = RankRun(distributed.get_rank(), groups.dcp.rank(), groups.pp.rank(), generator.is_driver, clock.steps)
    everywhere = gather_objects((own, moments, counts), groups.dcp_replica)
    report = _report(generator, model, lengths, everywhere, clock)
    if trace is not None:
        _trace(generator, clock, list(prompts), min(TRACED_TOKENS, max_new_tokens), trace)
    return report


def _report(llm: LLM, model: Any, prompts: list[list[int]], everywhere: list[Any], clock: Clock) -> ProfileReport:
    runs = tuple(sorted((run for run, _, _ in everywhere), key=lambda run: run.rank))
    moments, counts = everywhere[llm.groups.dcp_driver][1:]
    phases = tuple(each for phase in PHASES if (each := phase_report(phase, runs)) is not None)
    kv = tuple(_point(moment, llm.layout) for moment in moments)
    hits = counts["prefix_hit_tokens"] / max(1, sum(map(len, prompts)))
    facts = _facts(llm, phases, prompts, moments, kv, counts["preemptions"], hits)
    return ProfileReport(
        settings=_settings(llm, model, prompts, facts),
        phases=phases,
        runs=runs,
        kv=kv,
        mark_s=gather_objects(switch_cost_s(clock.new_event), llm.groups.dcp_replica)[0],
        preemptions=counts["preemptions"],
        prefix_hits=hits,
        advice=tuple(advise(facts)),
    )


def _point(moment: KVMoment, layout: KVLayout) -> KVPoint:
    slots = moment.num_blocks * layout.block_size
    twice = moment.shared_blocks * layout.block_size  # shared blocks are whole ones
    fill = tuple(
        (sum(layout.local_length(length, rank) for length in moment.lengths) - twice) / slots
        for rank in range(layout.dcp_size)
    )
    held = moment.held_blocks / moment.num_blocks
    return KVPoint(moment.time_s, held, fill, moment.waiting, moment.window_held)


def shareable_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Prompt tokens that would be computed once if prompts shared every prefix that they have in common."""
    total, ordered = 0, sorted(map(tuple, prompts))
    for one, other in zip(ordered, ordered[1:], strict=False):
        total += next(
            (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )
    return total


def _facts(
    llm: LLM,
    phases: tuple[PhaseReport, ...],
    prompts: list[list[int]],
    moments: list[KVMoment],
    kv: tuple[KVPoint, ...],
    preemptions: int,
    hits: float,
) -> Facts:
    by_name = {each.phase: each for each in phases}
    prefill, decode = by_name.get("prefill"), by_name.get("decode")
    groups, cache = llm.groups, llm.cache_config
    return Facts(
        tp=groups.tp.size(),
        dcp=groups.dcp.size(),
        layout=groups.dcp_layout,
        exchange=llm.engine_config.exchange_for(groups.dcp_layout),
        prefill=llm.runner.prefill,
        on_gpu=next(llm.model.parameters()).is_cuda,
        kv_dtype=str(llm.runner.kv_dtype).removeprefix("torch."),
        pool_sized=cache.num_blocks is not None or cache.bytes_per_rank is not None,
        batch=max((len(moment.lengths) for moment in moments), default=0),
        context=max((length for moment in moments for length in moment.lengths), default=0),
        decode_communication=decode.communication_share if decode else 0.0,
        prefill_communication=prefill.communication_share if prefill else 0.0,
        decode_attention=decode.share("attention") if decode else 0.0,
        decode_rest=decode.share("rest") if decode else 0.0,
        decode_engine=decode.engine_share if decode else 0.0,
        decode_gpu_wait=decode.gpu_wait_share if decode else None,
        decode_imbalance=decode.imbalance if decode else 0.0,
        slowest_rank=decode.slowest.rank if decode else 0,
        pool_use=max((point.held for point in kv), default=0.0),
        preemptions=preemptions,
        shareable_prefix=shareable_tokens(prompts) / max(1, sum(map(len, prompts))),
        prefix_hits=hits,
        prefix_caching=llm.engine_config.prefix_caching,
        logical_block=llm.layout.logical_block_tokens,
    )


def _settings(llm: LLM, model: Any, prompts: list[list[int]], facts: Facts) -> dict[str, str]:
    sizes, runner = parallel_state.get_parallel_config(), llm.runner
    parameter = next(llm.model.parameters())
    lengths = sorted(map(len, prompts))
    span = f"{lengths[0]:,}" + (f" to {lengths[-1]:,}" if lengths[-1] > lengths[0] else "")
    return {
        "model": "a live model" if isinstance(model, torch.nn.Module) else os.fspath(model),
        "ranks": f"tp {facts.tp}, dcp {facts.dcp} ({facts.layout}), pp {sizes.pipeline_model_parallel_size}, "
        f"ep {sizes.expert_model_parallel_size}; {parameter.device.type}",
        "workload": f"{len(prompts)} prompts of {span} tokens, at most {facts.batch} at the same time, up to "
        f"{facts.context:,} tokens each",
        "weights": str(parameter.dtype).removeprefix("torch."),
        "cache": f"{facts.kv_dtype}, {runner.num_blocks} blocks of {llm.layout.block_size} on each rank, interleave "
        f"{llm.layout.interleave}",
        "exchange": f"{facts.exchange if facts.dcp > 1 else 'none'}; prefill {runner.prefill}; attention "
        + ", ".join(dict.fromkeys(each.backend.name for each in runner.attentions)),
    }


def _trace(llm: LLM, clock: Clock, prompts: list[Any], max_new_tokens: int, path: str) -> None:
    """One more run of a few tokens under `torch.profiler`; every rank writes its trace."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    llm.weights_changed()
    with torch.profiler.profile(activities=activities) as traced, measured(llm, clock, ranges_here(tracing=True)):
        llm.generate(prompts, SamplingParams(max_tokens=max_new_tokens, ignore_eos=True))
    on_all_ranks(traced.export_chrome_trace, trace_path(path, distributed.get_rank(), distributed.get_world_size()))


def trace_path(path: str, rank: int, world: int) -> str:
    """Where a rank's trace goes: ``path`` itself for one rank, ``a.rank0.json`` for ``a.json`` and several."""
    if world == 1:
        return path
    stem, extension = os.path.splitext(path)
    return f"{stem}.rank{rank}{extension}"
