"""``AsyncLLM`` on real models: what a request gets alone, it gets among others, however they come and go."""

import asyncio
import os
import time
from contextlib import aclosing
from unittest import mock

import pytest
import torch

from megatron_dcp import LLM, AsyncLLM, CacheConfig, EngineConfig, SamplingParams, parallel_state
from megatron_dcp.comm.collectives import CollectiveError
from megatron_dcp.engine.runner import ModelRunner
from models import tiny_model
from workers import run_on_ranks

CACHE = CacheConfig(block_size=4, num_blocks=40)
ENGINE = EngineConfig(prefill_chunk_size=16, max_num_seqs=4)
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=True)
LONG = SamplingParams(max_tokens=120, ignore_eos=True)


@pytest.fixture(scope="module")
def path() -> str:
    return str(tiny_model(tokenizer=True, positions=256))


@pytest.fixture
def llm(path):
    """On this process alone; the groups go with the test."""
    made = AsyncLLM(path, cache=CACHE, engine=ENGINE)
    yield made
    asyncio.run(made.shutdown())
    assert not made._thread.is_alive()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


async def collect(llm, prompt, params=PARAMS, **named):
    return [piece async for piece in llm.generate(prompt, params, **named)]


def is_empty(llm) -> bool:
    stats = llm.stats()
    if llm._engine.scheduler is not None:
        llm._engine.scheduler.check_integrity()
    return (stats.running, stats.waiting, stats.kv_used_tokens) == (0, 0, 0) and not llm._streams


async def until(condition):
    """Wait for what the engine's thread does next."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def offline(rank, world, path, prompts, params):
    return LLM(path, decode_context_parallel_size=world, cache=CACHE, engine=ENGINE).generate(prompts, params)


PROMPTS = ["once upon a time", "x", [5, 6, 7], "once upon a time there was a harbour", "h\u00e9llo", "a" * 40]


def serve(rank, world, path, params):
    """Pieces of every prompt, asked for by as many tasks at once; ``None`` on the followers."""
    llm = AsyncLLM(path, decode_context_parallel_size=world, cache=CACHE, engine=ENGINE)
    if not llm.is_driver:
        for call in (lambda: llm.generate("x"), llm.stats):
            with pytest.raises(ValueError, match="is for the driver of the replica, rank 0; this is rank"):
                call()
        llm.weights_changed()  # may be called everywhere
        return llm.follow()

    async def late(prompt, delay):
        await asyncio.sleep(delay)
        return await collect(llm, prompt, params)

    async def main():
        async with llm:
            with pytest.raises(ValueError, match="nobody to follow"):
                llm.follow()
            return await asyncio.gather(*(late(prompt, 0.02 * i) for i, prompt in enumerate(PROMPTS)))

    pieces = asyncio.run(main())
    assert is_empty(llm)
    return pieces


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.mcore_line), 4])
def test_many_requests_at_once_get_what_generate_gives(path, world):
    expected = run_on_ranks(1, offline, path, PROMPTS, PARAMS)[0]
    streams, *others = run_on_ranks(world, serve, path, PARAMS)
    assert others == [None] * (world - 1)
    for pieces, output in zip(streams, expected, strict=True):
        *before, last = pieces
        assert [piece.token_id for piece in pieces] == output.token_ids == last.output.token_ids
        assert "".join(piece.text for piece in pieces) == output.text == last.output.text
        assert [piece.logprob for piece in pieces] == pytest.approx(output.logprobs, abs=1e-4)
        assert last.output.finish_reason == "length" and not any(piece.output for piece in before)
        assert {piece.request_id for piece in pieces} == {last.request_id}
    assert len({pieces[0].request_id for pieces in streams}) == len(streams)


def test_samples_come_in_one_stream(path, llm):
    params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.9, seed=3, n=3)
    pieces = asyncio.run(collect(llm, "once", params))
    expected = run_on_ranks(1, offline, path, ["once"], params)[0]
    for sample in range(3):
        own = [piece for piece in pieces if piece.sample == sample]
        assert own[-1].output == expected[sample]
        assert [piece.token_id for piece in own] == expected[sample].token_ids


def test_abort_ends_a_stream_with_what_there_is(llm):
    async def main():
        pieces, ended = [], None
        async for piece in llm.generate("once", LONG, request_id="mine"):
            pieces.append(piece)
            if len(pieces) == 3:
                llm.abort("mine")
                llm.abort("nobody's")
            ended = piece.output
        assert pieces[-1].token_id is None and ended.finish_reason == "abort"
        assert [piece.token_id for piece in pieces[:-1]] == ended.token_ids and 3 <= len(ended.token_ids) < 120
        assert "".join(piece.text for piece in pieces) == ended.text
        assert is_empty(llm)
        assert llm.stats().finished == {"abort": 1}

    asyncio.run(main())


def test_a_cancelled_task_and_a_closed_iterator_abort_their_request(llm):
    async def main():
        other = asyncio.create_task(collect(llm, "x"))
        task = asyncio.create_task(collect(llm, "once", LONG))
        await until(lambda: llm.stats().generated_tokens > 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with aclosing(llm.generate("twice", LONG)) as pieces:
            await anext(pieces)
        assert len(await other) == 12
        await until(lambda: is_empty(llm))
        assert llm.stats().finished == {"abort": 2, "length": 1}

    asyncio.run(main())


def test_what_cannot_run_is_refused_and_disturbs_nobody(llm):
    async def main():
        good = asyncio.create_task(collect(llm, "once", PARAMS, request_id="good"))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="request_id='good' runs already"):
            await collect(llm, "x", request_id="good")
        with pytest.raises(ValueError, match="needs 239 tokens of KV cache"):
            await collect(llm, [1] * 120, LONG)
        for prompt, message in (([], "0 tokens"), ([[1], [2]], "not a list of whole"), ([1] * 300, "context is 256")):
            with pytest.raises(ValueError, match=message):
                llm.generate(prompt)
        with pytest.raises(ValueError, match="logit_bias names token 999"):
            await collect(llm, "x", SamplingParams(logit_bias={999: 1.0}))
        assert len(await good) == 12

    asyncio.run(main())


def test_weights_change_between_requests_only(llm):
    async def main():
        async with aclosing(llm.generate("once upon a time", LONG)) as pieces:
            await anext(pieces)
            with pytest.raises(ValueError, match="cannot change while 1 requests run"):
                llm.weights_changed()
        for hits in (0, 12):
            llm.weights_changed() if not hits else None
            assert (await collect(llm, "once upon a time"))[-1].output.num_cached_tokens == hits

    asyncio.run(main())


def test_shutdown_aborts_what_runs_and_takes_nothing_more(llm):
    async def main():
        tasks = [asyncio.create_task(collect(llm, "once", LONG)) for _ in range(6)]  # two of them wait
        await until(lambda: llm.stats().running == 4)
        await llm.shutdown()
        for pieces in await asyncio.gather(*tasks):
            assert pieces[-1].output.finish_reason == "abort"
        with pytest.raises(ValueError, match="was shut down"):
            await collect(llm, "x")
        await llm.shutdown()  # nothing more to do
        assert is_empty(llm)

    asyncio.run(main())


def fail_in_the_third_step(rank, world, path, error):
    llm = AsyncLLM(path, decode_context_parallel_size=world, cache=CACHE, engine=ENGINE)
    if not llm.is_driver:
        return llm.follow()
    steps = iter(range(3))
    sample = llm._engine.sampler.sample

    def failing(*args):
        if next(steps, None) is None:
            raise error
        return sample(*args)

    async def main():
        async with llm:
            with mock.patch.object(llm._engine.sampler, "sample", failing):
                tasks = [collect(llm, prompt, LONG) for prompt in ("once", "x")]
                errors = await asyncio.gather(*tasks, return_exceptions=True)
            try:
                await collect(llm, "y")
            except Exception as later:
                errors.append(later)
            return errors

    return asyncio.run(main())


def test_a_request_that_fails_leaves_the_others_alone(llm):
    everything = range(llm.prompt_reader.vocab_size)
    poison = SamplingParams(max_tokens=4, min_tokens=2, n=2, stop_token_ids=everything)

    async def among_others():
        innocent = asyncio.create_task(collect(llm, [5, 6, 7], LONG))
        with pytest.raises(ValueError, match="min_tokens=2 of prompt 0 forbids every token"):
            await collect(llm, [1], poison)
        pieces = await innocent
        assert len(pieces) == 120 and pieces[-1].output.finish_reason == "length"
        await until(lambda: is_empty(llm))
        assert [piece.token_id for piece in await collect(llm, [5, 6, 7], LONG)] == pieces[-1].output.token_ids

    asyncio.run(among_others())


def test_names_of_their_own_do_not_clash_with_given_ones(llm):
    async def named_and_not():
        named = asyncio.create_task(collect(llm, [5], LONG, request_id="request-1"))
        others = await asyncio.gather(*(collect(llm, [6], PARAMS) for _ in range(4)))
        ids = {pieces[0].request_id for pieces in others}
        assert len(ids | {"request-1"}) == 5 and len(await named) == 120

    asyncio.run(named_and_not())


@pytest.mark.parametrize("error", [ValueError("not finite"), ZeroDivisionError("by zero")])
def test_an_error_of_the_engine_reaches_every_request_and_every_rank(path, error):
    errors, follower = run_on_ranks(2, fail_in_the_third_step, path, error, expect_errors=True)
    kind = ValueError if isinstance(error, ValueError) else RuntimeError
    assert len(errors) == 3
    for each in (*errors, follower):
        assert type(each) is kind and str(error) in str(each)


def idle(rank, world, path, port, limit):
    """Ranks whose collectives may take ``limit`` seconds, without work for three times as long."""
    torch.distributed.destroy_process_group()
    torchrun = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in torchrun.items()}):
        llm = AsyncLLM(path, decode_context_parallel_size=world, cache=CACHE, timeout_s=limit)
    if not llm.is_driver:
        return llm.follow()

    async def main():
        async with llm:
            await asyncio.sleep(3 * limit)
            return [piece.token_id for piece in await collect(llm, "x")]

    return asyncio.run(main())


def test_followers_wait_for_work_longer_than_the_time_limit(path):
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    tokens, follower = run_on_ranks(2, idle, path, port, 4.0)
    assert len(tokens) == 12 and follower is None


def one_dies(rank, world, path, victim):
    """What the others hear when a rank is killed between two steps."""
    llm = AsyncLLM(path, decode_context_parallel_size=world, cache=CACHE, engine=ENGINE)
    step, steps = ModelRunner.step, iter(range(4))

    def dying(self, batch):
        if next(steps, None) is None:
            os.kill(os.getpid(), 9)
        return step(self, batch)

    if rank == victim:
        ModelRunner.step = dying
    if not llm.is_driver:
        return llm.follow()

    async def main():
        errors = await asyncio.gather(*(collect(llm, p, LONG) for p in ("once", "x")), return_exceptions=True)
        await llm.shutdown()
        return errors

    return asyncio.run(main())


@pytest.mark.parametrize("victim", [0, 2], ids=["driver", "follower"])
def test_a_rank_that_dies_is_one_clear_error_everywhere(path, victim):
    answers = run_on_ranks(3, one_dies, path, victim, timeout=60, expect_errors=True)
    for rank, answer in enumerate(answers):
        if rank != victim:
            for error in answer if isinstance(answer, list) else [answer]:
                assert isinstance(error, CollectiveError) and "died or hung" in str(error), answers
