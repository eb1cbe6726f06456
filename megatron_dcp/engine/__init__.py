"""Generation: requests, scheduling, sampling, the model runner, and ``LLM`` (in ``engine.llm``) over them.

``request``, ``batch``, ``scheduler``, ``prompts`` and ``detokenizer`` run without torch.
"""

from megatron_dcp.engine.batch import SeqStep, StepBatch
from megatron_dcp.engine.request import RequestOutput, SamplingParams

__all__ = ["RequestOutput", "SamplingParams", "SeqStep", "StepBatch"]
