"""What a pipeline stage hands to the next one: the hidden states of a step, from each rank to its successor.

Shapes: ``T`` tokens that the rank computes in this step, ``h`` hidden size. ``T`` follows from the plan, which every
stage has, so no shape is sent.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from megatron_dcp.comm.collectives import group_device, issue
from megatron_dcp.metrics import Metrics


def send_to_next_stage(hidden_T1h: Tensor, group: ProcessGroup, metrics: Metrics | None = None) -> None:
    """Send to the rank that follows this one in the pipeline group, which must not be its last.

    Raises:
        CollectiveError: That rank has died, or did not receive within the time limit.
    """
    flat = hidden_T1h.reshape(-1)
    to = group.rank() + 1
    issue("send", lambda: distributed.send(flat, group=group, group_dst=to), group, metrics, flat.nbytes)


def receive_from_previous_stage(
    num_tokens: int, hidden_size: int, dtype: torch.dtype, group: ProcessGroup, metrics: Metrics | None = None
) -> Tensor:
    """``[T, 1, h]`` from the rank that precedes this one in the pipeline group, which must not be its first.

    Raises:
        CollectiveError: That rank has died, or did not send within the time limit.
    """
    hidden_T1h = torch.empty(num_tokens, 1, hidden_size, dtype=dtype, device=group_device(group))
    source = group.rank() - 1
    issue("receive", lambda: distributed.recv(hidden_T1h, group=group, group_src=source), group, metrics, 0)
    return hidden_T1h
