"""Attention over one rank's shard of the KV cache: the contract, its back ends, and the choice between them."""

from __future__ import annotations

import os
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
from megatron_dcp.attention.flash import FlashBackend
from megatron_dcp.attention.flash_mla import FlashMLABackend
from megatron_dcp.attention.flashinfer import FlashInferBackend
from megatron_dcp.attention.paged import PagedBackend
from megatron_dcp.attention.sdpa import SDPABackend
from megatron_dcp.attention.te import TEBackend
from megatron_dcp.config import check_choice

BACKENDS: tuple[type[AttentionBackend[Any]], ...] = (  # best first
    TEBackend,
    FlashBackend,
    FlashInferBackend,
    FlashMLABackend,
    PagedBackend,
    SDPABackend,
)
VARIABLE = "MEGATRON_DCP_BACKEND"

__all__ = [
    "BACKENDS",
    "VARIABLE",
    "Attention",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionSpec",
    "BatchTensors",
    "Planned",
    "PoolOrder",
    "choose_backend",
]


def choose_backend(name: str, spec: AttentionSpec, *, environment: bool = True) -> Attention:
    """Make the attention back end for a pool of this kind.

    Args:
        name: A back end's name, or ``auto``: the one that the environment variable ``MEGATRON_DCP_BACKEND`` names, else
            the first of ``BACKENDS`` that supports the pool.
        environment: Whether the variable counts.

    Raises:
        ValueError: The name is not known, or cannot serve such a pool.
    """
    setting, source = "backend", "the configuration"
    if name == "auto" and environment and os.environ.get(VARIABLE):
        setting, source, name = VARIABLE, VARIABLE, os.environ[VARIABLE].strip().lower()
    check_choice(setting, name, ("auto", *(backend.name for backend in BACKENDS)))
    refusals: list[str] = []
    for backend in (kind() for kind in BACKENDS if name in ("auto", kind.name)):
        refusal = backend.supports(spec)
        if refusal is None:
            chosen = f"{backend.name}: " + ("chosen" if name == "auto" else f"chosen by {source}")
            reason = "; ".join([*refusals, chosen])
            return Attention(backend, spec, reason)
        refusals.append(f"{backend.name}: {refusal}, skipped" if name == "auto" else f"{backend.name}: {refusal}")
    raise ValueError(
        f"{setting}={name!r} cannot serve head_dim={spec.head_dim}, v_dim={spec.v_dim}, dtype={spec.dtype} on "
        f"{spec.device} ({'; '.join(refusals)}); use another backend or dtype"
    )
