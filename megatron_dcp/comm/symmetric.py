"""Small collectives by reading the other ranks' memory: torch's symmetric memory, for groups inside one machine.

The exchange of a decode step is a few hundred kilobytes at most, where a collective of NCCL costs its start rather
than its bytes. Here every rank writes its part into a buffer that all ranks of the group have mapped, waits for the
others on the GPU, and reads theirs: no communicator, no host. Sums are made in rank order, so all get the same bits.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from megatron_dcp.distributed import time_limit

LIMIT_BYTES = 256 << 10  # of one rank's part; more is bound by bandwidth, which NCCL uses better

_by_group: WeakKeyDictionary[ProcessGroup, SymmetricGroup] = WeakKeyDictionary()


class SymmetricGroup:
    """The ranks of a group and a buffer that they have all mapped.

    Args:
        handle: What ``torch.distributed._symmetric_memory.rendezvous`` returns for this rank's ``buffer``.
        buffer: uint8 ``[LIMIT_BYTES]`` of this rank.
        timeout_ms: How long a rank waits for the others before the GPU stops with an error; 0: without end.
    """

    def __init__(self, handle: Any, buffer: Tensor, timeout_ms: int = 0) -> None:
        self._handle, self._buffer, self._timeout_ms = handle, buffer, timeout_ms

    def all_gather(self, part: Tensor, gathered: Tensor) -> None:
        """The ranks' parts, one-dimensional, one after the other in rank order, into ``gathered``."""
        mine = self._buffer[: part.nbytes].view(part.dtype)
        mine.copy_(part)
        self._wait()
        for rank, room in enumerate(gathered.view(self._handle.world_size, -1)):
            theirs = mine if rank == self._handle.rank else self._handle.get_buffer(rank, part.shape, part.dtype)
            room.copy_(theirs)
        self._wait()  # nobody writes the next part over one that is still being read

    def _wait(self) -> None:
        self._handle.barrier(timeout_ms=self._timeout_ms)

    def all_reduce(self, tensor: Tensor, op: ReduceOp.RedOpType) -> None:
        """Reduce over the ranks, in place: sums in fp32 and in rank order, or the largest."""
        flat = tensor.view(-1)
        gathered_Pn = flat.new_empty(self._handle.world_size, flat.numel())
        self.all_gather(flat, gathered_Pn)
        if op == ReduceOp.MAX:
            flat.copy_(gathered_Pn.amax(0))
            return
        total = gathered_Pn[0].float()
        for part in gathered_Pn[1:]:
            total = total + part
        flat.copy_(total)


def enable(group: ProcessGroup, device: torch.device) -> None:
    """Let small collectives of ``group`` go by symmetric memory until `disable`; a collective call of its ranks.

    Raises:
        ValueError: No GPU, or the ranks cannot map each other's memory (several machines, no peer access).
    """
    if group.size() == 1 or group in _by_group:
        return
    if device.type != "cuda":
        raise ValueError(f"symmetric memory needs GPUs, and this rank computes on {device}; use symmetric_memory=False")
    try:
        handle, buffer = _rendezvous(group, device)
    except RuntimeError as error:
        raise ValueError(
            f"the ranks of group {group.group_desc or group.group_name} cannot map each other's memory ({error}); they "
            "must be GPUs of one machine with peer access; use symmetric_memory=False"
        ) from error
    limit = time_limit()
    _by_group[group] = SymmetricGroup(handle, buffer, 0 if limit is None else int(limit.total_seconds() * 1000))


def disable(group: ProcessGroup) -> None:
    """Let all collectives of ``group`` go by its communicator again."""
    _by_group.pop(group, None)


def of(group: ProcessGroup, part: Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM) -> SymmetricGroup | None:
    """The group's symmetric memory, if it has one and a collective with such a part of each rank may go by it."""
    if not _by_group or part.nbytes > LIMIT_BYTES or op not in (ReduceOp.SUM, ReduceOp.MAX):
        return None
    return _by_group.get(group)


def _rendezvous(group: ProcessGroup, device: torch.device) -> tuple[Any, Tensor]:
    import torch.distributed._symmetric_memory as symm_mem

    buffer = symm_mem.empty(LIMIT_BYTES, dtype=torch.uint8, device=device)
    return symm_mem.rendezvous(buffer, group), buffer
