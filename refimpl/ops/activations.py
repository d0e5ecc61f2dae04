"""Nonlinearities: gelu_tanh and softmax."""
import math

from refimpl.array import xp_of
from refimpl.autograd import op

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)                 # a Python float: it does not promote float32


@op
def gelu_tanh(x):
    """GELU, tanh form: the one GPT-2 was trained with.  It differs from the erf form by up to 4.7e-4.

    Equation:   y = ½·x·(1 + t),  t = tanh(√(2/π)·(x + 0.044715·x³))
    Shapes:     x[...] -> y[...]
    VJP:        dx = dy·½·(1 + t + x·(1 - t²)·√(2/π)·(1 + 3·0.044715·x²))
    Residuals:  x, t
    Reference:  Hendrycks and Gimpel 2016, section 2.  HF `gelu_new`
    """
    t = xp_of(x).tanh(SQRT_2_OVER_PI * (x + 0.044715 * (x * x * x)))
    y = 0.5 * x * (1 + t)

    def vjp(dy):
        slope = SQRT_2_OVER_PI * (1 + 3 * 0.044715 * (x * x))   # d of tanh's argument
        return dy * (0.5 * (1 + t + x * (1 - t * t) * slope))
    return y, vjp


@op
def softmax(x):
    """Softmax over the last axis.  A row that is -inf everywhere gives 0, not nan.

    Equation:   y = e^(x - m) / Σ e^(x - m),  m = max x
    Shapes:     x[..., V] -> y[..., V]
    VJP:        dx = y·(dy - Σ y·dy)
    Residuals:  y
    Reference:  Bridle 1990
    """
    if x.ndim == 0:
        raise ValueError("softmax: x[] has no last axis to normalise over")
    y = softmax_array(x)

    def vjp(dy):
        return y * (dy - (y * dy).sum(axis=-1, keepdims=True))
    return y, vjp


def softmax_array(x):
    """softmax of a plain array."""
    xp = xp_of(x)
    if x.shape[-1] == 0:
        return x + 0
    m = x.max(axis=-1, keepdims=True)
    m = xp.where(m == -xp.inf, xp.zeros_like(m), m)     # a row with nothing visible: e^-inf = 0, not e^(-inf + inf)
    e = xp.exp(x - m)
    total = e.sum(axis=-1, keepdims=True)
    return e / xp.where(total == 0, xp.ones_like(total), total)
