"""dropout whose mask is a hash of the global index of each element: the same under every layout."""
from refimpl.array import xp_of
from refimpl.autograd import op
from refimpl.ops.axes import check_integers
from refimpl.rng import draw24, flat_index


@op(linearity="each", values=slice(1))
def dropout(x, *at, key=0, rate=0.0, shape=()):
    """Inverted dropout.

    `at` holds one int vector per axis of x: the *global* coordinates of its rows, positions and channels; `shape` is the
    global shape (its first size is not used: samples are numbered without end).  `key` comes from rng.stream.

    Equation:   y = x·m / (1 - rate),  m = [draw(key, global index) ≥ rate·2²⁴]
    Shapes:     x[n_0, n_1, ...], at[k] int[n_k] -> y[n_0, n_1, ...]
    VJP:        dx = dy·m / (1 - rate)
    Residuals:  keep
    Reference:  Srivastava et al. 2014; counter-based draws as in Salmon et al. 2011
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout: rate must be in [0, 1), got {rate}")
    if tuple(len(a) for a in at) != x.shape or len(shape) != x.ndim:
        raise ValueError(f"dropout: x{list(x.shape)} needs one coordinate per element along each axis and a global shape; got "
                         f"{[len(a) for a in at]} and {list(shape)}")
    check_coordinates(at, shape)
    xp = xp_of(x)
    index = xp.asarray(flat_index([xp.asarray(a) for a in at], shape))
    keep = draw24(key, index) >= xp.uint64(int(rate * 2 ** 24))
    factor = 1 / (1 - rate)
    y = xp.where(keep, x, xp.zeros_like(x))             # x·keep would make nan of a dropped infinity
    y *= factor
    nothing = (None,) * len(at)

    def vjp(dy):
        dx = xp.where(keep, dy, xp.zeros_like(dy))
        dx *= factor
        return (dx, *nothing)
    return y, vjp


def check_coordinates(at, shape):
    """Coordinates outside the global shape would draw the numbers of other elements."""
    check_integers("dropout", shape=shape)
    for k, (a, size) in enumerate(zip(at, shape)):
        if a.dtype.kind not in "iu":
            raise TypeError(f"dropout: the coordinates along axis {k} must be integers, got {a.dtype}")
        low, high = (int(a.min()), int(a.max())) if a.size else (0, 0)
        if low < 0 or k and a.size and high >= size:
            raise ValueError(f"dropout: the coordinates along axis {k} must be {f'in [0, {size})' if k else 'at least 0'}, got "
                             f"{low} to {high}")
