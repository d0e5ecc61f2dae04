"""Closed forms: traffic.py."""
from refimpl.analysis.traffic import local_parameters, step_payload

__all__ = ["local_parameters", "step_payload"]
