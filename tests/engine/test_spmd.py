"""``LLM`` on several ranks: whatever happens, it happens on all of them, and the next call works."""

from __future__ import annotations

import pytest
import torch
from torch import distributed

from megatron_dcp import LLM, CacheConfig, EngineConfig, SamplingParams, parallel_state
from models import tiny_model
from workers import run_on_ranks

PROMPTS = ["once upon a time", "x", [5, 6, 7], "h\u00e9llo"]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def path() -> str:
    return str(tiny_model(tokenizer=True))


def make(path, world, tp=1, prefix_caching=True, **cache) -> LLM:
    return LLM(
        path,
        tensor_model_parallel_size=tp,
        decode_context_parallel_size=world // tp,
        cache=CacheConfig(block_size=4, **cache),
        engine=EngineConfig(prefill_chunk_size=16, max_num_seqs=3, num_draft_tokens=1, prefix_caching=prefix_caching),
    )


def check_empty(llm) -> None:
    if llm.is_driver:
        stats = llm.stats()
        assert (stats.running, stats.waiting, stats.kv_used_tokens) == (0, 0, 0)
        llm._engine.scheduler.check_integrity()


def left_early(rank, world, path, tp, places):
    """Tokens of streams that end at these places, and those of a whole call after each of them."""
    llm = make(path, world, tp, prefix_caching=False)  # what is cached changes the order of the tokens
    seen = []
    for place in places:
        tokens = []
        for token in llm.stream(PROMPTS, PARAMS):
            tokens.append(token)
            # The ranks stand at the same place, with nothing under way between them.
            number = torch.tensor([len(tokens)])
            distributed.all_reduce(number)
            assert number.item() == world * len(tokens)
            if len(tokens) == place:
                break
        check_empty(llm)
        seen.append(tokens)
    return seen, llm.generate(PROMPTS, PARAMS)


@pytest.mark.parametrize(("world", "tp"), [(2, 1), (4, 2)])
def test_a_stream_is_the_same_on_every_rank_and_may_be_left_anywhere(path, world, tp):
    places = (1, 7, 47, 48, None)
    first, *others = run_on_ranks(world, left_early, path, tp, places)
    assert all(other == first for other in others)
    streams, outputs = first
    whole = streams[-1]
    assert len(whole) == 48
    for place, tokens in zip(places, streams, strict=True):
        assert tokens == whole[:place]
    for output in outputs:
        own = [token for token in whole if token.index == output.index]
        assert output.token_ids == [token.token_id for token in own]
        assert output.text == "".join(token.text for token in own)


def callback_fails(rank, world, path, victims):
    llm = make(path, world)
    calls = []

    def on_token(*token):
        calls.append(token)
        if len(calls) == 9 and rank in victims:
            raise ZeroDivisionError("in the callback")

    error = None
    try:
        llm.generate(PROMPTS, PARAMS, on_token=on_token)
    except Exception as caught:
        error = caught
    check_empty(llm)
    return error, len(calls), [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)], ids=["driver", "follower", "both"])
def test_a_callback_that_fails_leaves_ranks_that_work(path, victims):
    (first, calls, tokens), (second, _, others) = run_on_ranks(2, callback_fails, path, victims)
    assert isinstance(first, ZeroDivisionError if 0 in victims else type(None))
    assert calls == (9 if 0 in victims else 48)
    if 1 in victims:
        assert isinstance(second, ZeroDivisionError)
    else:
        assert isinstance(second, RuntimeError) and "driver of this replica left the generation" in str(second)
    assert tokens == others and all(len(each) == 12 for each in tokens)


def driver_fails(rank, world, path):
    """What each rank hears where the pool is too small, a bias names no token, and the weights are broken."""
    llm = make(path, world, num_blocks=5)
    errors = []

    def attempt(prompts, params):
        with pytest.raises(ValueError) as caught:
            llm.generate(prompts, params)
        errors.append(str(caught.value))
        check_empty(llm)

    llm.generate(PROMPTS, PARAMS)
    attempt([[1], [2] * 60], PARAMS)
    attempt([[1]], SamplingParams(logit_bias={5000: 1.0}))
    with torch.no_grad():
        weight = llm.model.embedding.word_embeddings.weight
        kept = weight[7].clone()
        weight[7] = torch.nan
        attempt([[5, 6], [7], [8]], PARAMS)
        weight[7] = kept
    return errors, [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]


def test_errors_of_the_driver_are_the_same_on_every_rank(path):
    first, *others = run_on_ranks(3, driver_fails, path)
    assert all(other == first for other in others)
    (small, bias, broken), _ = first
    assert "prompt 1 needs 71 tokens" in small and "holds 60 (5 blocks x 12 tokens, over 3 ranks)" in small
    assert "logit_bias names token 5000" in bias
    assert "the logits of prompt 1 hold NaN or infinity" in broken


def weights_change(rank, world, path):
    llm = make(path, world)
    prompt = ["once upon a time there was a harbour"]
    tokens, cached = [], []
    for change in (False, False, True):
        if change:
            with torch.no_grad():
                llm.model.decoder.layers[0].self_attention.linear_qkv.weight.mul_(-1.0)
            llm.weights_changed()
        (output,) = llm.generate(prompt, PARAMS)
        tokens.append(output.token_ids)
        cached.append(output.num_cached_tokens)
    llm.weights_changed()
    assert llm.generate(prompt, PARAMS)[0].token_ids == tokens[2]
    return tokens, cached


def test_what_was_computed_with_other_weights_is_not_reused(path):
    for tokens, cached in run_on_ranks(2, weights_change, path):
        assert tokens[0] == tokens[1] != tokens[2]
        assert cached[0] == cached[2] == 0 < cached[1]


def test_progress_and_the_line_of_statistics(path, capsys, caplog):
    llm = LLM(path, cache=CacheConfig(block_size=4), engine=EngineConfig(log_interval_s=0))
    try:
        with caplog.at_level("INFO", logger="megatron_dcp"):
            outputs = llm.generate(PROMPTS, PARAMS, progress=True)
        assert len(outputs) == 4 and "4/4" in capsys.readouterr().err
        first, *lines = caplog.records
        assert first.name == "megatron_dcp.startup" and "sdpa: chosen" in first.getMessage()
        assert len(lines) == llm.stats().steps == 12 and {line.name for line in lines} == {"megatron_dcp"}
        assert llm.stats().generated_tokens == 48
        llm.generate(PROMPTS, PARAMS)
        assert capsys.readouterr() == ("", "")
    finally:
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()
