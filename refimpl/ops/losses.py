"""cross_entropy as (sum, count): the caller divides once, by the count of the whole batch (the token rule)."""
from refimpl.array import xp_of
from refimpl.autograd import op

IGNORE = -100


@op
def cross_entropy(logits, targets, ignore_index=IGNORE):
    """Cross entropy of integer targets, summed, and the number of targets that count.

    Never a mean: means of shards or micro-batches with different counts do not add up.

    Equation:   y = Σ (lse(logits) - logits[target]),  count = number of targets ≠ ignore_index
    Shapes:     logits[..., V], targets int[...] -> y[], count int[]
    VJP:        dlogits = dy·(softmax(logits) - onehot(target)), 0 in rows that are ignored
    Residuals:  p, rows, columns
    Reference:  Goodfellow et al. 2016, section 6.2.2.  torch cross_entropy(reduction="sum")
    """
    V = logits.shape[-1] if logits.ndim else 0
    if targets.shape != logits.shape[:-1] or targets.dtype.kind not in "iu" or V == 0:
        raise ValueError(f"cross_entropy: logits{list(logits.shape)} with V > 0 need integer targets"
                         f"{list(logits.shape[:-1])}, got {targets.dtype}{list(targets.shape)}")
    xp = xp_of(logits)
    flat, ids = logits.reshape(-1, V), targets.reshape(-1)
    counted = ids != ignore_index
    rows, columns = xp.flatnonzero(counted), ids[counted]
    if rows.size and not (0 <= int(columns.min()) and int(columns.max()) < V):
        raise ValueError(f"cross_entropy: targets must be in [0, {V}) or {ignore_index}, got {int(columns.min())} to "
                         f"{int(columns.max())}")
    shifted = flat - flat.max(axis=-1, keepdims=True)   # (N, V)
    p = xp.exp(shifted)
    total = p.sum(axis=-1, keepdims=True)
    y = (xp.log(total[rows, 0]) - shifted[rows, columns]).sum()
    p /= total
    shape = logits.shape

    def vjp(dy, dcount=None):
        dlogits = xp.zeros_like(p)
        dlogits[rows] = p[rows]
        dlogits[rows, columns] -= 1                     # each row once: no duplicates
        dlogits *= dy
        return dlogits.reshape(shape), None
    return (y, xp.asarray(rows.size)), vjp
