"""A good checkpoint passes however it is run, and what is wrong on one side is found and named."""

from __future__ import annotations

import dataclasses
import random
from argparse import Namespace

import pytest
from megatron_models import random_state, sharded_model, tiny_config

from megatron_dcp import CacheConfig, EngineConfig, parallel_state, verify
from models import tiny_model
from workers import run_on_ranks

pytestmark = pytest.mark.mcore_line

PROMPT = [random.Random(3).randrange(90) + i % 5 for i in range(30)]
TEXT = dict(prompt=PROMPT, max_new_tokens=8, decode_tokens=15)
SMALL = dict(cache=CacheConfig(block_size=4), engine=EngineConfig(prefill_chunk_size=16))


def sizes(tp=1, dcp=1, layout="orthogonal", pp=1, ep=1):
    return dict(
        tensor_model_parallel_size=tp,
        decode_context_parallel_size=dcp,
        dcp_layout=layout,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,
    )


def good_case(rank, world, cases):
    """Reports of checkpoints that nothing is wrong with."""
    reports = []
    for path, hf, given, dtype, more in cases:
        reports.append(verify(path, hf=hf, dtype=dtype, **TEXT, **{**SMALL, **given, **more}))
        parallel_state.destroy_model_parallel()
    return reports


@pytest.mark.parametrize(
    "world,cases",
    [
        (1, [("llama", {}, {}), ("deepseek_v2", {}, {}), ("llama bf16", {}, {})]),
        (
            2,
            [
                ("llama", dict(dcp=2), dict(cache=CacheConfig(block_size=4, kv_interleave_size=2))),
                ("llama", dict(dcp=2), dict(engine=EngineConfig(prefill="pass_q", exchange="a2a"))),
                ("one kv head", dict(tp=2, dcp=2, layout="within_tp"), {}),
                ("llama", dict(pp=2), {}),
                ("mixtral", dict(tp=2, ep=2), {}),
                ("mixtral bf16", dict(dcp=2), {}),
                ("gemma3_text", dict(dcp=2), {}),
                ("deepseek_v2", dict(tp=2, dcp=2, layout="within_tp"), {}),
            ],
        ),
        (3, [("llama", dict(dcp=3), {}), ("deepseek_v2 bf16", dict(dcp=3), {}), ("mistral", dict(dcp=3), {})]),
        (4, [("llama", dict(tp=2, dcp=2), {}), ("deepseek_v2", dict(dcp=2, pp=2), {}), ("mixtral", dict(tp=4), {})]),
    ],
    ids=["1", "2", "3", "4"],
)
def test_a_good_checkpoint_passes(world, cases):
    models = {
        "llama": tiny_model("llama", layers=4),
        "one kv head": tiny_model("llama", kv_heads=1),
        "mixtral": tiny_model("mixtral", kv_heads=4),
        "mistral": tiny_model("mistral"),
        "gemma3_text": tiny_model("gemma3_text", layers=4),
        "deepseek_v2": tiny_model("deepseek_v2", layers=4),
    }
    calls = []
    for name, given, more in cases:
        path, dtype = str(models[name.removesuffix(" bf16")]), "bfloat16" if name.endswith("bf16") else "float32"
        calls.append((path, path, sizes(**given), dtype, more))
    for reports in zip(*run_on_ranks(world, good_case, calls, timeout=300), strict=True):
        assert all(report.to_dict() == reports[0].to_dict() for report in reports), "every rank has the same report"
        first = reports[0]
        assert first.passed, str(first)
        assert [each.name for each in first.comparisons] == ["hf", "prefill", "decode", "generate"]
        assert first["prefill"].positions == first["hf"].positions == tuple(range(37))
        assert first["decode"].positions == tuple(range(22, 37))
        assert first["generate"].positions == tuple(range(29, 37))
        for each in first.comparisons:
            assert each.first_layer is None, str(first)
            assert each.name == "generate" or len(each.layers) in (3, 5), "the embedding and every layer"
        if "float32" in first.settings["text"]:
            assert max(each.max_logprob_diff for each in first.comparisons) < 1e-4
            assert not any(each.different_argmax for each in first.comparisons)
            assert 0 < first["prefill"].max_logit_share < 1e-5


CONFIG = tiny_config(num_layers=4)


def fault_case(rank, world, given, fault):
    """The report of a trainer and a generator of which one has the fault."""
    parallel_state.initialize_model_parallel(**given)
    state = random_state(CONFIG)
    reference, config = sharded_model(CONFIG, state), CONFIG
    if fault == "weight":
        name = "decoder.layers.2.mlp.linear_fc2.weight"
        state = {**state, name: state[name].clone()}
        state[name][5, 7] += 0.5
    elif fault == "rope":
        config = dataclasses.replace(CONFIG, rotary_base=10500.0)
    elif fault == "output":
        state = {**state, "output_layer.weight": state["output_layer.weight"] * 1.01}
    model = sharded_model(config, state)
    with pytest.MonkeyPatch.context() as patch:
        if fault == "cache":  # a decoded token's key gets lost
            from megatron_dcp.layers.context import DCPContext

            write = DCPContext.write

            def wrong(self, layer_number, k_TKH, v_TKH=None):
                if layer_number != 2 or len(k_TKH) > 1:
                    write(self, layer_number, k_TKH, v_TKH)

            patch.setattr(DCPContext, "write", wrong)
        return verify(model, reference=reference, vocab_size=100, **TEXT, **SMALL)


@pytest.mark.parametrize(
    "given,fault,layers",
    [
        (dict(), "weight", (2, 2)),
        (sizes(tp=2, dcp=2), "weight", (2, 2)),
        (sizes(pp=2, dcp=2), "weight", (2, 2)),
        (sizes(dcp=2), "rope", (0, 0)),
        (sizes(dcp=2), "cache", (None, 1)),
        (sizes(tp=2), "output", (None, None)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_of_the_generator_is_found_and_its_layer_named(given, fault, layers):
    world = given.get("tensor_model_parallel_size", 1) * given.get("decode_context_parallel_size", 1)
    for report in run_on_ranks(world * given.get("pipeline_model_parallel_size", 1), fault_case, given, fault):
        assert not report.passed, str(report)
        assert (report["prefill"].first_layer, report["decode"].first_layer) == layers, str(report)
        assert report["generate"].max_logprob_diff > report.max_logprob_diff or fault in ("rope", "weight")
        where = "prefill" if layers[0] is not None or fault == "output" else "decode"
        assert f"FAIL  {where}" in str(report)


def same_model_case(rank, world):
    """A clean model against itself, live and as an ``LLM``; and what does not fit."""
    from megatron_dcp import LLM

    parallel_state.initialize_model_parallel(decode_context_parallel_size=world)
    model = sharded_model(CONFIG, random_state(CONFIG)).train()
    llm = LLM(model, vocab_size=100, cache=CacheConfig(block_size=4))
    by_llm, live = verify(llm, **TEXT), verify(model, vocab_size=100, **TEXT)
    assert model.training and all(module.training for module in model.modules())
    assert by_llm.passed and live.passed and live.settings["model"] == "a live model"
    assert all(not layer._forward_hooks for layer in model.decoder.layers)
    other = sharded_model(tiny_config(), random_state(tiny_config()))
    for given, message in [
        (dict(reference=other), "the reference model has num_layers 2, but 4 is verified"),
        (dict(prompt=[]), "the prompt is empty"),
        (dict(prompt=[100]), "token id 100"),
        (dict(prompt=[1] * 600), "has 600 tokens, but the model's context is 512"),
        (dict(max_new_tokens=0), "max_new_tokens=0 must be a whole number >= 1"),
        (dict(decode_tokens=True), "decode_tokens=True must be"),
        (dict(max_logprob_diff=-1.0), r"max_logprob_diff=-1.0 must be a number >= 0"),
        (dict(dtype="float32"), "dtype cannot be given: an LLM has its own settings"),
        (dict(hf="/nowhere"), "'/nowhere' is no directory"),
        (dict(max_new_tokens=3 + rank), "verify's arguments .max_new_tokens. must be the same on ranks"),
    ]:
        with pytest.raises(ValueError, match=message):
            verify(llm, **{**TEXT, **given})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("psutil.virtual_memory", lambda: Namespace(available=10**4))
        with pytest.raises(ValueError, match="training forward of 37 tokens takes about 0.0 GiB on this rank"):
            verify(llm, **TEXT)
    return by_llm.max_logprob_diff, verify(llm, prompt=[1], max_new_tokens=1, max_logprob_diff=0.5)


def test_live_models_and_what_does_not_fit():
    for allowed, shortest in run_on_ranks(2, same_model_case):
        assert allowed == 1e-4
        assert shortest.passed and shortest.max_logprob_diff == shortest.mean_logprob_diff == 0.5
        assert [len(each.positions) for each in shortest.comparisons] == [1, 1, 1]
