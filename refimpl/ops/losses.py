"""cross_entropy as (sum, count): the caller divides once, by the count of the whole batch (the token rule)."""
import math

from refimpl.array import in_pairs, xp_of
from refimpl.autograd import op
from refimpl.autograd.layout import last_axis

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
    VJP:        dlogits = dy·((1 + 2·z·lse)·softmax(logits) - t), softmax = e/total; 0 in rows that are ignored
    Residuals:  e, total, rows, at, columns, lse
    Reference:  Goodfellow et al. 2016, section 6.2.2; z-loss: Chowdhery et al. 2022 (PaLM), section 5
    """
    return cross_entropy_sum(logits, targets, logits.shape[-1] if logits.ndim else 0, ignore_index=ignore_index,
                             smoothing=smoothing, smoothing_over=smoothing_over, z_loss=z_loss)


def cross_entropy_sum(logits, targets, V, first=0, all_reduce=None, pieces=1, ignore_index=IGNORE, smoothing=0.0,
                      smoothing_over="all", z_loss=0.0):
    """`cross_entropy` of logits[..., V/tp], the columns from `first` on of V, which other ranks have the rest of.

    all_reduce(x, how)  the sum or maximum over these ranks; None where all columns are here
    pieces              sums over columns are made of so many equal parts, added up in pairs
    """
    check(logits, targets, V, smoothing, smoothing_over, z_loss)
    xp = xp_of(logits)
    here = max(0, min(logits.shape[-1], V - first))     # columns behind V are padding
    flat, ids = logits.reshape(math.prod(logits.shape[:-1]), logits.shape[-1])[:, :here], targets.reshape(-1)
    rows = xp_of(ids).flatnonzero(ids != ignore_index)  # targets may lie on the host: they are checked where they are
    columns = ids[rows]
    if rows.size and not (0 <= int(columns.min()) and int(columns.max()) < V):
        raise ValueError(f"cross_entropy: targets must be in [0, {V}) or {ignore_index}, got {int(columns.min())} to "
                         f"{int(columns.max())}")
    at = xp_of(ids).flatnonzero((columns >= first) & (columns < first + here))      # of the rows that count: target here
    rows, at, columns = xp.asarray(rows), xp.asarray(at), xp.asarray(columns[at] - first)
    z_loss = float(z_loss)
    low, high = spread(float(smoothing), smoothing_over, V)
    whole = rows.size == ids.size
    flat = flat if whole else flat[rows]                # (n, V/tp), the rows that count: nothing in the others matters
    m = row_max(flat, all_reduce)
    x = flat - m
    sums = xp.zeros((2 + bool(low), rows.size), x.dtype)            # of e^x, of x at the target, of x
    sums[1][at] = x[at, columns]
    if low:
        sums[2] = row_sum(x, pieces, logits.shape[-1])
    e = xp.exp(x, out=x)
    sums[0] = row_sum(e, pieces, logits.shape[-1])
    sums = all_reduce(sums, "sum") if all_reduce else sums
    total = xp.where(sums[0] == 0, xp.ones_like(sums[0]), sums[0])
    log_total = xp.log(total)
    lse = m[:, 0] + log_total
    # Σ t = 1, so lse - Σ t·logits = ln Σ - Σ t·(logits - m), which does not subtract two large numbers
    y = (log_total - (high - low) * sums[1]).sum()
    if low:
        y = y - low * sums[2].sum()
    if z_loss:
        y = y + z_loss * (lse * lse).sum()
    shape = logits.shape

    def vjp(dy, dcount=None):
        d = e * ((1 + 2 * z_loss * lse if z_loss else 1) * dy / total)[:, None]      # softmax is e / total
        if low:
            d -= low * dy
        d[at, columns] -= (high - low) * dy             # each row once: no duplicates
        if whole and here == shape[-1]:
            return d.reshape(shape), None
        dlogits = xp.zeros((math.prod(shape[:-1]), shape[-1]), d.dtype)
        if whole:
            dlogits[:, :here] = d
        else:
            dlogits[rows, :here] = d
        return dlogits.reshape(shape), None
    return (y, xp.asarray(rows.size)), vjp


def row_max(x, all_reduce):
    """The maxima [n, 1] over all ranks' columns; 0 in a row with nothing visible, -inf everywhere, so that no nan arises."""
    xp = xp_of(x)
    m = x.max(axis=-1, keepdims=True) if x.shape[-1] else xp.full((len(x), 1), -xp.inf, x.dtype)
    m = all_reduce(m, "max") if all_reduce else m
    return xp.where(m == -xp.inf, xp.zeros_like(m), m)


def row_sum(x, pieces, width):
    """Σ x over the last axis, made of `pieces` equal parts of `width` columns, of which the last may be missing."""
    n = width // pieces
    return in_pairs(x[:, k * n:(k + 1) * n].sum(axis=-1) for k in range(pieces))


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
