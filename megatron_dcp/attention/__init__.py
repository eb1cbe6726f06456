"""Attention over one rank's shard of the KV cache: the contract, its back ends, and the choice between them."""

from __future__ import annotations

from typing import Any

import torch

from megatron_dcp.attention.base import AttentionBackend, AttentionBatch, BatchTensors, PoolOrder
from megatron_dcp.attention.sdpa import SDPABackend
from megatron_dcp.config import check_choice

BACKENDS: tuple[type[AttentionBackend[Any]], ...] = (SDPABackend,)  # best first

__all__ = ["BACKENDS", "AttentionBackend", "AttentionBatch", "BatchTensors", "PoolOrder", "choose_backend"]


def choose_backend(
    name: str, *, head_dim: int, v_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[AttentionBackend[Any], str]:
    """Make the attention back end for a pool of this kind.

    Args:
        name: A back end's name, or ``auto``: the first of ``BACKENDS`` that supports the pool.
        head_dim: Dim of the keys.
        v_dim: Dim of the values.
        dtype: Of the pool.
        device: Of the pool.

    Returns:
        ``(backend, reason)``: a new back end and one line that says why it was picked.

    Raises:
        ValueError: ``name`` is not known, or cannot serve such a pool.
    """
    check_choice("backend", name, ("auto", *(backend.name for backend in BACKENDS)))
    refusals: list[str] = []
    for backend in (kind() for kind in BACKENDS if name in ("auto", kind.name)):
        refusal = backend.supports(head_dim=head_dim, v_dim=v_dim, dtype=dtype, device=device)
        if refusal is None:
            why = "asked for" if name != "auto" else "; ".join(["first that supports the pool", *refusals])
            return backend, f"{backend.name}: {why}"
        refusals.append(f"{backend.name} does not: {refusal}")
    raise ValueError(
        f"backend={name!r} cannot serve head_dim={head_dim}, v_dim={v_dim}, dtype={dtype} on {device} "
        f"({'; '.join(refusals)}); use another backend or dtype"
    )
