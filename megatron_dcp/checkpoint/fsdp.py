"""Reading Megatron's ``fsdp_dtensor`` format, which Megatron-FSDP saves (also ``torch_dcp``, of torch's FSDP2).

Both are plain ``torch.distributed.checkpoint`` directories of the state of a training: ``model.module.…`` for the
model, whose layers and experts have their global numbers, gate and up of a gated MLP apart (``…_w``, ``…_v``);
``args`` and ``checkpoint_version`` are objects among the others. The optimizer's states are never read.
"""

from __future__ import annotations

from typing import Any

from megatron_dcp.checkpoint.dist import DistSource, Reader, read_args
from megatron_dcp.checkpoint.files import Location
from megatron_dcp.model_config import ModelConfig

_COMMON = ("args", "checkpoint_version", "iteration")


class FsdpSource(DistSource):
    """An ``fsdp_dtensor`` checkpoint, open for reading; errors as of `DistSource`."""

    def __init__(self, location: Location) -> None:
        reader = _FsdpReader(location.data)
        super().__init__(location, reader)
        tp = getattr(reader.common()["args"], "tensor_model_parallel_size", None) or 1
        packed = [name for name, spec in self.specs.items() if spec.parts > 1 and len(self._stored[name].keys) == 1]
        if tp > 1 and packed:
            raise ValueError(
                f"{packed[0]} in {location.data} holds gate and up of {tp} tensor parallel ranks in one tensor, whose "
                "order is not known; save the checkpoint with --ckpt-format torch_dist"
            )


def read_fsdp_config(location: Location) -> ModelConfig:
    """Shape of the model at ``location``, without looking at its tensors."""
    return read_args(location, _FsdpReader(location.data))[1]


class _FsdpReader(Reader):
    def check_format(self) -> None:
        """There is no file that says the format; `common` finds out."""

    def common(self) -> dict[str, Any]:
        stored = self.metadata.state_dict_metadata
        if not any(key.startswith("model.") for key in stored):
            raise ValueError(
                f"{str(self._directory)!r} has no metadata.json, which Megatron writes last: its saving was "
                "interrupted; take an earlier iteration"
            )
        return {key: self.read_object(key) for key in _COMMON if key in stored}
