"""Who is in which group, for worlds up to 64, without a process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from megatron_dcp.config import ParallelConfig
from megatron_dcp.rank_groups import dcp_groups, drivers, group_ranks, megatron_groups

WORLDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "dp-tp-pp-cp-ep")


def cases(world: int, layout: str, order: str = ORDERS[0]) -> Iterator[dict[str, int]]:
    """Every legal (tp, pp, cp, dcp) of a world."""
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    for tp, pp, cp in product(sizes, sizes, (1, 2, 3)):
        fits_experts = order.endswith("pp") or pp == 1 or cp == 1  # else Megatron refuses the order
        if world % (tp * pp * cp) == 0 and fits_experts:
            split = tp if layout == "within_tp" else world // (tp * pp)
            yield from ({"tp": tp, "pp": pp, "cp": cp, "dcp": d} for d in range(1, split + 1) if split % d == 0)


# Written by hand from the definitions.
LITERAL = [
    (
        {"world_size": 4, "tp": 2, "dcp": 2},
        {
            "tp": [[0, 1], [2, 3]],
            "dp": [[0, 2], [1, 3]],
            "dcp": [[0, 2], [1, 3]],
            "tp_dcp": [[0, 1, 2, 3]],
            "replica": [[0, 1, 2, 3]],
        },
    ),
    (
        {"world_size": 8, "tp": 2, "pp": 2, "dcp": 2},
        {
            "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
            "pp": [[0, 4], [1, 5], [2, 6], [3, 7]],
            "dp": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "dcp": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "tp_dcp": [[0, 1, 2, 3], [4, 5, 6, 7]],
            "replica": [[0, 1, 2, 3, 4, 5, 6, 7]],
        },
    ),
    (
        {"world_size": 8, "tp": 2, "pp": 2, "dcp": 2, "order": "tp-cp-ep-pp-dp"},
        {
            "pp": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "dp": [[0, 4], [1, 5], [2, 6], [3, 7]],
            "dcp": [[0, 4], [1, 5], [2, 6], [3, 7]],
            "tp_dcp": [[0, 1, 4, 5], [2, 3, 6, 7]],
            "replica": [[0, 1, 2, 3, 4, 5, 6, 7]],
        },
    ),
    (
        {"world_size": 16, "tp": 4, "dcp": 2},  # dp 4: two copies of the model, two shards each
        {
            "dp": [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]],
            "dcp": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
            "tp_dcp": [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]],
            "replica": [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]],
        },
    ),
    (
        {"world_size": 16, "tp": 4, "pp": 2, "dcp": 2, "layout": "within_tp"},
        {
            "dp": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
            "dcp": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]],
            "tp_dcp": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
            "replica": [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]],
        },
    ),
    (
        {"world_size": 8, "tp": 2, "ep": 2, "dcp": 2},
        {
            "ep": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "dcp": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "replica": [[0, 1, 2, 3], [4, 5, 6, 7]],
        },
    ),
    (
        {"world_size": 8, "ep": 4, "expert_tp": 2, "dcp": 4},  # experts over tp 2 x ep 4, dense layers on tp 1
        {
            "ep": [[0, 2, 4, 6], [1, 3, 5, 7]],
            "dcp": [[0, 1, 2, 3], [4, 5, 6, 7]],
            "replica": [[0, 1, 2, 3], [4, 5, 6, 7]],
        },
    ),
    (
        {"world_size": 8, "tp": 2, "cp": 2, "dcp": 4},  # training's cp ranks hold the same weights: dcp takes them
        {
            "cp": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "dp": [[0, 4], [1, 5], [2, 6], [3, 7]],
            "dp_cp": [[0, 2, 4, 6], [1, 3, 5, 7]],
            "dcp": [[0, 2, 4, 6], [1, 3, 5, 7]],
            "tp_dcp": [[0, 1, 2, 3, 4, 5, 6, 7]],
        },
    ),
    (
        {"world_size": 6, "tp": 2, "dcp": 3},
        {"dcp": [[0, 2, 4], [1, 3, 5]], "tp_dcp": [[0, 1, 2, 3, 4, 5]], "replica": [[0, 1, 2, 3, 4, 5]]},
    ),
    (
        {"world_size": 64, "tp": 8, "pp": 2, "dcp": 4},
        {
            "dcp": [[first + t + 8 * d for d in range(4)] for first in (0, 32) for t in range(8)],
            "tp_dcp": [list(range(0, 32)), list(range(32, 64))],
            "replica": [list(range(64))],
        },
    ),
]


@pytest.mark.parametrize(("sizes", "expected"), LITERAL)
def test_members_written_by_hand(sizes: dict, expected: dict) -> None:
    table = group_ranks(**sizes)
    assert {name: table[name] for name in expected} == expected


@pytest.mark.parametrize("world", WORLDS)
def test_members_by_coordinates(world: int) -> None:
    """In the default order a rank is ``t + TP (c + CP (d + DP p))``; dcp is the fast part of ``c + CP d``, or of t."""
    for layout in ("orthogonal", "within_tp"):
        for sizes in cases(world, layout):
            table = group_ranks(world, **sizes, layout=layout)
            tp, pp, cp, dcp = sizes["tp"], sizes["pp"], sizes["cp"], sizes["dcp"]
            dp = world // (tp * pp * cp)
            names = ("tp", "pp", "cp", "dp", "dp_cp", "mp", "dcp", "tp_dcp", "replica")
            expected: dict[str, dict] = {name: {} for name in names}
            for rank in range(world):
                t, c, d, p = rank % tp, rank // tp % cp, rank // (tp * cp) % dp, rank // (tp * cp * dp)
                copy = c + cp * d
                if layout == "orthogonal":
                    shard, unit = (t, copy // dcp, p), copy // dcp
                else:
                    shard, unit = (t // dcp, copy, p), copy
                keys = ((c, d, p), (t, c, d), (t, d, p), (t, c, p), (t, p), (c, d), shard, (unit, p), unit)
                for name, key in zip(names, keys, strict=True):
                    expected[name].setdefault(key, []).append(rank)
            for name in names:
                assert table[name] == sorted(expected[name].values()), (name, sizes, layout)


def test_drivers_written_by_hand() -> None:
    assert drivers(group_ranks(4, tp=2, dcp=2)) == dict.fromkeys(range(4), 0)
    assert drivers(group_ranks(8, tp=2, pp=2, dcp=2)) == dict.fromkeys(range(8), 4)
    # pp varies faster than dp: the stages are ranks 0, 1, 4, 5 and 2, 3, 6, 7
    assert drivers(group_ranks(8, tp=2, pp=2, dcp=2, order="tp-cp-ep-pp-dp")) == dict.fromkeys(range(8), 2)
    assert drivers(group_ranks(8, tp=2, pp=2, dcp=2, layout="within_tp")) == dict.fromkeys(range(8), 2)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", ["orthogonal", "within_tp"])
def test_every_replica_has_one_driver(order: str, layout: str) -> None:
    """The first rank of the last stage, with pp 1 the replica's first."""
    for world in WORLDS:
        for sizes in cases(world, layout, order):
            table = group_ranks(world, **sizes, layout=layout, order=order)
            last = {group[-1] for group in table["pp"]}
            places = drivers(table)
            assert sorted(places) == list(range(world))
            for replica in table["replica"]:
                (place,) = {places[rank] for rank in replica}
                assert replica[place] == min(last.intersection(replica))
                assert sizes["pp"] > 1 or place == 0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", ["orthogonal", "within_tp"])
def test_invariants_in_any_order(order: str, layout: str) -> None:
    for world in WORLDS:
        for sizes in cases(world, layout, order):
            table = group_ranks(world, **sizes, layout=layout, order=order)
            of = {name: {r: set(group) for group in groups for r in group} for name, groups in table.items()}
            for name, groups in table.items():
                assert sorted(r for group in groups for r in group) == list(range(world)), name
                assert groups == sorted(map(sorted, groups)), name
            tp, pp, dcp = sizes["tp"], sizes["pp"], sizes["dcp"]
            extra = dcp if layout == "orthogonal" else 1
            for rank in range(world):
                assert len(of["dcp"][rank]) == dcp
                assert len(of["tp_dcp"][rank]) == tp * extra
                assert len(of["replica"][rank]) == tp * extra * pp
                assert of["dcp"][rank] | of["tp"][rank] <= of["tp_dcp"][rank] <= of["replica"][rank]
                assert of["mp"][rank] <= of["replica"][rank]
                assert len(of["pp"][rank] & of["tp_dcp"][rank]) == 1
                if layout == "orthogonal":
                    assert of["dcp"][rank] <= of["dp_cp"][rank]
                    assert len(of["dcp"][rank] & of["tp"][rank]) == 1
                    # The shards of the TP ranks line up: the same place in dcp is the same TP group.
                    places = {sorted(of["dcp"][r]).index(r) for r in of["tp"][rank]}
                    assert len(places) == 1
                else:
                    assert of["dcp"][rank] <= of["tp"][rank]
                    assert max(of["dcp"][rank]) - min(of["dcp"][rank]) == (dcp - 1) * stride(of["tp"][rank])


def stride(group: set[int]) -> int:
    first, *rest = sorted(group)
    return rest[0] - first if rest else 0


@pytest.mark.mcore_line
@pytest.mark.parametrize("order", ORDERS)
def test_megatron_agrees(order: str) -> None:
    from megatron.core.parallel_state import RankGenerator

    for world in WORLDS:
        for sizes in cases(world, "within_tp", order):
            if sizes["dcp"] > 1:
                continue
            tp, pp, cp = sizes["tp"], sizes["pp"], sizes["cp"]
            theirs = RankGenerator(tp=tp, ep=1, dp=world // (tp * pp * cp), pp=pp, cp=cp, order=order)
            table = group_ranks(world, tp=tp, pp=pp, cp=cp, order=order)
            names = {"tp": "tp", "pp": "pp", "cp": "cp", "dp": "dp", "dp_cp": "dp-cp", "mp": "tp-pp"}
            for ours, token in names.items():
                assert table[ours] == theirs.get_ranks(token), (ours, world, sizes)


@pytest.mark.mcore_line
@pytest.mark.parametrize(("ep", "expert_tp"), [(1, 1), (2, 2), (4, 1), (2, 4), (8, 1)])
def test_megatron_agrees_on_experts(ep: int, expert_tp: int) -> None:
    from megatron.core.parallel_state import RankGenerator

    for world, tp, pp in product((16, 32, 64), (1, 2, 4), (1, 2)):
        expert_dp = world // (expert_tp * ep * pp)
        theirs = RankGenerator(tp=expert_tp, ep=ep, dp=expert_dp, pp=pp, cp=1, order="tp-cp-ep-dp-pp")
        assert group_ranks(world, tp=tp, pp=pp, ep=ep, expert_tp=expert_tp)["ep"] == theirs.get_ranks("ep")


def test_dcp_groups_need_no_order() -> None:
    """From the members alone, as when attaching to groups that somebody else made."""
    for order in ORDERS:
        parallel = ParallelConfig(
            tensor_model_parallel_size=2, pipeline_model_parallel_size=2, decode_context_parallel_size=4
        )
        table = megatron_groups(32, parallel, order)
        whole = group_ranks(32, tp=2, pp=2, dcp=4, order=order)
        assert dcp_groups({name: table[name] for name in ("tp", "pp", "dp_cp")}, parallel).items() <= whole.items()


@pytest.mark.parametrize(
    ("world", "sizes", "message"),
    [
        (8, {"tp": 3}, "world_size=8 is no multiple of 3 .*start a multiple of 3 ranks"),
        (8, {"tp": 2, "pp": 2, "cp": 4}, "world_size=8 is no multiple of 16 "),
        (8, {"ep": 3}, "world_size=8 is no multiple of 3 .*expert_model_parallel_size=3"),
        (8, {"tp": 2, "dcp": 3}, "decode_context_parallel_size=3 does not divide the 4 ranks .*use one of 1, 2, 4,"),
        (8, {"tp": 8, "dcp": 2}, "decode_context_parallel_size=2 does not divide the 1 ranks .*use one of 1,"),
        (8, {"tp": 8, "dcp": 3, "layout": "within_tp"}, "divide tensor_model_parallel_size=8,.*use one of 1, 2, 4, 8"),
        (8, {"dcp": 0}, "decode_context_parallel_size=0 must be a whole number >= 1"),
        (8, {"pp": -1}, "pipeline_model_parallel_size=-1 must be"),
        (0, {}, "world_size=0 must be"),
        (8, {"layout": "ring"}, "dcp_layout='ring' is not known; use one of orthogonal, within_tp"),
        (8, {"order": "tp-dcp-dp-pp"}, "names 'dcp'; .*dcp has no place in it"),
        (8, {"pp": 2, "order": "tp-dp"}, "leaves out 'pp'"),
        (8, {"order": "tp-tp-dp"}, "repeats a name"),
        (8, {"pp": 2, "ep": 2, "order": "tp-ep-pp-dp"}, "does not end in pp"),
        (8, {"pp": 2, "ep": 2, "order": "tp-pp-ep-dp"}, "does not end in pp"),
    ],
)  # fmt: skip
def test_bad_sizes_name_value_bound_and_remedy(world: int, sizes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_ranks(world, **sizes)
