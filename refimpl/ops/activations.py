"""The nonlinearities of feed-forward layers."""
import math

from refimpl.array import in_cache, xp_of
from refimpl.autograd import op
from refimpl.ops.corners import annulled, silent
from refimpl.ops.elementwise import sigmoid_array
from refimpl.ops.erf import erf_array

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)                 # a Python float: it does not promote float32
SIGMOID_IS_FLAT = 40.0                                  # beyond ±40 σ(2u) of GELU is 0 or 1 in float64
DENSITY_IS_0 = 40.0                                     # beyond, the normal distribution's density is 0 in float64
SIGMOID_IS_0 = -1000.0                                  # σ is 0 from here on to the left: with it for x, x·σ is -0 also at -inf


def clipped(xp, x, size):
    """x kept within ±size."""
    return xp.minimum(xp.maximum(x, -size), size)


@op
def gelu_tanh(x):
    """GELU, tanh form: the one GPT-2 was trained with.  It differs from the erf form by up to 4.7e-4.

    Equation:   y = ½·x·(1 + tanh u) = x·s,  s = σ(2u),  u = √(2/π)·(x + 0.044715·x³)
    Shapes:     x[...] -> y[...]
    VJP:        dx = dy·s·(1 + x·(1 - s)·2u'),  u' = √(2/π)·(1 + 3·0.044715·x²)
    Residuals:  x   (s is computed again: cheaper than keeping an array as large as x)
    Reference:  Hendrycks and Gimpel 2016, section 2.  HF `gelu_new`
    """
    def forward(x):
        return xp_of(x).maximum(x, -SIGMOID_IS_FLAT) * gelu_gate(x)     # -0 from there on to the left, also at -inf

    def backward(dy, x):
        s = gelu_gate(x)
        u = clipped(xp_of(x), x, SIGMOID_IS_FLAT)
        dx = u * u
        dx *= 2 * SQRT_2_OVER_PI * 3 * 0.044715
        dx += 2 * SQRT_2_OVER_PI                        # 2u'
        dx *= u
        dx *= 1 - s
        dx += 1
        dx *= s
        dx *= dy
        return dx

    def vjp(dy):
        return in_cache(backward, dy, x)
    return in_cache(forward, x), vjp


def gelu_gate(x):
    """σ(2u)"""
    with silent():                                      # x³ may overflow: then it is 0 or 1
        s = x * x                                       # in place from here: a temporary costs more than its arithmetic
        s *= 2 * SQRT_2_OVER_PI * 0.044715
        s += 2 * SQRT_2_OVER_PI
        s *= x
    return sigmoid_array(s)


@op
def gelu_erf(x):
    """GELU, exact form: the one of BERT and of torch's default.  It differs from the tanh form by up to 4.7e-4.

    Equation:   y = x·Φ(x),  Φ(x) = ½·(1 + erf(x/√2))
    Shapes:     x[...] -> y[...]
    VJP:        dx = dy·(Φ(x) + x·e^(-x²/2)/√(2π))
    Residuals:  x, cdf
    Reference:  Hendrycks and Gimpel 2016, section 2.  HF `gelu`
    """
    y, cdf = in_cache(gelu_erf_parts, x)

    def vjp(dy):
        return in_cache(gelu_erf_vjp, dy, x, cdf)
    return y, vjp


def gelu_erf_parts(x):
    cdf = erf_array(x * math.sqrt(0.5))
    cdf += 1
    cdf *= 0.5
    return xp_of(x).maximum(x, -DENSITY_IS_0) * cdf, cdf    # -0 from there on to the left, also at -inf


def gelu_erf_vjp(dy, x, cdf):
    u = clipped(xp_of(x), x, DENSITY_IS_0)
    dx = u * u
    dx *= -0.5
    dx = xp_of(x).exp(dx)
    dx *= 1 / math.sqrt(2 * math.pi)                    # the density of the normal distribution
    dx *= u
    dx += cdf
    dx *= dy
    return dx


@op
def relu(x):
    """Rectifier.  At 0 the gradient is 0.

    Equation:   y = max(x, 0)
    Shapes:     x[...] -> y[...]
    VJP:        dx = dy where x > 0, else 0
    Residuals:  positive
    Reference:  Nair and Hinton 2010
    """
    positive = x > 0
    y = xp_of(x).maximum(x, 0)

    def vjp(dy):
        with silent():
            dx = dy * positive
            return annulled(dx, positive)
    return y, vjp


@op
def silu(x):
    """Sigmoid-weighted linear unit, also called swish.

    Equation:   y = x·s,  s = σ(x)
    Shapes:     x[...] -> y[...]
    VJP:        dx = dy·s·(1 + x·(1 - s))
    Residuals:  x, s
    Reference:  Hendrycks and Gimpel 2016, section 2; Ramachandran et al. 2017
    """
    return gated(x, 1)


def gated(x, factor):
    """x·σ(factor·x) and its vjp."""
    def forward(x):
        low = xp_of(x).maximum(x, SIGMOID_IS_0)
        with silent():
            s = sigmoid_array(low if factor == 1 else factor * low)
        return low * s, s

    def backward(dy, x, s):
        dx = xp_of(x).maximum(x, SIGMOID_IS_0) * (1 - s)
        if factor != 1:
            dx *= factor
        dx += 1
        dx *= s
        dx *= dy
        return dx
    y, s = in_cache(forward, x)

    def vjp(dy):
        return in_cache(backward, dy, x, s)
    return y, vjp


@op
def quick_gelu(x):
    """GELU's sigmoid approximation, as in CLIP.

    Equation:   y = x·s,  s = σ(1.702·x)
    Shapes:     x[...] -> y[...]
    VJP:        dx = dy·s·(1 + 1.702·x·(1 - s))
    Residuals:  x, s
    Reference:  Hendrycks and Gimpel 2016, section 2.  HF `quick_gelu`
    """
    return gated(x, 1.702)


@op
def swiglu(gate, up):
    """The gated unit of LLaMA's feed-forward layer, fused.

    Equation:   y = gate·s·up,  s = σ(gate)
    Shapes:     gate[...], up[...] -> y[...]
    VJP:        dgate = dy·up·s·(1 + gate·(1 - s));  dup = dy·gate·s
    Residuals:  gate, up, s
    Reference:  Shazeer 2020, "GLU Variants Improve Transformer", eq. 6
    """
    if gate.shape != up.shape:
        raise ValueError(f"swiglu: gate{list(gate.shape)} and up{list(up.shape)} must have one shape")
    y, s = in_cache(swiglu_parts, gate, up)

    def vjp(dy):
        return in_cache(swiglu_vjp, dy, gate, up, s)
    return y, vjp


def swiglu_parts(gate, up):
    low = xp_of(gate).maximum(gate, SIGMOID_IS_0)
    s = sigmoid_array(low)
    y = low * s
    y *= up
    return y, s


def swiglu_vjp(dy, gate, up, s):
    low = xp_of(gate).maximum(gate, SIGMOID_IS_0)
    dup = low * s
    dup *= dy
    dgate = 1 - s
    dgate *= low
    dgate += 1
    dgate *= s
    dgate *= up
    dgate *= dy
    return dgate, dup
