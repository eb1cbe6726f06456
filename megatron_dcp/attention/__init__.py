"""Attention over one rank's shard of the KV cache: the contract, its back ends, and the choice between them."""

from __future__ import annotations

from typing import Any

from megatron_dcp.attention.base import (
    Attention,
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    BatchTensors,
    Planned,
    PoolOrder,
)
from megatron_dcp.attention.paged import PagedBackend
from megatron_dcp.attention.sdpa import SDPABackend
from megatron_dcp.config import check_choice

BACKENDS: tuple[type[AttentionBackend[Any]], ...] = (PagedBackend, SDPABackend)  # best first

__all__ = [
    "BACKENDS",
    "Attention",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionSpec",
    "BatchTensors",
    "Planned",
    "PoolOrder",
    "choose_backend",
]


def choose_backend(name: str, spec: AttentionSpec) -> Attention:
    """Make the attention back end for a pool of this kind.

    Args:
        name: A back end's name, or ``auto``: the first of ``BACKENDS`` that supports the pool.

    Raises:
        ValueError: ``name`` is not known, or cannot serve such a pool.
    """
    check_choice("backend", name, ("auto", *(backend.name for backend in BACKENDS)))
    refusals: list[str] = []
    for backend in (kind() for kind in BACKENDS if name in ("auto", kind.name)):
        refusal = backend.supports(spec)
        if refusal is None:
            why = "asked for" if name != "auto" else "; ".join(["first that supports the pool", *refusals])
            return Attention(backend, spec, f"{backend.name}: {why}")
        refusals.append(f"{backend.name} does not: {refusal}")
    raise ValueError(
        f"backend={name!r} cannot serve head_dim={spec.head_dim}, v_dim={spec.v_dim}, dtype={spec.dtype} on "
        f"{spec.device} ({'; '.join(refusals)}); use another backend or dtype"
    )
