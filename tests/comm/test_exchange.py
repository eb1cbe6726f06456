"""Every exchange on 1 to 8 ranks against fp64 attention over all keys; its bits, its traffic, and a rank that is lost.

Shapes: ``P`` ranks, ``S`` keys per rank, ``T`` tokens, ``N`` heads, ``H`` head dim.
"""

import hashlib
import os
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from megatron_dcp.comm.collectives import CollectiveError
from megatron_dcp.comm.exchange import all_reduce_sum, gather_heads, get_exchange
from megatron_dcp.merge import merge_partials
from megatron_dcp.metrics import Metrics
from megatron_dcp.traffic import expected_traffic, head_slice
from workers import WorkerDied, run_on_ranks

NAMES = ["fold", "all_reduce", "ag_rs", "a2a"]


@dataclass(frozen=True)
class Case:
    T: int
    N: int
    H: int
    keys: str = "some"  # "some": 0 to 5 per rank and token; "last": only on the last rank; "none"
    offset: float = 0.0  # of all logits
    spread: float = 4.0
    strided: bool = False


CASES = [
    Case(1, 8, 4),
    Case(1, 1, 1),
    Case(1, 2, 3, keys="last"),
    Case(1, 5, 8, keys="none"),
    Case(3, 4, 16, strided=True),
    Case(7, 3, 8, keys="last", strided=True),
    Case(5, 7, 2, spread=60.0),
    Case(2, 6, 64, offset=1e4),
    Case(2, 9, 5, offset=-1e4, strided=True),
    Case(4, 32, 8, spread=1e4),
    Case(9, 12, 4, keys="none"),
    Case(33, 16, 32),
]


@dataclass(frozen=True)
class Partials:
    out_PTNH: Tensor  # fp32; NaN where no key is seen
    lse_PTN: Tensor
    full_TNH: Tensor  # fp64


def make_partials(case: Case, ranks: int, seed: int) -> Partials:
    """The same on every rank. Each token sees its own number of each rank's keys, as in a prefill."""
    generator = torch.Generator().manual_seed(seed)
    S, T, N, H = 5, case.T, case.N, case.H
    scores_PSTN = torch.randn(ranks, S, T, N, dtype=torch.float64, generator=generator) * case.spread + case.offset
    v_PSNH = torch.randn(ranks, S, N, H, dtype=torch.float64, generator=generator)
    visible_PT = torch.randint(0, S + 1, (ranks, T), generator=generator)
    if case.keys == "last":
        visible_PT[:-1], visible_PT[-1] = 0, S
    elif case.keys == "none":
        visible_PT[:] = 0
    hidden_PST = torch.arange(S).view(1, S, 1) >= visible_PT.unsqueeze(1)
    scores_PSTN.masked_fill_(hidden_PST.unsqueeze(-1), -torch.inf)
    out_PTNH = torch.einsum("pstn,psnh->ptnh", scores_PSTN.softmax(1), v_PSNH)
    full_TNH = torch.einsum("stn,snh->tnh", scores_PSTN.flatten(0, 1).softmax(0).nan_to_num(0.0), v_PSNH.flatten(0, 1))
    return Partials(out_PTNH.float(), scores_PSTN.logsumexp(1).float(), full_TNH)


def strided(x: Tensor) -> Tensor:
    """The same values with the dimensions in another order in memory, and gaps."""
    reordered = x.new_full([2 * size for size in reversed(x.shape)], torch.nan)
    view = reordered[tuple(slice(None, None, 2) for _ in x.shape)].permute(*reversed(range(x.dim())))
    view.copy_(x)
    assert not view.is_contiguous() or x.numel() <= 1
    return view


def bits(x: Tensor) -> str:
    return hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()


def check_case(case: Case, name: str, seed: int, group: distributed.ProcessGroup) -> None:
    ranks, rank = group.size(), group.rank()
    partials = make_partials(case, ranks, seed)
    out, lse = partials.out_PTNH[rank], partials.lse_PTN[rank]
    if case.strided:
        out, lse = strided(out), strided(lse)
    before = bits(out), bits(lse)
    metrics = Metrics()
    merged = get_exchange(name)(out, lse, group, metrics=metrics)
    assert metrics.collectives == expected_traffic(name, case.T, case.N, case.H, ranks, rank)
    assert (bits(out), bits(lse)) == before, "the input was changed"

    own = (0, case.N) if name in ("fold", "all_reduce") else head_slice(case.N, ranks, rank)
    assert (merged.first_head, merged.num_heads) == own
    assert merged.out_TnH.shape == (case.T, own[1], case.H) and merged.out_TnH.dtype == torch.float32
    assert merged.out_TnH.isfinite().all()
    assert merged.summed == (name != "fold" or ranks == 1)
    result = merged.out_TnH if merged.summed else all_reduce_sum(merged.out_TnH.clone(), group)
    heads = slice(own[0], own[0] + own[1])

    # fp32 partials merged in fp64 are what the exchange must give; its own arithmetic is worth a few roundings ...
    out_PTNH, lse_PTN = partials.out_PTNH, partials.lse_PTN
    exact_TNH, _ = merge_partials(out_PTNH.double(), lse_PTN.double())
    torch.testing.assert_close(result.double(), exact_TNH[:, heads], rtol=2e-6, atol=2e-6)
    # ... and so are the fp32 LSEs that it gets, the larger the logits (1e4 has steps of 1e-3).
    largest = lse_PTN.abs().masked_fill(lse_PTN.isinf(), 0.0).max().item()
    tolerance = 2e-6 + 2.0**-22 * largest
    torch.testing.assert_close(result.double(), partials.full_TNH[:, heads], rtol=tolerance, atol=tolerance)

    if name == "a2a" and ranks > 1:
        in_rank_order, _ = merge_partials(out_PTNH, lse_PTN)
        assert torch.equal(result, in_rank_order[:, heads])
    if name in ("fold", "all_reduce"):
        hashes: list[Any] = [None] * ranks
        distributed.all_gather_object(hashes, bits(result), group=group)
        assert len(set(hashes)) == 1, "ranks hold different bits"


def check_all_cases(rank: int, world: int) -> None:
    group = distributed.group.WORLD
    assert group is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed, case in enumerate(CASES):
            for name in NAMES:
                try:
                    check_case(case, name, seed, group)
                except Exception as error:
                    error.add_note(f"{name}, {case}")
                    raise


@pytest.mark.parametrize("world", range(1, 9))
def test_exchange_is_attention_over_all_keys(world: int) -> None:
    run_on_ranks(world, check_all_cases)


def test_order_of_ranks_changes_bits() -> None:
    """Else the comparison of bits with the merge in rank order above would show nothing."""
    partials = make_partials(Case(33, 16, 32), 3, 0)
    forward, _ = merge_partials(partials.out_PTNH, partials.lse_PTN)
    backward, _ = merge_partials(partials.out_PTNH.flip(0), partials.lse_PTN.flip(0))
    assert not torch.equal(forward, backward)


def check_in_subgroups(rank: int, world: int) -> None:
    groups = [distributed.new_group([0, 2, 4]), distributed.new_group([1, 3])]
    for name in NAMES:
        check_case(Case(3, 7, 4), name, 11, groups[rank % 2])


def test_ranks_of_a_group_are_counted_inside_it() -> None:
    run_on_ranks(5, check_in_subgroups)


def run_in_bf16(rank: int, world: int, name: str) -> tuple[Tensor, bool]:
    partials = make_partials(Case(3, 4, 8), world, 5)
    group = distributed.group.WORLD
    assert group is not None
    merged = get_exchange(name)(partials.out_PTNH[rank].bfloat16(), partials.lse_PTN[rank], group)
    return merged.out_TnH, merged.summed


@pytest.mark.parametrize("name", NAMES)
def test_partials_in_bf16_are_merged_in_fp32(name: str) -> None:
    results = run_on_ranks(2, run_in_bf16, name)
    partials = make_partials(Case(3, 4, 8), 2, 5)
    expected, _ = merge_partials(partials.out_PTNH.bfloat16().float(), partials.lse_PTN)
    outs = [out for out, _ in results]
    if not results[0][1]:
        merged = outs[0] + outs[1]
    else:
        merged = outs[0] if name == "all_reduce" else torch.cat(outs, dim=1)
    torch.testing.assert_close(merged, expected, rtol=2e-6, atol=2e-6)


class Alone:
    """A group of one rank that fails whatever it is asked beyond that."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize("name", NAMES)
def test_group_of_one_issues_no_collective(name: str) -> None:
    out, lse = torch.randn(3, 2, 4), torch.randn(3, 2)
    out[1], lse[1] = torch.nan, -torch.inf
    metrics = Metrics()
    group: Any = Alone()
    merged = get_exchange(name)(out, lse, group, metrics=metrics)
    assert torch.equal(merged.out_TnH, out.nan_to_num(0.0)) and (merged.first_head, merged.num_heads) == (0, 2)
    assert torch.equal(all_reduce_sum(out, group, metrics=metrics).nan_to_num(7.0), out.nan_to_num(7.0))
    assert gather_heads(lse, group, metrics=metrics) is lse
    assert metrics.snapshot() == Metrics().snapshot()


def test_traffic_of_one_layer_and_token() -> None:
    """By hand: 32 heads of 128, fp32, one token."""
    assert expected_traffic("fold", 1, 32, 128, 4) == {"all_gather": (1, 3 * 128)}
    assert expected_traffic("all_reduce", 1, 32, 128, 4) == {"all_reduce": (2, 192 + 24768)}
    assert expected_traffic("ag_rs", 1, 32, 128, 4) == {"all_gather": (1, 384), "reduce_scatter": (1, 3 * 8 * 512)}
    assert expected_traffic("a2a", 1, 32, 128, 4) == {"all_to_all": (1, 24 * 516)}
    # 3 ranks, 4 heads: 2, 2 and 0 of them. ag_rs pads to 6, a2a sends what there is.
    assert expected_traffic("ag_rs", 1, 4, 8, 3)["reduce_scatter"] == (1, 2 * 2 * 32)
    assert [expected_traffic("a2a", 1, 4, 8, 3, rank)["all_to_all"] for rank in range(3)] == [
        (1, 72),
        (1, 72),
        (1, 144),
    ]
    for name in NAMES:
        assert expected_traffic(name, 9, 32, 128, 1) == {}
        once, often = expected_traffic(name, 1, 32, 128, 4), expected_traffic(name, 10, 32, 128, 4)
        assert often == {op: (calls, 10 * sent) for op, (calls, sent) in once.items()}


@pytest.mark.parametrize("ranks", range(1, 10))
@pytest.mark.parametrize("heads", [1, 2, 3, 7, 8, 12, 96])
def test_head_slices_cover_all_heads_once_in_order(heads: int, ranks: int) -> None:
    slices = [head_slice(heads, ranks, rank) for rank in range(ranks)]
    assert [head for first, count in slices for head in range(first, first + count)] == list(range(heads))
    assert max(count for _, count in slices) == -(-heads // ranks)


def test_unknown_exchange_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="exchange='a2b' is not known; use one of fold, all_reduce, ag_rs, a2a"):
        get_exchange("a2b")


def gather_and_sum(rank: int, world: int) -> tuple[Tensor, Tensor, dict[str, tuple[int, int]]]:
    group = distributed.new_group(group_desc="heads")
    metrics = Metrics()
    q_TnH = torch.full((2, 3, 4), float(rank), dtype=torch.bfloat16)
    gathered = gather_heads(strided(q_TnH), group, metrics=metrics)
    summed = all_reduce_sum(strided(torch.full((5, 3), 2.0**rank)), group, metrics=metrics)
    assert all(labels == "heads" for _, labels in metrics.snapshot()["collectives"])
    return gathered, summed, metrics.collectives


def test_gather_heads_and_all_reduce_sum() -> None:
    for gathered, summed, collectives in run_on_ranks(3, gather_and_sum):
        assert gathered.dtype == torch.bfloat16 and gathered.shape == (2, 9, 4)
        assert gathered[:, :, 0].tolist() == [[0.0] * 3 + [1.0] * 3 + [2.0] * 3] * 2
        assert torch.equal(summed, torch.full((5, 3), 7.0))
        assert collectives == {"all_gather": (1, 2 * 2 * 3 * 4 * 2), "all_reduce": (1, 2 * 2 * 60 // 3)}


def loses_rank_1(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(1)
    check_case(Case(1, 4, 4), "a2a", 0, distributed.group.WORLD)


def test_lost_rank_is_one_clear_error_on_the_others() -> None:
    results = run_on_ranks(3, loses_rank_1, expect_errors=True)
    assert isinstance(results[1], WorkerDied)
    for rank in (0, 2):
        assert isinstance(results[rank], CollectiveError)
        others = [other for other in range(3) if other != rank]
        for part in (f"all_to_all over ranks [0, 1, 2] failed on rank {rank}", f"logs of ranks {others}"):
            assert part in str(results[rank])


def waits_for_rank_1(rank: int, world: int, name: str) -> None:
    group = distributed.new_group(timeout=timedelta(seconds=1))
    if rank == 1:
        distributed.barrier()  # keeps its connections open, takes no part in the exchange
        return
    try:
        get_exchange(name)(torch.ones(1, 2, 2), torch.ones(1, 2), group)
    except CollectiveError as error:
        assert error.__cause__ is not None
        raise
    finally:
        distributed.barrier()


@pytest.mark.parametrize("name", NAMES)
def test_rank_that_does_not_come_is_an_error_within_the_time_limit(name: str) -> None:
    first, second = run_on_ranks(2, waits_for_rank_1, name, expect_errors=True)
    assert isinstance(first, CollectiveError) and second is None
