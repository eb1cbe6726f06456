"""Runs one step of a model over this rank's shard of the cache: tokens in, logits out.

Shapes: ``T`` tokens of the step on this rank, flat over sequences; ``B`` rows of logits, ``h`` hidden size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dcp.attention import Attention, AttentionBatch, AttentionSpec, choose_backend
from megatron_dcp.cache.layout import KVLayout
from megatron_dcp.cache.pool import KVPool, bytes_per_block
from megatron_dcp.cache.sizes import StripeSizes, blocks_in, exchange_work_bytes
from megatron_dcp.comm import symmetric
from megatron_dcp.comm.collectives import gather_objects
from megatron_dcp.comm.consensus import agree
from megatron_dcp.comm.exchange import all_reduce_sum, gather_heads, get_exchange
from megatron_dcp.comm.pipeline import receive_from_previous_stage, send_to_next_stage
from megatron_dcp.config import CacheConfig, EngineConfig, check_within_tp_bound
from megatron_dcp.engine.batch import StepBatch, Window
from megatron_dcp.engine.decode_graphs import DecodeGraphs
from megatron_dcp.engine.places import Places, place_tokens
from megatron_dcp.layers import (
    AttentionShape,
    Chunk,
    DCPContext,
    KindPlan,
    LatentShape,
    StepPlan,
    attention_layers,
    cached_kv_heads,
    check_expert_groups,
    enable_dcp,
    expanded_spec,
    experts_over_dcp,
    is_striped,
    layer_windows,
    plan_latent,
    plan_striped,
    rotary_table,
)
from megatron_dcp.metrics import Metrics
from megatron_dcp.parallel_state import get_parallel_config

KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
}


class ModelRunner:
    """A model, its shard of the KV cache, and what attends and merges. Every rank of the replica steps together.

    Args:
        model: Megatron ``GPTModel`` (bare or wrapped); gets its decode path here, sharing its parameters.
        groups: From :func:`megatron_dcp.parallel_state.get_process_group_collection`.
        cache: Block size, interleave and pool size; one of ``num_blocks`` and ``bytes_per_rank`` is set.
        engine: Exchange, back end and batch sizes.
        vocab_size: Tokens that exist; the embedding's padding is cut from the logits.
        max_sequence_length: Longest sequence, in tokens.

    Raises:
        ValueError: Sizes that do not fit the model, the layout or the pool.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        groups: Any,
        *,
        cache: CacheConfig,
        engine: EngineConfig,
        vocab_size: int,
        max_sequence_length: int,
        metrics: Metrics | None = None,
    ) -> None:
        self.model: Any = enable_dcp(model)
        self.groups = groups
        self.engine = engine
        self.vocab_size = vocab_size
        self.metrics = metrics
        self.max_sequence_length = max_sequence_length
        config = self.model.config
        if config.num_moe_experts:
            check_expert_groups(groups)
        check_within_tp_bound(get_parallel_config(), cached_kv_heads(config))
        self.rank: int = groups.dcp.rank()
        self.layout = KVLayout(
            dcp_size=groups.dcp.size(), interleave=cache.kv_interleave_size, block_size=cache.block_size
        )
        parameter = next(self.model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        layers = attention_layers(self.model)
        self.shape = AttentionShape.of(config, groups)
        self.latent = LatentShape.of(config, groups) if config.multi_latent_attention else None
        self.kv_dtype = self.dtype if cache.kv_cache_dtype == "auto" else KV_DTYPES[cache.kv_cache_dtype]
        windows = layer_windows(config)
        own = [windows[layer.self_attention.layer_number - 1] for layer in layers]
        self.windows = sorted(set(own), key=lambda window: window is not None)  # of each kind of layer
        self.attentions = [self._choose_attention(window) for window in self.windows]
        self.expanded = None
        if self.latent is not None:
            spec = expanded_spec(self.attentions[0].spec, self.latent, self.dtype)
            self.expanded = choose_backend("auto", spec, environment=False)
        self.num_blocks, self.window = self._pool_sizes(own, cache)
        self.pools = tuple(self._make_pool(kind, own.count(window)) for kind, window in enumerate(self.windows))
        self.rotaries = [rotary_table(self.model, window=window is not None) for window in self.windows]
        self.prefill = engine.prefill if groups.dcp_layout == "orthogonal" else "replicated"
        self.stripe_sizes = _stripe_sizes(self.shape, self.latent, self.pools[0], self.dtype)
        self.context = DCPContext(
            max_batch_size=engine.max_num_seqs,
            max_sequence_length=max_sequence_length,
            pools=self.pools,
            cache_index={
                layer.self_attention.layer_number: (self.windows.index(window), own[:index].count(window))
                for index, (layer, window) in enumerate(zip(layers, own, strict=True))
            },
            groups=groups,
            exchange=get_exchange(engine.exchange_for(groups.dcp_layout)),
            rotary_interleaved=any(table is not None and table.interleaved for table in self.rotaries),
            values_first=self.latent is not None and self.latent.values_first,
            experts_over_dcp=bool(config.num_moe_experts) and experts_over_dcp(groups),
            metrics=metrics,
        )
        for group in (groups.dcp, groups.tp_dcp):
            if engine.symmetric_memory:
                symmetric.enable(group, self.device)
            else:
                symmetric.disable(group)
        self.graphs = None if engine.cuda_graphs == "none" else DecodeGraphs(self, engine.cuda_graphs)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache on this rank."""
        return sum(pool.bytes for pool in self.pools)

    @property
    def work_bytes(self) -> int:
        """Most bytes that the exchange of a step takes beside pool, weights and activations; not the context's."""
        return exchange_work_bytes(
            self.stripe_sizes,
            self.layout,
            self.prefill,
            prefill_chunk_size=self.engine.prefill_chunk_size,
            replicated=self.engine.max_num_seqs * (1 + self.engine.num_draft_tokens),
        )

    @torch.inference_mode()
    def step(self, batch: StepBatch) -> Tensor:
        """Compute the step's tokens, keep their keys, return logits.

        Returns:
            fp32 ``[B, vocab_size]``, the rows that ``num_logits`` of each sequence asks for, in order, on the TP group
            of the last pipeline stage that has the first DCP rank; ``[0, vocab_size]`` on the others.
        """
        if self.graphs is not None and self.graphs.takes(batch):
            hidden, logits = self.graphs.step(batch)
        else:
            striped = is_striped([len(seq.token_ids) for seq in batch.seqs], self.layout, self.prefill)
            places = place_tokens(batch, self.layout, self.rank, striped)
            positions_T = torch.from_numpy(places.positions_T).to(self.device)
            plan = self._plan(batch, places, positions_T, striped)
            received = None if self.model.pre_process else self.receive(len(places.tokens_T))
            hidden = self.forward(plan, torch.from_numpy(places.tokens_T).to(self.device), positions_T, received)
            logits = self._chosen_logits(hidden, places) if self.model.post_process else None
        if logits is None:
            send_to_next_stage(hidden, self.groups.pp, self.metrics)
            return torch.empty(0, self.vocab_size, device=self.device)
        return logits

    def forward(self, plan: StepPlan, tokens_T: Tensor, positions_T: Tensor, received_T1h: Tensor | None) -> Tensor:
        """Hidden states ``[T, 1, h]`` after this stage's layers; the keys are kept.

        Args:
            received_T1h: The previous stage's; ``None`` on the first.
        """
        self.context.plan = plan
        hidden = None  # the decoder takes what is set instead
        if received_T1h is None:
            hidden = self.model.embedding(input_ids=tokens_T.unsqueeze(0), position_ids=positions_T.unsqueeze(0))
        else:
            self.model.set_input_tensor(received_T1h)
        hidden = self.model.decoder(hidden_states=hidden, attention_mask=None, inference_context=self.context)
        self.model.set_input_tensor(None)
        self.context.plan = None
        return hidden

    def receive(self, num_tokens: int) -> Tensor:
        """The previous stage's hidden states, ``[T, 1, h]``."""
        return receive_from_previous_stage(
            num_tokens, self.model.config.hidden_size, self._hidden_dtype, self.groups.pp, self.metrics
        )

    def empty_hidden(self, num_tokens: int) -> Tensor:
        """Room for the previous stage's hidden states."""
        shape = num_tokens, 1, self.model.config.hidden_size
        return torch.zeros(shape, dtype=self._hidden_dtype, device=self.device)

    @property
    def _hidden_dtype(self) -> torch.dtype:
        return torch.float32 if self.model.config.fp32_residual_connection else self.dtype

    def _pool_sizes(self, own: list[int | None], cache: CacheConfig) -> tuple[int, Window | None]:
        """Blocks of the pool, and the window's pool if any layer of the model has one; the same on every stage.

        A collective call of the stages where the size is given in bytes.

        Args:
            own: Windows of this stage's layers.
        """
        window = next((window for window in layer_windows(self.model.config) if window is not None), None)
        most = max(self.engine.prefill_chunk_size, 1 + self.engine.num_draft_tokens)
        limit = 0 if window is None else self.engine.max_num_seqs * self.layout.window_blocks(window, most)
        num_blocks, in_window = cache.num_blocks, limit
        if cache.bytes_per_rank is not None:
            one = bytes_per_block(num_layers=1, block_size=cache.block_size, dtype=self.kv_dtype, **self.shape.cache)
            full, fit, error = own.count(None), None, None
            sizes = dict(block_bytes=one * full, window_bytes=one * (len(own) - full), window_limit=limit)
            try:
                fit = blocks_in(cache.bytes_per_rank, **sizes)
            except ValueError as caught:
                error = caught
            agree(error, self.groups.pp)
            fits = gather_objects(fit, self.groups.pp)
            longest = self.layout.blocks_for(self.max_sequence_length) * self.engine.max_num_seqs
            num_blocks = min((blocks for blocks, _ in fits if blocks is not None), default=longest)
            in_window = min(blocks for _, blocks in fits)
        assert num_blocks is not None, "the engine sizes the pool before it makes a runner"
        return num_blocks, None if window is None else Window(window, min(num_blocks, in_window))

    def _choose_attention(self, window: int | None) -> Attention:
        spec = AttentionSpec(
            heads=self.shape.heads,
            kv_heads=self.shape.kv_heads,
            head_dim=self.shape.head_dim,
            v_dim=self.shape.v_dim,
            v_in_k=self.shape.v_in_k,
            dtype=self.kv_dtype,
            query_dtype=self.dtype,
            device=self.device,
            block_size=self.layout.block_size,
            windows=window is not None,
        )
        return choose_backend(self.engine.backend, spec)

    def _make_pool(self, kind: int, num_layers: int) -> KVPool:
        window = self.windows[kind]
        return KVPool(
            num_layers,
            self.num_blocks if window is None or self.window is None else self.window.num_blocks,
            self.layout.block_size,
            dtype=self.kv_dtype,
            device=self.device,
            order=self.attentions[kind].backend.pool_order,
            **self.shape.cache,
        )

    def _plan(self, batch: StepBatch, places: Places, positions_T: Tensor, striped: list[bool]) -> StepPlan:
        every = len(places.owned_t) == len(places.positions_T)
        kinds = tuple(self._plan_kind(kind, batch, places, positions_T, striped) for kind in range(len(self.windows)))
        return StepPlan(
            owned_t=None if every else torch.from_numpy(places.owned_t).to(self.device),
            replicated=places.replicated,
            striped_counts=() if kinds[0].striped is None else kinds[0].striped.counts,
            kinds=kinds,
        )

    def _plan_kind(
        self, kind: int, batch: StepBatch, places: Places, positions_T: Tensor, striped: list[bool]
    ) -> KindPlan:
        window, rotary = self.windows[kind], self.rotaries[kind]
        tables = [seq.block_table if window is None else seq.window_table for seq in batch.seqs]
        slots_t = places.slots_t if window is None else places.window_slots_t
        cos, sin = (None, None) if rotary is None else rotary.cos_sin(positions_T, self.dtype)
        attention = dealt_out = None
        if not all(striped):
            positions = places.positions_T[: places.replicated]
            visible: np.ndarray = self.layout.visible(positions, self.rank)  # type: ignore[type-var]
            hidden: tuple[int, ...] = ()
            if window is not None:
                hidden = tuple(self.layout.hidden(positions, window, self.rank).tolist())  # type: ignore[type-var]
            attention = self._plan_attention(
                kind,
                AttentionBatch(
                    q_lens=tuple(len(seq.token_ids) for seq, out in zip(batch.seqs, striped, strict=True) if not out),
                    visible=tuple(visible.tolist()),
                    block_tables=tuple(tuple(table) for table, out in zip(tables, striped, strict=True) if not out),
                    block_size=self.layout.block_size,
                    hidden=hidden,
                ),
            )
        if any(striped):
            chunks = [
                Chunk(seq.start, seq.start + len(seq.token_ids), table, window)
                for seq, table, out in zip(batch.seqs, tables, striped, strict=True)
                if out
            ]
            dealt_out = plan_striped(
                chunks,
                self.layout,
                self.rank,
                name=self.prefill,
                sizes=self.stripe_sizes,
                plan=partial(self._plan_attention, kind),
                device=self.device,
            )
        return KindPlan(
            cos_T1R=cos,
            sin_T1R=sin,
            slots_t=torch.from_numpy(slots_t).to(self.device),
            attention=attention,
            striped=dealt_out,
        )

    def _plan_attention(self, kind: int, batch: AttentionBatch) -> Any:
        if self.latent is not None and self.expanded is not None:
            return plan_latent(batch, self.latent, self.attentions[kind], self.expanded)
        return self.attentions[kind].plan(batch)

    def _chosen_logits(self, hidden_T1h: Tensor, places: Places) -> Tensor:
        if not len(places.rows_B):
            return torch.empty(0, self.vocab_size, device=self.device)
        rows_B = torch.from_numpy(places.rows_B).to(self.device)
        hidden_B1h = hidden_T1h[rows_B]
        if places.shared:
            first = places.replicated if self.rank else 0  # what all ranks have comes from the first one
            hidden_B1h.masked_fill_((rows_B < first)[:, None, None], 0.0)
            hidden_B1h = all_reduce_sum(hidden_B1h, self.groups.dcp, metrics=self.metrics)
        return self.logits(hidden_B1h)

    def logits(self, hidden_B1h: Tensor) -> Tensor:
        """fp32 ``[B, vocab_size]`` of the last stage's hidden states; ``[0, vocab_size]`` on ranks that make none."""
        if self.rank and self.groups.dcp_layout == "orthogonal":
            return torch.empty(0, self.vocab_size, device=self.device)
        model = self.model
        shared = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        logits, _ = model.output_layer(hidden_B1h, weight=shared)
        if model.parallel_output:
            logits = gather_heads(logits, self.groups.tp, metrics=self.metrics)
        return logits.flatten(1)[:, : self.vocab_size].float()


def _stripe_sizes(shape: AttentionShape, latent: LatentShape | None, pool: KVPool, dtype: torch.dtype) -> StripeSizes:
    if latent is None:
        q_dim, out_dim = shape.head_dim, shape.v_dim
    else:
        q_dim, out_dim = latent.qk_head_dim + latent.rotated, latent.exchanged_dim
    per_query = shape.heads * (q_dim * dtype.itemsize + (out_dim + 1) * 4)
    return StripeSizes(per_key=pool.bytes_per_key, per_query=per_query)
