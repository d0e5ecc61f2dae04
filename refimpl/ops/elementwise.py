"""Elementwise functions of one array: exp, log, sqrt, tanh, sigmoid, softplus, erf, power.

Where a slope is infinite (log and sqrt at 0) a zero cotangent still gives a zero gradient: see corners.py.
"""
import math

from refimpl.array import xp_of
from refimpl.autograd import op
from refimpl.ops.corners import reciprocal, times
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
    y = xp_of(x).exp(x)

    def vjp(dy):
        return times(dy, y)
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
    y = xp_of(x).log(x)

    def vjp(dy):
        return times(dy, reciprocal(x))
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
    y = xp_of(x).sqrt(x)

    def vjp(dy):
        return times(dy, 0.5 * reciprocal(y))
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
    y = x ** exponent

    def vjp(dy):
        return times(dy, exponent * x ** (exponent - 1))
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
        return dy * (1 - y * y)
    return y, vjp


def sigmoid_array(x):
    """1/(1 + e^-x) without overflow: ½·(1 + tanh(x/2))."""
    return 0.5 * (1 + xp_of(x).tanh(0.5 * x))


@op
def sigmoid(x):
    """Logistic function.

    Equation:   y = σ(x) = 1/(1 + e^-x) = ½·(1 + tanh(x/2))
    Shapes:     x[...] -> y[...]
    VJP:        dx = dy·y·(1 - y)
    Residuals:  y
    Reference:  torch.sigmoid
    """
    y = sigmoid_array(x)

    def vjp(dy):
        return dy * (y * (1 - y))
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
    positive = x.real > 0
    size = xp.where(positive, x, -x)                    # |x|, also for a complex step
    y = xp.where(positive, x, xp.zeros_like(x)) + xp.log1p(xp.exp(-size))

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
