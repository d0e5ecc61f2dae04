"""The softmax family: probabilities, their logarithms, and the logarithm of their denominator."""
from refimpl.array import in_cache, xp_of
from refimpl.autograd import op
from refimpl.autograd.layout import last_axis
from refimpl.ops.linear import row_dot


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
        return in_cache(softmax_vjp, dy, y, rows=True)
    return y, vjp


def softmax_array(x, own=False):
    """softmax of a plain array; `own`: x may be overwritten."""
    if own and x.size:
        return softmax_parts(x, own)[0]
    return in_cache(lambda x: softmax_parts(x)[0], x, rows=True) if x.size else x + 0


def softmax_vjp(dy, y):
    dx = dy - row_dot(y, dy)
    dx *= y
    return dx


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

    def forward(x):
        p, m, log_total = softmax_parts(x)
        y = x - m                                       # not x - (m + log_total), which loses digits where m is large
        y -= log_total
        return y, p

    def backward(dy, p):
        dx = p * -dy.sum(axis=-1, keepdims=True)
        dx += dy
        dx *= p.any(axis=-1, keepdims=True)             # 0 in a row that is -inf everywhere, whose p is 0
        return dx
    y, p = in_cache(forward, x, rows=True)

    def vjp(dy):
        return in_cache(backward, dy, p, rows=True)
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
    p, m, log_total = in_cache(softmax_parts, x, rows=True)
    lse = m + log_total
    y = xp.where(p.any(axis=-1, keepdims=True), lse, xp.full_like(lse, -xp.inf))
    y = y if keepdims else y[..., 0]

    def vjp(dy):
        return p * (dy if keepdims else dy[..., None])
    return y, vjp


def check_last_axis(op_name, x):
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op_name}: x{list(x.shape)} needs a last axis with at least one element")
