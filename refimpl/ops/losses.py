"""cross_entropy as (sum, count): the caller divides once, by the count of the whole batch (the token rule)."""
import math

from refimpl.array import xp_of
from refimpl.autograd import op
from refimpl.autograd.layout import last_axis
from refimpl.ops.activations import softmax_parts

IGNORE = -100
SMOOTHING_OVER = ("all", "others")


@op(values=slice(1), along=last_axis)
def cross_entropy(logits, targets, ignore_index=IGNORE, smoothing=0.0, smoothing_over="all", z_loss=0.0):
    """Cross entropy of integer targets, summed, and the number of targets that count.

    Never a mean: means of shards or micro-batches with different counts do not add up.  Label smoothing α has two published
    forms: spread over "all" V classes (t = α/V + [target]·(1 - α); Szegedy et al. 2016, PyTorch), or over the V - 1 "others"
    (t = α/(V - 1) off the target, 1 - α on it; Megatron-LM).

    Equation:   y = Σ (lse - Σ_v t_v·logits_v + z·lse²),  count = number of targets ≠ ignore_index,  z the z-loss coefficient
    Shapes:     logits[..., V], targets int[...] -> y[], count int[]
    VJP:        dlogits = dy·((1 + 2·z·lse)·softmax(logits) - t), 0 in rows that are ignored
    Residuals:  p, rows, columns, lse
    Reference:  Goodfellow et al. 2016, section 6.2.2; z-loss: Chowdhery et al. 2022 (PaLM), section 5
    """
    V = logits.shape[-1] if logits.ndim else 0
    check(logits, targets, V, smoothing, smoothing_over, z_loss)
    xp = xp_of(logits)
    flat, ids = logits.reshape(-1, V), targets.reshape(-1)
    rows = xp_of(ids).flatnonzero(ids != ignore_index)  # targets may lie on the host: they are checked where they are
    columns = ids[rows]
    if rows.size and not (0 <= int(columns.min()) and int(columns.max()) < V):
        raise ValueError(f"cross_entropy: targets must be in [0, {V}) or {ignore_index}, got {int(columns.min())} to "
                         f"{int(columns.max())}")
    rows, columns = xp.asarray(rows), xp.asarray(columns)
    z_loss = float(z_loss)
    low, high = spread(float(smoothing), smoothing_over, V)
    whole = rows.size == ids.size
    flat = flat if whole else flat[rows]                # (n, V), the rows that count: nothing in the others matters
    p, m, log_total = softmax_parts(flat)
    lse = (m + log_total)[:, 0]
    # Σ t = 1, so lse - Σ t·logits = ln Σ - Σ t·(logits - m), which does not subtract two large numbers
    y = (log_total - (high - low) * (flat[xp.arange(rows.size), columns][:, None] - m)).sum()
    if low:
        y = y - low * (flat - m).sum()
    if z_loss:
        y = y + z_loss * (lse * lse).sum()
    shape = logits.shape

    def vjp(dy, dcount=None):
        d = p * (1 + 2 * z_loss * lse)[:, None] if z_loss else p * 1
        if low:
            d -= low
        d[xp.arange(rows.size), columns] -= high - low  # each row once: no duplicates
        d *= dy
        if whole:
            return d.reshape(shape), None
        dlogits = xp.zeros((math.prod(shape[:-1]), V), d.dtype)
        dlogits[rows] = d
        return dlogits.reshape(shape), None
    return (y, xp.asarray(rows.size)), vjp


def spread(smoothing, over, V):
    """The target distribution: its value off the target and on it."""
    if over == "all":
        return smoothing / V, 1 - smoothing + smoothing / V
    return (smoothing / (V - 1), 1 - smoothing) if V > 1 else (0.0, 1.0)        # one class has no others


def check(logits, targets, V, smoothing, over, z_loss):
    if targets.shape != logits.shape[:-1] or targets.dtype.kind not in "iu" or V == 0:
        raise ValueError(f"cross_entropy: logits{list(logits.shape)} with V > 0 need integer targets"
                         f"{list(logits.shape[:-1])}, got {targets.dtype}{list(targets.shape)}")
    if not 0 <= smoothing < 1 or over not in SMOOTHING_OVER:
        raise ValueError(f"cross_entropy: smoothing must be in [0, 1) and smoothing_over one of {', '.join(SMOOTHING_OVER)}, "
                         f"got {smoothing} and {over!r}")
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"cross_entropy: z_loss must be finite and at least 0, got {z_loss}")
