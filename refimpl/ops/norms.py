"""Normalisation over the last axis."""
from refimpl.array import xp_of
from refimpl.autograd import op
from refimpl.autograd.layout import last_axis
from refimpl.ops.axes import check_eps
from refimpl.ops.linear import column_dot, column_sum, row_dot


@op(along=last_axis)
def layer_norm(x, g, b=None, eps=1e-5):
    """Layer normalisation over the last axis.

    Equation:   xhat = (x - μ) / √(σ² + eps);  y = g·xhat + b   (σ² is the biased variance)
    Shapes:     x[..., D], g[D], b[D] or None -> y[..., D]
    VJP:        dx = r·(dxhat - mean(dxhat) - xhat·mean(dxhat·xhat)),  dxhat = g·dy,  r = 1/√(σ² + eps)
                dg = Σ xhat·dy;  db = Σ dy, over all leading axes
    Residuals:  xhat, r, g
    Reference:  Ba, Kiros, Hinton 2016, eq. 4.  HF GPT-2 `ln_1`, Megatron `FusedLayerNorm`
    """
    D = x.shape[-1] if x.ndim else 0
    if g.shape != (D,) or (b is not None and b.shape != (D,)) or D == 0:
        raise ValueError(f"layer_norm: x{list(x.shape)} needs g and b of shape [{D}], D > 0; got g{list(g.shape)}, "
                         f"b{'None' if b is None else list(b.shape)}")
    check_eps("layer_norm", eps)
    xhat = x - x.mean(axis=-1, keepdims=True)
    r = 1 / xp_of(x).sqrt(row_dot(xhat, xhat) / D + float(eps))
    xhat *= r
    y = g * xhat
    if b is not None:
        y += b
    biased = b is not None

    def vjp(dy):
        dx = g * dy                                     # dxhat
        along = row_dot(dx, xhat) / D
        dx -= dx.mean(axis=-1, keepdims=True)
        dx -= xhat * along
        dx *= r
        return dx, column_dot(xhat, dy), column_sum(dy) if biased else None
    return y, vjp


GAINS = ("w", "1+w")


@op(along=last_axis)
def rms_norm(x, w, eps=1e-6, gain="w"):
    """Root-mean-square normalisation over the last axis.

    gain "w" multiplies by w (LLaMA, initial w = 1), "1+w" by 1 + w (Gemma, initial w = 0): the same weights give different
    numbers, so the form is named.

    Equation:   xhat = x·r,  r = 1/√(mean x² + eps);  y = xhat·w or xhat·(1 + w)
    Shapes:     x[..., D], w[D] -> y[..., D]
    VJP:        dx = r·(dxhat - xhat·mean(dxhat·xhat)),  dxhat = factor·dy;  dw = Σ xhat·dy, over all leading axes
    Residuals:  xhat, r, factor
    Reference:  Zhang and Sennrich 2019, eq. 4.  HF LlamaRMSNorm, GemmaRMSNorm
    """
    D = x.shape[-1] if x.ndim else 0
    if w.shape != (D,) or D == 0 or gain not in GAINS:
        raise ValueError(f"rms_norm: x{list(x.shape)} needs w of shape [{D}], D > 0, and gain {' or '.join(GAINS)}; got "
                         f"w{list(w.shape)}, {gain!r}")
    check_eps("rms_norm", eps)
    r = 1 / xp_of(x).sqrt(row_dot(x, x) / D + float(eps))
    xhat = x * r
    factor = w if gain == "w" else 1 + w
    y = xhat * factor

    def vjp(dy):
        dx = factor * dy                                # dxhat
        dx -= xhat * (row_dot(dx, xhat) / D)
        dx *= r
        return dx, column_dot(xhat, dy)
    return y, vjp
