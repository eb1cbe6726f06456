"""Measures this machine for the planner: what it reads, computes and sends per second, and what a step takes besides.

Nothing of it knows the model that is planned for. What is measured, how, and how well it predicts: docs/planner.md.
"""

from megatron_dcp.calibration.run import about_machine, calibrate

__all__ = ["about_machine", "calibrate"]
