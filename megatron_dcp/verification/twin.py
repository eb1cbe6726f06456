"""The Hugging Face twin of a checkpoint, run by ``transformers`` in fp32 on one rank.

Shapes: ``T`` tokens, ``h`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.comm.collectives import broadcast
from megatron_dcp.engine.loading import on_all_ranks


class Twin:
    """What ``transformers`` computes for a text: logits, and the hidden states after embedding and layers.

    Rank 0 of the replica computes; `logits` and `states` are collective calls that bring it to all ranks.

    Args:
        directory: Hugging Face checkpoint.
        token_ids: The text.
        gpt: The Megatron model that it is the twin of.
        vocab_size: Tokens that exist.
        group: The replica.

    Raises:
        ValueError: On every rank: it cannot be read, or has another shape.
    """

    def __init__(
        self, directory: str | os.PathLike[str], token_ids: list[int], gpt: Any, vocab_size: int, group: Any
    ) -> None:
        self._group = group
        self._device = next(gpt.parameters()).device
        self._logits = torch.empty(len(token_ids), vocab_size, device=self._device)
        self._num_layers, hidden = gpt.config.num_layers, gpt.config.hidden_size
        self._states: dict[int, Tensor] = {}
        self._state_shape = len(token_ids), hidden
        on_all_ranks(lambda: self._compute(os.fspath(directory), token_ids) if group.rank() == 0 else None)

    def logits(self) -> Tensor:
        """``[T, V]``, fp32."""
        broadcast(self._logits, self._group)
        return self._logits

    def states(self, layer: int) -> Tensor:
        """``[T, h]`` after a layer, numbered from 0; -1: the embedding."""
        state = self._states.pop(layer, None)
        if state is None:
            state = torch.empty(self._state_shape, device=self._device)
        broadcast(state, self._group)
        return state

    @torch.no_grad()
    def _compute(self, directory: str, token_ids: list[int]) -> None:
        model = _load(directory).to(self._device)
        layers, vocab_size = model.get_decoder().layers, self._logits.shape[1]
        embedding = model.get_input_embeddings()
        shape = len(layers), embedding.weight.shape[1], embedding.weight.shape[0]
        if shape[:2] != (self._num_layers, self._state_shape[1]) or shape[2] < vocab_size:
            raise ValueError(
                f"{directory} has {shape[0]} layers, hidden size {shape[1]} and {shape[2]} tokens, the checkpoint "
                f"{self._num_layers}, {self._state_shape[1]} and {vocab_size}: it is another model's"
            )

        def keep(number: int) -> Any:
            def hook(module: Any, args: Any, output: Any) -> None:
                hidden = output[0] if isinstance(output, tuple) else output
                self._states[number] = hidden.reshape(self._state_shape).contiguous()

            return hook

        embedding.register_forward_hook(keep(-1))
        for number, layer in enumerate(layers):
            layer.register_forward_hook(keep(number))
        logits = model(torch.tensor([token_ids], device=self._device)).logits[0]
        self._logits.copy_(logits[:, :vocab_size])


def _load(directory: str) -> Any:
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise ValueError("--hf needs the package transformers: pip install transformers") from error
    if not os.path.isdir(directory):
        raise ValueError(f"{directory!r} is no directory; --hf takes that of a Hugging Face checkpoint")
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # whatever its files make the model's own code raise
        raise ValueError(f"transformers cannot load {directory!r}: {error}") from error
    finally:
        if bars:
            logging.enable_progress_bar()
    if missing := sorted(info["missing_keys"]):  # these it fills with random numbers
        raise ValueError(f"{directory} lacks {missing[0]} and {len(missing) - 1} more: it is incomplete")
    return model.eval()
