"""Tiny Hugging Face models with random weights, for every test that needs a checkpoint.

``tiny_model("qwen2")`` returns a directory as ``transformers`` saves it. The same arguments give the same model; it is
made once per process and removed with it. Nothing in the weights is trivial: norms differ from 1, biases from 0, and
logits differ enough that the greedy token does not hang on rounding.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3")
WINDOW_FAMILIES = ("mistral", "gemma3_text", "gpt_oss")
MLA_FAMILIES = ("deepseek_v2", "deepseek_v3")
MOE_FAMILIES = ("mixtral", "qwen3_moe", *MLA_FAMILIES)  # and gpt_oss
BYTE_VOCAB = 260  # 256 bytes, <eos>, <bos>, two that no text uses


@functools.cache
def tiny_model(
    family: str = "llama",
    *,
    tied: bool = False,
    vocab_size: int = 100,
    hidden: int = 32,
    ffn: int = 48,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    positions: int = 512,
    rope_theta: float = 10000.0,
    rope_scaling: tuple[tuple[str, Any], ...] | None = None,
    dtype: str = "float32",
    tokenizer: bool = False,
    max_shard_size: str | None = None,
    seed: int = 0,
    **further: Any,
) -> Path:
    """Directory of a random model.

    Args:
        family: One of `FAMILIES`, `WINDOW_FAMILIES` or `MOE_FAMILIES`. The last have 8 experts, of which a token sees
            4, and layer 0 dense where the family can have that; those of `MLA_FAMILIES` have a KV head per query head,
            and ``head_dim`` says nothing. Those of `WINDOW_FAMILIES` have a sliding window of 9, in ``gemma3_text`` and
            ``gpt_oss`` in every other layer, from the first on. ``gpt_oss`` has experts, too, whose activations are cut
            at 1.
        head_dim: Default ``hidden / heads``, but for ``qwen3`` and ``qwen3_moe`` 12, which is not that.
        rope_scaling: Items of the dict, e.g. ``LLAMA3``, or ``YARN`` for `MLA_FAMILIES`.
        tokenizer: Add a byte-level tokenizer; ``vocab_size`` is then at least `BYTE_VOCAB`.
        max_shard_size: Split the weights into files of this size, e.g. ``"20KB"``.
        further: More keys of the family's ``config.json``, e.g. ``q_lora_rank=None``; lists as tuples.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = _new_directory(family)
    sizes: dict[str, Any] = dict(
        vocab_size=max(vocab_size, BYTE_VOCAB) if tokenizer else vocab_size,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=256 if tokenizer else vocab_size - 1,
        rope_parameters={"rope_type": "default", **dict(rope_scaling or ()), "rope_theta": rope_theta},
    )
    if family in ("qwen3", "qwen3_moe"):
        head_dim = head_dim or 12
    if head_dim is not None:
        sizes["head_dim"] = head_dim
    if family in MLA_FAMILIES:
        sizes["num_key_value_heads"] = heads
    if family in WINDOW_FAMILIES:
        sizes["sliding_window"] = 9
    if family == "gemma3_text":
        kinds = ("sliding_attention", "full_attention")
        ropes = ({"rope_type": "default", "rope_theta": 500.0}, sizes["rope_parameters"])
        sizes |= dict(
            layer_types=[kinds[i % 2] for i in range(layers)],
            rope_parameters=dict(zip(kinds, ropes, strict=True)),
            head_dim=head_dim or 12,
            query_pre_attn_scalar=10,
        )
    sizes |= _EXPERTS.get(family, {})
    sizes |= {key: list(value) if isinstance(value, tuple) else value for key, value in further.items()}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes), dtype=getattr(torch, dtype))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        tensors = [*model.named_parameters(), *(each for each in model.named_buffers() if "e_score" in each[0])]
        for name, parameter in sorted(tensors):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                noise = noise * (1.0 if "embed" in name or "lm_head" in name else 1.5 * parameter.shape[-1] ** -0.5)
            elif name.endswith("norm.weight") or "layernorm" in name:
                noise = 1 + 0.2 * noise
            elif "e_score" in name:
                noise = 0.2 * noise  # decides between scores, which lie between 0 and 1
            parameter.copy_(noise)
    options = {"max_shard_size": max_shard_size} if max_shard_size else {}
    model.save_pretrained(directory, **options)
    if tokenizer:
        save_byte_tokenizer(directory)
    return directory


_LATENT = dict(
    q_lora_rank=24, kv_lora_rank=28, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=8,
    num_experts_per_tok=4, moe_intermediate_size=20, first_k_dense_replace=1, routed_scaling_factor=1.5,
)  # fmt: skip
_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": dict(num_local_experts=8, num_experts_per_tok=4),
    "qwen3_moe": dict(
        num_experts=8, num_experts_per_tok=4, moe_intermediate_size=20, mlp_only_layers=[0], norm_topk_prob=True
    ),
    "gpt_oss": dict(num_local_experts=8, num_experts_per_tok=4, swiglu_limit=1.0, head_dim=12),
    "deepseek_v2": dict(_LATENT, n_shared_experts=2, topk_method="greedy"),
    "deepseek_v3": dict(_LATENT, n_shared_experts=1, n_group=4, topk_group=2),
}
YARN = (
    ("rope_type", "yarn"),
    ("factor", 8.0),
    ("original_max_position_embeddings", 64),
    ("mscale", 0.7),
    ("mscale_all_dim", 0.9),
)
LLAMA3 = (
    ("rope_type", "llama3"),
    ("factor", 4.0),
    ("low_freq_factor", 1.0),
    ("high_freq_factor", 4.0),
    ("original_max_position_embeddings", 64),
)


def save_byte_tokenizer(directory: Path) -> None:
    """A tokenizer with one token per byte, ``<eos>`` = 256 and ``<bos>`` = 257, as ``transformers`` saves it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<bos>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>").save_pretrained(directory)


def hf_model(directory: Path) -> Any:
    """The ``transformers`` model in ``directory``, in fp32 and eval mode, with eager attention."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def hf_tensors(directory: Path) -> dict[str, Any]:
    """Every tensor in the safetensors files of ``directory``."""
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def _new_directory(family: str) -> Path:
    directory = Path(tempfile.mkdtemp(prefix=f"tiny-{family}-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory
