"""Stand-ins for CUDA graphs on a CPU: what Python decided while recording is frozen, as a graph freezes it.

`RecordedOps` keeps every operator of torch with the tensors that it read and wrote, and computes them again in the same
order into the same memory. What a GPU refuses while it captures, reading values on the host, it refuses too.
`GatherBackend` is an attention back end whose plans can be refreshed, and which is nothing but such operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron_dcp.attention import AttentionBatch, AttentionSpec, BatchTensors
from megatron_dcp.attention.sdpa import SDPABackend
from megatron_dcp.kernels import twins
from megatron_dcp.shard import Shard, dequantise

READ_VALUES = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "repeat_interleave.Tensor", "equal.default")


class RecordedOps(TorchDispatchMode):
    """One graph."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(each in name for each in READ_VALUES):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        if name.startswith(("aten.index.Tensor", "aten.index_put_")):
            masks = [x for x in tree_leaves(args[1]) if isinstance(x, Tensor) and x.dtype == torch.bool]
            if masks and not (name.startswith("aten.index_put_") and args[2].numel() == 1):
                raise RuntimeError(f"operation not permitted when stream is capturing: {name} with a mask")
        result = func(*args, **(kwargs or {}))
        self.ops.append((func, args, kwargs or {}, result))
        return result

    def call(self, function: Callable[[], object]) -> None:
        """Call it, and again at every replay: a collective, which torch's operators do not show whole."""
        with _disable_current_modes():
            function()
        self.ops.append((lambda: [function(), None][1], (), {}, None))

    def replay(self) -> None:
        for func, args, kwargs, result in self.ops:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class StandInGraphs:
    """`megatron_dcp.capture.Graphs` by `RecordedOps`; counts what it recorded and replayed."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0
        self._open: RecordedOps | None = None

    @contextmanager
    def stream(self) -> Iterator[None]:
        yield

    def begin(self) -> RecordedOps:
        self.recorded += 1
        graph = RecordedOps()
        graph.__enter__()
        self._open = graph
        return graph

    def end(self, graph: RecordedOps) -> None:
        self._open = None
        graph.__exit__(None, None, None)

    def holding(self, collective: Callable[..., object]) -> Callable[..., object]:
        """The collective, which a graph that is being recorded then holds."""

        def held(*args: Any, **kwargs: Any) -> None:
            graph, self._open = self._open, None  # a collective may be made of others
            try:
                if graph is None:
                    collective(*args, **kwargs)
                else:
                    graph.call(lambda: collective(*args, **kwargs))
            finally:
                self._open = graph

        return held

    def replay(self, graph: RecordedOps) -> None:
        self.replayed += 1
        graph.replay()


class GatherPlan(NamedTuple):
    spec: AttentionSpec
    tensors: BatchTensors


class GatherBackend(SDPABackend):
    """Plans that are refreshed gather every block that a table has room for; all others are SDPA's."""

    name = "gather"
    refreshable = True

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, *, blocks: int = 0) -> Any:
        if not blocks:
            return super().plan(batch, spec)
        assert set(batch.q_lens) == {1}
        return GatherPlan(spec, batch.tensors(spec.device, blocks))

    def refresh(self, plan: Any, batch: AttentionBatch) -> None:
        batch.copy_to(plan.tensors)

    def attend(self, q_TNH: Tensor, shard: Shard, plan: Any, *, scale: float) -> tuple[Tensor, Tensor]:
        if not isinstance(plan, GatherPlan):
            return super().attend(q_TNH, shard, plan, scale=scale)
        spec, tensors = plan
        size = spec.block_size
        slots_TC = (tensors.block_tables.long()[:, :, None] * size + torch.arange(size)).flatten(1)
        place_C = torch.arange(slots_TC.shape[1])
        seen_TC = place_C < tensors.visible_T[:, None]
        if tensors.hidden_T is not None:
            seen_TC &= place_C >= tensors.hidden_T[:, None]

        def read(stored: Tensor, scale_SK: Tensor | None) -> Tensor:
            x = stored[slots_TC].float() if scale_SK is None else dequantise(stored[slots_TC], scale_SK[slots_TC])
            return x.masked_fill(~seen_TC[..., None, None], 0.0).repeat_interleave(spec.group, 2)

        k_TCNH, v_TCNV = read(shard.k_SKH, shard.k_scale_SK), read(shard.v_SKV, shard.v_scale_SK)
        scores_TNC = torch.einsum("tnh,tcnh->tnc", q_TNH.float(), k_TCNH) * scale
        scores_TNC = scores_TNC.masked_fill(~seen_TC[:, None], -torch.inf)
        lse_TN = torch.logsumexp(scores_TNC, -1)
        weights_TNC = torch.exp(scores_TNC - lse_TN.masked_fill(lse_TN == -torch.inf, 0.0)[..., None])
        return torch.einsum("tnc,tcnv->tnv", weights_TNC, v_TCNV), lse_TN


@torch.library.custom_op("megatron_dcp_tests::store_slots", mutates_args=("stored", "scale"))
def _store_slots(slot_t: Tensor, x_tKH: Tensor, stored: Tensor, scale: Tensor | None) -> None:
    twins.store_slots(slot_t, x_tKH, stored, scale)


def store_slots(slot_t: Tensor, x_tKH: Tensor, stored: Tensor, scale: Tensor | None) -> None:
    """The KV write as one operator, as the kernel is one on a GPU."""
    _store_slots(slot_t, x_tKH, stored, scale)
