"""``verify``: the same text by training forward, prefill and decode, and the log-probabilities of what is generated."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import psutil
import torch
from torch import distributed

from megatron_dcp import parallel_state
from megatron_dcp.comm.collectives import gather_objects
from megatron_dcp.comm.consensus import same_on_all
from megatron_dcp.config import check_at_least
from megatron_dcp.distributed import initialize_distributed
from megatron_dcp.engine.front import eval_mode
from megatron_dcp.engine.llm import LLM
from megatron_dcp.engine.loading import on_all_ranks
from megatron_dcp.engine.params import SamplingParams
from megatron_dcp.layers import attention_layers
from megatron_dcp.layers.forward import recorded_layers, training_forward
from megatron_dcp.layers.specs import unwrap
from megatron_dcp.verification.compare import LayerDifferences, Rows
from megatron_dcp.verification.passes import Found, Passes, clear_pool, make_runner
from megatron_dcp.verification.report import Comparison, Difference, VerifyReport
from megatron_dcp.verification.twin import Twin

# What passes is ALLOWED times what rounding does to the training forward itself, and at least AT_LEAST: the largest
# and the mean difference of log-probabilities (natural log), and that of a hidden state relative to its size. Sound
# decoding was measured at 0.2 to 1.4 times rounding in bf16 and at 0.4 to 1.8 in fp32, the mean at 0.2 to 1.1: 88 texts
# of 8 to 150 tokens, tiny random models, dense, MLA, experts. Two more with experts in bf16 are above (one at 7.8, one
# with a mean of 2.1): a last bit had decided on an expert, and in none of the runs with noise.
ALLOWED = 3.0
AT_LEAST = {
    torch.float32: (1e-4, 2e-5, 5e-5),
    torch.bfloat16: (0.1, 0.02, 0.05),
    torch.float16: (0.0125, 0.0025, 0.00625),
}

DEFAULT_PROMPT_TOKENS = 160
DEFAULT_PROMPT = (
    "The harbour master kept two clocks. One showed the time of the town, the other the time of the tides, and nobody "
    "but him could say by how much they differed. On the first day of spring a ship came in that had 1,024 crates of "
    "tea on board, 37 barrels of salt and a letter. 'Read it aloud,' said the captain. The harbour master read: "
    '"Whoever opens this has 12 hours. Count the crates, then count the barrels; if both are right, sail on." '
    "So they counted, once by the light of day and once by lamp, and both times the numbers were the same."
)


def verify(
    model: str | os.PathLike[str] | torch.nn.Module | LLM,
    *,
    hf: str | os.PathLike[str] | None = None,
    reference: torch.nn.Module | None = None,
    prompt: str | Sequence[int] | None = None,
    max_new_tokens: int = 32,
    decode_tokens: int = 128,
    max_logprob_diff: float | None = None,
    **llm: Any,
) -> VerifyReport:
    """Compare, token by token, what training computes with what generation computes. All ranks call it together.

    Continues the prompt greedily, and runs the whole text through Megatron's own forward, through prefill in chunks,
    and token by token through decode.

    Args:
        model: A checkpoint, a live Megatron model, or an `LLM` of either: what generates.
        hf: The checkpoint's Hugging Face twin; ``transformers`` runs it in fp32 on rank 0, and the training forward is
            compared with it.
        reference: A live model over the same tp and pp groups whose training forward is the reference, e.g. the one
            that the checkpoint was saved from. Default: ``model``'s own.
        prompt: Text or token ids. Default: a text, or without a tokenizer some token ids.
        max_new_tokens: Tokens to generate after it.
        decode_tokens: So many tokens at the end of the text go through decode one by one; those before them are
            prefilled.
        max_logprob_diff: Largest absolute difference of a token's log-probability that passes. Default: 3 times what
            the training forward itself moves when what each layer hands on is changed in its last bit; the same holds
            for the mean difference.
        llm: Arguments of `LLM`: parallel sizes, layout, cache, engine, dtype.

    Returns:
        The same report on every rank of a replica.

    Raises:
        ValueError: On every rank: arguments, prompt or twin that do not fit, and all that `LLM` raises.
    """
    on_all_ranks(_check, llm.get("timeout_s", 600.0), prompt, max_new_tokens, decode_tokens, max_logprob_diff)
    if isinstance(model, LLM):
        on_all_ranks(_refuse_settings, llm)
        generator = model
    else:
        generator = LLM(model, **llm)
    given: dict[str, Any] = {"hf": None if hf is None else os.fspath(hf), "reference": reference is not None}
    given |= {"max_new_tokens": max_new_tokens, "decode_tokens": decode_tokens, "max_logprob_diff": max_logprob_diff}
    assert distributed.group.WORLD is not None
    same_on_all([(name, str(value)) for name, value in given.items()], distributed.group.WORLD, "verify's arguments")
    own = unwrap(generator.model)
    trained = own if reference is None else on_all_ranks(_same_shape, reference, own)

    said = _continue(generator, prompt, max_new_tokens)
    text = said.prompt_token_ids + said.token_ids
    on_all_ranks(_check_memory, trained, len(text) - 1)
    with eval_mode(generator.model), eval_mode(trained):
        with recorded_layers(trained) as states:
            logits = training_forward(trained, text[:-1], generator.groups)
        passes = Passes(generator, text, logits, dict(states))
        found = [passes.rounding(trained)]
        found.append(passes.generated(len(said.prompt_token_ids), said.logprobs or []))
        if hf is not None:
            found.append(passes.twin(Twin(hf, text[:-1], own, passes.vocab_size, generator.groups.dcp_replica)))
        runner = on_all_ranks(make_runner, generator, len(text) - 1)
        chunk = generator.engine_config.prefill_chunk_size
        found.append(passes.steps("prefill", runner, [(0, len(text) - 1, chunk)]))
        clear_pool(runner)
        first = max(0, len(text) - 1 - decode_tokens)
        found.append(passes.steps("decode", runner, [(0, first, chunk), (first, len(text) - 1, 1)], compare_from=first))

    everywhere = gather_objects(found, generator.groups.dcp_replica)
    parts = [{part.name: part for part in of_rank} for of_rank in everywhere]
    driver = parts[generator.groups.dcp_driver]
    merged = {name: LayerDifferences.merged([part[name].layers for part in parts]) for name in driver}
    dtypes = [next(each.parameters()).dtype for each in (own, trained)]
    at_least = [max(both) for both in zip(*(AT_LEAST[dtype] for dtype in dtypes), strict=True)]
    thresholds = {layer: max(at_least[2], ALLOWED * value) for layer, value in merged["rounding"].items()}

    def comparison(name: str) -> Comparison:
        return _comparison(driver[name], merged[name], thresholds, generator.tokenizer)

    rounding = comparison("rounding")
    allowed = [max(at_least[0], ALLOWED * rounding.max_logprob_diff)]
    allowed.append(max(at_least[1], ALLOWED * rounding.mean_logprob_diff))
    if max_logprob_diff is not None:
        allowed = [max_logprob_diff, max_logprob_diff]
    return VerifyReport(
        settings=_settings(model, generator, hf, reference, said),
        comparisons=tuple(comparison(name) for name in ("hf", "prefill", "decode", "generate") if name in driver),
        rounding=rounding,
        max_logprob_diff=allowed[0],
        mean_logprob_diff=allowed[1],
    )


def _comparison(driver: Found, layers: dict[int, float], thresholds: dict[int, float], tokenizer: Any) -> Comparison:
    rows = driver.rows
    assert rows is not None
    known = {} if driver.name == "generate" else dict(
        max_logit_share=float((rows.logit / rows.span).max()),
        max_kl=float(rows.kl.max()),
        mean_kl=float(rows.kl.mean()),
    )  # fmt: skip
    differ = (rows.reference_argmax != rows.argmax).nonzero()[0]
    return Comparison(
        name=driver.name,
        positions=tuple(rows.position.tolist()),
        logprob_diffs=tuple(abs(rows.reference_logprob - rows.logprob).tolist()),
        different_argmax=len(differ),
        first_difference=_difference(rows, int(differ[0]), tokenizer) if len(differ) else None,
        layers=layers or None,
        first_layer=next((layer for layer, value in layers.items() if not value <= thresholds[layer]), None),
        **known,
    )


def _difference(rows: Rows, row: int, tokenizer: Any) -> Difference:
    tokens = int(rows.reference_argmax[row]), int(rows.argmax[row])
    texts = [None if tokenizer is None else tokenizer.decode([token]) for token in tokens]
    return Difference(
        position=int(rows.position[row]),
        reference_token=tokens[0],
        token=tokens[1],
        reference_text=texts[0],
        text=texts[1],
        margin=float(rows.margin[row]),
    )


def _check(timeout_s: float, prompt: Any, max_new_tokens: int, decode_tokens: int, allowed: float | None) -> None:
    initialize_distributed(timeout_s)
    check_at_least("max_new_tokens", max_new_tokens, 1)
    check_at_least("decode_tokens", decode_tokens, 1)
    number = isinstance(allowed, int | float) and not isinstance(allowed, bool)
    if allowed is not None and not (number and 0 <= allowed < float("inf")):
        raise ValueError(f"max_logprob_diff={allowed!r} must be a number >= 0; leave it out for the dtype's default")
    if isinstance(prompt, str | list | tuple) and not prompt:
        raise ValueError("the prompt is empty; give text or token ids, or leave it out")


def _refuse_settings(llm: dict[str, Any]) -> None:
    if llm:
        raise ValueError(f"{', '.join(llm)} cannot be given: an LLM has its own settings; leave it out")


def _same_shape(reference: torch.nn.Module, own: Any) -> Any:
    """The bare reference model; ``ValueError`` unless it has the shape of ``own``."""
    bare = unwrap(reference)

    def shape(gpt: Any) -> dict[str, Any]:
        names = ("num_layers", "hidden_size", "num_attention_heads", "tensor_model_parallel_size")
        return {name: getattr(gpt.config, name) for name in names} | {
            "layers of this stage": [layer.layer_number for layer in gpt.decoder.layers],
            "first stage": gpt.pre_process,
        }

    theirs, ours = shape(bare), shape(own)
    for name, value in ours.items():
        if theirs[name] != value:
            raise ValueError(
                f"the reference model has {name} {theirs[name]}, but {value} is verified; give the model that it was "
                "saved from, over the same groups"
            )
    return bare


def _continue(llm: LLM, prompt: Any, max_new_tokens: int) -> Any:
    """The output of greedy generation with log-probabilities."""
    if prompt is None:
        room = max(1, llm.prompt_reader.max_sequence_length - max_new_tokens)
        if llm.tokenizer is not None:
            prompt = list(on_all_ranks(llm.tokenizer.encode, DEFAULT_PROMPT))[:room]
        else:
            rng = random.Random(0)
            count = min(DEFAULT_PROMPT_TOKENS, room)
            prompt = [rng.randrange(llm.prompt_reader.vocab_size) for _ in range(count)]
    one = prompt if isinstance(prompt, str) else [prompt]
    (output,) = llm.generate(one, SamplingParams(max_tokens=max_new_tokens, logprobs=True, ignore_eos=True))
    return output


def _check_memory(gpt: Any, tokens: int) -> None:
    """Raise ``ValueError`` where Megatron's own attention, which writes out every score, has no room for the text."""
    attention = attention_layers(gpt)[0].self_attention
    if type(attention.core_attention).__name__ != "DotProductAttention" or torch.cuda.is_available():
        return
    needed = 3 * attention.num_attention_heads_per_partition * tokens**2 * 4  # scores, masked scores, probabilities
    free = psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if needed > free:
        raise ValueError(
            f"the training forward of {tokens} tokens takes about {needed / 2**30:.1f} GiB on this rank for the scores "
            f"of one layer, of {free / 2**30:.1f} GiB that are free for it; use a shorter prompt, or a larger "
            "tensor_model_parallel_size"
        )


def _settings(model: Any, llm: LLM, hf: Any, reference: Any, said: Any) -> dict[str, str]:
    sizes, engine = parallel_state.get_parallel_config(), llm.engine_config
    own = unwrap(llm.model)
    dtype, cached = (str(each.dtype).removeprefix("torch.") for each in (next(own.parameters()), llm.runner.pools[0]))
    where = "a live model" if isinstance(model, torch.nn.Module | LLM) else os.fspath(model)
    settings = {"model": where}
    if reference is not None:
        settings["reference"] = "the training forward of another live model"
    if hf is not None:
        settings["twin"] = f"{os.fspath(hf)}, float32"
    ep = sizes.expert_model_parallel_size
    settings["ranks"] = (
        f"tp {sizes.tensor_model_parallel_size}, dcp {sizes.decode_context_parallel_size} ({sizes.dcp_layout}), "
        f"pp {sizes.pipeline_model_parallel_size}" + (f", ep {ep}" if ep > 1 else "")
    )
    settings["cache"] = (
        f"{cached}, interleave {llm.cache_config.kv_interleave_size}, blocks of {llm.cache_config.block_size}; "
        f"exchange {engine.exchange_for(sizes.dcp_layout)}, prefill {engine.prefill}"
    )
    settings["text"] = (
        f"{len(said.prompt_token_ids)} prompt tokens and {len(said.token_ids)} generated; {dtype} weights"
    )
    return settings
