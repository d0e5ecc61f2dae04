"""The rule for corners: a zero cotangent gives a zero gradient, also where the slope is infinite.

Without it, the branch that `where` did not take leaks: 0·∞ is nan, and the nan reaches the parameters.  The ops whose slope
can be infinite follow it: divide, exp, log, sqrt, power.  Left out: products.  mul, linear, matmul, einsum and norm give nan
for 0·∞, as numpy does; where one operand may be infinite, choose a finite one with `where` before the product.
"""
import numpy as np

from refimpl.array import xp_of


def silent():
    """Around a function whose value at a corner is ±inf or nan by definition (ln 0, √-1, 1/0): numpy need not warn of it."""
    return np.errstate(divide="ignore", over="ignore", invalid="ignore")


def annulled(dx, dy):
    """dx = dy·slope with 0·∞ = 0: where a nan has arisen and dy is 0, dx is 0."""
    xp = xp_of(dx)
    return xp.where(dy == 0, xp.zeros((), dx.dtype), dx) if bool(xp.isnan(dx).any()) else dx
