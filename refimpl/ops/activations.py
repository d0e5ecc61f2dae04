"""Nonlinearities: the softmax family, and the activations of feed-forward layers."""
import math

from refimpl.array import xp_of
from refimpl.autograd import op
from refimpl.autograd.layout import last_axis
from refimpl.ops.corners import annulled, silent
from refimpl.ops.elementwise import sigmoid_array
from refimpl.ops.erf import erf_array
from refimpl.ops.linear import row_dot

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)                 # a Python float: it does not promote float32
TANH_IS_1 = 10.0                                        # beyond ±10 GELU's tanh is ±1 in float64
DENSITY_IS_0 = 40.0                                     # beyond, the normal distribution's density is 0 in float64
SIGMOID_IS_0 = -1000.0                                  # σ is 0 from here on to the left: with it for x, x·σ is -0 also at -inf


def clipped(xp, x, size):
    """x kept within ±size."""
    return xp.minimum(xp.maximum(x, -size), size)


@op
def gelu_tanh(x):
    """GELU, tanh form: the one GPT-2 was trained with.  It differs from the erf form by up to 4.7e-4.

    Equation:   y = ½·x·(1 + t),  t = tanh(√(2/π)·(x + 0.044715·x³))
    Shapes:     x[...] -> y[...]
    VJP:        dx = dy·½·(1 + t + x·(1 - t²)·√(2/π)·(1 + 3·0.044715·x²))
    Residuals:  x, t
    Reference:  Hendrycks and Gimpel 2016, section 2.  HF `gelu_new`
    """
    low = xp_of(x).maximum(x, -TANH_IS_1)               # y is -0 from here on to the left, also at -inf
    u = xp_of(x).minimum(low, TANH_IS_1)                # x³ would overflow
    t = u * u                                           # in place from here: a temporary costs more than its arithmetic
    t *= SQRT_2_OVER_PI * 0.044715
    t += SQRT_2_OVER_PI
    t *= u
    t = xp_of(x).tanh(t)
    y = t + 1
    y *= 0.5
    y *= low

    def vjp(dy):
        u = clipped(xp_of(x), x, TANH_IS_1)
        dx = u * u
        dx *= SQRT_2_OVER_PI * 3 * 0.044715
        dx += SQRT_2_OVER_PI                            # d of tanh's argument
        dx *= u
        dx *= 1 - t * t
        dx += t
        dx += 1
        dx *= 0.5
        dx *= dy
        return dx
    return y, vjp


@op(along=last_axis)
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
        dx = dy - row_dot(y, dy)
        dx *= y
        return dx
    return y, vjp


def softmax_array(x, own=False):
    """softmax of a plain array; `own`: x may be overwritten."""
    return softmax_parts(x, own)[0] if x.shape[-1] else x + 0


def softmax_parts(x, own=False):
    """softmax(x), the rows' maxima m and ln Σ e^(x - m), with x - lse = (x - m) - ln Σ.

    A row with nothing visible, -inf everywhere, has m = 0 and Σ = 1: then its softmax is 0, and no nan arises.
    """
    xp = xp_of(x)
    m = x.max(axis=-1, keepdims=True)
    m = xp.where(m == -xp.inf, xp.zeros_like(m), m)
    if own:
        x -= m
    e = x if own else x - m
    xp.exp(e, out=e)
    total = e.sum(axis=-1, keepdims=True)
    total = xp.where(total == 0, xp.ones_like(total), total)
    e /= total
    return e, m, xp.log(total)


@op(along=last_axis)
def log_softmax(x):
    """Logarithm of softmax over the last axis.  A row that is -inf everywhere stays -inf, with gradient 0.

    Equation:   y = x - lse(x)
    Shapes:     x[..., V] -> y[..., V]
    VJP:        dx = dy - softmax(x)·Σ dy
    Residuals:  p
    Reference:  torch.log_softmax
    """
    check_last_axis("log_softmax", x)
    p, m, log_total = softmax_parts(x)
    y = x - m                                           # not x - (m + log_total), which loses digits where m is large
    y -= log_total

    def vjp(dy):
        dx = dy - p * dy.sum(axis=-1, keepdims=True)
        return dx * p.any(axis=-1, keepdims=True)       # 0 in a row that is -inf everywhere, whose p is 0
    return y, vjp


@op(along=last_axis)
def logsumexp(x, keepdims=False):
    """Logarithm of the sum of exponentials over the last axis.  A row that is -inf everywhere gives -inf, with gradient 0.

    Equation:   y = m + ln Σ e^(x - m),  m = max x
    Shapes:     x[..., V] -> y[...]
    VJP:        dx = dy·softmax(x)
    Residuals:  p
    Reference:  torch.logsumexp
    """
    check_last_axis("logsumexp", x)
    xp = xp_of(x)
    p, m, log_total = softmax_parts(x)
    lse = m + log_total
    y = xp.where(p.any(axis=-1, keepdims=True), lse, xp.full_like(lse, -xp.inf))
    y = y if keepdims else y[..., 0]

    def vjp(dy):
        return p * (dy if keepdims else dy[..., None])
    return y, vjp


def check_last_axis(op_name, x):
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op_name}: x{list(x.shape)} needs a last axis with at least one element")


@op
def gelu_erf(x):
    """GELU, exact form: the one of BERT and of torch's default.  It differs from the tanh form by up to 4.7e-4.

    Equation:   y = x·Φ(x),  Φ(x) = ½·(1 + erf(x/√2))
    Shapes:     x[...] -> y[...]
    VJP:        dx = dy·(Φ(x) + x·e^(-x²/2)/√(2π))
    Residuals:  x, cdf
    Reference:  Hendrycks and Gimpel 2016, section 2.  HF `gelu`
    """
    cdf = erf_array(x * math.sqrt(0.5))
    cdf += 1
    cdf *= 0.5
    y = xp_of(x).maximum(x, -DENSITY_IS_0) * cdf        # -0 from there on to the left, also at -inf

    def vjp(dy):
        u = clipped(xp_of(x), x, DENSITY_IS_0)
        dx = u * u
        dx *= -0.5
        dx = xp_of(x).exp(dx)
        dx *= 1 / math.sqrt(2 * math.pi)                # the density of the normal distribution
        dx *= u
        dx += cdf
        dx *= dy
        return dx
    return y, vjp


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
    low = xp_of(x).maximum(x, SIGMOID_IS_0)
    s = sigmoid_array(low)
    y = low * s

    def vjp(dy):
        return gated(dy, x, s)
    return y, vjp


def gated(dy, x, s, factor=1):
    """dy·s·(1 + factor·x·(1 - s)): the vjp of x·σ(factor·x)."""
    dx = 1 - s
    dx *= xp_of(x).maximum(x, SIGMOID_IS_0)
    if factor != 1:
        dx *= factor
    dx += 1
    dx *= s
    dx *= dy
    return dx


@op
def quick_gelu(x):
    """GELU's sigmoid approximation, as in CLIP.

    Equation:   y = x·s,  s = σ(1.702·x)
    Shapes:     x[...] -> y[...]
    VJP:        dx = dy·s·(1 + 1.702·x·(1 - s))
    Residuals:  x, s
    Reference:  Hendrycks and Gimpel 2016, section 2.  HF `quick_gelu`
    """
    low = xp_of(x).maximum(x, SIGMOID_IS_0)
    with silent():
        s = sigmoid_array(1.702 * low)
    y = low * s

    def vjp(dy):
        return gated(dy, x, s, 1.702)
    return y, vjp


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
    low = xp_of(gate).maximum(gate, SIGMOID_IS_0)
    s = sigmoid_array(low)
    y = low * s
    y *= up

    def vjp(dy):
        dup = dy * xp_of(gate).maximum(gate, SIGMOID_IS_0)
        dup *= s
        return gated(dy * up, gate, s), dup
    return y, vjp
