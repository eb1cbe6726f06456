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
) -> Path:
    """Directory of a random model.

    Args:
        family: ``llama``, ``qwen2`` (QKV biases) or ``qwen3`` (QK norm).
        head_dim: Default ``hidden / heads``, but for ``qwen3`` 12, which is not that.
        rope_scaling: Items of the dict, e.g. ``LLAMA3``.
        tokenizer: Add a byte-level tokenizer; ``vocab_size`` is then at least `BYTE_VOCAB`.
        max_shard_size: Split the weights into files of this size, e.g. ``"20KB"``.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

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
    kinds = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    if family == "qwen3":
        head_dim = head_dim or 12
    if head_dim is not None:
        sizes["head_dim"] = head_dim
    model = AutoModelForCausalLM.from_config(kinds[family](**sizes), dtype=getattr(torch, dtype))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                noise = noise * (1.0 if "embed" in name or "lm_head" in name else 1.5 * parameter.shape[1] ** -0.5)
            elif name.endswith("norm.weight") or "layernorm" in name:
                noise = 1 + 0.2 * noise
            parameter.copy_(noise)
    options = {"max_shard_size": max_shard_size} if max_shard_size else {}
    model.save_pretrained(directory, **options)
    if tokenizer:
        save_byte_tokenizer(directory)
    return directory


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
