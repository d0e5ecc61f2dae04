"""Generation: sample.py."""
from refimpl.generate.sample import sample

__all__ = ["sample"]
