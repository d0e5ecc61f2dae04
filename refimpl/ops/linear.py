"""The linear layer, and `product`, the one place where ops multiply matrices.

Shape letters: D inputs, F outputs, ... any leading axes.  Weights are stored (D, F): y = x @ w + b, so a column-parallel
layer cuts axis 1 of w and a row-parallel layer axis 0.
"""
import math

from refimpl.array import xp_of
from refimpl.autograd import Layout, LayoutError, Tensor, op, seam
from refimpl.autograd.layout import describe, join, names


@seam(detail=True)
def product(a, b):
    """a @ b.  Every matrix product of the package comes through here, so that Count sees every FLOP."""
    return a @ b


@seam(detail=True)
def row_dot(a, b):
    """Σ a·b over the last axis, kept as size 1, without the temporary a·b. (A seam: its rounding is a row's.)"""
    return xp_of(a).einsum("...d,...d->...", a, b)[..., None]


def column_dot(a, b):
    """Σ a·b over all axes but the last, without the temporary a·b."""
    xp = xp_of(a)
    return column_sum(xp.concatenate([xp.einsum("bnd,bnd->bd", p, q) for p, q in zip(blocks(a), blocks(b))], axis=0))


def column_sum(a):
    """Σ a over all axes but the last: within blocks, then over the blocks, so that rounding errors stay small.

    numpy adds rows up one by one: of a million rows in float32 the error is 3e-5, here 1e-7.
    """
    if math.prod(a.shape[:-1]) <= BLOCK:
        return a.sum(axis=tuple(range(a.ndim - 1)))
    return column_sum(xp_of(a).concatenate([p.sum(axis=1) for p in blocks(a)], axis=0))


BLOCK = 256                                             # rows


def blocks(a):
    """The rows of `a`, the vectors along its last axis, as [blocks, BLOCK, D] and the rows that are left as [1, rows, D]."""
    N, D = math.prod(a.shape[:-1]), a.shape[-1]
    rows, whole = a.reshape(N, D), N - N % BLOCK
    return rows[:whole].reshape(N // BLOCK, BLOCK, D), rows[whole:].reshape(1, N - whole, D)


def linear_layout(args, static):
    """A weight cut along its rows (axis 0) is contracted over the cut: the product is a partial sum over that mesh axis."""
    tensors = [a for a in args if type(a) is Tensor]
    layout = join(linear, tensors)
    x, w, b = (*args, None)[:3]
    summed = frozenset(axis for axis, k in getattr(w, "cut", {}).items() if k == 0)
    columns = frozenset(axis for axis, k in getattr(x, "cut", {}).items() if k == x.array.ndim - 1)
    name = getattr(w, "name", "") or "a weight"
    if type(w) is Tensor and columns - summed:
        raise LayoutError(f"linear: {describe(x)} is cut by columns over {names(columns - summed)}, {name} is not cut by rows "
                          f"there: it has no part that belongs to them")
    rows = frozenset(getattr(x, "cut", {})) - columns
    if rows & frozenset(getattr(w, "cut", {})):
        raise LayoutError(f"linear: {describe(x)} is cut by rows over {names(rows & frozenset(w.cut))}, and so is {name}, "
                          f"along another axis: all_gather the rows first")
    if b is not None and summed | layout.partial:
        raise LayoutError(f"linear: the product with {name} is partial over {names(summed | layout.partial)}; its bias would "
                          f"be added once per rank: add it after reduce_from")
    if type(b) is Tensor and frozenset(getattr(w, "cut", {})) - frozenset(b.cut):
        raise LayoutError(f"linear: {name} is cut by columns over {names(frozenset(w.cut) - frozenset(b.cut))}, its bias is "
                          f"not: each rank needs those of its own columns")
    if not summed:
        return layout
    if type(x) is Tensor and not summed <= x.varies:
        raise LayoutError(f"linear: {name} is cut by rows over {names(summed)}, so x must be cut by columns there; it is "
                          f"replicated: scatter_to it first")
    return Layout(layout.varies, layout.partial | summed)


def linear_cut(args, static, y):
    """Columns of w are columns of y; rows of x stay rows."""
    x, w = args[:2]
    cut = {axis: k for axis, k in getattr(x, "cut", {}).items() if k < y.ndim - 1}
    return cut | {axis: y.ndim - 1 for axis, k in getattr(w, "cut", {}).items() if k == 1}


@op(linearity="each", named_by=1, layout=linear_layout, cut=linear_cut)
def linear(x, w, b=None):
    """Linear layer.

    Equation:   y = x·w + b
    Shapes:     x[..., D], w[D, F], b[F] or None -> y[..., F]
    VJP:        dx = dy·wᵀ;  dw = xᵀ·dy, summed over all leading axes;  db = Σ dy over them
    Residuals:  x, w
    Reference:  Megatron ColumnParallelLinear / RowParallelLinear hold parts of w (theirs is stored transposed); HF GPT-2 Conv1D
    """
    N, D, F = sizes("linear", x, w, b)
    y = product(x.reshape(N, D), w)                     # (N, F)
    if b is not None:
        y += b
    y = y.reshape(*x.shape[:-1], F)
    biased = b is not None

    def vjp(dy):
        dy2 = dy.reshape(N, F)
        dx = product(dy2, w.T).reshape(x.shape)
        dw = product(x.reshape(N, D).T, dy2)
        return dx, dw, column_sum(dy2) if biased else None
    return y, vjp


def sizes(op_name, x, w, b=None):
    """N rows (all leading axes of x together), D inputs, F outputs.  Error: ValueError where the shapes do not fit."""
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[0] or (b is not None and b.shape != w.shape[1:]):
        bias = "None" if b is None else list(b.shape)
        raise ValueError(f"{op_name}: x{list(x.shape)}, w{list(w.shape)}, b{bias}: x's last axis must equal w's first, b's "
                         f"only axis w's second")
    return math.prod(x.shape[:-1]), *w.shape            # -1 would not do for D = 0
