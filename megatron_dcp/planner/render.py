"""A plan for people: a table, the advice, what does not fit. And for programs: a dict for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megatron_dcp.planner.advice import advise, binding, problems
from megatron_dcp.planner.machine import Machine
from megatron_dcp.planner.memory import kv_dtype
from megatron_dcp.planner.plan import Plan, Row
from megatron_dcp.planner.weights import count_parameters

_COLUMNS = (
    ("configuration", ""), ("weights", "GB"), ("KV", "GB"), ("copies", ""), ("rest", "GB"), ("used", "%"),
    ("batch", "most"), ("context", "most"), ("exchange", "KB/tok/layer"), ("calls", "/layer"), ("TTFT", "s"),
    ("TPOT", "ms"), ("per user", "tok/s"), ("per {unit}", "tok/s"), ("binds", ""),
)  # fmt: skip

_PRODUCTS = ("float32", "bfloat16")
DRIFT = 0.25  # of the memory's speed, above which a measurement is not to be trusted


def render(plan: Plan, top: int) -> str:
    """The ``top`` configurations of a plan, the advice, and what does not fit."""
    lines = [*_head(plan), ""]
    fitting = plan.distinct(plan.fitting)
    if shown := fitting[:top]:
        if plan.best is not None and plan.best not in shown:
            shown[-1] = plan.best
        lines += _table(plan, shown)
        if len(fitting) > len(shown):
            lines.append(f"{len(fitting) - len(shown)} more fit (--top, --json)")
        lines.append("")
    lines.append(advise(plan))
    if missing := problems(plan):
        lines += ["", "does not fit:", *(f"  {line}" for line in missing)]
    return "\n".join(lines)


def render_machine(machine: Machine, about: dict[str, Any]) -> str:
    """What a calibration has found, for people."""
    how = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in about.items() if name != "device")
    lines = [
        f"{machine.name}: {how}",
        "",
        f"memory       {_rate(machine.memory_bandwidth, 'B/s')} of weights; {machine.memory_bytes / 1e9:.1f} GB a rank",
        "products     " + ", ".join(f"{_rate(machine.flops[name], 'FLOP/s')} in {name}" for name in _PRODUCTS),
        *_attention_lines(machine),
        *_chunk_lines(machine),
        *_collective_lines(machine),
        "a step       " + _times(("alone", machine.step_s), ("a sequence", machine.sequence_s)),
        "a layer      " + _times(("alone", machine.layer_s), ("a sequence", machine.layer_sequence_s)),
    ]
    if machine.ranks > 1:
        lines += [
            "several      " + _times(("a step, for the other ranks", machine.followers_s)),
            "ranks        " + _times(("a layer, to merge", machine.merge_s))
            + f"; attention takes {machine.imbalance:.2f} times as long where they wait for each other",
        ]  # fmt: skip
    if machine.drift > DRIFT:
        lines += [
            "",
            f"The speed of the memory changed by {machine.drift:.0%} meanwhile: something else was running. "
            "Measure again when nothing is.",
        ]
    return "\n".join(lines)


def _attention_lines(machine: Machine) -> list[str]:
    """Rates by what is attended to, a line for each dtype."""
    lines = []
    for dim, latent in dict.fromkeys((one.head_dim, one.latent) for one in machine.attention):
        what = f"a latent of {dim} dims" if latent else f"keys of {dim} dims"
        lines.append(f"attention    to {what}, bytes of the cache per second, by query heads of a KV head:")
        for dtype in dict.fromkeys(one.kv_dtype for one in machine.attention):
            rates = [one for one in machine.attention if (one.kv_dtype, one.head_dim) == (dtype, dim)]
            lines.append(f"  {dtype:<10} " + ", ".join(f"{one.rows}: {_rate(one.bytes_per_s, 'B/s')}" for one in rates))
    return lines


def _chunk_lines(machine: Machine) -> list[str]:
    """Rates of a prompt's chunk, a line for each dtype."""
    lines = [
        f"a chunk      its activations are passed over {machine.activations:.1f} times; attention, by dims of a key:"
    ]
    for dtype in dict.fromkeys(one.dtype for one in machine.chunks):
        rates = [one for one in machine.chunks if one.dtype == dtype]
        lines.append(f"  {dtype:<10} " + ", ".join(f"{one.head_dim}: {_rate(one.flops, 'FLOP/s')}" for one in rates))
    return lines


def _collective_lines(machine: Machine) -> list[str]:
    """Times by what is sent, a line for each kind of group."""
    kinds = dict.fromkeys((one.op, one.ranks, one.span) for one in machine.collectives)
    lines = ["collectives  by bytes that a rank sends; R of S: R ranks among S neighbours"] if kinds else []
    for op, ranks, span in kinds:
        alike = [one for one in machine.collectives if (one.op, one.ranks, one.span) == (op, ranks, span)]
        found = ", ".join(f"{one.bytes / 1e3:.0f} kB: {one.seconds * 1e6:.0f} us" for one in alike)
        lines.append(f"  {op:<14} {f'{ranks} of {span}':<8} {found}")
    return lines


def _times(*times: tuple[str, float]) -> str:
    return " and ".join(f"{seconds * 1e6:.0f} us {what}" for what, seconds in times)


def to_dict(plan: Plan) -> dict[str, Any]:
    """Everything, for JSON: bytes and seconds."""
    best = plan.best
    cache = plan.rows[0].candidate.cache
    size = cache.block_size
    return {
        "model": plan.model_name,
        "parameters": count_parameters(plan.model),
        "gpus": plan.gpus,
        "machine": asdict(plan.machine),
        "workload": asdict(plan.workload),
        "legal_interleaves": [number for number in range(1, size + 1) if size % number == 0],
        "advice": advise(plan),
        "best": None if best is None else plan.rows.index(best),
        "configurations": [_row_dict(row) for row in plan.rows],
    }


def _row_dict(row: Row) -> dict[str, Any]:
    one = row.candidate
    return {
        "name": one.name,
        "tp": one.tp,
        "dcp": one.dcp,
        "layout": one.layout,
        "pp": one.pp,
        "dp": one.dp,
        "ep": one.parallel.expert_model_parallel_size,
        "expert_tp": one.parallel.expert_tp,
        "kv_interleave_size": one.cache.kv_interleave_size,
        "kv_cache_dtype": one.kv_cache_dtype,
        "exchange": one.exchange,
        "fits": row.problem is None,
        "problem": row.problem,
        "bytes_per_gpu": asdict(row.memory) | {"total": row.memory.total},
        "largest_batch": row.largest_batch,
        "largest_context": row.largest_context,
        "traffic": asdict(row.traffic),
        "exchanges": {name: asdict(traffic) for name, traffic in row.exchanges.items()},
        "step_seconds": asdict(row.step),
        "binds": binding(row.step)[0],
        "ttft_s": row.ttft_s,
        "tpot_s": row.tpot_s,
        "tokens_per_s_per_user": row.interactivity,
        "tokens_per_s_per_gpu": row.throughput,
    }


def _head(plan: Plan) -> list[str]:
    work, one = plan.workload, plan.machine
    stored = sorted({row.candidate.kv_cache_dtype for row in plan.rows})
    cached = " and ".join(kv_dtype(work.weight_dtype) if name == "auto" else name for name in stored)
    count = count_parameters(plan.model)
    parameters = f"{count / 1e9:.1f} B parameters" if count >= 1e8 else f"{count / 1e6:.2f} M parameters"
    head = [
        f"{plan.model_name}: {parameters} in {work.weight_dtype}, KV in {cached}",
        f"{plan.gpus} x {one.name}: {one.memory_bytes / 1e9:.0f} GB, of which {work.memory_share:.0%} may be used; "
        f"reached {_rate(one.memory_bandwidth, 'B/s')}, {_rate(one.flops['bfloat16'], 'FLOP/s')} in bf16",
        f"{work.batch} sequence{'s' if work.batch > 1 else ''} of {work.context} tokens; estimates (docs/planner.md)",
    ]
    if 0 < one.ranks < plan.gpus:
        head.append(
            f"measured with {one.ranks} ranks, {one.link_gpus} to a machine: larger groups are extrapolated from these"
        )
    if work.weight_dtype in ("fp8", "mxfp4", "nvfp4"):
        head.append(f"{work.weight_dtype} weights are for planning: the engine computes with 16 or 32 bits")
    return head


def _table(plan: Plan, rows: list[Row]) -> list[str]:
    cells = [_cells(plan, row) for row in rows]
    head = [[name.format(unit=plan.machine.unit) for name, _ in _COLUMNS], [unit for _, unit in _COLUMNS]]
    widths = [max(map(len, column)) for column in zip(*head, *cells, strict=True)]

    def line(row: list[str]) -> str:
        texts = [
            cell.ljust(width) if index in (0, len(row) - 1) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(texts).rstrip()

    return [*map(line, head), "-" * (sum(widths) + 2 * (len(widths) - 1)), *map(line, cells)]


def _rate(value: float, unit: str) -> str:
    """With the prefix that leaves one to three digits before the point: ``3.84 TB/s``."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value / 1e6:.3g} M{unit}"


def _gigabytes(num_bytes: float, places: int) -> str:
    """With ``places`` behind the point, or two digits where these would be zeros."""
    value = num_bytes / 1e9
    return f"{value:.{places}f}" if value >= 0.1 else f"{value:.2g}"


def _cells(plan: Plan, row: Row) -> list[str]:
    memory, traffic = row.memory, row.traffic
    return [
        ("* " if row is plan.best else "  ") + row.candidate.name,
        _gigabytes(memory.weights, 1),
        _gigabytes(memory.kv, 2),
        f"{memory.kv_copies:g}",
        _gigabytes(memory.activations + memory.work, 2),
        f"{100 * memory.total / plan.machine.memory_bytes:.0f}",
        str(row.largest_batch),
        str(row.largest_context),
        f"{traffic.exchange_bytes / 1e3:.1f}",
        str(traffic.exchange_calls),
        f"{row.ttft_s:.2f}",
        f"{row.tpot_s * 1e3:.1f}",
        f"{row.interactivity:.1f}",
        f"{row.throughput:.1f}",
        binding(row.step)[0],
    ]
