"""Elementwise functions of one array: exp, log, sqrt, tanh, sigmoid, softplus, erf, power.

Where a slope is infinite (log and sqrt at 0) a zero cotangent still gives a zero gradient: see corners.py.
"""
import math

from refimpl.array import xp_of
from refimpl.autograd import op
from refimpl.ops.corners import annulled, silent
from refimpl.ops.erf import erf_array


@op
def exp(x):
    """Exponential.

    Equation:   y = e^x
    Shapes:     x[...] -> y[...]
    VJP:        dx = dy·y
    Residuals:  y
    Reference:  numpy.exp
    """
    with silent():
        y = xp_of(x).exp(x)

    def vjp(dy):
        with silent():
            return annulled(dy * y, dy)
    return y, vjp


@op
def log(x):
    """Natural logarithm.

    Equation:   y = ln x
    Shapes:     x[...] -> y[...]
    VJP:        dx = dy/x, and 0 where dy = 0
    Residuals:  x
    Reference:  numpy.log
    """
    with silent():
        y = xp_of(x).log(x)

    def vjp(dy):
        with silent():
            return annulled(dy / x, dy)
    return y, vjp


@op
def sqrt(x):
    """Square root.

    Equation:   y = √x
    Shapes:     x[...] -> y[...]
    VJP:        dx = dy/(2y), and 0 where dy = 0
    Residuals:  y
    Reference:  numpy.sqrt
    """
    with silent():
        y = xp_of(x).sqrt(x)

    def vjp(dy):
        with silent():
            dx = dy / y
            dx *= 0.5
            return annulled(dx, dy)
    return y, vjp


@op
def power(x, exponent=2.0):
    """x to a fixed power.

    Equation:   y = x^n
    Shapes:     x[...] -> y[...]
    VJP:        dx = dy·n·x^(n-1), and 0 where dy = 0
    Residuals:  x
    Reference:  numpy.power
    """
    exponent = float(exponent)
    with silent():
        y = x ** exponent

    def vjp(dy):
        if exponent == 0:
            return xp_of(dy).zeros_like(dy)             # not 0·x^-1, which is nan at 0
        with silent():
            dx = x ** (exponent - 1)
            dx *= exponent
            dx *= dy
            return annulled(dx, dy)
    return y, vjp


@op
def tanh(x):
    """Hyperbolic tangent.

    Equation:   y = tanh x
    Shapes:     x[...] -> y[...]
    VJP:        dx = dy·(1 - y²)
    Residuals:  y
    Reference:  numpy.tanh
    """
    y = xp_of(x).tanh(x)

    def vjp(dy):
        dx = y * y
        dx *= -1
        dx += 1
        dx *= dy
        return dx
    return y, vjp


def minus_size(x):
    """-|x|, also of a complex step."""
    return xp_of(x).minimum(x, -x)


def sigmoid_array(x):
    """1/(1 + e^-x), which keeps the digits of small values, and is 0 where e^-x overflows."""
    xp, y = xp_of(x), -x
    if x.dtype.kind == "c":                             # a complex infinity would make nan: stop before it
        y = xp.minimum(y, 88.0 if x.dtype == "complex64" else 709.0)
    with silent():
        y = xp.exp(y)
        y += 1
        return 1 / y


@op
def sigmoid(x):
    """Logistic function.

    Equation:   y = σ(x) = 1/(1 + e^-x)
    Shapes:     x[...] -> y[...]
    VJP:        dx = dy·y·(1 - y)
    Residuals:  y
    Reference:  torch.sigmoid
    """
    y = sigmoid_array(x)

    def vjp(dy):
        dx = 1 - y
        dx *= y
        dx *= dy
        return dx
    return y, vjp


@op
def softplus(x):
    """Smooth relu.  No threshold above which it is replaced by x (torch has one, at 20).

    Equation:   y = ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|)
    Shapes:     x[...] -> y[...]
    VJP:        dx = dy·σ(x)
    Residuals:  x
    Reference:  Dugas et al. 2001
    """
    xp = xp_of(x)
    y = xp.log1p(xp.exp(minus_size(x)))
    y += xp.maximum(x, 0)

    def vjp(dy):
        return dy * sigmoid_array(x)
    return y, vjp


@op
def erf(x):
    """Error function, within 1e-15 of the exact value (float64; measured, see erf.py).

    Equation:   y = (2/√π)·∫₀ˣ e^(-t²) dt
    Shapes:     x[...] -> y[...]
    VJP:        dx = dy·(2/√π)·e^(-x²)
    Residuals:  x
    Reference:  Abramowitz and Stegun 7.1.1
    """
    y = erf_array(x)

    def vjp(dy):
        return dy * (2 / math.sqrt(math.pi) * xp_of(x).exp(-(x * x)))
    return y, vjp
