"""The merge against fp64 softmax attention over all keys at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_dcp.merge import add_sink, merge_into, merge_partials, merge_weights, weigh


def attend(scores_STN: Tensor, v_SNH: Tensor) -> tuple[Tensor, Tensor]:
    """Attention and LSE in the dtype given; no keys: 0 and -inf."""
    if not len(scores_STN):
        return v_SNH.new_zeros(*scores_STN.shape[1:], v_SNH.shape[-1]), scores_STN.new_full(
            scores_STN.shape[1:], -torch.inf
        )
    return torch.einsum("stn,snh->tnh", scores_STN.softmax(0), v_SNH), scores_STN.logsumexp(0)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=9),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)),
    spread=st.sampled_from([0.1, 5.0, 100.0]),
    offset=st.sampled_from([0.0, -1e4, 1e4]),
    seed=st.integers(0, 2**31),
)
def test_merge_of_shards_is_attention_over_all_keys(
    lengths: list[int], shape: tuple[int, int, int], spread: float, offset: float, seed: int
) -> None:
    T, N, H = shape
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(sum(lengths), T, N, dtype=torch.float64, generator=generator) * spread + offset
    v = torch.randn(sum(lengths), N, H, dtype=torch.float64, generator=generator)
    shards = zip(scores.split(lengths), v.split(lengths), strict=True)
    outs, lses = zip(*(attend(*shard) for shard in shards), strict=True)
    out, lse = merge_partials(torch.stack(outs), torch.stack(lses))
    one_out, one_lse = outs[0].clone(), lses[0].clone()
    for other in zip(outs[1:], lses[1:], strict=True):
        merge_into(one_out, one_lse, *other)
    expected_out, expected_lse = attend(scores, v)
    torch.testing.assert_close(one_out, expected_out, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(one_lse, expected_lse, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(out, expected_out, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-9)
    # fp32: held to the fp64 merge of the same fp32 numbers, since an LSE near 1e4 has itself an error of 5e-4.
    out32, lse32 = torch.stack(outs).float(), torch.stack(lses).float()
    merged32, merged_lse32 = merge_partials(out32, lse32)
    assert merged32.dtype == merged_lse32.dtype == torch.float32
    exact, exact_lse = merge_partials(out32.double(), lse32.double())
    torch.testing.assert_close(merged32.double(), exact, rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(merged_lse32.double(), exact_lse, rtol=2e-7, atol=2e-6)


@pytest.mark.parametrize("counts", [0, 1, 2])
def test_a_sink_in_one_of_the_partials_is_one_more_key_without_a_value(counts: int) -> None:
    """Also in an empty one, of which there are two here."""
    generator = torch.Generator().manual_seed(counts)
    lengths, (T, N, H) = [3, 0, 2, 0], (2, 3, 4)
    scores = torch.randn(sum(lengths), T, N, dtype=torch.float64, generator=generator) * 3
    v = torch.randn(sum(lengths), N, H, dtype=torch.float64, generator=generator)
    sink = torch.randn(N, dtype=torch.float64, generator=generator) * 3
    shards = zip(scores.split(lengths), v.split(lengths), strict=True)
    outs, lses = map(torch.stack, zip(*(attend(*shard) for shard in shards), strict=True))
    outs, lses = outs.float(), lses.float()
    add_sink(outs[counts], lses[counts], sink)
    out, lse = merge_partials(outs, lses)
    all_scores, all_v = torch.cat((scores, sink.expand(1, T, N))), torch.cat((v, torch.zeros(1, N, H)))
    expected_out, expected_lse = attend(all_scores, all_v)
    torch.testing.assert_close(out.double(), expected_out, rtol=3e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=3e-6, atol=1e-6)


def test_lse_is_natural_log() -> None:
    out, lse = merge_partials(torch.tensor([1.0, 5.0]).view(2, 1, 1, 1), torch.tensor([0.0, 3.0]).log().view(2, 1, 1))
    assert out.item() == 5.0 and lse.item() == pytest.approx(1.0986123)
    out, lse = merge_partials(torch.tensor([1.0, 5.0]).view(2, 1, 1, 1), torch.tensor([1.0, 3.0]).log().view(2, 1, 1))
    assert out.item() == 4.0 and lse.item() == pytest.approx(1.3862944)


def test_all_shards_empty() -> None:
    out, lse = merge_partials(torch.full((3, 2, 1, 4), torch.nan), torch.full((3, 2, 1), -torch.inf))
    assert torch.equal(out, torch.zeros(2, 1, 4)) and torch.equal(lse, torch.full((2, 1), -torch.inf))


def test_what_a_weightless_partial_holds_does_not_matter() -> None:
    out_PTNH = torch.randn(4, 2, 3, 5)
    lse_PTN = torch.randn(4, 2, 3)
    lse_PTN[1], lse_PTN[3, 0] = -torch.inf, -torch.inf
    lse_PTN[2, 1] = -500.0  # its weight underflows to 0
    clean, _ = merge_partials(out_PTNH, lse_PTN)
    for rubbish in (torch.nan, torch.inf, -torch.inf):
        dirty = out_PTNH.clone()
        dirty[1], dirty[3, 0], dirty[2, 1] = rubbish, rubbish, rubbish
        merged, _ = merge_partials(dirty, lse_PTN)
        assert torch.equal(merged, clean) and merged.isfinite().all()


def test_weights_sum_to_one_or_are_all_zero() -> None:
    lse_PTN = torch.tensor([[1e4, -torch.inf, -1e4], [1e4 - 1, -torch.inf, -torch.inf]]).view(2, 3, 1)
    weight_PTN, lse_TN = merge_weights(lse_PTN)
    assert weight_PTN.sum(0).flatten().tolist() == [1.0, 0.0, 1.0]
    assert weight_PTN[:, 0, 0].tolist() == pytest.approx([0.7310586, 0.2689414])
    assert lse_TN.flatten()[1:].tolist() == [-torch.inf, -1e4]


def test_one_token_has_the_same_bits_alone_and_in_a_batch() -> None:
    """A sum whose order depends on the shape would make a token depend on what it is batched with."""
    out_PTNH = torch.randn(16, 64, 8, 32)
    lse_PTN = torch.randn(16, 64, 8) * 3
    out, lse = merge_partials(out_PTNH, lse_PTN)
    for t in range(0, 64, 7):
        for n in (0, 5):
            out_1, lse_1 = merge_partials(out_PTNH[:, t : t + 1, n : n + 1], lse_PTN[:, t : t + 1, n : n + 1])
            assert torch.equal(out_1, out[t : t + 1, n : n + 1]) and torch.equal(lse_1, lse[t : t + 1, n : n + 1])


def test_partials_are_added_in_their_order() -> None:
    out_PTNH = torch.tensor([1.0, 1e8, -1e8]).view(3, 1, 1, 1)
    lse_PTN = torch.zeros(3, 1, 1)
    forward, _ = merge_partials(out_PTNH, lse_PTN)
    backward, _ = merge_partials(out_PTNH.flip(0), lse_PTN)
    assert (forward.item(), backward.item()) == (0.0, pytest.approx(1 / 3))


def test_inputs_are_left_as_they_are() -> None:
    out_PTNH, lse_PTN = torch.randn(2, 3, 2, 4), torch.randn(2, 3, 2)
    before = out_PTNH.clone(), lse_PTN.clone()
    merge_partials(out_PTNH, lse_PTN)
    weigh(out_PTNH[0], torch.zeros(3, 2))
    assert torch.equal(out_PTNH, before[0]) and torch.equal(lse_PTN, before[1])
