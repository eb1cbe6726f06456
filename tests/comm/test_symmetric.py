"""Collectives through memory that all ranks have mapped, here a file: the same results, for many calls in a row."""

from __future__ import annotations

import inspect
import os
import random
import time

import pytest
import torch
from torch import distributed
from torch.distributed import ReduceOp

from megatron_dcp.comm import collectives, get_exchange, symmetric
from megatron_dcp.metrics import Metrics
from workers import run_on_ranks


class FileHandle:
    """As torch's handle of symmetric memory: the same buffer of every rank, and a barrier."""

    def __init__(self, group, folder):
        self.rank, self.world_size, self._group = group.rank(), group.size(), group
        size = symmetric.LIMIT_BYTES
        names = [os.path.join(folder, f"{rank}.bin") for rank in range(self.world_size)]
        if self.rank == 0:
            for name in names:
                with open(name, "wb") as file:
                    file.truncate(size)
        self.barrier()
        self.buffers = [torch.from_file(name, shared=True, size=size, dtype=torch.uint8) for name in names]

    def barrier(self, channel=0, timeout_ms=0):
        time.sleep(random.random() / 2000)  # ranks come at any time, before and behind each barrier
        distributed.barrier(self._group)
        time.sleep(random.random() / 2000)

    def get_buffer(self, rank, sizes, dtype, storage_offset=0):
        length = torch.Size(sizes).numel() * dtype.itemsize
        return self.buffers[rank][storage_offset : storage_offset + length].view(dtype).view(sizes)


def both_ways(rank, world, folder):
    """For many tensors the results of gloo and of the mapped memory, and the bytes that the latter counts."""
    group = distributed.group.WORLD
    handle = FileHandle(group, folder)
    generator = torch.Generator().manual_seed(rank)
    counted = Metrics()
    pairs = []
    for turn in range(30):
        dtype = torch.bfloat16 if turn % 3 == 2 else torch.float32
        tensor = torch.randn(1 + turn, 3, generator=generator).to(dtype)
        tensor[0, 0] = -torch.inf if rank != turn % world else 1.0
        results = []
        for mapped in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                metrics = None
                if mapped:
                    near = symmetric.SymmetricGroup(handle, handle.buffers[rank])
                    patch.setitem(symmetric._by_group, group, near)
                    metrics = counted
                summed = tensor.nan_to_num(neginf=-3.0)
                results.append(
                    [
                        collectives.all_gather(tensor, group, metrics),
                        collectives.all_reduce(summed.clone(), group, metrics),
                        collectives.all_reduce(tensor.clone(), group, metrics, op=ReduceOp.MAX),
                    ]
                )
                out = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(rank + turn))
                lse = torch.randn(2, 5, generator=torch.Generator().manual_seed(rank + turn))
                results[-1].append(get_exchange("all_reduce")(out, lse, group).out_TnH)
        pairs.append(results)
    big = torch.ones(symmetric.LIMIT_BYTES // 4 + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(symmetric._by_group, group, "must not be asked")
        assert (collectives.all_reduce(big, group) == world).all()
    return pairs, counted.collectives


@pytest.mark.parametrize("world", [2, 3])
def test_results_are_those_of_collectives(world, tmp_path):
    per_rank = run_on_ranks(world, both_ways, str(tmp_path))
    sizes = [3 * (1 + turn) * (2 if turn % 3 == 2 else 4) for turn in range(30)]
    sent = (world - 1) * sum(sizes)
    for pairs, counted in per_rank:
        assert counted == {"all_gather": (30, sent), "all_reduce": (60, 2 * sent)}
        for turn, (gloo, mapped) in enumerate(pairs):
            assert torch.equal(gloo[0], mapped[0]) and torch.equal(gloo[2], mapped[2])
            tolerance = 2e-2 if turn % 3 == 2 else 1e-6  # gloo adds bf16 up in bf16
            torch.testing.assert_close(gloo[1], mapped[1], rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(gloo[3], mapped[3], rtol=1e-6, atol=1e-6)
    for turn in range(30):
        first = per_rank[0][0][turn][1]
        assert all(torch.equal(a, b) for pairs, _ in per_rank for a, b in zip(first, pairs[turn][1], strict=True))


def test_what_cannot_be_enabled_is_said():
    class Group:
        group_name, group_desc = "7", "DCP_DCP"

        def size(self):
            return 2

    with pytest.raises(ValueError, match="needs GPUs, and this rank computes on cpu; use symmetric_memory=False"):
        symmetric.enable(Group(), torch.device("cpu"))

    def fails(group, device):
        raise RuntimeError("no peer access")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric, "_rendezvous", fails)
        with pytest.raises(
            ValueError, match="group DCP_DCP cannot map each other's memory .no peer access.; they must"
        ):
            symmetric.enable(Group(), torch.device("cuda"))
    assert not symmetric._by_group


def test_torch_has_what_is_called():
    import torch.distributed._symmetric_memory as symm_mem

    assert list(inspect.signature(symm_mem.rendezvous).parameters) == ["tensor", "group"]
    assert {"dtype", "device"} <= set(inspect.signature(symm_mem.empty).parameters)
    handle = torch._C._distributed_c10d._SymmetricMemory
    assert "sizes" in handle.get_buffer.__doc__ and "storage_offset" in handle.get_buffer.__doc__
    assert "channel" in handle.barrier.__doc__ and {"rank", "world_size"} <= set(dir(handle))


class Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append((self.name, other.name))


def test_a_communicator_goes_from_stream_to_stream_in_order(monkeypatch):
    log: list[tuple[str, str]] = []
    main, side = Stream("main", log), Stream("side", log)

    class Group:
        group_name = "a group"

    other = type("Other", (), {"group_name": "another"})
    monkeypatch.setattr(collectives, "_streams", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for stream, group in [(main, Group), (main, Group), (side, other), (side, Group), (main, Group)]:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda stream=stream: stream)
        collectives._after_last_call(group)
    assert log == [("side", "main"), ("main", "side")]
