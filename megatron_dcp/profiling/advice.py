"""What to change, from what was measured: rules with named thresholds, in plain sentences. No torch.

A rule speaks where its number is above its threshold, says the number, and names options that the run at hand has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMMUNICATION_SHARE = 0.30
"""Of a phase's time, in collectives of layers, embedding and logits."""
ATTENTION_SHARE = 0.50
"""Of decode's time, in attention over the own shard."""
POOL_USE = 0.90
"""Of a pool of a configured size, at its fullest."""
IMBALANCE = 0.15
"""By how much the slowest rank computes longer than the mean of all."""
REST_SHARE = 0.50
"""Of decode's time, in nothing that is attention, communication or a product: mostly Python and small kernels."""
GPU_WAIT_SHARE = 0.10
"""Of decode's time: a host that waits less for its GPU than this is what the step waits for."""
ENGINE_SHARE = 0.25
"""Of decode's time, outside the model: planning, sampling, and waiting for the driver that does it."""
SHAREABLE_PREFIX = 0.20
"""Of all prompt tokens, in prefixes that prompts have in common."""
PREFIX_HITS = 0.50
"""Of these, found in the prefix cache."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the rules look at. Shares are of a phase's wall time, mean over ranks; 0 where there was no such phase.

    Attributes:
        tp, dcp, layout, exchange, prefill: Of the run.
        on_gpu: Whether it ran on GPUs.
        kv_dtype: What the pool holds.
        pool_sized: Whether the pool has a configured size; otherwise it is as large as the requests need.
        batch: Most sequences that ran at the same time.
        context: Longest sequence, in tokens.
        decode_communication, prefill_communication, decode_attention, decode_rest, decode_engine: Shares.
        decode_gpu_wait: Share that the host waited for the GPU; ``None`` on a CPU.
        decode_imbalance: Of the slowest rank over the mean of all, minus 1.
        slowest_rank: In decode.
        pool_use: At its fullest, of all blocks.
        preemptions: In the run.
        shareable_prefix: Of prompt tokens, in prefixes that the prompts share.
        prefix_hits: Of prompt tokens, found in the prefix cache.
        prefix_caching: Whether there is one.
        logical_block: Tokens that are shared or not as one.
    """

    tp: int
    dcp: int
    layout: str
    exchange: str
    prefill: str
    on_gpu: bool
    kv_dtype: str
    pool_sized: bool
    batch: int
    context: int
    decode_communication: float
    prefill_communication: float
    decode_attention: float
    decode_rest: float
    decode_engine: float
    decode_gpu_wait: float | None
    decode_imbalance: float
    slowest_rank: int
    pool_use: float
    preemptions: int
    shareable_prefix: float
    prefix_hits: float
    prefix_caching: bool
    logical_block: int


@dataclass(frozen=True)
class Advice:
    """One sentence or two, and the name of the rule that says it."""

    rule: str
    text: str


def advise(facts: Facts) -> list[Advice]:
    """What the rules say, the most telling first; one sentence where none of them has anything to say."""
    found = [Advice(name, text) for name, rule in RULES.items() for text in rule(facts)]
    nothing = "No rule has anything to say: communication, balance, pool and overhead are below their thresholds."
    return found or [Advice("none", nothing)]


def _decode_communication(facts: Facts) -> Iterator[str]:
    if facts.decode_communication <= COMMUNICATION_SHARE:
        return
    options = []
    if facts.dcp > 1:
        if not _pool_is_short(facts):
            options.append(f"a dcp below {facts.dcp} if the KV cache still fits")
        if facts.layout == "orthogonal" and facts.exchange != "fold":
            options.append(
                f"--exchange fold instead of {facts.exchange}, which leaves the sum to the output projection"
            )
    elif facts.tp > 1:
        options.append(f"a tp below {facts.tp} if the weights still fit")
    if _pool_is_short(facts):
        options.append(f"a larger KV pool, so that more than {facts.batch} sequences share a collective")
    else:
        options.append(f"a batch above {facts.batch}, which sends more per collective and not more of them")
    if facts.on_gpu:
        options.append("symmetric memory (EngineConfig.symmetric_memory) for small exchanges within a machine")
        options.append("--cuda-graphs, which take the launches out of them")
    yield (
        f"Communication takes {facts.decode_communication:.0%} of decode (threshold {COMMUNICATION_SHARE:.0%}); "
        f"try {_listed(options)}."
    )


def _prefill_communication(facts: Facts) -> Iterator[str]:
    if facts.prefill_communication > COMMUNICATION_SHARE:
        options = ["a larger --prefill-chunk-size, so that keys travel less often"]
        if facts.prefill not in ("auto", "replicated"):
            options.append(f"--prefill auto instead of {facts.prefill}")
        yield (
            f"Communication takes {facts.prefill_communication:.0%} of prefill (threshold {COMMUNICATION_SHARE:.0%}); "
            f"try {_listed(options)}."
        )


def _attention(facts: Facts) -> Iterator[str]:
    if facts.decode_attention > ATTENTION_SHARE:
        more = (
            f"a dcp above {facts.dcp}" if facts.layout == "orthogonal" else "--dcp-layout orthogonal with a larger dcp"
        )
        eight = "" if _is_8_bit(facts) else ", or an 8-bit --kv-cache-dtype, which halves what is read but is not exact"
        yield (
            f"Attention takes {facts.decode_attention:.0%} of decode (threshold {ATTENTION_SHARE:.0%}) at up to "
            f"{facts.context:,} tokens a sequence; try {more}, since each rank then reads a smaller shard{eight}."
        )


def _pool(facts: Facts) -> Iterator[str]:
    if not _pool_is_short(facts):
        return
    said = f"The KV pool is {facts.pool_use:.0%} full at its fullest (threshold {POOL_USE:.0%})"
    if facts.preemptions:
        said += f", and sequences lost their blocks and were computed again (preemptions: {facts.preemptions})"
    options = [f"a dcp above {facts.dcp}, whose group holds more tokens"]
    if not _is_8_bit(facts):
        options.append(f"an 8-bit --kv-cache-dtype instead of {facts.kv_dtype} (not exact)")
    options.append("a larger pool if there is memory")
    yield f"{said}; try {_listed(options)}."


def _balance(facts: Facts) -> Iterator[str]:
    if facts.decode_imbalance > IMBALANCE:
        yield (
            f"Rank {facts.slowest_rank} computes {facts.decode_imbalance:.0%} longer than the mean of the ranks in "
            f"decode (threshold {IMBALANCE:.0%}), and the others wait for it in their collectives; look at its load, "
            "its clock and its experts, and at a smaller --kv-interleave if its KV fill is above that of the others."
        )


def _overhead(facts: Facts) -> Iterator[str]:
    host_bound = facts.decode_gpu_wait is None or facts.decode_gpu_wait < GPU_WAIT_SHARE
    if facts.on_gpu and host_bound:
        yield (
            f"The host waits for the GPU in {facts.decode_gpu_wait or 0.0:.0%} of decode only (threshold "
            f"{GPU_WAIT_SHARE:.0%}): the GPU waits for Python; try --cuda-graphs, or a batch above {facts.batch}."
        )
    elif not facts.on_gpu and facts.decode_rest > REST_SHARE:
        yield (
            f"{facts.decode_rest:.0%} of decode (threshold {REST_SHARE:.0%}) is neither attention nor communication "
            f"nor a product, but Python and small operations; try a batch above {facts.batch}, which shares them, and "
            "--cuda-graphs on a GPU."
        )


def _engine(facts: Facts) -> Iterator[str]:
    if facts.decode_engine > ENGINE_SHARE:
        yield (
            f"{facts.decode_engine:.0%} of decode (threshold {ENGINE_SHARE:.0%}) goes by outside the model, where the "
            f"driver plans and samples and the others wait for it; try a batch above {facts.batch}, and fewer sampling "
            "options that look at every logit."
        )


def _prefixes(facts: Facts) -> Iterator[str]:
    shareable = facts.shareable_prefix
    if shareable <= SHAREABLE_PREFIX or facts.prefix_hits >= PREFIX_HITS * shareable:
        return
    remedy = (
        f"try a smaller --block-size: only whole logical blocks are shared, of {facts.logical_block:,} tokens here"
        if facts.prefix_caching
        else "leave --no-prefix-caching out"
    )
    yield (
        f"{shareable:.0%} of the prompt tokens (threshold {SHAREABLE_PREFIX:.0%}) are prefixes that prompts share, but "
        f"only {facts.prefix_hits:.0%} were found in the prefix cache; {remedy}."
    )


RULES: dict[str, Callable[[Facts], Iterator[str]]] = {
    "communication": _decode_communication,
    "attention": _attention,
    "pool": _pool,
    "balance": _balance,
    "overhead": _overhead,
    "engine": _engine,
    "prefill communication": _prefill_communication,
    "prefixes": _prefixes,
}


def _pool_is_short(facts: Facts) -> bool:
    return (facts.pool_sized and facts.pool_use > POOL_USE) or facts.preemptions > 0


def _is_8_bit(facts: Facts) -> bool:
    return facts.kv_dtype in ("int8", "float8_e4m3fn")


def _listed(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])}, or {options[-1]}"
