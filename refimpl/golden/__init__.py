"""Golden values: right ones for another stack (make.py), and whether its own are right (session.py); compare.py for two sets of
arrays of ours.  README.md has the order to read in."""
from refimpl.golden.compare import Difference, compare, gauge_scales

__all__ = ["Difference", "compare", "gauge_scales"]
