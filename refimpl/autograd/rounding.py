"""bfloat16, emulated: float32 numbers of which the upper 16 bits count, so numpy, which has no bfloat16, computes with them.

`Round` is a frame: with it in force, what an op gives and what its vjp hands on are rounded to bfloat16.  Inside an op
everything stays float32 (sums, exponentials, the statistics of a norm), and so do the loss, and what is summed outside of ops:
gradients of a value that is used twice, of micro-batches, and over data-parallel ranks.  The weights that a step starts from
are the rounded ones of float32 masters, which the optimizer keeps (train/loop.py).  On tensor-parallel ranks each rank's
partial product is rounded before it is added up, as on a GPU: sharded and serial runs agree to bfloat16's rounding, not to
float32's.
Reference: Kalamkar et al. 2019 (bfloat16); Micikevicius et al. 2018, section 3.1 (master weights)
"""
from typing import Any, Callable

from refimpl.array import Array, xp_of
from refimpl.autograd.frames import Frame
from refimpl.autograd.op import Seam

LOSSES = ("cross_entropy", "vocab_parallel_cross_entropy")      # their values stay float32


def bfloat16(x: Array) -> Array:
    """float32 -> the nearest bfloat16 number, as float32; of two equally near ones the one whose last bit is 0.

    >>> import numpy as np
    >>> bfloat16(np.array([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38], "float32")).tolist()
    [1.0, 1.015625, inf]
    """
    if x.dtype != "float32":
        raise TypeError(f"bfloat16 is the upper half of float32, got {x.dtype}")
    xp = xp_of(x)
    bits = xp.ascontiguousarray(x).view("uint32")
    bits = (bits + (0x7FFF + (bits >> 16 & 1))) & 0xFFFF0000    # carries into the exponent where it has to, up to inf
    return xp.where(xp.isnan(x), x, bits.view("float32").reshape(x.shape))


class Round(Frame):
    """Round what ops give and what their vjps hand on to bfloat16."""

    def call(self, op: Any, run: Callable, *arrays: Any, **static: Any) -> tuple[Any, Any]:
        y, vjp = run(*arrays, **static)
        if isinstance(op, Seam):
            return y, vjp
        return y if op.name in LOSSES else rounded(y), lambda *dy: rounded(vjp(*dy))


def rounded(values: Any) -> Any:
    """An array, or a tuple of arrays and None: its float32 arrays rounded, the others (ids, counts) as they are."""
    if type(values) is tuple:
        return tuple(map(rounded, values))
    return bfloat16(values) if getattr(values, "dtype", None) == "float32" else values
