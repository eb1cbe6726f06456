"""Megatron's own forward of the whole text, as training runs it, and the hidden states that a model passes through.

Shapes: ``T`` tokens, ``h`` hidden size, ``V`` vocabulary with its padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from torch import Tensor

from megatron_dcp._cpu import megatron_on_cpu
from megatron_dcp.comm.exchange import gather_heads
from megatron_dcp.comm.pipeline import receive_from_previous_stage, send_to_next_stage
from megatron_dcp.layers.model_info import attention_layers
from megatron_dcp.shard import dequantise, is_quantised, quantise


@torch.no_grad()
def training_forward(gpt: Any, token_ids: list[int], groups: Any) -> Tensor | None:
    """Logits of Megatron's training forward: the text at once, no cache. A collective call of the model's ranks.

    Args:
        gpt: The bare model of this rank's shard and pipeline stage, in eval mode.
        token_ids: The text, the same on every rank.
        groups: Process groups with ``.tp`` and ``.pp``.

    Returns:
        fp32 ``[T, V]`` on the ranks of the last pipeline stage, ``None`` on the others.
    """
    length, config = len(token_ids), gpt.config
    parameter = next(gpt.parameters())
    device = parameter.device
    if not gpt.pre_process:
        dtype = torch.float32 if config.fp32_residual_connection else parameter.dtype
        gpt.set_input_tensor(receive_from_previous_stage(length, config.hidden_size, dtype, groups.pp))
    tokens = torch.tensor([token_ids], device=device)
    mask = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None, None]
    with megatron_on_cpu(), _any_rng_tracker():
        out: Tensor = gpt(tokens, torch.arange(length, device=device)[None], mask)
    gpt.set_input_tensor(None)
    if not gpt.post_process:
        send_to_next_stage(out, groups.pp)
        return None
    logits = out[0].float()
    return gather_heads(logits, groups.tp) if gpt.parallel_output else logits


@contextmanager
def _any_rng_tracker() -> Iterator[None]:
    """Megatron's attention asks for a state of its random numbers by name, also where it drops nothing.

    Training has made one. Elsewhere one that draws nothing stands in, and is gone afterwards.
    """
    if random.get_cuda_rng_tracker().is_initialized():
        yield
        return
    before = random._CUDA_RNG_STATE_TRACKER
    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    try:
        yield
    finally:
        random._CUDA_RNG_STATE_TRACKER = before


@contextmanager
def rounding_noise(gpt: Any, seed: int) -> Iterator[None]:
    """Change what the embedding and every layer hand on in its last bit: by a random share of the dtype's epsilon.

    How far that moves the logits is how far rounding alone may move them, in this model and on this text. The noise is
    that of the seed, and the same on all ranks that hold the same hidden states.
    """

    def disturb(number: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            generator = torch.Generator().manual_seed(seed * 10**6 + number + 1)
            share = 2 * torch.rand(hidden.shape, generator=generator).to(hidden.device) - 1
            hidden = (hidden.float() * (1 + torch.finfo(hidden.dtype).eps * share)).to(hidden.dtype)
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        return hook

    with _hooks(gpt, disturb):
        yield


@contextmanager
def cached_as(gpt: Any, dtype: torch.dtype) -> Iterator[None]:
    """Let every layer's attention see keys and values as a KV cache of ``dtype`` gives them back.

    With MLA those of all heads, where the cache has the latent that they come from: about the same loss.
    """

    def through_cache(x: Tensor) -> Tensor:
        if is_quantised(dtype):
            return dequantise(*quantise(x, dtype)).to(x.dtype)
        return x.to(dtype).to(x.dtype)

    def hook(module: Any, args: Any) -> Any:
        query, key, value, *others = args
        return query, through_cache(key), through_cache(value), *others

    attentions = [layer.self_attention.core_attention for layer in attention_layers(gpt)]
    hooks = [attention.register_forward_pre_hook(hook) for attention in attentions]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


@contextmanager
def recorded_layers(gpt: Any) -> Iterator[dict[int, Tensor]]:
    """Hidden states of the model's last forward inside the block, ``[T, h]`` by the number of the layer they come from.

    Layers have their global numbers from 0; -1 is the embedding. A pipeline stage has its own only.
    """
    states: dict[int, Tensor] = {}

    def keep(number: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            states[number] = hidden.detach().squeeze(1)

        return hook

    with _hooks(gpt, keep):
        yield states


@contextmanager
def _hooks(gpt: Any, make: Callable[[int], Any]) -> Iterator[None]:
    """A forward hook ``make(number)`` on every layer, numbered from 0 over all stages, and on the embedding, -1."""
    hooks = [layer.register_forward_hook(make(layer.layer_number - 1)) for layer in gpt.decoder.layers]
    if gpt.pre_process:
        hooks.append(gpt.embedding.register_forward_hook(make(-1)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
