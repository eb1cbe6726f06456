"""The groups as real gloo process groups: made, attached to, refused, destroyed and made again."""

from __future__ import annotations

import gc
import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_dcp import parallel_state
from megatron_dcp.config import ParallelConfig
from megatron_dcp.rank_groups import group_ranks
from workers import run_on_ranks

pytestmark = pytest.mark.mcore_line

SHORT = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "expert_tp",
    "decode_context_parallel_size": "dcp",
    "dcp_layout": "layout",
    "order": "order",
}
FIELDS = {"dcp": "dcp", "tp_dcp": "tp_dcp", "dcp_replica": "replica", "tp": "tp", "pp": "pp", "ep": "ep", "dp": "dp"}


def sizes(**short: Any) -> dict[str, Any]:
    return {long: short[name] for long, name in SHORT.items() if name in short}


def members(rank: int) -> dict[str, list[int]]:
    """What this rank's collection says, checked by an all-reduce over every group."""
    collection = parallel_state.get_process_group_collection()
    found = {}
    for attribute, name in FIELDS.items():
        group = getattr(collection, attribute)
        total = torch.tensor([rank])
        dist.all_reduce(total, group=group)
        found[name] = dist.get_process_group_ranks(group)
        assert total.item() == sum(found[name]), name
    decides = collection.tp.rank() == collection.dcp.rank() == 0 and collection.pp.rank() == collection.pp.size() - 1
    flags: list[Any] = [None] * collection.dcp_replica.size()
    dist.all_gather_object(flags, decides, group=collection.dcp_replica)
    assert [i for i, flag in enumerate(flags) if flag] == [collection.dcp_driver]
    assert collection.dcp is parallel_state.get_decode_context_parallel_group()
    assert collection.tp_dcp is parallel_state.get_tp_dcp_group()
    assert collection.dcp_replica is parallel_state.get_replica_group()
    assert collection.dcp_layout == parallel_state.get_dcp_layout() == parallel_state.get_parallel_config().dcp_layout
    assert parallel_state.get_decode_context_parallel_world_size() == len(found["dcp"])
    assert parallel_state.get_decode_context_parallel_rank() == found["dcp"].index(rank)
    return found


def made(rank: int, world: int, arguments: dict[str, Any]) -> tuple[dict, list, ParallelConfig]:
    orders = []
    real = dist.new_group

    def new_group(ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        orders.append(list(ranks))
        return real(ranks, *args, **kwargs)

    with mock.patch.object(dist, "new_group", new_group):
        parallel_state.initialize_model_parallel(**arguments)
    assert parallel_state.is_initialized()
    return members(rank), orders, parallel_state.get_parallel_config()


@pytest.mark.parametrize(
    ("world", "short"),
    [
        (1, {}),
        (2, {"dcp": 2}),
        (2, {"tp": 2, "dcp": 2, "layout": "within_tp"}),
        (3, {"dcp": 3}),
        (4, {"tp": 2, "dcp": 2}),
        (4, {"tp": 2}),
        (4, {"pp": 2, "dcp": 2}),
        (4, {"pp": 2, "tp": 2, "dcp": 2, "layout": "within_tp"}),
        (4, {"ep": 2, "dcp": 2}),
        (4, {"cp": 2, "dcp": 4}),
        (4, {"tp": 4, "dcp": 2, "layout": "within_tp"}),
        (8, {"tp": 2, "pp": 2, "dcp": 2}),
        (8, {"tp": 2, "pp": 2, "dcp": 2, "order": "tp-cp-ep-pp-dp"}),
        (8, {"tp": 2, "ep": 4, "dcp": 2}),
        (8, {"tp": 4, "dcp": 2, "layout": "within_tp"}),
    ],
)
def test_groups_are_those_of_the_table(world: int, short: dict[str, Any]) -> None:
    results = run_on_ranks(world, made, sizes(**short))
    table = group_ranks(world, **short)
    for rank, (found, orders, parallel) in enumerate(results):
        assert found == {name: next(g for g in table[name] if rank in g) for name in FIELDS.values()}
        assert orders == results[0][1]  # the same groups, in the same order, on every rank
        assert parallel == results[0][2]
    expected = ParallelConfig(**{k: v for k, v in sizes(**short).items() if k != "order"})
    assert results[0][2].ranks == expected.ranks and results[0][2].expert_tp == expected.expert_tp


def shared_communicators(rank: int, world: int) -> list[bool]:
    from megatron.core import parallel_state as mpu

    parallel_state.initialize_model_parallel(2, decode_context_parallel_size=2, dcp_layout="within_tp")
    same = [
        parallel_state.get_decode_context_parallel_group() is mpu.get_tensor_model_parallel_group(),
        parallel_state.get_tp_dcp_group() is mpu.get_tensor_model_parallel_group(),
        parallel_state.get_replica_group() is mpu.get_tensor_model_parallel_group(),
    ]
    parallel_state.destroy_model_parallel(destroy_megatron=False)
    # What belongs to Megatron is not destroyed with ours.
    dist.all_reduce(torch.ones(1), group=mpu.get_tensor_model_parallel_group())
    return same


def test_one_set_of_ranks_has_one_communicator() -> None:
    assert run_on_ranks(2, shared_communicators) == [[True] * 3] * 2


def attached(rank: int, world: int, megatron: dict[str, Any], arguments: dict[str, Any]) -> tuple[dict, ParallelConfig]:
    from megatron.core import parallel_state as mpu

    mpu.initialize_model_parallel(**megatron)
    tp, dp = mpu.get_tensor_model_parallel_group(), mpu.get_data_parallel_group()
    parallel_state.initialize_model_parallel(**arguments)
    collection = parallel_state.get_process_group_collection()
    assert collection.tp is tp and collection.dp is dp
    found, parallel = members(rank), parallel_state.get_parallel_config()
    parallel_state.destroy_model_parallel()
    assert not parallel_state.is_initialized()
    assert mpu.model_parallel_is_initialized()  # whoever made them keeps them
    dist.all_reduce(torch.ones(1), group=dp)
    return found, parallel


@pytest.mark.parametrize(
    ("world", "megatron", "more"),
    [
        (2, {}, {"dcp": 2}),
        (4, {"tp": 2}, {"dcp": 2}),
        (4, {"tp": 2, "pp": 2}, {"dcp": 2, "layout": "within_tp"}),
        (4, {"ep": 2}, {"dcp": 2}),
        (4, {"cp": 2}, {"dcp": 4}),
        (8, {"tp": 2, "pp": 2, "order": "tp-cp-ep-pp-dp"}, {"dcp": 2}),
        (8, {"tp": 2, "pp": 2, "order": "dp-tp-pp"}, {"dcp": 2}),
    ],
)
def test_attaches_to_groups_of_a_training_stack(world: int, megatron: dict[str, Any], more: dict[str, Any]) -> None:
    table = group_ranks(world, **megatron, **more)
    # All sizes left out, and (in the order that Megatron was given) all sizes given.
    for arguments in (sizes(**more), sizes(**megatron, **more)):
        for rank, (found, parallel) in enumerate(run_on_ranks(world, attached, sizes(**megatron), arguments)):
            assert found == {name: next(g for g in table[name] if rank in g) for name in FIELDS.values()}
            assert parallel.tensor_model_parallel_size == megatron.get("tp", 1)
            assert parallel.decode_context_parallel_size == more["dcp"]


def refused(rank: int, world: int, megatron: dict[str, Any] | None, per_rank: list[dict[str, Any]]) -> str:
    from megatron.core import parallel_state as mpu

    if megatron is not None:
        mpu.initialize_model_parallel(**megatron)
    with pytest.raises(ValueError) as caught:
        parallel_state.initialize_model_parallel(**per_rank[rank % len(per_rank)])
    assert not parallel_state.is_initialized()
    assert mpu.model_parallel_is_initialized() == (megatron is not None)
    # A refusal leaves nothing behind that is in the way of a right call.
    parallel_state.initialize_model_parallel(decode_context_parallel_size=1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("megatron", "wrong", "message"),
    [
        ({"tp": 2}, {"tp": 1, "dcp": 2}, "tensor_model_parallel_size=1 differs from the 2 .*leave it out or pass 2"),
        ({"pp": 2}, {"pp": 4}, "pipeline_model_parallel_size=4 differs from the 2"),
        ({"ep": 2}, {"ep": 4}, "expert_model_parallel_size=4 differs from the 2"),
        ({"tp": 2, "pp": 2}, {"dcp": 2}, "decode_context_parallel_size=2 does not divide the 1 ranks"),
        ({"tp": 2, "order": "dp-tp-pp"}, {"order": "tp-dp-pp", "dcp": 2}, "'tp-dp-pp' is not that of Megatron's"),
        (None, {"dcp": 3}, "decode_context_parallel_size=3 does not divide the 4 ranks .*use one of 1, 2, 4"),
        (None, {"tp": 2, "dcp": 4}, "decode_context_parallel_size=4 does not divide the 2 ranks"),
        (None, {"tp": 3}, "world_size=4 is no multiple of 3"),
        (None, {"order": "tp-dcp-dp"}, "dcp has no place in it"),
    ],
)
def test_bad_sizes_are_refused_on_every_rank(megatron: dict | None, wrong: dict, message: str) -> None:
    made_first = None if megatron is None else sizes(**megatron)
    for text in run_on_ranks(4, refused, made_first, [sizes(**wrong)]):
        assert re.search(message, text), text


def test_ranks_that_disagree_are_told_on_every_rank() -> None:
    texts = run_on_ranks(4, refused, None, [sizes(dcp=2), sizes(dcp=4)])
    for text in texts:
        assert "were given different sizes" in text
        assert "decode_context_parallel_size=2" in text and "decode_context_parallel_size=4" in text


def test_error_of_one_rank_is_told_on_every_rank() -> None:
    first, *others = run_on_ranks(2, refused, None, [sizes(dcp=5), sizes(dcp=2)])
    assert first.startswith("decode_context_parallel_size=5 does not divide")
    for text in others:
        assert text.startswith("rank 0 cannot initialise its groups: ValueError: decode_context_parallel_size=5")


def half_attached(rank: int, world: int) -> str:
    from megatron.core import parallel_state as mpu

    mpu.initialize_model_parallel()
    if rank == 1:
        mpu.destroy_model_parallel()
    with pytest.raises(ValueError) as caught:
        parallel_state.initialize_model_parallel(decode_context_parallel_size=2)
    return str(caught.value)


def test_megatron_groups_on_some_ranks_only() -> None:
    for text in run_on_ranks(2, half_attached):
        assert "attached to Megatron's groups" in text and "without Megatron's groups" in text


def megatron_fails(rank: int, world: int) -> None:
    with pytest.raises(RuntimeError, match="interleaved"):
        parallel_state.initialize_model_parallel(virtual_pipeline_model_parallel_size=2)
    assert parallel_state._groups_of_world() == [dist.group.WORLD]
    parallel_state.initialize_model_parallel(decode_context_parallel_size=2)
    members(rank)


def test_failure_inside_megatron_leaves_no_half_made_groups() -> None:
    run_on_ranks(2, megatron_fails)


@pytest.mark.parametrize("argument", [{"rank_offset": 1}, {"gtp_remat_size": 2}])
def test_megatron_arguments_that_do_not_go_with_dcp(argument: dict[str, Any]) -> None:
    for text in run_on_ranks(2, refused, None, [argument]):
        assert f"{next(iter(argument))}=" in text and "leave it out" in text


def life_cycle(rank: int, world: int) -> list[dict]:
    from megatron.core import parallel_state as mpu

    with pytest.raises(RuntimeError, match="call megatron_dcp.parallel_state.initialize_model_parallel"):
        parallel_state.get_decode_context_parallel_group()
    parallel_state.destroy_model_parallel()  # of nothing
    found, threads = [], []
    for arguments in (sizes(dcp=4), sizes(tp=2, dcp=2), sizes(tp=4, dcp=4, layout="within_tp")):
        parallel_state.initialize_model_parallel(**arguments)
        with pytest.raises(ValueError, match="exist already; call megatron_dcp.parallel_state.destroy_model_parallel"):
            parallel_state.initialize_model_parallel(**arguments)
        found.append(members(rank))
        parallel_state.destroy_model_parallel()
        assert not parallel_state.is_initialized() and not mpu.model_parallel_is_initialized()
        with pytest.raises(RuntimeError, match="not initialised"):
            parallel_state.get_process_group_collection()
        # Megatron forgets its groups only. Left to torch they would keep threads, and a process would get slower and
        # slower: after 24 times on two ranks a decode step took twice as long.
        assert parallel_state._groups_of_world() == [dist.group.WORLD]
        gc.collect()
        threads.append(len(os.listdir("/proc/self/task")))
    assert max(threads) - min(threads) < 10, threads
    return found


def test_destroy_and_make_again() -> None:
    tables = [group_ranks(4, dcp=4), group_ranks(4, tp=2, dcp=2), group_ranks(4, tp=4, dcp=4, layout="within_tp")]
    for rank, found in enumerate(run_on_ranks(4, life_cycle)):
        for table, one in zip(tables, found, strict=True):
            assert one == {name: next(g for g in table[name] if rank in g) for name in FIELDS.values()}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def new_world(rank: int, world: int) -> tuple[int, int, set]:
    """A process that tears its world down and starts another one, from torchrun's variables."""
    from megatron.core import parallel_state as mpu

    parallel_state.initialize_model_parallel(decode_context_parallel_size=2)
    port = [free_port()]
    dist.broadcast_object_list(port, src=0)
    dist.destroy_process_group()
    assert not parallel_state.is_initialized()
    with pytest.raises(RuntimeError, match=r"call initialize_distributed\(\) first"):
        parallel_state.initialize_model_parallel()

    torchrun = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port[0]}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in torchrun.items()}):
        parallel_state.initialize_distributed(timeout_s=90)
        parallel_state.initialize_distributed(timeout_s=1)  # nothing more to do
    with pytest.raises(ValueError, match="Megatron's groups belong to a torch.distributed world that was destroyed"):
        parallel_state.initialize_model_parallel(decode_context_parallel_size=2)
    mpu.destroy_model_parallel()
    limits = set()
    real = dist.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        if kwargs["group_desc"].startswith("DCP_"):  # Megatron passes its time limit to most of its groups
            limits.add(kwargs["timeout"].total_seconds())
        return real(*args, **kwargs)

    with mock.patch.object(dist, "new_group", new_group):
        parallel_state.initialize_model_parallel(decode_context_parallel_size=2)
    members(rank)
    return dist.get_rank(), dist.get_world_size(), limits


def test_world_from_torchrun_with_its_time_limit_in_every_dcp_group() -> None:
    assert run_on_ranks(2, new_world) == [(0, 2, {90.0}), (1, 2, {90.0})]


def alone(rank: int, world: int) -> tuple[int, dict]:
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="timeout_s=0"):
        parallel_state.initialize_distributed(timeout_s=0)
    parallel_state.initialize_distributed()
    parallel_state.initialize_model_parallel()
    return dist.get_world_size(), members(0)


def test_one_process_without_torchrun() -> None:
    assert run_on_ranks(1, alone) == [(1, {name: [0] for name in FIELDS.values()})]


def test_nccl_options_of_the_new_communicators(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """High priority unless Megatron's file says otherwise; none for gloo."""

    class Options:
        def __init__(self, is_high_priority_stream: bool) -> None:
            self.is_high_priority_stream, self.config = is_high_priority_stream, SimpleNamespace()

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    assert parallel_state._nccl_options("dcp", None) is None
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "cpu:gloo,cuda:nccl")
    options = parallel_state._nccl_options("dcp", None)
    assert options.is_high_priority_stream and not vars(options.config)
    file = tmp_path / "nccl.yaml"
    file.write_text("dcp: {max_ctas: 4, is_high_priority_stream: false}\ntp: {max_ctas: 32}\n")
    options = parallel_state._nccl_options("dcp", str(file))
    assert not options.is_high_priority_stream and vars(options.config) == {"max_ctas": 4}
    assert parallel_state._nccl_options("tp_dcp", str(file)).is_high_priority_stream
