"""Rows picked and rows added up by integer ids: embedding, gather and its transpose scatter_add.

Ids may lie on the host: they are checked where they are, then moved to the values.
"""
from refimpl.array import xp_of
from refimpl.autograd import op
from refimpl.autograd.layout import first_axis
from refimpl.ops.axes import check_integers


def check_ids(op_name, ids, below):
    """Ids must be integers in [0, below): cupy would wrap them round, numpy would count negative ones from the end."""
    if ids.dtype.kind not in "iu":
        raise TypeError(f"{op_name}: ids must be integers, got {ids.dtype}")
    if ids.size and not (0 <= int(ids.min()) and int(ids.max()) < below):
        raise ValueError(f"{op_name}: ids must be in [0, {below}), got {int(ids.min())} to {int(ids.max())}")


def sum_by_id(values, ids, n):
    """y[v] = Σ values over the places where ids = v, for v < n: the same bits in every run.

    Rows are sorted by id, and each run of equal ids is added up in pairs, then pairs of pairs.  `y[ids] += values` would keep
    one of equal ids; an atomic scatter-add has no fixed order; cupy's add.reduceat subtracts running sums, which loses
    digits and carries a nan from one id to the next.  Shapes: values[N, ...], ids int[N] -> y[n, ...]
    """
    xp = xp_of(values)
    y = xp.zeros((n, *values.shape[1:]), values.dtype)
    if ids.size:
        order = xp.argsort(ids, kind="stable")
        ids, rows = ids[order], values[order]
        first = xp.concatenate([xp.ones(1, bool), ids[1:] != ids[:-1]])
        starts = xp.flatnonzero(first)
        place = xp.arange(ids.size) - starts[xp.cumsum(first, dtype="int64") - 1]       # 0, 1, 2, ... in each run of equal ids
        step, left = 1, starts
        while left.size:                                # a row and the row `step` further on in the same run
            left = xp.flatnonzero((place[:-step] % (2 * step) == 0) & (ids[:-step] == ids[step:]))
            rows[left] += rows[left + step]
            step *= 2
        y[ids[starts]] = rows[starts]
    return y


@op(linearity="each", named_by=0, values=slice(1), along=first_axis)
def embedding(w, ids):
    """Row lookup.

    Equation:   y = w[ids]
    Shapes:     w[V, D], ids int[...] -> y[..., D]
    VJP:        dw[v] = Σ dy over the places where ids = v (a token that occurs twice gets both)
    Residuals:  ids
    Reference:  HF `wte`, `wpe`; Megatron VocabParallelEmbedding holds some of the rows
    """
    if w.ndim != 2:
        raise ValueError(f"embedding: w{list(w.shape)} must be [V, D]")
    check_ids("embedding", ids, w.shape[0])
    ids = xp_of(w).asarray(ids)
    y = w[ids]
    V, D = w.shape

    def vjp(dy):
        return sum_by_id(dy.reshape(ids.size, D), ids.reshape(-1), V), None
    return y, vjp


def indexed_cut(args, static, y):
    """The first axis is picked or added up by ids of this rank's own rows; the cuts of the others stay."""
    return {mesh_axis: k for mesh_axis, k in getattr(args[0], "cut", {}).items() if k > 0}


@op(linearity="each", values=slice(1), cut=indexed_cut)
def gather(x, ids):
    """Slices along the first axis, in any order and any number of times.

    Equation:   y_i = x[ids_i]
    Shapes:     x[N, ...], ids int[M] -> y[M, ...]
    VJP:        dx[v] = Σ dy_i over the i with ids_i = v
    Residuals:  ids
    Reference:  numpy.take along axis 0
    """
    if ids.ndim != 1 or x.ndim == 0:
        raise ValueError(f"gather: x{list(x.shape)} and ids{list(ids.shape)} must be [N, ...] and [M]")
    check_ids("gather", ids, x.shape[0])
    ids = xp_of(x).asarray(ids)
    y = x[ids]
    N = x.shape[0]

    def vjp(dy):
        return sum_by_id(dy, ids, N), None
    return y, vjp


@op(linearity="each", values=slice(1), cut=indexed_cut)
def scatter_add(x, ids, n=0):
    """Slices added into `n` slots; equal ids add up.  The transpose of gather.

    Equation:   y[v] = Σ x_i over the i with ids_i = v
    Shapes:     x[M, ...], ids int[M] -> y[n, ...]
    VJP:        dx_i = dy[ids_i]
    Residuals:  ids
    Reference:  numpy.add.at; torch index_add
    """
    if ids.ndim != 1 or ids.shape != x.shape[:1]:
        raise ValueError(f"scatter_add: x{list(x.shape)} and ids{list(ids.shape)} must be [M, ...] and [M]")
    check_integers("scatter_add", n=n)
    if n < 0:
        raise ValueError(f"scatter_add: n must be at least 0, got {n}")
    check_ids("scatter_add", ids, n)
    ids = xp_of(x).asarray(ids)
    y = sum_by_id(x, ids, n)

    def vjp(dy):
        return dy[ids], None
    return y, vjp
