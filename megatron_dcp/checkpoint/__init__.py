"""Checkpoints: Megatron's ``torch_dist`` and legacy formats and Hugging Face safetensors, read, written, loaded.

Megatron's ``fsdp_dtensor`` is read only.

Importing this imports torch, but neither Megatron nor ``transformers``.
"""

from megatron_dcp.checkpoint.convert import convert, open_source
from megatron_dcp.checkpoint.files import detect_format
from megatron_dcp.checkpoint.load import load_model, load_tokenizer, read_config
from megatron_dcp.checkpoint.save import save_model

__all__ = ["convert", "detect_format", "load_model", "load_tokenizer", "open_source", "read_config", "save_model"]
