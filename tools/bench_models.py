"""What ``bench.py decode`` measures: shapes, cases, random caches, and this package as a contender.

Shapes: ``C`` positions, ``B`` sequences, ``K`` KV heads, ``H`` head dim.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.attention.base import AttentionBatch
from megatron_dcp.config import CacheConfig, EngineConfig
from megatron_dcp.engine.batch import SeqStep, StepBatch
from megatron_dcp.engine.runner import ModelRunner
from megatron_dcp.metrics import Metrics
from megatron_dcp.model_config import ModelConfig
from megatron_dcp.rope import RotaryTable, inverse_frequencies, rotate

PERIOD = 1024  # random keys and values repeat after so many positions (then rotated by position)
CHUNK = 8192  # positions that are filled at once


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama: RMSNorm, SwiGLU, RoPE, no biases, output layer of its own."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def with_sizes(self, sizes: dict[str, int]) -> Shape:
        return replace(self, **sizes)

    @property
    def parameters(self) -> int:
        return self._matrices + self.vocab * self.hidden + (2 * self.layers + 1) * self.hidden

    @property
    def _matrices(self) -> int:
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn) + self.vocab * self.hidden

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all weights that a step must read: every matrix but the embedding."""
        return self._matrices * getattr(torch, dtype).itemsize

    def kv_bytes_per_token(self, dtype: str) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * getattr(torch, dtype).itemsize

    def config(self, positions: int) -> ModelConfig:
        return ModelConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            ffn_hidden_size=self.ffn,
            num_attention_heads=self.heads,
            num_query_groups=self.kv_heads,
            kv_channels=self.head_dim,
            vocab_size=self.vocab,
            padded_vocab_size=self.vocab,
            max_position_embeddings=positions,
            untie_embeddings_and_output_weights=True,
        )


@dataclass(frozen=True, kw_only=True)
class Preset:
    shape: Shape
    contexts: tuple[int, ...]
    batches: tuple[int, ...]


PRESETS = {
    # Little but attention, in the head shape of 7B to 70B models: how near to the memory's bandwidth is it?
    "attention": Preset(
        shape=Shape(layers=2, hidden=1024, ffn=1024, heads=32, kv_heads=8, head_dim=128, vocab=1024),
        contexts=(1024, 4096, 16384, 32768, 65536),
        batches=(1, 4),
    ),
    # 124.7M parameters at short context: what does a layer cost besides reading its weights?
    "small": Preset(
        shape=Shape(layers=12, hidden=768, ffn=2048, heads=12, kv_heads=4, head_dim=64, vocab=32000),
        contexts=(128, 512),
        batches=(1, 8),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """``batch`` sequences, each with ``context`` keys when the measured token attends."""

    context: int
    batch: int

    def kv_bytes(self, shape: Shape, dtype: str) -> int:
        return self.batch * self.context * shape.kv_bytes_per_token(dtype)


class RandomKV:
    """The keys and values that every cache is filled with."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.rotary = RotaryTable(inv_freq=inverse_frequencies(config).to(device))

    def read(self, layer: int, sequence: int, positions_C: Tensor, *, rotated: bool) -> tuple[Tensor, Tensor]:
        """``k_CKH, v_CKH`` of a sequence at these positions."""
        size = (PERIOD, self.config.num_query_groups, self.config.kv_channels)
        generator = torch.Generator().manual_seed(1 + layer * 1000 + sequence)
        k, v = (torch.randn(size, generator=generator).to(self.device)[positions_C % PERIOD] for _ in range(2))
        if rotated:
            k = rotate(k, *self.rotary.cos_sin(positions_C, torch.float32))
        return k.to(self.dtype), v.to(self.dtype)

    def tokens(self, batch: int) -> list[int]:
        return [(7 + 31 * sequence) % self.config.vocab_size for sequence in range(batch)]


class Contender:
    """One way to decode. ``prepare`` fills its caches, ``step`` decodes one token per sequence."""

    name: str
    ranks = 1
    measures_attention = False  # whether there is ``attend``, the attention of a step alone
    traffic: dict[str, tuple[int, int]] | None = None
    kv_bytes = 0

    def memory(self, case: Case) -> float:
        """Bytes that it takes, about: its cache and what a step allocates beside it."""
        raise NotImplementedError

    def prepare(self, case: Case) -> None:
        raise NotImplementedError

    def step(self) -> Tensor:
        """Logits ``[B, vocab]``, fp32; leaves the cache as it was before."""
        raise NotImplementedError

    def attend(self) -> None:
        raise NotImplementedError

    def count_traffic(self) -> None:
        """Set ``traffic`` to the collectives of one step."""

    def release(self) -> None:
        raise NotImplementedError


class Ours(Contender):
    """This package on ``ranks`` ranks, orthogonal layout, blocks of a sequence in a row as the scheduler deals them."""

    measures_attention = True

    def __init__(self, ranks: int, model: Any, groups: Any, kv: RandomKV, arguments: argparse.Namespace) -> None:
        self.name, self.ranks = f"dcp {ranks}", ranks
        self.model, self.groups, self.kv = model, groups, kv
        self.shape, self.arguments = arguments.shape, arguments
        self.metrics = Metrics(enabled=False)

    def memory(self, case: Case) -> float:
        return case.kv_bytes(self.shape, self.arguments.dtype)

    def prepare(self, case: Case) -> None:
        arguments, config = self.arguments, self.kv.config
        blocks = -(-case.context // (arguments.block_size * self.ranks))
        self.runner = ModelRunner(
            self.model,
            self.groups,
            cache=CacheConfig(
                block_size=arguments.block_size,
                kv_interleave_size=arguments.interleave,
                num_blocks=blocks * case.batch,
            ),
            engine=EngineConfig(max_num_seqs=case.batch, exchange=arguments.exchange),
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_position_embeddings,
            metrics=self.metrics,
        )
        self.kv_bytes = self.runner.kv_bytes
        tables = [list(range(blocks * b, blocks * (b + 1))) for b in range(case.batch)]
        self.batch = StepBatch(
            [
                SeqStep([token], case.context - 1, table, 1)
                for token, table in zip(self.kv.tokens(case.batch), tables, strict=True)
            ]
        )
        for sequence, table in enumerate(tables):
            self._fill(sequence, torch.tensor(table, device=self.kv.device), case.context - 1)
        self._prepare_attention(case, tables)

    def _fill(self, sequence: int, table: Tensor, length: int) -> None:
        layout, rank = self.runner.layout, self.runner.rank
        for start in range(0, length, CHUNK):
            own = layout.local_range(start, min(start + CHUNK, length), rank)
            local = torch.arange(own.start, own.stop, device=table.device)
            slots = layout.slot(table[local // layout.block_size], local)
            for layer in range(self.shape.layers):
                keys = self.kv.read(layer, sequence, layout.global_position(local, rank), rotated=True)
                self.runner.pools[0].write(layer, slots, *keys)

    def _prepare_attention(self, case: Case, tables: list[list[int]]) -> None:
        runner = self.runner
        self.attention_batch = AttentionBatch(
            q_lens=(1,) * case.batch,
            visible=(runner.layout.visible(case.context - 1, runner.rank),) * case.batch,
            block_tables=tuple(map(tuple, tables)),
            block_size=runner.layout.block_size,
        )
        self.q_TNH = torch.randn(case.batch, runner.shape.heads, self.shape.head_dim).to(runner.device, runner.dtype)

    def attend(self) -> None:
        """Plan, and the partial attention of every layer over the own shard."""
        runner = self.runner
        plan = runner.attentions[0].plan(self.attention_batch)
        for layer in range(self.shape.layers):
            plan.attend(self.q_TNH, runner.pools[0].layer(layer), scale=self.shape.head_dim**-0.5)

    def step(self) -> Tensor:
        return self.runner.step(self.batch)

    def count_traffic(self) -> None:
        self.metrics.reset()
        self.metrics.enabled = True
        self.step()
        self.metrics.enabled = False
        self.traffic = self.metrics.collectives

    def release(self) -> None:
        del self.runner
