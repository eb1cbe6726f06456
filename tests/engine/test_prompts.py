import numpy as np
import pytest
import torch

from megatron_dcp.engine.prompts import PromptReader, fingerprint
from megatron_dcp.engine.request import SamplingParams


class Words:
    """One token per word: its length."""

    def encode(self, text):
        return [len(word) for word in text.split()]


reader = PromptReader(vocab_size=10, max_sequence_length=6, eos_token_ids=(0,), tokenizer=Words())
bare = PromptReader(vocab_size=10, max_sequence_length=6)


@pytest.mark.parametrize(
    ("prompts", "tokens"),
    [
        ("a bb ccc", [[1, 2, 3]]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        ([[1, 2], "a bb", (3,)], [[1, 2], [1, 2], [3]]),
        (["a", "bb"], [[1], [2]]),
        (torch.tensor([4, 5]), [[4, 5]]),
        (torch.tensor([[4, 5], [6, 7]]), [[4, 5], [6, 7]]),
        ([np.int64(4), np.int64(5)], [[4, 5]]),
        ([np.array([4, 5]), torch.tensor([6])], [[4, 5], [6]]),
        ([], []),
        (iter([[1], [2]]), [[1], [2]]),
    ],
)
def test_forms_of_prompts(prompts, tokens):
    requests = reader.read(prompts, None)
    assert [r.prompt for r in requests] == tokens
    assert [r.index for r in requests] == list(range(len(tokens)))
    assert all(type(token) is int for r in requests for token in r.prompt)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], "prompt 0 has 0 tokens"),
        ("", "prompt 0 has 0 tokens"),
        ([[1], [], [2]], "prompt 1 has 0 tokens"),
        ([[1], [1] * 7], "prompt 1 has 7 tokens, but the model's context is 6"),
        ([[1], [2, 10]], "prompt 1 has token id 10 at place 1.*0 to 9"),
        ([[-1]], "prompt 0 has token id -1 at place 0"),
        ([[10**5000]], "prompt 0 has token id of 16610 bits at place 0"),
        (["a", "b\ud800"], "prompt 1 has the lone surrogate .* at place 1"),
        (["a", "ten letters eleventwelve"], "prompt 1 has token id 12 at place 2"),
        ([[1], [1.5]], "prompt 1 is not a list of whole numbers"),
        ([[True]], "prompt 0 is not a list of whole numbers"),
        ([["a"]], "prompt 0 is not a list of whole numbers"),
        ([None], "prompt 0 is None"),
        ([[1], 5], "prompt 1 is 5"),
        (5, "prompts=5"),
        (b"a", "prompts=b'a'"),
        ([b"a"], "prompt 0 is b'a'"),
        ({"prompt": [1]}, r"prompts=\{'prompt': \[1\]\} must be text, a list of token ids"),
        ({5, 3}, r"prompts=\{3, 5\} must be text"),
        ([[1], {5}], r"prompt 1 is \{5\}; give text or a list of token ids"),
        ([{"prompt": [1] * 90}], r"prompt 0 is \{'prompt': .{60,80}\.\.\.; give text"),
        (torch.tensor([1.5]), "whole numbers|prompt 0"),
    ],
)
def test_bad_prompts_are_refused_with_their_index(prompts, message):
    with pytest.raises(ValueError, match=message):
        reader.read(prompts, None)


def test_text_needs_a_tokenizer():
    with pytest.raises(ValueError, match="prompt 1 is text, but the model came without a tokenizer"):
        bare.read([[1], "a"], None)


@pytest.mark.parametrize(("length", "asked", "allowed"), [(1, 128, 5), (4, 2, 2), (4, 3, 2), (5, 9, 1), (6, 9, 1)])
def test_generation_ends_with_the_context(length, asked, allowed):
    (request,) = reader.read([1] * length, SamplingParams(max_tokens=asked))
    assert request.max_tokens == allowed
    assert request.cached_tokens <= 6


def test_stop_tokens_and_end_of_text():
    first, second = reader.read(
        [[1], [1]], [SamplingParams(stop_token_ids=[7]), SamplingParams(stop_token_ids=[7], ignore_eos=True)]
    )
    assert first.stop_ids == {0, 7}
    assert second.stop_ids == {7}


def test_one_sampling_parameter_for_all_or_one_for_each():
    with pytest.raises(ValueError, match="3 sampling parameters for 2 prompts"):
        reader.read([[1], [2]], [SamplingParams()] * 3)
    requests = reader.read([[1], [2]], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)])
    assert [r.max_tokens for r in requests] == [1, 2]


@pytest.mark.parametrize(
    "params", [{"max_tokens": 3}, [{"max_tokens": 3}], 3, "a", [None], iter([SamplingParams()]), {SamplingParams()}]
)
def test_what_is_no_sampling_params_is_refused(params):
    with pytest.raises(ValueError, match=r"^sampling_params must be SamplingParams or a list .*SamplingParams\(max_"):
        reader.read([[1]], params)


def test_fingerprint_tells_prompts_parameters_and_boundaries_apart():
    def mark(prompts, **params):
        return fingerprint(bare.read(prompts, SamplingParams(**params)))

    marks = [
        mark([[1, 2], [3]]),
        mark([[1], [2, 3]]),
        mark([[1, 2, 3]]),
        mark([[1, 2], [3]], seed=1),
        mark([[1, 2], [3]], temperature=1.0),
        mark([]),
    ]
    assert len(set(marks)) == len(marks)
    assert marks[0] == mark([[1, 2], [3]])
