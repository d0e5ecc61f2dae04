"""The autograd: read layout.py, tensor.py, op.py, tape.py, then frames.py, rounding.py."""
from refimpl.autograd.frames import Clock, Count, Entry, Frame, Guard, Record, Replace, Span, difference, residuals
from refimpl.autograd.layout import REPLICATED, Layout, LayoutError
from refimpl.autograd.op import REGISTRY, Op, call, op, scoped, seam, stack
from refimpl.autograd.rounding import Round, bfloat16
from refimpl.autograd.tape import Tape, recompute, value_and_grad
from refimpl.autograd.tensor import Params, Tensor

__all__ = ["Clock", "Count", "Entry", "Frame", "Guard", "Layout", "LayoutError", "Op", "Params", "REGISTRY", "REPLICATED",
           "Record", "Replace", "Round", "Span", "Tape", "Tensor", "bfloat16", "call", "difference", "op", "recompute",
           "residuals", "scoped", "seam", "stack", "value_and_grad"]
