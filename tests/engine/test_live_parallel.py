"""A live model at the trainer's own tp and pp: its very weights, and its very log-probabilities."""

from __future__ import annotations

import pytest
import torch
from megatron_models import moe_config, random_state, sharded_model, tiny_config

from megatron_dcp import LLM, CacheConfig, EngineConfig, SamplingParams, parallel_state
from megatron_dcp.model_config import MLAConfig
from workers import run_on_ranks

pytestmark = pytest.mark.mcore_line

MLA = MLAConfig(q_lora_rank=24, kv_lora_rank=28, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12)
MODELS = {
    "gqa": tiny_config(num_layers=4, add_qkv_bias=True),
    "mla": tiny_config(num_layers=4, mla=MLA, num_query_groups=4),
    "experts": moe_config("qwen"),
}
PROMPTS = [[3, 14, 15, 92, 65, 35], [89], [i % 90 for i in range(23)]]


def live_case(rank, world, sizes, kind, dtype):
    """Largest difference of the sampled tokens' log-probabilities from the trainer's, and how far rounding moves it.

    Over prompts and two steps of training: ``[(sampler, rounding), …]``, where this rank has the trainer's logits.
    """
    from megatron.core import parallel_state as mpu

    from megatron_dcp.layers.forward import rounding_noise, training_forward

    tp, pp = sizes.get("tp", 1), sizes.get("pp", 1)
    mpu.initialize_model_parallel(tp, pp)  # what the trainer does; everything else is attached to it
    parallel_state.initialize_model_parallel(
        decode_context_parallel_size=sizes.get("dcp", 1), dcp_layout=sizes.get("layout", "orthogonal")
    )
    config = MODELS[kind]
    model = sharded_model(config, random_state(config), dtype=getattr(torch, dtype)).train()
    storage = {
        name: tensor.data_ptr() for name, tensor in model.state_dict(keep_vars=True).items() if tensor is not None
    }
    llm = LLM(
        model,
        vocab_size=config.vocab_size,
        cache=CacheConfig(block_size=4),
        engine=EngineConfig(prefill_chunk_size=16),
    )
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=5, logprobs=True, ignore_eos=True)
    found = []
    for _ in range(2):
        outputs = llm.generate(PROMPTS, params)
        model.eval()
        for output in outputs:
            first, text = len(output.prompt_token_ids) - 1, output.prompt_token_ids + output.token_ids
            logits = training_forward(model, text[:-1], llm.groups)
            with rounding_noise(model, 0):
                moved = training_forward(model, text[:-1], llm.groups)
            if logits is not None:
                wanted, disturbed = (
                    each[first:, : config.vocab_size].log_softmax(-1)[range(len(output.token_ids)), output.token_ids]
                    for each in (logits, moved)
                )
                sampler = (torch.tensor(output.logprobs) - wanted).abs().max()
                found.append((float(sampler), float((disturbed - wanted).abs().max())))
        model.train()
        with torch.no_grad():
            for parameter in model.parameters():  # an update that all ranks make alike
                parameter.mul_(1.05)
    now = {name: tensor.data_ptr() for name, tensor in model.state_dict(keep_vars=True).items() if tensor is not None}
    assert now == storage, "the trainer's own tensors, and no others"
    return [output.token_ids for output in outputs], found


@pytest.mark.parametrize(
    "sizes,kind,dtype",
    [
        (dict(pp=2), "gqa", "float32"),
        (dict(dcp=2), "experts", "float32"),
        (dict(tp=2, dcp=2, layout="within_tp"), "mla", "float32"),
        (dict(tp=2, dcp=2), "gqa", "float32"),
        (dict(dcp=2), "experts", "bfloat16"),
        (dict(tp=2, dcp=2), "gqa", "bfloat16"),
        (dict(pp=2, dcp=2), "mla", "bfloat16"),
    ],
    ids=str,
)
def test_sampled_log_probabilities_are_the_trainers(sizes, kind, dtype):
    world = sizes.get("tp", 1) * sizes.get("pp", 1) * (1 if "layout" in sizes else sizes.get("dcp", 1))
    results = run_on_ranks(world, live_case, sizes, kind, dtype)
    assert all(tokens == results[0][0] for tokens, _ in results)
    compared = [found for _, found in results if found]
    assert len(compared) == world // sizes.get("pp", 1)
    for found in compared:
        assert len(found) == 6
        sampler, rounding = (max(each) for each in zip(*found, strict=True))
        assert sampler < (5e-5 if dtype == "float32" else 2 * rounding), found
