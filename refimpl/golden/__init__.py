"""Golden values: compare.py."""
from refimpl.golden.compare import Difference, compare, gauge_scales

__all__ = ["Difference", "compare", "gauge_scales"]
