"""DCP inside a training script: its options, its groups, and the loop that docs/training.md shows."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import torch
from megatron_models import random_state, single_rank_groups, tiny_config, whole_model

from megatron_dcp import add_dcp_args, initialize_dcp_from_args, llm_from_args, parallel_state
from workers import run_on_ranks

DOC = Path(__file__).resolve().parents[1] / "docs" / "training.md"


def parse(*words: str) -> argparse.Namespace:
    """As Megatron-LM does: its own options, then those of the provider, in one parser."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument_group("distributed").add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser = add_dcp_args(parser)
    return parser.parse_args(list(words))


def test_options(capsys):
    args = parse("--decode-context-parallel-size", "2", "--dcp-layout", "within_tp", "--dcp-block-size", "16")
    assert (args.decode_context_parallel_size, args.dcp_layout, args.dcp_block_size) == (2, "within_tp", 16)
    assert vars(parse())["dcp_exchange"] is None and parse().decode_context_parallel_size == 1
    with pytest.raises(SystemExit):
        parse("--help")
    assert "decode context parallel:" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        parse("--dcp-num-blocks", "4", "--dcp-bytes-per-rank", "4")


@pytest.mark.mcore_line
def test_options_beside_those_of_megatron_training(monkeypatch):
    """With the parser of ``megatron.training`` itself, which comes with Megatron-Core 0.19."""
    arguments = pytest.importorskip("megatron.training.arguments")
    monkeypatch.setattr("sys.argv", ["pretrain.py", "--decode-context-parallel-size", "2", "--dcp-block-size", "16"])
    args = arguments.parse_args(extra_args_provider=add_dcp_args)
    assert (args.decode_context_parallel_size, args.dcp_block_size, args.tensor_model_parallel_size) == (2, 16, 1)


def trainer(tp=1, pp=1, config=None):
    """A model as a training script has it: Megatron's groups and nothing of DCP."""
    from megatron.core import parallel_state as mpu
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    from megatron_dcp._mcore import build_model, local_layer_spec
    from megatron_dcp.layers import sdpa_layer_spec

    mpu.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    groups, config = ProcessGroupCollection.use_mpu_process_groups(), config or tiny_config()
    torch.manual_seed(1)
    spec = sdpa_layer_spec(local_layer_spec(config))
    return build_model(config, groups, layer_spec=spec, perform_initialization=True).train()


def args_case(rank, world):
    model = trainer(tp=2)
    args = parse("--decode-context-parallel-size", "2", "--dcp-kv-interleave-size", "2", "--dcp-block-size", "8",
                 "--dcp-exchange", "a2a", "--dcp-prefill", "pass_q", "--dcp-max-num-seqs", "3",
                 "--dcp-prefill-chunk-size", "10", "--dcp-bytes-per-rank", "100000")  # fmt: skip
    with pytest.raises(ValueError, match="has 2 chunks on this rank: virtual pipeline stages are not supported"):
        llm_from_args(args, [model, model])
    initialize_dcp_from_args(args)
    llm = llm_from_args(args, [model], vocab_size=100, eos_token_ids=[7])
    assert parallel_state.get_decode_context_parallel_world_size() == 2
    assert llm.model is model and list(llm.prompt_reader.eos_token_ids) == [7]
    assert (llm.layout.interleave, llm.layout.block_size, llm.cache_config.bytes_per_rank) == (2, 8, 100000)
    engine = llm.engine_config
    assert (engine.exchange, engine.prefill, engine.max_num_seqs, engine.prefill_chunk_size) == ("a2a", "pass_q", 3, 10)
    assert len(llm.generate([1, 2, 3])[0].token_ids)
    with pytest.raises(ValueError, match="decode_context_parallel_size=1 differs from the 2 of the groups that exist"):
        initialize_dcp_from_args(parse())
    with pytest.raises(ValueError, match="kv_interleave_size=3 does not divide block_size=64"):
        llm_from_args(parse("--dcp-kv-interleave-size", "3"), model)


@pytest.mark.mcore_line
def test_groups_and_llm_come_from_the_arguments():
    run_on_ranks(4, args_case)


def misfit_case(rank, world):
    trainer(tp=2)
    with pytest.raises(ValueError, match="decode_context_parallel_size=2 does not divide the 1 ranks"):
        initialize_dcp_from_args(parse("--decode-context-parallel-size", "2"))


def test_a_size_that_megatron_has_no_ranks_for():
    run_on_ranks(2, misfit_case)


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", DOC.read_text(), re.M | re.S)


def loop_case(rank, world, tp, dcp):
    """Mean reward of every step, the largest departure of the ratio from 1, and the completions of the last step."""
    model = trainer(tp=tp, config=tiny_config(vocab_size=128))
    namespace = {
        "model": model,
        "args": parse("--decode-context-parallel-size", str(dcp)),
        "prompts": [[5, 17, 40], [99, 3, 64]],
        "reward": lambda tokens: sum(token % 2 for token in tokens) / len(tokens),
    }
    exec(compile(blocks()[1], str(DOC), "exec"), namespace)
    worst = max(float((ratio - 1).abs().max()) for ratio in namespace["ratios_of_steps"])
    return namespace["rewards_of_steps"], worst


@pytest.mark.mcore_line
def test_the_loop_in_the_documentation_learns():
    assert len(blocks()[1].splitlines()) < 40
    results = run_on_ranks(4, loop_case, 2, 2, timeout=200)
    for rewards, worst in results:
        assert rewards == results[0][0], "every rank has seen the same completions"
        assert worst < 1e-4, "the sampler's log-probabilities are the trainer's, after every update"
        assert 0.3 < rewards[0] < 0.7 and min(rewards[-3:]) > 0.9, rewards


def test_the_shown_names_exist():
    import megatron_dcp

    names = re.findall(r"from megatron_dcp import (.*)", DOC.read_text())
    assert len(names) == 2 and all(hasattr(megatron_dcp, name) for line in names for name in line.split(", "))


def prefix_case(rank, world):
    """Tokens after new weights: with the cache dropped as it should be, and kept."""
    from megatron_dcp import LLM, CacheConfig, SamplingParams
    from megatron_dcp.engine.core import Engine

    parallel_state.initialize_model_parallel(decode_context_parallel_size=world)
    config = tiny_config()
    old, new = random_state(config), random_state(config, seed=1)
    groups = single_rank_groups()
    model = whole_model(config, old)
    prompt, params = [i % 90 for i in range(25)], SamplingParams(max_tokens=12, logprobs=True, ignore_eos=True)

    def after_training(keep_cache):
        model.load_state_dict(old, strict=False)
        llm = LLM(model, vocab_size=100, cache=CacheConfig(block_size=4))
        llm.generate(prompt, params)
        model.load_state_dict(new, strict=False)
        with pytest.MonkeyPatch.context() as patch:
            if keep_cache:
                patch.setattr(Engine, "weights_changed", lambda self: None)
            (output,) = llm.generate(prompt, params)
        return output.token_ids, output.num_cached_tokens, output.logprobs

    from megatron_dcp.layers.forward import training_forward

    dropped, stale = after_training(False), after_training(True)
    logits = training_forward(model.eval(), prompt + dropped[0], groups)[len(prompt) - 1 : -1, :100]
    want = logits.log_softmax(-1)[range(len(dropped[0])), dropped[0]]
    return dropped, stale, float((want - torch.tensor(dropped[2])).abs().max())


def test_a_stale_prefix_cache_would_give_wrong_tokens_and_is_dropped():
    for dropped, stale, error in run_on_ranks(2, prefix_case):
        assert dropped[1] == 0 and error < 1e-4
        assert stale[1] > 0 and stale[0] != dropped[0]
