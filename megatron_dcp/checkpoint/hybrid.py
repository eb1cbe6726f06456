"""Arguments of a ``HybridModel``, a pattern of layers, as those of the ``GPTModel`` that computes the same.

Megatron-Core 0.19 prefers ``HybridModel``: ``*`` attention, ``+`` latent attention, ``-`` MLP, ``E`` experts, and
others, each a layer of its own. Attention and MLP in turns are the two halves of a GPT's layers.
"""

from __future__ import annotations

from typing import Any

_ATTENTION, _FFN = "*+", "-E"
_OTHERS = {"M": "Mamba", "G": "gated delta net (GDN)", "D": "sparse attention"}


def as_gpt(values: dict[str, Any], where: str) -> dict[str, Any]:
    """The arguments ``values`` with the layers of a pattern put together; others unchanged.

    Args:
        where: The file, for messages.

    Raises:
        ValueError: The pattern has layers that are not supported, or is not attention and MLP (or experts) in turns.
    """
    pattern = values.get("hybrid_layer_pattern") or values.get("hybrid_override_pattern")
    if not pattern:
        return values
    main, *drafts = pattern.split("/")  # behind it the layers of multi-token prediction
    layers = main.replace("|", "")  # where pipeline stages began
    what = f"hybrid_layer_pattern={pattern!r} in the args of {where}"
    for symbol, kind in _OTHERS.items():
        if symbol in layers:
            raise ValueError(f"{what} has {kind} layers ({symbol!r}), which are not supported")
    if drafts:
        raise ValueError(f"{what} has layers for multi-token prediction, which are not supported; save it without them")
    attention, ffn = layers[::2], layers[1::2]
    if len(attention) != len(ffn) or set(attention) - set(_ATTENTION) or set(ffn) - set(_FFN):
        raise ValueError(
            f"{what} is not attention ('*' or '+') and MLP ('-' or 'E') in turns, the one kind that loads; a live "
            "model with this pattern generates, see enable_dcp"
        )
    experts = {"moe_layer_freq": [int(symbol == "E") for symbol in ffn]} if "E" in ffn else {"num_experts": None}
    return values | {"num_layers": len(ffn), "is_hybrid_model": False} | experts
