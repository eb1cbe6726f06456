"""Proof that trainer and generator agree: training forward, prefill and decode of one model, compared."""

from megatron_dcp.verification.report import Comparison, Difference, VerifyReport
from megatron_dcp.verification.run import verify

__all__ = ["Comparison", "Difference", "VerifyReport", "verify"]
