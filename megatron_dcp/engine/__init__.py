"""Generation: requests, scheduling, sampling, the model runner, and ``LLM`` and ``AsyncLLM`` over them.

``params``, ``request``, ``batch``, ``scheduler``, ``prompts``, ``detokenizer``, ``stops``, ``draft``, ``wire``,
``stats`` and ``prometheus`` run without torch.
"""

from megatron_dcp.engine.batch import SeqStep, StepBatch
from megatron_dcp.engine.params import SamplingParams
from megatron_dcp.engine.request import RequestOutput

__all__ = ["RequestOutput", "SamplingParams", "SeqStep", "StepBatch"]
