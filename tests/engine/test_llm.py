"""Real models through the front door. That tokens and logits are exact on all ranks and layouts: test_exactness.py."""

import re

import pytest
import torch

from megatron_dcp import LLM, CacheConfig, EngineConfig, SamplingParams, parallel_state
from models import hf_model, tiny_model
from workers import run_on_ranks

BLOCK = 4


def sizes(tp: int, dcp: int, layout: str = "orthogonal") -> dict:
    return dict(tensor_model_parallel_size=tp, decode_context_parallel_size=dcp, dcp_layout=layout)


def prompts_of(vocab: int, lengths) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


def greedy(path, prompt: list[int], steps: int) -> list[int]:
    """By ``transformers``, the prompt alone."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        text = hf_model(path).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=steps,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return text[0, len(prompt) :].tolist()


def generate(rank, world, path, sizes, engine, prompts, steps):
    llm = LLM(path, **sizes, cache=CacheConfig(block_size=BLOCK, kv_interleave_size=2), engine=engine)
    params = SamplingParams(max_tokens=steps, ignore_eos=True)
    return [output.token_ids for output in llm.generate(prompts, params)]


@pytest.mark.mcore_line
@pytest.mark.parametrize(
    ("world", "parallel", "model"),
    [(2, sizes(1, 2), {}), (3, sizes(3, 3, "within_tp"), dict(hidden=72, heads=6, kv_heads=1))],
)
def test_prompts_that_wait_and_come_in_pieces_give_the_tokens_of_transformers(world, parallel, model):
    path = tiny_model("llama", **model)
    prompts = prompts_of(100, (17, 1, 2, 33, 3, 4, 12, 5, 16))
    engine = EngineConfig(max_num_seqs=3, prefill_chunk_size=7)
    expected = [greedy(path, prompt, 8) for prompt in prompts]
    for tokens in run_on_ranks(world, generate, str(path), parallel, engine, prompts, 8):
        assert tokens == expected


def one_by_one_and_together(rank, world, path, params):
    llm = LLM(path, **sizes(1, world), cache=CacheConfig(block_size=BLOCK, num_blocks=24))
    prompts = prompts_of(100, (5, 1, 30, 8))
    together = [(o.token_ids, o.logprobs) for o in llm.generate(prompts, params)]
    alone = [(o.token_ids, o.logprobs) for p, own in zip(prompts, params, strict=True) for o in llm.generate(p, own)]
    return together, alone


def test_seeded_sampling_is_the_same_alone_in_a_batch_and_on_every_rank():
    kinds = [{"top_k": 20}, {"top_p": 0.8}, {}, {"temperature": 0.0}]
    params = [
        SamplingParams(
            **{"max_tokens": 20, "temperature": 0.9, "seed": i, "logprobs": True, "ignore_eos": True, **kind}
        )
        for i, kind in enumerate(kinds)
    ]
    path = str(tiny_model("llama"))
    results = [result for world in (1, 2) for result in run_on_ranks(world, one_by_one_and_together, path, params)]
    for together, alone in results:
        assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
        assert [tokens for tokens, _ in together] == [tokens for tokens, _ in results[0][0]]
        for (_, one), (_, other) in zip(together, alone, strict=True):
            assert one == pytest.approx(other, abs=1e-4)


def longer_than_a_rank(rank, world, path, prompt):
    llm = LLM(path, **sizes(1, world), cache=CacheConfig(block_size=4, num_blocks=8))
    tokens = llm.generate(prompt, SamplingParams(max_tokens=5, ignore_eos=True))[0].token_ids
    with pytest.raises(ValueError, match=r"needs 65 tokens of KV cache.*DCP group holds 64 .*over 2 ranks"):
        llm.generate([1] * 61, SamplingParams(max_tokens=5))
    return tokens, llm.runner.pools[0].num_slots


def test_a_prompt_may_be_longer_than_a_ranks_pool_but_not_than_the_groups():
    prompt = prompts_of(100, (60,))[0]
    path = tiny_model("llama")
    expected = greedy(path, prompt, 5)
    for tokens, slots in run_on_ranks(2, longer_than_a_rank, str(path), prompt):
        assert tokens == expected
        assert slots == 32


@pytest.fixture
def llm():
    """A model with tokenizer on this process alone; the groups go with the test."""
    made = LLM(tiny_model("llama", tokenizer=True, positions=64), cache=CacheConfig(block_size=BLOCK))
    yield made
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def test_stream_and_callback_hand_out_what_generate_returns(llm):
    prompts = ["h\u00e9llo", [3, 4, 5], "x" * 30]
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    streamed = list(llm.stream(prompts, params))
    called = []
    assert llm.generate(prompts, params, on_token=lambda *token: called.append(token)) == outputs
    assert called == streamed
    for output in outputs:
        own = [token for token in streamed if token.index == output.index]
        assert [token.token_id for token in own] == output.token_ids
        assert "".join(token.text for token in own) == output.text
    assert outputs[0].prompt_token_ids == llm.tokenizer.encode("h\u00e9llo")
    assert [o.finish_reason for o in outputs] == ["length"] * 3
    assert outputs[0].logprobs is None


def test_stop_tokens_end_of_text_and_context(llm):
    free = llm.generate([5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True))[0]
    stop = free.token_ids[6]
    stopped = llm.generate([5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=[stop]))[0]
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert stopped.finish_reason == "stop"
    assert stopped.text == llm.tokenizer.decode(stopped.token_ids)
    full = llm.generate([[1] * 60, [1] * 64], SamplingParams(max_tokens=99, ignore_eos=True))
    assert [(len(o.token_ids), o.finish_reason) for o in full] == [(4, "length"), (1, "length")]


def test_end_of_text_ends_the_sequence_and_is_not_in_the_text(llm):
    free = llm.generate([5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True))[0]
    llm.prompt_reader = type(llm.prompt_reader)(
        vocab_size=260, max_sequence_length=64, eos_token_ids=(free.token_ids[4],), tokenizer=llm.tokenizer
    )
    ended = llm.generate([5, 6, 7], SamplingParams(max_tokens=20))[0]
    first = free.token_ids.index(free.token_ids[4])
    assert ended.token_ids == free.token_ids[: first + 1]
    assert ended.finish_reason == "stop"
    assert ended.text == llm.tokenizer.decode(ended.token_ids[:-1])
    assert "".join(t.text for t in llm.stream([5, 6, 7], SamplingParams(max_tokens=20))) == ended.text


def test_leaving_a_stream_early_leaves_nothing_behind(llm):
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    llm.model.train()
    stream = llm.stream([[1, 2], [3]], params)
    next(stream)
    with pytest.raises(ValueError, match="still running"):
        llm.generate([1], params)
    assert not llm.model.training
    stream.close()
    assert llm.model.training
    assert not torch.is_inference_mode_enabled()
    assert len(llm.generate([1], params)[0].token_ids) == 10


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "prompt 1 has 0 tokens"),
        ([[1], [1] * 65], "prompt 1 has 65 tokens.*context is 64"),
        ([[260]], "prompt 0 has token id 260"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(llm, prompts, message):
    calls = []
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, on_token=lambda *token: calls.append(token))
    with pytest.raises(ValueError, match=message):
        llm.stream(prompts)
    assert not calls and llm.runner is None
    assert llm.generate([]) == []


def test_arguments_that_contradict_each_other(llm):
    path = tiny_model("llama", tokenizer=True, positions=64)
    with pytest.raises(ValueError, match="decode_context_parallel_size=2 differs from the 1 of the groups"):
        LLM(path, decode_context_parallel_size=2)
    with pytest.raises(ValueError, match="dtype='float8' is not known"):
        LLM(path, dtype="float8")
    with pytest.raises(ValueError, match="vocab_size=5 cannot be given"):
        LLM(path, vocab_size=5)
    with pytest.raises(ValueError, match="dtype='float32' cannot be given"):
        LLM(llm.model, dtype="float32")
    with pytest.raises(ValueError, match="exchange='fold'"):
        parallel_state.destroy_model_parallel()
        LLM(path, dcp_layout="within_tp", engine=EngineConfig(exchange="fold"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(cache={"num_blocks": 3}), r"cache=\{'num_blocks': 3\} must be of type CacheConfig; leave it out"),
        (dict(engine={}), r"engine=\{\} must be of type EngineConfig"),
        (dict(metrics=3), "metrics=3 must be of type Metrics"),
        (dict(eos_token_ids=5), "eos_token_ids=5 must be a list of token ids"),
        (dict(eos_token_ids="a"), "eos_token_ids='a' must be a list of token ids"),
        (dict(eos_token_ids=["a"]), "a token id of eos_token_ids='a' must be a whole number"),
        (dict(eos_token_ids=[-1]), "a token id of eos_token_ids=-1 must be a whole number >= 0"),
        (dict(tokenizer=3), "tokenizer=3 must have the methods encode and decode"),
        (dict(dtype=""), "dtype='' is not known; use one of float32"),
        (dict(device="foo"), "device='foo' is not known; use 'cpu'"),
        (dict(device=""), "device='' is not known"),
        (dict(device="meta"), "device='meta' is not known"),
        (dict(device="cuda:99"), r"device='cuda:99' is not there: this machine has \d GPUs; use 'cpu'"),
        (dict(model=5), "model=5 must be the directory of a checkpoint or a Megatron GPTModel"),
        (dict(timeout_s=-1), "timeout_s=-1 must be a number of seconds above 0"),
        (dict(timeout_s="1"), "timeout_s='1' must be"),
        (dict(timeout_s=float("inf")), "timeout_s=inf must be .* at most 1e\\+09"),
    ],
)
def test_wrong_types_are_refused_by_name(llm, arguments, message):
    with pytest.raises(ValueError, match=message):
        LLM(**{"model": tiny_model("llama", tokenizer=True, positions=64), **arguments})


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_has_to_be_there(llm):
    with pytest.raises(ValueError, match="device='cuda' is not there: this machine has 0 GPUs; use 'cpu'"):
        LLM(tiny_model("llama", tokenizer=True, positions=64), device="cuda")


def test_groups_are_gone_after_a_checkpoint_that_does_not_load(tmp_path):
    with pytest.raises(ValueError):
        LLM(tmp_path / "nothing")
    assert not parallel_state.is_initialized()


def errors_of(rank, world, path):
    """What each rank hears of mistakes that one rank makes."""
    llm = LLM(path, **sizes(1, world))
    errors = []
    for prompts in ([[1], [] if rank else [2]], [[1, rank]], ["text" if rank else [1]]):
        try:
            llm.generate(prompts, SamplingParams(max_tokens=2))
            errors.append(None)
        except ValueError as error:
            errors.append(str(error))
    try:
        llm.generate([1], SamplingParams(max_tokens=2, seed=rank))
    except ValueError as error:
        errors.append(str(error))
    return errors, llm.generate([1], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids


def test_a_mistake_on_one_rank_is_an_error_on_every_rank():
    (first, tokens), (second, others) = run_on_ranks(2, errors_of, str(tiny_model("llama")))
    assert "rank 1" in first[0] and "prompt 1 has 0 tokens" in first[0] and "prompt 1 has 0 tokens" in second[0]
    assert "same" in first[1] and "same" in second[1]
    assert "without a tokenizer" in first[2] and "without a tokenizer" in second[2]
    assert "same" in first[3] and "same" in second[3]
    assert tokens == others and len(tokens) == 3


def load_here(rank, world, paths):
    LLM(paths[rank], **sizes(1, world))


def test_a_checkpoint_that_one_rank_does_not_see_is_an_error_on_every_rank(tmp_path):
    paths = [str(tiny_model("llama")), str(tmp_path / "nowhere")]
    errors = run_on_ranks(2, load_here, paths, expect_errors=True)
    assert all(isinstance(error, ValueError) and "nowhere" in str(error) for error in errors)


def settings_that_differ(rank, world, path, by_rank):
    LLM(path, **sizes(1, world), **by_rank[rank])


@pytest.mark.parametrize(
    "by_rank",
    [
        [{"cache": CacheConfig(kv_interleave_size=1)}, {"cache": CacheConfig(kv_interleave_size=8)}],
        [{"cache": CacheConfig(num_blocks=4)}, {"cache": CacheConfig(num_blocks=5)}],
        [{"engine": EngineConfig(exchange="fold")}, {"engine": EngineConfig(exchange="a2a")}],
        [{"engine": EngineConfig(prefill_chunk_size=4)}, {"engine": EngineConfig(prefill_chunk_size=8)}],
        [{"dtype": "float32"}, {"dtype": "bfloat16"}],
    ],
    ids=["interleave", "blocks", "exchange", "chunk", "dtype"],
)
def test_settings_that_differ_between_ranks_are_an_error_on_every_rank(by_rank):
    errors = run_on_ranks(2, settings_that_differ, str(tiny_model("llama")), by_rank, expect_errors=True)
    assert all(isinstance(error, ValueError) and "the settings of the LLM" in str(error) for error in errors), errors


MISTAKES = [
    (dict(decode_context_parallel_size=1), "decode_context_parallel_size=1 differs from the 2 of the groups"),
    (dict(dtype="int8"), "dtype='int8' is not known"),
    (dict(vocab_size=5), "vocab_size=5 cannot be given"),
    (dict(cache={}), "cache={} must be of type CacheConfig"),
    (dict(eos_token_ids=["a"]), "a token id of eos_token_ids='a'"),
    (dict(tokenizer=3), "tokenizer=3 must have the methods"),
    (dict(device="foo"), "device='foo' is not known"),
    (dict(timeout_s=-1), "timeout_s=-1 must be a number of seconds above 0"),
    (dict(model=5), "model=5 must be the directory"),
    (dict(engine=EngineConfig(exchange="fold")), "exchange='fold'"),
]


def mistakes_of(rank, world, path, mistaken):
    """What each rank hears of arguments that only rank ``mistaken`` gives, and whether all are in step afterwards."""
    right = dict(model=path, tensor_model_parallel_size=2, dcp_layout="within_tp", engine=EngineConfig(exchange="a2a"))
    LLM(**right, decode_context_parallel_size=2)
    errors = []
    for arguments, _ in MISTAKES:
        with pytest.raises(ValueError) as error:
            LLM(**{**right, **(arguments if rank == mistaken else {})})
        errors.append(str(error.value))
    return errors, LLM(**right).generate([1], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids


@pytest.mark.parametrize("mistaken", [0, 1])
def test_arguments_that_one_rank_gets_wrong_are_an_error_on_every_rank(mistaken):
    path = str(tiny_model("llama", hidden=48, heads=6, kv_heads=1))
    results = run_on_ranks(2, mistakes_of, path, mistaken)
    for rank, (errors, tokens) in enumerate(results):
        assert tokens == results[0][1] and len(tokens) == 3
        for (_, message), error in zip(MISTAKES, errors, strict=True):
            assert message in error
            assert (f"rank {mistaken} failed with" in error) == (rank != mistaken)


def live_here(rank, world, path, differs):
    """A live model whose arguments, or which itself, one rank has another of."""
    llm = LLM(path, **sizes(1, world))
    arguments = [dict(model=llm.model), {"model": llm.model, **differs}][rank]
    LLM(**arguments)


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        ({"decode_context_parallel_size": 1}, "decode_context_parallel_size=1 differs from the 2"),
        ({"dtype": "float32"}, "dtype='float32' cannot be given: a live model keeps its own"),
        ({"vocab_size": 10**6}, "vocab_size=1000000 exceeds the "),
        ({"vocab_size": 0}, "vocab_size=0 must be a whole number >= 1"),
        ({"vocab_size": 50}, "vocab_size"),
        ({"model": torch.nn.Linear(1, 1)}, "rank 1 failed|Linear"),
        ({"model": "path"}, "the kind of model must be the same on ranks"),
    ],
    ids=["size", "dtype", "large", "zero", "vocabulary", "model", "kind"],
)
def test_a_live_model_that_one_rank_gets_wrong_is_an_error_on_every_rank(differs, message):
    errors = run_on_ranks(2, live_here, str(tiny_model("llama")), differs, expect_errors=True)
    assert all(isinstance(error, ValueError) and re.search(message, str(error)) for error in errors), errors


def replicas(rank, world, path):
    """Two replicas with prompts of their own: neither waits for the other."""
    llm = LLM(path)
    prompts = prompts_of(100, (4,)) if rank else []
    return [output.token_ids for output in llm.generate(prompts, SamplingParams(max_tokens=5, ignore_eos=True))]


def test_replicas_are_independent():
    path = str(tiny_model("llama"))
    assert run_on_ranks(2, replicas, path) == [[], run_on_ranks(1, generate_one, path)[0]]


def generate_one(rank, world, path):
    return [
        o.token_ids for o in LLM(path).generate(prompts_of(100, (4,)), SamplingParams(max_tokens=5, ignore_eos=True))
    ]
