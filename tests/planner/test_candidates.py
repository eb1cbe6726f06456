from __future__ import annotations

import pytest

from megatron_dcp.config import check_within_tp_bound
from megatron_dcp.planner import MODELS, Pins, candidates
from megatron_dcp.rank_groups import group_ranks

LLAMA, DEEPSEEK = MODELS["llama-3-70b"], MODELS["deepseek-v3"]


def names(model: str, gpus: int, **pins: object) -> list[str]:
    return [one.name for one in candidates(MODELS[model], gpus, Pins(**pins))]  # type: ignore[arg-type]


def test_all_of_two_gpus() -> None:
    assert names("llama-3-70b", 2) == ["tp 1, dp 2", "tp 1 x dcp 2 (orthogonal)", "tp 1, pp 2", "tp 2"]
    # one KV head fewer than ranks, and 61 layers that no two stages can share
    assert names("deepseek-v3", 2, ep=1, expert_tp=1) == [
        "tp 1, dp 2", "tp 1 x dcp 2 (orthogonal)", "tp 2", "tp 2 x dcp 2 (within_tp)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "gpus"), [("llama-3-70b", 16), ("deepseek-v3", 8), ("gpt-oss-120b", 8), ("gemma-3-27b", 8)]
)
def test_every_one_passes_the_rules_that_a_run_has(model: str, gpus: int) -> None:
    shape, found = MODELS[model], candidates(MODELS[model], gpus, Pins())
    assert len(set(found)) == len(found) > 10
    for one in found:
        assert one.gpus == gpus
        check_within_tp_bound(one.parallel, shape.cached_kv_heads)
        parallel = one.parallel
        table = group_ranks(
            gpus, tp=one.tp, pp=one.pp, dcp=one.dcp, layout=one.layout,
            ep=parallel.expert_model_parallel_size, expert_tp=parallel.expert_tp,
        )  # fmt: skip
        assert len(table["replica"]) == one.dp
        assert len(table["tp_dcp"][0]) == one.layer_ranks
        if shape.moe is not None:
            shared = parallel.expert_model_parallel_size * parallel.expert_tp
            # Megatron numbers the ranks that share experts one after the other.
            sharing = [set(range(first, first + shared)) for first in range(0, gpus, shared)]
            assert all(any(ranks <= set(group) for group in table["tp_dcp"]) for ranks in sharing)
    for layout in ("orthogonal", "within_tp"):
        listed = {(one.tp, one.dcp) for one in found if one.layout == layout and one.dcp > 1}
        assert listed or (layout == "within_tp" and shape.cached_kv_heads >= gpus)


def test_nothing_legal_is_left_out() -> None:
    """By brute force over all sizes up to 8 of a dense model."""
    found = {(one.tp, one.pp, one.dcp, one.layout, one.dp) for one in candidates(LLAMA, 8, Pins())}
    wanted = {
        (tp, pp, dcp, "orthogonal", 8 // (tp * pp * dcp))
        for tp in (1, 2, 4, 8)
        for pp in (1, 2, 4, 8)
        for dcp in (1, 2, 4, 8)
        if 8 % (tp * pp * dcp) == 0
    }
    assert found == wanted  # its 8 KV heads leave nothing to within_tp


def test_pinned_sizes() -> None:
    found = candidates(DEEPSEEK, 16, Pins(tp=8, dcp=8, layout="within_tp", kv_cache_dtypes=("auto", "int8")))
    assert {(one.tp, one.dcp, one.layout, one.dp) for one in found} == {(8, 8, "within_tp", 2)}
    assert {one.kv_cache_dtype for one in found} == {"auto", "int8"}
    assert all(one.exchange == "a2a" for one in found)
    assert all(one.layout == "orthogonal" for one in candidates(DEEPSEEK, 8, Pins(exchange="fold")) if one.dcp > 1)


@pytest.mark.parametrize(
    ("model", "gpus", "pins", "message"),
    [
        ("llama-3-70b", 8, dict(tp=3), "tensor_model_parallel_size=3 does not fit.*use one of 1, 2, 4, 8"),
        ("llama-3-70b", 8, dict(pp=7), "pipeline_model_parallel_size=7 does not divide num_layers=80"),
        ("llama-3-70b", 8, dict(tp=8, dcp=2, layout="within_tp"), "1 copy of each of the 8 KV heads; use one of 1"),
        ("llama-3-70b", 8, dict(tp=8, dcp=2), "decode_context_parallel_size=2 does not divide the 1 ranks"),
        ("llama-3-70b", 12, dict(tp=8), "world_size=12 is no multiple of 8"),
        ("deepseek-v3", 8, dict(ep=7), "expert_model_parallel_size=7 does not divide num_experts=256"),
        ("gpt-oss-120b", 8, dict(expert_tp=2), "size=2 is not supported for experts with biases"),
        ("deepseek-v3", 8, dict(tp=2, dcp=1, ep=8), "no legal.* 8 GPUs has tp=2, dcp=1, ep=8 .ranks that share"),
        ("llama-3-70b", 0, {}, "gpus=0 must be a whole number >= 1"),
        ("llama-3-70b", 2**31 - 1, {}, "gpus=2147483647 is above 4096"),
    ],
)  # fmt: skip
def test_impossible_sizes_name_the_rule(model: str, gpus: int, pins: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        candidates(MODELS[model], gpus, Pins(**pins))  # type: ignore[arg-type]


def test_bad_pins() -> None:
    with pytest.raises(ValueError, match="kv_interleave_size=3 does not divide block_size=64"):
        Pins(interleave=3)
    with pytest.raises(ValueError, match="exchange='fold'"):
        Pins(exchange="fold", layout="within_tp")
    with pytest.raises(ValueError, match="dcp=0 must be a whole number >= 1"):
        Pins(dcp=0)
