"""``HybridModel`` (0.16: ``MambaModel``): its attention, MLP and expert layers decode, train and load as a GPT's."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from argparse import Namespace
from typing import Any

import pytest
import torch
from megatron_models import (
    forced_logits,
    make_runner,
    moe_config,
    random_state,
    shard,
    sharded_model,
    tiny_config,
    training_logits,
    whole_model,
)

from megatron_dcp import CacheConfig, parallel_state
from megatron_dcp.checkpoint.hybrid import as_gpt
from workers import run_on_ranks

# Megatron-Core 0.16 calls it MambaModel, and cuts stages evenly.
OLDER = importlib.util.find_spec("megatron.core.models.hybrid") is None
TEXT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38]


def hybrid_model(config: Any, pattern: str) -> Any:
    """Without weights, over the groups of ``parallel_state``; Megatron's own spec needs TransformerEngine."""
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    from megatron_dcp._cpu import megatron_on_cpu
    from megatron_dcp._mcore import _one_layer_spec, transformer_config

    groups = parallel_state.get_process_group_collection()
    whole = _one_layer_spec(config, None).submodules
    names = dict(sharded_state_dict_keys_map=whole.sharded_state_dict_keys_map)

    def ffn(module: Any, moe: Any) -> Any:
        own = _one_layer_spec(config, moe).submodules
        norm = dict(pre_mlp_layernorm=own.pre_mlp_layernorm, mlp_bda=own.mlp_bda, mlp=own.mlp)
        keys = {} if moe else names
        return ModuleSpec(module=module, submodules=TransformerLayerSubmodules(**norm, **keys))

    attention = TransformerLayerSubmodules(
        input_layernorm=whole.input_layernorm,
        self_attention=whole.self_attention,
        self_attn_bda=whole.self_attn_bda,
        **names,
    )
    layers = dict(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=ffn(MLPLayer, None),
        moe_layer=ffn(MoETransformerLayer, config.moe) if config.moe else None,
    )
    if OLDER:
        from megatron.core.models.mamba import MambaModel as model_class
        from megatron.core.ssm import mamba_block as block

        stack = ModuleSpec(module=block.MambaStack, submodules=block.MambaStackSubmodules(**layers))
        of_line = dict(mamba_stack_spec=stack, hybrid_override_pattern=pattern.replace("|", ""))
    else:
        from megatron.core.models.hybrid import hybrid_block as block
        from megatron.core.models.hybrid.hybrid_model import HybridModel as model_class

        stack = ModuleSpec(module=block.HybridStack, submodules=block.HybridStackSubmodules(**layers))
        of_line = dict(hybrid_stack_spec=stack, hybrid_layer_pattern=pattern)
    fields = dict(num_layers=len(pattern.replace("|", "")), pipeline_model_parallel_size=groups.pp.size())
    fields |= dict(pipeline_dtype=torch.float32, expert_model_parallel_size=groups.ep.size())
    if config.moe is not None:
        fields |= dict(moe_layer_freq=1, expert_tensor_parallel_size=groups.expt_tp.size())
    with megatron_on_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(block, "TENorm", WrappedTorchNorm)
        model = model_class(
            config=transformer_config(config, tp=groups.tp.size(), dtype=torch.float32, **fields),
            vocab_size=config.padded_vocab_size,
            max_sequence_length=config.max_position_embeddings,
            **of_line,
            pre_process=groups.pp.rank() == 0,
            post_process=groups.pp.rank() == groups.pp.size() - 1,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            rotary_base=config.rotary_base,
            pg_collection=groups,
        )
    return model.eval()


def fill(model: Any, config: Any, state: dict[str, torch.Tensor]) -> Any:
    """Give it the weights of the GPT that it is."""
    groups = parallel_state.get_process_group_collection()
    first = model.decoder.layers[0].layer_number - 1
    own = set(model.state_dict())
    named = {}
    for name, tensor in shard(config, state, groups).items():
        name = name.replace("decoder.final_layernorm", "decoder.final_norm")
        if match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name):
            half = 0 if match[2].startswith(("input_layernorm", "self_attention")) else 1
            name = f"decoder.layers.{2 * int(match[1]) + half - first}.{match[2]}"
        if name in own:
            named[name] = tensor
    incompatible = model.load_state_dict(named, strict=False)
    assert all(name.endswith("_extra_state") for name in incompatible.missing_keys), incompatible
    return model


MODELS = {"*-*-": tiny_config(add_qkv_bias=True), "*E*E": moe_config("qwen"), "*-*E": moe_config("deepseek-v3")}


def decode_case(rank, world, sizes, pattern):
    """Largest logit difference from the GPT with the same weights, of training forward and decode."""
    from megatron_dcp.layers import enable_dcp

    parallel_state.initialize_model_parallel(**sizes)
    groups = parallel_state.get_process_group_collection()
    kind = pattern.replace("|", "")
    config = MODELS[kind]
    state = random_state(config)
    model = fill(hybrid_model(config, pattern), config, state)
    want = training_logits(whole_model(config, state), TEXT)
    span = float(want.max() - want.min())
    from megatron_dcp.layers.forward import training_forward

    names, pointers = list(model.state_dict()), [p.data_ptr() for p in model.parameters()]
    trained = training_forward(model, TEXT, groups)
    assert enable_dcp(model) is model
    again = training_forward(model, TEXT, groups)
    assert list(model.state_dict()) == names and [p.data_ptr() for p in model.parameters()] == pointers
    runner = make_runner(model, config, cache=CacheConfig(block_size=4, num_blocks=20))
    assert len(set(runner.context.cache_index.values())) == 2 // groups.pp.size(), "only attention has a cache"
    if groups.pp.size() > 1:
        from megatron_dcp import verify

        report = verify(model, vocab_size=config.vocab_size, prompt=TEXT, max_new_tokens=3)
        return [0.0 if report.passed else 1.0, len(report["prefill"].layers)]
    assert torch.equal(trained, again), "the training forward is Megatron's"
    (got,) = forced_logits(runner, [TEXT], [5], chunk=3)
    errors = [(trained - want).abs().max(), (got - want[4:, : config.vocab_size]).abs().max()]
    return [float(error) / span for error in errors]


@pytest.mark.mcore_line
@pytest.mark.parametrize(
    "world,sizes,pattern",
    [
        (1, {}, "*-*-"),
        (1, {}, "*-*E"),
        (4, dict(tensor_model_parallel_size=2, decode_context_parallel_size=2), "*-*-"),
        (2, dict(decode_context_parallel_size=2, expert_model_parallel_size=2), "*E*E"),
    ],
)
def test_a_live_hybrid_model_decodes(world, sizes, pattern):
    for trained, decoded in run_on_ranks(world, decode_case, sizes, pattern):
        assert trained < 1e-6 and decoded < 1e-5


@pytest.mark.mcore_line
def test_stages_of_a_hybrid_model():
    sizes = dict(pipeline_model_parallel_size=2)
    assert run_on_ranks(2, decode_case, sizes, "*-|*-") == [[0.0, 5]] * 2


def load_case(rank, world, path, pattern, sizes):
    """Largest logit difference of the loaded checkpoint of a hybrid model from the GPT with the same weights."""
    from megatron_dcp import load_model
    from megatron_dcp.checkpoint import open_source
    from megatron_dcp.checkpoint.save import _save_sharded, args_from_config

    parallel_state.initialize_model_parallel()
    config = MODELS[pattern]
    state = random_state(config)
    groups = parallel_state.get_process_group_collection()
    model = fill(hybrid_model(config, pattern), config, state)
    directory = path / "iter_0000001"
    if rank == 0:
        directory.mkdir(parents=True)
    torch.distributed.barrier()
    _save_sharded(model, directory, groups)
    if rank == 0:
        args = args_from_config(config, dtype=torch.float32, iteration=1)
        args.num_layers, args.hybrid_layer_pattern, args.is_hybrid_model = len(pattern), pattern, True
        torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 1}, directory / "common.pt")
        (path / "latest_checkpointed_iteration.txt").write_text("1\n")
    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    loaded, shape = load_model(path, parallel_state.get_process_group_collection())
    assert shape == dataclasses.replace(config, moe=shape.moe) and shape.num_layers == 2
    source = open_source(path)
    assert all(torch.equal(source.read(name)[:100], tensor[:100]) for name, tensor in state.items())
    wanted = sharded_model(config, state).state_dict()
    return [name for name, tensor in loaded.state_dict().items() if tensor is not None
            and not name.endswith("_extra_state") and "word" not in name and "output" not in name
            and not torch.equal(tensor, wanted[name])]  # fmt: skip


@pytest.mark.mcore_line
@pytest.mark.parametrize("pattern", ["*-*-", "*E*E"])
def test_a_checkpoint_of_a_hybrid_model_loads_as_gpt(tmp_path, pattern):
    assert run_on_ranks(2, load_case, tmp_path / "saved", pattern, dict(tensor_model_parallel_size=2)) == [[], []]


def refused_case(rank, world):
    from megatron_dcp.layers import enable_dcp

    parallel_state.initialize_model_parallel()
    config = MODELS["*-*-"]
    for symbol, kind in {"M": "Mamba", "G": "gated delta net", "D": "sparse attention"}.items():
        model = hybrid_model(config, "*-*-")
        classes = [type(module) for module in model.modules()]
        model.decoder.layer_type_list[2] = symbol  # these layers cannot be built without their kernels
        with pytest.raises(
            ValueError, match=rf"'\*-{symbol}-' on this rank: {kind}.* are not supported by DCP decoding"
        ):
            enable_dcp(model)
        assert [type(module) for module in model.modules()] == classes
    with pytest.raises(ValueError, match="'--' on this pipeline stage, which has no attention layer"):
        enable_dcp(hybrid_model(config, "--"))


@pytest.mark.mcore_line
def test_layers_with_a_state_are_refused():
    run_on_ranks(1, refused_case)


@pytest.mark.parametrize(
    "pattern,message",
    [
        ("*-M-", "has Mamba layers .'M'., which are not supported"),
        ("G-", "has gated delta net .GDN. layers"),
        ("*-*-/*-", "has layers for multi-token prediction"),
        ("**--", "is not attention .* and MLP .* in turns"),
        ("*-*", "is not attention .* in turns"),
        ("-*", "is not attention .* in turns"),
    ],
)
def test_a_pattern_that_is_no_gpt_is_refused_where_it_is_read(pattern, message):
    with pytest.raises(ValueError, match=rf"hybrid_layer_pattern='.*' in the args of here {message}"):
        as_gpt(vars(Namespace(hybrid_layer_pattern=pattern)), "here")


def test_a_pattern_becomes_layers():
    values = dict(num_layers=6, hybrid_layer_pattern="*-|+E*E", is_hybrid_model=True, num_experts=4, hidden_size=8)
    found = as_gpt(values, "here")
    assert found == {**values, "num_layers": 3, "moe_layer_freq": [0, 1, 1], "is_hybrid_model": False}
    assert as_gpt(dict(num_layers=4, hybrid_override_pattern="*-*-", num_experts=4), "here")["num_experts"] is None
    plain = dict(num_layers=4, hybrid_layer_pattern="")
    assert as_gpt(plain, "here") is plain
