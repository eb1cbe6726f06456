"""Which ranks form which group. Pure lists of ints: no torch, no Megatron, no process.

A *table* maps a group's name to all groups of that name, each a list of ascending global ranks. `tp`, `pp`, `cp`,
`dp`, `dp_cp`, `mp` and `ep` are Megatron's; these are added:

- ``dcp``: the ranks over which the KV cache of a sequence is sharded.
- ``tp_dcp``: the ranks that share one layer of one copy of the model (tp x dcp; with ``within_tp`` the TP group).
- ``replica``: the ranks that decode one batch together (tp_dcp x pp).

``orthogonal``: weights are replicated over ``dp_cp``; the DCP groups are its runs of consecutive members.
``within_tp``: the DCP groups are the runs of consecutive members of the TP groups.
"""

from __future__ import annotations

from itertools import product
from math import prod

from megatron_dcp.config import DcpLayout, ParallelConfig

Groups = list[list[int]]

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
# The order in which Megatron appends dimensions that an order string leaves out.
_DIMENSIONS = ("tp", "pp", "dp", "ep", "cp")


def group_ranks(
    world_size: int,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    cp: int = 1,
    dcp: int = 1,
    layout: DcpLayout = "orthogonal",
    order: str = DEFAULT_ORDER,
    expert_tp: int | None = None,
) -> dict[str, Groups]:
    """The table of all groups of a world; the dp size follows from the others.

    Args:
        order: Megatron's order string: the first dimension varies fastest from rank to rank.

    Raises:
        ValueError: A size or the order does not fit; names value, bound and remedy.
    """
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=expert_tp,
        decode_context_parallel_size=dcp,
        dcp_layout=layout,
    )
    table = megatron_groups(world_size, parallel, order)
    return table | dcp_groups(table, parallel)


def megatron_groups(world_size: int, parallel: ParallelConfig, order: str = DEFAULT_ORDER) -> dict[str, Groups]:
    """The groups that Megatron makes for these sizes: ``tp, pp, cp, dp, dp_cp, mp, ep``."""
    parallel.check_world_size(world_size)
    tp, pp, cp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    ep, expert_tp = parallel.expert_model_parallel_size, parallel.expert_tp
    dense = {"tp": tp, "cp": cp, "ep": 1, "dp": world_size // (tp * cp * pp), "pp": pp}
    expert = {"tp": expert_tp, "cp": 1, "ep": ep, "dp": world_size // (expert_tp * ep * pp), "pp": pp}
    names = _dimensions_in_order(order, {name: max(dense[name], expert[name]) for name in _DIMENSIONS})
    wanted = {"tp": ("tp",), "pp": ("pp",), "cp": ("cp",), "dp": ("dp",), "dp_cp": ("dp", "cp"), "mp": ("tp", "pp")}
    table = {name: _subgrid(names, dense, axes) for name, axes in wanted.items()}
    pp_is_last = order.lower().endswith("pp") or pp == 1
    if _subgrid(names, expert, ("pp",)) != table["pp"] or not (pp_is_last or expert["dp"] == dense["dp"]):
        raise ValueError(
            f"order={order!r} does not end in pp, which pipeline_model_parallel_size={pp} needs where experts are cut "
            f"differently from dense layers (expert_model_parallel_size={ep}, expert_tensor_parallel_size={expert_tp}, "
            f"context_parallel_size={cp}); use order={DEFAULT_ORDER!r}"
        )
    return table | {"ep": _subgrid(names, expert, ("ep",))}


def dcp_groups(megatron: dict[str, Groups], parallel: ParallelConfig) -> dict[str, Groups]:
    """``dcp``, ``tp_dcp`` and ``replica`` for Megatron groups ``tp``, ``pp`` and ``dp_cp``, in whatever order made."""
    dcp = parallel.decode_context_parallel_size
    split = "tp" if parallel.dcp_layout == "within_tp" else "dp_cp"
    dcp_groups = [group[i : i + dcp] for group in megatron[split] for i in range(0, len(group), dcp)]
    tp_dcp = megatron["tp"] if split == "tp" else _unions(dcp_groups, megatron["tp"])
    return {"dcp": sorted(dcp_groups), "tp_dcp": sorted(tp_dcp), "replica": _unions(tp_dcp, megatron["pp"])}


def drivers(table: dict[str, Groups]) -> dict[int, int]:
    """Of every rank, the place in its replica of that replica's driver: where the logits are, tp and dcp rank 0.

    Args:
        table: Has ``tp``, ``pp``, ``dcp`` and ``replica``. Logits arise on the last pipeline stage.
    """
    first = {group[0] for group in table["tp"]} & {group[0] for group in table["dcp"]}
    candidates = first & {group[-1] for group in table["pp"]}
    places: dict[int, int] = {}
    for replica in table["replica"]:
        (driver,) = candidates.intersection(replica)
        places |= dict.fromkeys(replica, replica.index(driver))
    return places


def _dimensions_in_order(order: str, sizes: dict[str, int]) -> list[str]:
    """The dimensions that ``order`` names, fastest first, then those of size 1 that it leaves out."""
    names = order.lower().split("-")
    unknown = [name for name in names if name not in _DIMENSIONS]
    missing = [name for name in _DIMENSIONS if name not in names and sizes[name] > 1]
    if unknown or missing or len(set(names)) < len(names):
        what = f"names {unknown[0]!r}" if unknown else f"leaves out {missing[0]!r}" if missing else "repeats a name"
        raise ValueError(
            f"order={order!r} {what}; name each of {', '.join(_DIMENSIONS)} once, e.g. {DEFAULT_ORDER!r} "
            f"(dcp has no place in it: it is the inner split of dp, or of tp)"
        )
    return names + [name for name in _DIMENSIONS if name not in names]


def _subgrid(names: list[str], sizes: dict[str, int], axes: tuple[str, ...]) -> Groups:
    """Ranks of a grid whose dimension ``names[0]`` varies fastest, grouped so that only ``axes`` vary in a group."""
    stride = {name: prod(sizes[before] for before in names[:i]) for i, name in enumerate(names)}

    def offsets(kept: list[str]) -> list[int]:
        steps = [[i * stride[name] for i in range(sizes[name])] for name in kept]
        return sorted(sum(step) for step in product(*steps))

    inside = offsets([name for name in names if name in axes])
    return [[first + step for step in inside] for first in offsets([name for name in names if name not in axes])]


def _unions(groups: Groups, others: Groups) -> Groups:
    """Each of ``groups`` with all members of those ``others`` that it touches; every result once."""
    other_of = {rank: other for other in others for rank in other}
    unions = {tuple(sorted({r for rank in group for r in other_of[rank]})) for group in groups}
    return sorted(map(list, unions))
