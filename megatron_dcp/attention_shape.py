"""Sizes of attention on one rank, and what follows from them alone. No torch, no Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """What a rank attends with, and what it keeps per token and layer.

    Attributes:
        heads: Query heads that this rank attends with; in ``within_tp`` those of its whole DCP group.
        kv_heads: KV heads in this rank's cache.
        head_dim: Dim of queries and cached keys.
        v_dim: Dim of the cached values.
        v_in_k: The values are the first ``v_dim`` dims of the keys: MLA's latent.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    v_in_k: bool = False

    @classmethod
    def of(cls, config: Any, groups: Any) -> AttentionShape:
        """From a ``TransformerConfig`` and the process groups."""
        latent = (config.kv_lora_rank, config.qk_pos_emb_head_dim) if config.multi_latent_attention else None
        return cls.on_rank(
            heads=config.num_attention_heads,
            kv_heads=config.num_query_groups,
            head_dim=config.kv_channels,
            latent=latent,
            tp=groups.tp.size(),
            dcp=groups.dcp.size(),
            layout=groups.dcp_layout,
        )

    @classmethod
    def on_rank(
        cls, *, heads: int, kv_heads: int, head_dim: int, latent: tuple[int, int] | None, tp: int, dcp: int, layout: str
    ) -> AttentionShape:
        """From the sizes of a whole model.

        Args:
            latent: Of MLA, ``kv_lora_rank`` and ``qk_pos_emb_head_dim``.
        """
        attend = heads // tp * (dcp if layout == "within_tp" else 1)
        if latent is not None:
            return cls(heads=attend, kv_heads=1, head_dim=sum(latent), v_dim=latent[0], v_in_k=True)
        return cls(heads=attend, kv_heads=max(1, kv_heads // tp), head_dim=head_dim, v_dim=head_dim)

    @property
    def cache(self) -> dict[str, Any]:
        """The part that a KV pool is made from, as its keyword arguments."""
        return dict(num_kv_heads=self.kv_heads, head_dim=self.head_dim, v_dim=self.v_dim, v_in_k=self.v_in_k)


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Sizes of MLA on one rank.

    Attributes:
        heads: Query heads of this rank's own, ``N``.
        attend_heads: Query heads that it attends with when absorbed: in ``within_tp`` those of its DCP group.
        qk_head_dim, rotated, rank, v_head_dim: ``D``, ``P``, ``R``, ``V``.
        orthogonal: Whether this rank has the up-projections of all heads that it attends with.
    """

    heads: int
    attend_heads: int
    qk_head_dim: int
    rotated: int
    rank: int
    v_head_dim: int
    orthogonal: bool

    @classmethod
    def of(cls, config: Any, groups: Any) -> LatentShape:
        """From an ``MLATransformerConfig`` and the process groups."""
        heads = config.num_attention_heads // groups.tp.size()
        orthogonal = groups.dcp_layout == "orthogonal"
        return cls(
            heads=heads,
            attend_heads=heads if orthogonal else heads * groups.dcp.size(),
            qk_head_dim=config.qk_head_dim,
            rotated=config.qk_pos_emb_head_dim,
            rank=config.kv_lora_rank,
            v_head_dim=config.v_head_dim,
            orthogonal=orthogonal,
        )

    @property
    def values_first(self) -> bool:
        """Whether the value up-projection comes before the exchange.

        It is linear, so it may stand on either side of the merge: the exchange carries ``V`` numbers per head with the
        values first, ``R`` without. The smaller one is taken. In ``within_tp`` a rank lacks the other ranks'
        up-projections, so the values come after.
        """
        return self.orthogonal and self.v_head_dim <= self.rank

    @property
    def exchanged_dim(self) -> int:
        """Numbers per head that the exchange carries (and one LSE)."""
        return self.v_head_dim if self.values_first else self.rank

    def prefers_expanded(self, tokens: int, keys: int) -> bool:
        """Whether ``tokens`` queries over ``keys`` cached tokens take fewer operations expanded than absorbed.

        Only where the values come first: the exchange carries one form for all tokens of a step.
        """
        absorbed, expanded = self.operations(tokens, keys)
        return self.values_first and 0 < expanded < absorbed

    def operations(self, tokens: int, keys: int) -> tuple[int, int]:
        """Multiplications per head of ``tokens`` queries over ``keys`` cached tokens: absorbed, and expanded."""
        D, P, R, V = self.qk_head_dim, self.rotated, self.rank, self.v_head_dim
        absorbed = tokens * R * (D + V) + tokens * keys * (R + P + R)
        expanded = keys * R * (D + V) + tokens * keys * (D + P + V)
        return absorbed, expanded
