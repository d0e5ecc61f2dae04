"""Closed forms: parameters.py, traffic.py."""
from refimpl.analysis.parameters import PUBLISHED
from refimpl.analysis.traffic import local_parameters, step_payload

__all__ = ["PUBLISHED", "local_parameters", "step_payload"]
