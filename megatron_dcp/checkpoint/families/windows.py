"""How families say in ``config.json`` which layers have a sliding window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dcp.model_config import ModelConfig

KINDS = ("full_attention", "sliding_attention")


class Windows:
    """No layer has one."""

    def shape(self, values: dict[str, Any]) -> dict[str, Any]:
        """Fields of `ModelConfig`, from the keys of a ``config.json``."""
        return _fields(None, ())

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        """Inverse of `shape`."""
        return {}


class EveryLayer(Windows):
    """All layers have one, if there is a ``sliding_window``."""

    def shape(self, values: dict[str, Any]) -> dict[str, Any]:
        return _fields(values.get("sliding_window"), [True] * values["num_hidden_layers"])

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        return {"sliding_window": config.window_size}


@dataclass(frozen=True)
class LayerTypes(Windows):
    """``layer_types`` says it.

    Attributes:
        switch: A key without which there are none, if the family has one.
    """

    switch: str | None = None

    def shape(self, values: dict[str, Any]) -> dict[str, Any]:
        size = values.get("sliding_window") if self.switch is None or values.get(self.switch) else None
        if size is None:
            return _fields(None, ())
        types = values.get("layer_types") or self.default_types(values)
        if unknown := sorted(set(types) - set(KINDS)):
            raise ValueError(f"layer_types has {', '.join(unknown)}; supported are {', '.join(KINDS)}")
        return _fields(size, [kind == KINDS[1] for kind in types])

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        freq = config.window_attn_skip_freq
        keys: dict[str, Any] = {"sliding_window": config.window_size}
        if self.switch is not None:
            keys[self.switch] = freq is not None
        if freq is not None:
            keys["layer_types"] = [KINDS[slides] for slides in freq]
        return keys

    def default_types(self, values: dict[str, Any]) -> list[str]:
        """Where ``layer_types`` is missing, as in files of older ``transformers``."""
        first = values.get("max_window_layers", 28)
        return [KINDS[layer >= first] for layer in range(values["num_hidden_layers"])]


def _fields(size: int | None, slides: Sequence[bool]) -> dict[str, Any]:
    if size is None or not any(slides):
        return {"window_size": None, "window_attn_skip_freq": None}
    return {"window_size": size, "window_attn_skip_freq": tuple(map(int, slides))}
