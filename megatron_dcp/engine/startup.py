"""What a run tells once, when its KV pool is there: who shares what with whom, what fits, and what computes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch.distributed import get_process_group_ranks

from megatron_dcp.comm.collectives import gather_objects
from megatron_dcp.traffic import expected_traffic

if TYPE_CHECKING:
    from megatron_dcp.engine.runner import ModelRunner

_log = logging.getLogger("megatron_dcp.startup")


def report_startup(runner: ModelRunner) -> None:
    """Log a few lines on the driver of the first replica. A collective call of the replica's ranks."""
    groups = runner.groups
    members = [tuple(get_process_group_ranks(group)) for group in (groups.dcp, groups.tp, groups.pp)]
    everywhere = gather_objects((members, runner.kv_bytes), groups.dcp_replica)
    replica = get_process_group_ranks(groups.dcp_replica)
    if 0 not in replica or groups.dcp_replica.rank() != groups.dcp_driver:
        return
    dcp, tp, pp = (sorted({each[kind] for each, _ in everywhere}) for kind in range(3))
    lines = [f"megatron_dcp: {_sizes(runner)}", f"  ranks      dcp {_listed(dcp)}; tp {_listed(tp)}; pp {_listed(pp)}"]
    lines += _cache(runner, [kv_bytes for _, kv_bytes in everywhere])
    lines += _attention(runner)
    lines += [f"  exchange   {_exchange(runner)}; prefill {runner.prefill}; CUDA graphs {runner.engine.cuda_graphs}"]
    _log.info("\n".join(lines))


def _sizes(runner: ModelRunner) -> str:
    groups = runner.groups
    product = f"tp {groups.tp.size()} x dcp {groups.dcp.size()}"
    if groups.dcp_layout == "within_tp":
        product = f"tp {groups.tp.size()} with dcp {groups.dcp.size()} inside"
    return f"{product} ({groups.dcp_layout}), pp {groups.pp.size()}"


def _listed(groups: list[tuple[int, ...]]) -> str:
    return " ".join(f"[{' '.join(map(str, group))}]" for group in groups)


def _cache(runner: ModelRunner, per_rank: list[int]) -> list[str]:
    layout, dtype = runner.layout, str(runner.kv_dtype).removeprefix("torch.")
    tokens = runner.num_blocks * layout.logical_block_tokens
    most = f"{max(per_rank) / 2**20:.2f} MiB per rank"
    lines = [
        f"  KV cache   {tokens:,} tokens of the group: {runner.num_blocks} x {layout.block_size} on each of "
        f"{layout.dcp_size} dcp ranks, {dtype}, interleave {layout.interleave}; {most}"
    ]
    if runner.window is not None:
        lines.append(
            f"             beside them {runner.window.num_blocks} x {layout.block_size} for the layers with a window "
            f"of {runner.window.tokens:,} tokens"
        )
    return lines


def _attention(runner: ModelRunner) -> list[str]:
    """The back end of each kind of layer, and on a GPU why it is none of those before it."""
    lines: list[str] = []
    for number, attention in enumerate(runner.attentions):
        *skipped, chosen = attention.reason.split("; ")
        if number and attention.backend.name == runner.attentions[0].backend.name:
            continue
        lines.append(f"  attention  {chosen}{' for the layers with a window' if number else ''}")
        if runner.device.type != "cpu":
            lines += [f"             {each}" for each in skipped]
    return lines


def _exchange(runner: ModelRunner) -> str:
    groups, name = runner.groups, runner.engine.exchange_for(runner.groups.dcp_layout)
    if groups.dcp.size() == 1:
        return "none: one rank has every key"
    dim = runner.shape.v_dim if runner.latent is None else runner.latent.exchanged_dim
    traffic = expected_traffic(name, 1, runner.shape.heads, dim, groups.dcp.size(), groups.dcp.rank())
    sent = sum(size for _, size in traffic.values())
    return f"{name}, {sent:,} bytes sent per rank, decoded token and layer"
