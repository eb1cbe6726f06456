"""Which configuration serves a model on some GPUs: what fits, what it costs, which to take. No torch, no Megatron.

The model behind it, its sources and its limits: docs/planner.md.
"""

from megatron_dcp.planner.candidates import Candidate, Pins, candidates, legal_dcp
from megatron_dcp.planner.gpus import machine
from megatron_dcp.planner.machine import Machine
from megatron_dcp.planner.models import MODELS, known_model
from megatron_dcp.planner.plan import Plan, Row, Workload, make_plan

__all__ = [
    "MODELS",
    "Candidate",
    "Machine",
    "Pins",
    "Plan",
    "Row",
    "Workload",
    "candidates",
    "known_model",
    "legal_dcp",
    "machine",
    "make_plan",
]
