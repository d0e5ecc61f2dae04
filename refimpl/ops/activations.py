"""Nonlinearities: the softmax family, and the activations of feed-forward layers."""
import math

from refimpl.array import xp_of
from refimpl.autograd import op
from refimpl.ops.elementwise import sigmoid_array
from refimpl.ops.erf import erf_array

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


@op
def log_softmax(x):
    """Logarithm of softmax over the last axis.  A row that is -inf everywhere stays -inf, with gradient 0.

    Equation:   y = x - lse(x)
    Shapes:     x[..., V] -> y[..., V]
    VJP:        dx = dy - softmax(x)·Σ dy
    Residuals:  p
    Reference:  torch.log_softmax
    """
    p, lse = softmax_and_lse(x)
    y = x - lse

    def vjp(dy):
        return dy - p * dy.sum(axis=-1, keepdims=True)
    return y, vjp


@op
def logsumexp(x, keepdims=False):
    """Logarithm of the sum of exponentials over the last axis.  A row that is -inf everywhere gives -inf, with gradient 0.

    Equation:   y = m + ln Σ e^(x - m),  m = max x
    Shapes:     x[..., V] -> y[...]
    VJP:        dx = dy·softmax(x)
    Residuals:  p
    Reference:  torch.logsumexp
    """
    p, lse = softmax_and_lse(x)
    hidden = (p.real == 0).all(axis=-1, keepdims=True)
    xp = xp_of(x)
    y = xp.where(hidden, xp.full_like(lse, -xp.inf), lse)
    y = y if keepdims else y[..., 0]

    def vjp(dy):
        return p * (dy if keepdims else dy[..., None])
    return y, vjp


def softmax_and_lse(x):
    """softmax(x) and lse(x) of a plain array; in a row that is -inf everywhere 0 and 0, so that x - lse is -inf, not nan."""
    xp = xp_of(x)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"logsumexp and log_softmax need a last axis with at least one element, got x{list(x.shape)}")
    m = x.max(axis=-1, keepdims=True)
    m = xp.where(m == -xp.inf, xp.zeros_like(m), m)
    p = xp.exp(x - m)
    total = p.sum(axis=-1, keepdims=True)
    total = xp.where(total == 0, xp.ones_like(total), total)
    return p / total, m + xp.log(total)


@op
def gelu_erf(x):
    """GELU, exact form: the one of BERT and of torch's default.  It differs from the tanh form by up to 4.7e-4.

    Equation:   y = x·Φ(x),  Φ(x) = ½·(1 + erf(x/√2))
    Shapes:     x[...] -> y[...]
    VJP:        dx = dy·(Φ(x) + x·e^(-x²/2)/√(2π))
    Residuals:  x, cdf
    Reference:  Hendrycks and Gimpel 2016, section 2.  HF `gelu`
    """
    cdf = 0.5 * (1 + erf_array(x * math.sqrt(0.5)))
    y = x * cdf

    def vjp(dy):
        return dy * (cdf + x * (xp_of(x).exp(-0.5 * (x * x)) * (1 / math.sqrt(2 * math.pi))))
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
    xp = xp_of(x)
    positive = x > 0
    y = xp.maximum(x, 0)

    def vjp(dy):
        return xp.where(positive, dy, xp.zeros_like(dy))
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
    s = sigmoid_array(x)
    y = x * s

    def vjp(dy):
        return dy * (s * (1 + x * (1 - s)))
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
    s = sigmoid_array(1.702 * x)
    y = x * s

    def vjp(dy):
        return dy * (s * (1 + 1.702 * x * (1 - s)))
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
    s = sigmoid_array(gate)
    y = gate * s * up

    def vjp(dy):
        return dy * up * (s * (1 + gate * (1 - s))), dy * gate * s
    return y, vjp
