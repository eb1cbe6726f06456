"""What a rank sends in one decode step: nothing of it depends on the context.

Formulas are those of `megatron_dcp.traffic`, which tests hold to what the layers count, and of Megatron's own sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dcp.model_config import ModelConfig
from megatron_dcp.model_tensors import padded_vocab_size
from megatron_dcp.planner.candidates import Candidate
from megatron_dcp.planner.machine import Sent
from megatron_dcp.planner.memory import attention_shape, latent_shape
from megatron_dcp.planner.weights import itemsize
from megatron_dcp.traffic import expected_traffic


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Groups of a candidate, as what `Sent` needs of them: ``(ranks, span)``. TP ranks follow each other, then DCP."""

    candidate: Candidate

    def sent(self, what: str, op: str, group: str, num_bytes: float, *, calls: int = 1, exchange: bool = False) -> Sent:
        ranks, span = self._sizes(group)
        return Sent(
            what=what, op=op, ranks=ranks, span=span, world=self.candidate.gpus, calls=calls, bytes=num_bytes,
            exchange=exchange,
        )  # fmt: skip

    def all_reduce(self, what: str, group: str, num_bytes: float, *, exchange: bool = False) -> Sent:
        """Of ``num_bytes`` on every rank."""
        ranks, _ = self._sizes(group)
        return self.sent(what, "all_reduce", group, 2 * (ranks - 1) / ranks * num_bytes, exchange=exchange)

    def all_gather(self, what: str, group: str, own_bytes: float, *, exchange: bool = False) -> Sent:
        """Of ``own_bytes`` from every rank."""
        ranks, _ = self._sizes(group)
        return self.sent(what, "all_gather", group, (ranks - 1) * own_bytes, exchange=exchange)

    def _sizes(self, group: str) -> tuple[int, int]:
        one = self.candidate
        shared = one.parallel.expert_model_parallel_size * one.parallel.expert_tp
        sizes = {
            "tp": (one.tp, one.tp),
            "dcp": (one.dcp, one.layer_ranks if one.layout == "orthogonal" else one.dcp),
            "tp_dcp": (one.layer_ranks, one.layer_ranks),
            "experts": (shared, shared),
            "pp": (one.pp, one.gpus),
        }
        return sizes[group]


def attention_traffic(model: ModelConfig, candidate: Candidate, dtype: str, tokens: int) -> Iterator[Sent]:
    """Of one attention layer, from its input to the sum of its output."""
    groups, size = Groups(candidate=candidate), itemsize(dtype)
    shape, latent = attention_shape(model, candidate), latent_shape(model, candidate)
    tp, dcp = candidate.tp, candidate.dcp
    own_heads = model.num_attention_heads // tp
    if latent is None and model.num_query_groups < tp:
        rows = (model.num_attention_heads + 2 * model.num_query_groups) * model.kv_channels // tp
        yield groups.all_gather("KV group", "tp", tokens * rows * size)
    if latent is not None and tp > 1 and model.mla is not None:
        for width in filter(None, (model.mla.q_lora_rank, model.mla.latent_dim)):
            yield groups.all_gather("latent", "tp", tokens * width / tp * size)
    if dcp > 1 and candidate.layout == "within_tp":
        yield groups.all_gather("queries", "dcp", tokens * own_heads * shape.head_dim * size, exchange=True)
    v_dim = shape.v_dim if latent is None else latent.exchanged_dim
    for op, (calls, num_bytes) in expected_traffic(candidate.exchange, tokens, shape.heads, v_dim, dcp).items():
        yield groups.sent("exchange", op, "dcp", num_bytes, calls=calls, exchange=True)
    alone = groups.all_reduce("output", "tp", tokens * model.hidden_size * size)
    if dcp > 1 and candidate.layout == "orthogonal" and candidate.exchange != "all_reduce":
        wide = groups.all_reduce("output", "tp_dcp", tokens * model.hidden_size * size, exchange=True)
        yield Sent(**{**vars(wide), "instead": alone})
    else:
        yield alone


def ffn_traffic(model: ModelConfig, candidate: Candidate, dtype: str, tokens: int, *, experts: bool) -> Iterator[Sent]:
    """Of one MLP, or of one layer of experts."""
    groups, hidden = Groups(candidate=candidate), tokens * model.hidden_size * itemsize(dtype)
    if not experts or model.moe is None:
        yield groups.all_reduce("MLP", "tp", hidden)
        return
    yield groups.all_reduce("experts", "experts", hidden)
    if model.moe.moe_shared_expert_intermediate_size is not None:
        yield groups.all_reduce("shared expert", "tp", hidden)


def step_traffic(model: ModelConfig, candidate: Candidate, dtype: str, tokens: int) -> Iterator[Sent]:
    """Of a step, outside its layers: embedding, stages, logits."""
    groups, size = Groups(candidate=candidate), itemsize(dtype)
    hidden = tokens * model.hidden_size * size
    yield groups.all_reduce("embedding", "tp", hidden)
    yield groups.sent("stages", "send", "pp", (candidate.pp - 1) * hidden, calls=candidate.pp - 1)
    rows = padded_vocab_size(model.vocab_size, candidate.tp) // candidate.tp
    yield groups.all_gather("logits", "tp", tokens * rows * size)
