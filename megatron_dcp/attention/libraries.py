"""What the back ends over attention libraries share: is the library here, what it cannot do, and the way of a call.

Shapes: ``T`` query tokens of the batch, ``t`` of one set of virtual sequences, ``S`` pool slots, ``N`` query heads,
``K`` KV heads, ``H`` head dim, ``V`` values' head dim.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from megatron_dcp.attention.base import AttentionBackend, AttentionBatch, AttentionSpec, PoolOrder
from megatron_dcp.attention.rows import RowLists, Rows
from megatron_dcp.shard import Shard, is_quantised

HALF = (torch.bfloat16, torch.float16)


class Library(NamedTuple):
    """What came of importing an optional library: one of the two is ``None``.

    Attributes:
        module: The library.
        missing: Why it cannot be used, and what to install.
    """

    module: Any
    missing: str | None


def load(name: str, importer: Callable[[], Any], remedy: str) -> Library:
    """Import an optional library, whatever its import does.

    Args:
        name: The library, for the reason.
        importer: Imports and returns it.
        remedy: What to do where it is not installed.
    """
    try:
        return Library(importer(), None)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] == name.partition(".")[0]:
            return Library(None, f"{name} is not installed; {remedy}")
        return Library(None, f"{name} needs {error.name}, which is not installed; {remedy}")
    except Exception as error:  # noqa: BLE001 (built for another torch or CUDA, a library fails as it likes)
        text = " ".join(str(error).split()) or "no message"
        return Library(None, f"{name} is installed but does not import ({type(error).__name__}: {text[:200]})")


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU, ``None`` for another device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def cudnn_version() -> int:
    """Of the cuDNN that torch runs with, as ``90700``; 0: none."""
    return torch.backends.cudnn.version() or 0


def refuse_pool(spec: AttentionSpec, *, dtypes: Collection[torch.dtype] = HALF) -> str | None:
    """Why no kernel of a library can serve such a pool, and which back end does.

    Args:
        dtypes: That the library reads.
    """
    if spec.windows:
        return (
            "a sliding window on a shard hides its first keys, which no mask of a library says (triton and sdpa do it)"
        )
    if spec.dtype not in dtypes:
        if is_quantised(spec.dtype):
            return f"{spec.dtype} pools with scales are not read (triton and sdpa read them)"
        return f"{spec.dtype} pools are not read, only half precision (triton and sdpa read them)"
    return None


class Pages(NamedTuple):
    """A layer's pool by block, views.

    Attributes:
        k, v: ``[blocks, block_size, K, H]`` and ``[blocks, block_size, K, V]``.
        k_scale, v_scale: ``[blocks, block_size, K]``; ``None``: nothing to multiply with.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None


@dataclass(frozen=True)
class LibraryPlan:
    """One step: its sets of virtual sequences.

    Attributes:
        sets: Each one call of the library per layer.
        states: What the library keeps for each set.
    """

    spec: AttentionSpec
    sets: list[Rows]
    states: list[Any]


class LibraryBackend(AttentionBackend[LibraryPlan]):
    """A back end over a library: it names what it refuses, and calls one kernel for a set of virtual sequences.

    Attributes:
        uniform: The library wants as many query tokens of every sequence in a call.
    """

    pool_order: ClassVar[PoolOrder] = "slots_first"
    refreshable = True
    uniform: ClassVar[bool] = False

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, *, blocks: int = 0) -> LibraryPlan:
        lists = [RowLists.of_decode(batch)] if blocks else RowLists.of_batch(batch, uniform=self.uniform)
        sets = [Rows.of(one, batch, spec.device, blocks=blocks) for one in lists]
        states = [self._prepare(one, rows, spec, refreshed=bool(blocks)) for one, rows in zip(lists, sets, strict=True)]
        return LibraryPlan(spec, sets, states)

    def refresh(self, plan: LibraryPlan, batch: AttentionBatch) -> None:
        lists = RowLists.of_decode(batch)
        (rows,), (state,) = plan.sets, plan.states
        rows.copy_(lists)
        self._prepare_again(lists, state, plan.spec)

    @torch.no_grad()
    def attend(self, q_TNH: Tensor, shard: Shard, plan: LibraryPlan, *, scale: float) -> tuple[Tensor, Tensor]:
        spec = plan.spec
        pages = Pages(*(None if x is None else x.unflatten(0, (-1, spec.block_size)) for x in shard))  # type: ignore[arg-type]
        if not is_quantised(spec.dtype):
            q_TNH = q_TNH.to(spec.dtype)
        elif q_TNH.dtype not in HALF:
            q_TNH = q_TNH.bfloat16()
        out_TNV: Tensor | None = None
        lse_TN: Tensor | None = None
        for rows, state in zip(plan.sets, plan.states, strict=True):
            own = rows.tokens_t
            q_tNH = q_TNH.contiguous() if own is None else q_TNH.index_select(0, own)
            out, lse = (x.float() for x in self._call(q_tNH, pages, rows, state, spec, scale))
            if rows.tensors.blind_t is not None:
                out = out.masked_fill(rows.tensors.blind_t[:, None, None], 0.0)
                lse = lse.masked_fill(rows.tensors.blind_t[:, None], -torch.inf)
            if own is None:
                return out, lse.contiguous()
            if out_TNV is None or lse_TN is None:
                out_TNV, lse_TN = self._nothing(q_TNH, spec)
            out_TNV.index_copy_(0, own, out)
            lse_TN.index_copy_(0, own, lse)
        return self._nothing(q_TNH, spec) if out_TNV is None or lse_TN is None else (out_TNV, lse_TN)

    @staticmethod
    def _nothing(q_TNH: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """The result of tokens that see no key."""
        tokens, heads = q_TNH.shape[:2]
        out_TNV = q_TNH.new_zeros(tokens, heads, spec.v_dim, dtype=torch.float32)
        return out_TNV, q_TNH.new_full((tokens, heads), -torch.inf, dtype=torch.float32)

    def _prepare(self, lists: RowLists, rows: Rows, spec: AttentionSpec, *, refreshed: bool) -> Any:
        """What the library works out once per step for a set."""
        return None

    def _prepare_again(self, lists: RowLists, state: Any, spec: AttentionSpec) -> None:
        """The same for another batch, in place; its tensors are in ``rows`` already."""

    @abstractmethod
    def _call(
        self, q_tNH: Tensor, pages: Pages, rows: Rows, state: Any, spec: AttentionSpec, scale: float
    ) -> tuple[Tensor, Tensor]:
        """``(out_tNV, lse_tN)`` of a set, natural log, any float dtype. Every row sees a key."""
