"""The collectives this package issues: counted, timed, and with one clear error where a rank is lost.

Nothing is issued in a group of one rank. Shapes: ``P`` ranks of the group.

Bytes are what each rank sends with the ring algorithm (the least any algorithm can do): ``(P - 1) / P`` of the whole
tensor for a reduce-scatter or all-to-all, ``P - 1`` times the own part for an all-gather, twice a reduce-scatter for an
all-reduce. Fractions are rounded down.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, ReduceOp

from megatron_dcp.capture import current_recorder
from megatron_dcp.comm import symmetric
from megatron_dcp.metrics import Metrics, timed

# Renamed in torch 2.13, where the old names warn.
_RENAMED = hasattr(distributed, "all_gather_single")
_all_gather = distributed.all_gather_single if _RENAMED else distributed.all_gather_into_tensor
_reduce_scatter = distributed.reduce_scatter_single if _RENAMED else distributed.reduce_scatter_tensor


class CollectiveError(RuntimeError):
    """A collective failed: a rank of the group died, hung past the time limit or called another collective."""


def all_gather(tensor: Tensor, group: ProcessGroup, metrics: Metrics | None = None) -> Tensor:
    """The ranks' tensors (all of one shape) stacked in rank order: ``[P, …]``."""
    ranks = group.size()
    if ranks == 1:
        return tensor.unsqueeze(0)
    flat = tensor.reshape(-1)  # the one form that every back end takes
    gathered = flat.new_empty(ranks * flat.numel())
    sent = (ranks - 1) * tensor.nbytes
    near = symmetric.of(group, flat)
    if near is not None:
        issue("all_gather", lambda: near.all_gather(flat, gathered), group, metrics, sent)
    else:
        issue("all_gather", lambda: _all_gather(gathered, flat, group=group), group, metrics, sent)
    return gathered.view(ranks, *tensor.shape)


def reduce_scatter_sum(parts: Tensor, group: ProcessGroup, metrics: Metrics | None = None) -> Tensor:
    """The sum over ranks of ``parts[own rank]``, for ``parts`` ``[P, …]``."""
    ranks = group.size()
    if ranks == 1:
        return parts[0]
    flat = parts.reshape(-1)
    own = flat.new_empty(flat.numel() // ranks)
    sent = (ranks - 1) * own.nbytes
    issue("reduce_scatter", lambda: _reduce_scatter(own, flat, group=group), group, metrics, sent)
    return own.view(parts.shape[1:])


def all_to_all(rows: Tensor, counts: Sequence[int], group: ProcessGroup, metrics: Metrics | None = None) -> Tensor:
    """Send ``counts[r]`` consecutive rows to each rank ``r``; every rank uses the same ``counts`` (0 is fine).

    Returns:
        What the ranks sent to this one, in rank order: ``[P, counts[own rank], …]``.
    """
    ranks, own = group.size(), counts[group.rank()]
    if ranks == 1:
        return rows.unsqueeze(0)
    received = rows.new_empty(ranks * own, *rows.shape[1:])

    def call() -> None:
        distributed.all_to_all_single(received, rows.contiguous(), [own] * ranks, list(counts), group=group)

    row_bytes = rows.nbytes // rows.shape[0] if rows.shape[0] else 0
    issue("all_to_all", call, group, metrics, (rows.shape[0] - own) * row_bytes)
    return received.unflatten(0, (ranks, own))


def all_reduce(
    tensor: Tensor, group: ProcessGroup, metrics: Metrics | None = None, *, op: ReduceOp.RedOpType = ReduceOp.SUM
) -> Tensor:
    """Reduce over the group; every rank gets the same bits. May be done in place: use what is returned."""
    ranks = group.size()
    if ranks == 1:
        return tensor
    tensor = tensor.contiguous()
    near = symmetric.of(group, tensor, op)
    if near is not None:
        issue("all_reduce", lambda: near.all_reduce(tensor, op), group, metrics, (ranks - 1) * tensor.nbytes)
        return tensor
    sent = 2 * (ranks - 1) * tensor.nbytes // ranks
    issue("all_reduce", lambda: distributed.all_reduce(tensor, op=op, group=group), group, metrics, sent)
    return tensor


def broadcast(tensor: Tensor, group: ProcessGroup, metrics: Metrics | None = None, *, src: int = 0) -> None:
    """Every rank's ``tensor`` becomes that of rank ``src`` of the group, in place."""
    if group.size() > 1:
        sent = tensor.nbytes if group.rank() == src else 0
        issue("broadcast", lambda: distributed.broadcast(tensor, group=group, group_src=src), group, metrics, sent)


class Transfer:
    """A transfer in flight, from :func:`send_receive`."""

    def __init__(
        self, works: Sequence[Any], sent: Tensor, received: Tensor, group: ProcessGroup, metrics: Metrics | None
    ) -> None:
        self._works, self._sent, self._received = works, sent, received  # both stay alive until wait()
        self._group, self._metrics = group, metrics

    def wait(self) -> Tensor:
        """What was received. ``CollectiveError`` where a neighbour is lost."""

        def call() -> None:
            for work in self._works:
                work.wait()

        issue("send_receive", call, self._group, self._metrics, self._sent.nbytes)
        return self._received


def send_receive(
    sent: Tensor, received: Tensor, to: int, source: int, group: ProcessGroup, metrics: Metrics | None = None
) -> Transfer:
    """Start to send one tensor to a rank of the group and to receive another; both contiguous.

    Args:
        to, source: Ranks in the group.
    """
    peers = [distributed.P2POp(distributed.isend, sent, group=group, group_peer=to)]
    peers.append(distributed.P2POp(distributed.irecv, received, group=group, group_peer=source))
    works: list[Any] = []
    _guarded("send_receive", lambda: works.extend(distributed.batch_isend_irecv(peers)), group, metrics)
    return Transfer(works, sent, received, group, metrics)


def gather_objects(value: Any, group: ProcessGroup) -> list[Any]:
    """The ranks' picklable values in rank order. Slow; for errors and set-up. Not counted."""
    values: list[Any] = [value] * group.size()
    if group.size() > 1:
        issue("all_gather_object", lambda: distributed.all_gather_object(values, value, group=group), group, None, 0)
    return values


def group_device(group: ProcessGroup) -> torch.device:
    """Where a tensor must live to be sent over ``group``."""
    if distributed.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def issue(op: str, call: Callable[[], object], group: ProcessGroup, metrics: Metrics | None, bytes_sent: int) -> None:
    """Make a blocking call: timed, counted as ``op``, and with a `CollectiveError` where a rank is lost.

    The call reads and writes tensors that it holds, so that a `Recorder` can make it again with what they hold then.
    """

    def count() -> None:
        if metrics is not None:
            metrics.count_collective(op, group.group_desc, bytes_sent)

    recorder = current_recorder()
    if recorder is not None:
        recorder.collective(lambda: _guarded(op, call, group, metrics), count)
        return
    _guarded(op, call, group, metrics)
    count()


def _guarded(op: str, call: Callable[[], object], group: ProcessGroup, metrics: Metrics | None) -> None:
    """Make the call, timed; what a library says of a lost rank becomes the one clear error."""
    if torch.cuda.is_initialized():
        _after_last_call(group)
    try:
        with timed(metrics, "communication"):
            call()
    except RuntimeError as error:
        ranks = distributed.get_process_group_ranks(group)
        own = distributed.get_rank()
        raise CollectiveError(
            f"{op} over ranks {ranks} failed on rank {own}: another of these ranks has most likely died or hung "
            f"({_brief(error)}). Look for the earliest error in the logs of ranks "
            f"{[rank for rank in ranks if rank != own]} (torchrun --log-dir DIR --redirects 3 keeps one per rank), "
            "then start all ranks again"
        ) from error


_streams: dict[str, torch.cuda.Stream] = {}


def _after_last_call(group: ProcessGroup) -> None:
    """One communicator is never used from two streams at once: this stream waits for the one that used it last."""
    stream = torch.cuda.current_stream()
    last = _streams.get(group.group_name)
    # a stream that captures waits for its caller's where it begins (`megatron_dcp.capture`), and can for no other
    if last is not None and last != stream and not torch.cuda.is_current_stream_capturing():
        stream.wait_stream(last)
    _streams[group.group_name] = stream


def _brief(error: RuntimeError) -> str:
    """The first sentence of a library's message, without the place in its source."""
    text = re.sub(r"^\[[^\]]*:\d+\]\s*", "", str(error).strip())
    return re.split(r"\. |\n", text)[0].rstrip(".")
