"""Megatron's parallel linear layers with a short way through inference.

Megatron's own forward serves training: several autograd functions and process-group look-ups around one product. At
decode, where a layer takes a millisecond, they take longer than everything else in it together. Under
``torch.inference_mode()`` these classes compute the product and the tensor-parallel sum, and nothing else; anywhere
else every call goes to Megatron.

Shapes: ``T`` tokens (any leading dimensions), ``I`` inputs, ``O`` outputs of this rank, ``B`` parts of the weight.
"""

from __future__ import annotations

import math

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

# On a CPU in fp32, 2 to 12 tokens are 1.2 to 2.5 times faster as many small products, each with so many rows of the
# weight, than as one: nothing is repacked for them (measured for weights of 1 to 64 MB).
_FEW_TOKENS = range(2, 13)
_ROWS = 64


def product(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """``x @ weight.T``, ``[T, O]``, in the form that the device computes fastest."""
    outputs, inputs = weight_OI.shape
    tokens = math.prod(x_TI.shape[:-1])  # not numel / I: a rank without heads has I = 0
    flat_TI = x_TI.reshape(tokens, inputs)
    small = tokens in _FEW_TOKENS and x_TI.device.type == "cpu" and x_TI.dtype == torch.float32
    if small and outputs % _ROWS == 0:
        parts = outputs // _ROWS
        weight_BIO = weight_OI.view(parts, _ROWS, inputs).transpose(1, 2)
        out_TO = torch.bmm(flat_TI.expand(parts, tokens, inputs), weight_BIO).transpose(0, 1)
    else:
        out_TO = torch.mm(flat_TI, weight_OI.t())  # what linear() comes to, after several more calls
    return out_TO.reshape(*x_TI.shape[:-1], outputs)


class DCPColumnParallelLinear(ColumnParallelLinear):
    """``ColumnParallelLinear`` with a short way through inference."""

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """This rank's outputs and, with ``skip_bias_add``, the bias that the caller adds."""
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if not torch.is_inference_mode_enabled() or self.sequence_parallel or (gather and self.tp_group.size() > 1):
            return super().forward(input_, weight, runtime_gather_output)
        out = product(input_, self.weight if weight is None else weight)
        if self.skip_bias_add or self.bias is None:
            return out, self.bias
        return out + self.bias, None


class DCPRowParallelLinear(RowParallelLinear):
    """``RowParallelLinear`` with a short way through inference."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """The outputs, summed over the tensor-parallel ranks, and, with ``skip_bias_add``, the caller's bias."""
        if not torch.is_inference_mode_enabled() or self.sequence_parallel or not self.input_is_parallel:
            return super().forward(input_)
        out = product(input_, self.weight)
        if self.tp_group.size() > 1 and not self.explicit_expert_comm:  # experts are summed by their layer
            out = reduce_from_tensor_model_parallel_region(out, group=self.tp_group)
        if self.skip_bias_add or self.bias is None:
            return out, self.bias
        return out + self.bias, None
