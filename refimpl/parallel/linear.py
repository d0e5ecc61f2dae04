"""One matrix cut over the ranks of a mesh axis: by columns, or by rows.

    column cut (axis 1)                         row cut (axis 0)

         A = [ A_0 | A_1 ]                       A = [ A_0 ]      X = [ X_0 | X_1 ]
                                                     [ A_1 ]
    Y_r = X A_r     X on every rank             X_r A_r on rank r is a part of the sum
    Y = [ Y_0 | Y_1 ]    concatenate            Y = X_0 A_0 + X_1 A_1        add

A layer pair needs one exchange: columns first, the nonlinearity on each rank's own columns, then rows.  These two are plain
products that check the cut; f (`copy_to`) before the first and g (`reduce_from`) after the second stand in the model,
where a reader looks for them.  Reference: Shoeybi et al. 2019 (Megatron-LM), section 3.

Bits: a product over a part of the columns is rounded like the same columns of the whole on most, but not all, widths, and sums
of parts depend on how many there are.  Made of `pieces` (see models/equal_bits.py) both are the same on 1, 2, 4 ... ranks.
"""
from refimpl.array import in_pairs, xp_of
from refimpl.autograd import LayoutError, Tensor, op
from refimpl.autograd.layout import describe, names
from refimpl.ops.linear import column_sum, linear_cut, linear_layout, product, sizes
from refimpl.parallel.collectives import cut_in


def layout_where(name, axis):
    """The layout rule of `linear`, for a weight that must be cut along `axis`."""
    def layout(args, static):
        x, w = args[:2]
        if axis not in getattr(w, "cut", {}).values():
            raise LayoutError(f"{name}: {getattr(w, 'name', '') or 'the weight'} must be cut along axis {axis} over a mesh "
                              f"axis, its cut is {dict(getattr(w, 'cut', {})) or 'none'}")
        answer = linear_layout(args, static)
        rows = frozenset(mesh_axis for mesh_axis, k in w.cut.items() if k == 0)
        if type(x) is Tensor and any(x.cut.get(mesh_axis) != x.array.ndim - 1 for mesh_axis in rows):
            raise LayoutError(f"{name}: {w.name or 'the weight'} is cut by rows over {names(rows)}, so x must be cut by "
                              f"columns there; {describe(x)} is not, as far as is known")
        return answer
    return layout


@op(linearity="each", named_by=1, layout=layout_where("column_parallel_linear", 1), cut=linear_cut)
def column_parallel_linear(x, w, b=None, pieces=0, again=None):
    """This rank's columns of x @ w + b; `pieces` > 0: computed in so many blocks of columns.

    `again` (a Regathered): gives x once more to the backward pass, so that it is not kept.

    Equation:   y = x·w + b
    Shapes:     x[..., D] PerRank (after f), w[D, F/tp], b[F/tp] or None -> y[..., F/tp] Shard(-1)
    VJP:        dx = dy·wᵀ;  dw = xᵀ·dy;  db = Σ dy
    Residuals:  x, w  (with `again`, the share of x that it has)
    Error:      LayoutError where w is not cut along axis 1
    Reference:  Megatron ColumnParallelLinear with gather_output=False
    """
    N, D, F = sizes("column_parallel_linear", x, w, b)
    check_pieces("column_parallel_linear", pieces, w, 1)
    y = joined([product(x.reshape(N, D), own) for own in cut(w, pieces, 1)], 1)
    if b is not None:
        y += b
    y = y.reshape(*x.shape[:-1], F)
    biased, shape = b is not None, x.shape
    x = again.keep() if again else x

    def vjp(dy):
        rows = (again() if again else x).reshape(N, D)
        parts = cut(dy.reshape(N, F), pieces, 1)
        dx = in_pairs(product(part, own.T) for part, own in zip(parts, cut(w, pieces, 1)))
        dw = joined([product(rows.T, part) for part in parts], 1)
        return dx.reshape(shape), dw, joined([column_sum(part) for part in parts], 0) if biased else None
    return y, vjp


@op(linearity="each", named_by=1, layout=layout_where("row_parallel_linear", 0), cut=linear_cut)
def row_parallel_linear(x, w, pieces=0):
    """This rank's part of the sum x @ w; `pieces` > 0: made of so many parts.  A bias is added once, after the reduction.

    Equation:   y = x·w,  a part of the sum over ranks
    Shapes:     x[..., F/tp] Shard(-1), w[F/tp, D] -> y[..., D] Partial
    VJP:        dx = dy·wᵀ;  dw = xᵀ·dy
    Residuals:  x, w
    Error:      LayoutError where w is not cut along axis 0
    Reference:  Megatron RowParallelLinear with input_is_parallel=True
    """
    N, D, F = sizes("row_parallel_linear", x, w)
    check_pieces("row_parallel_linear", pieces, w, 0)
    y = in_pairs(product(part, own) for part, own in zip(cut(x.reshape(N, D), pieces, 1), cut(w, pieces, 0)))
    y = y.reshape(*x.shape[:-1], F)

    def vjp(dy):
        dy2 = dy.reshape(N, F)
        dx = joined([product(dy2, own.T) for own in cut(w, pieces, 0)], 1).reshape(x.shape)
        return dx, joined([product(part.T, dy2) for part in cut(x.reshape(N, D), pieces, 1)], 0)
    return y, vjp


def check_pieces(op_name, pieces, w, axis):
    if pieces < 0 or pieces and w.shape[axis] % pieces:
        raise ValueError(f"{op_name}: axis {axis} of w{list(w.shape)} cannot be cut into {pieces} equal pieces")


def cut(x, n, axis):
    """x in n equal parts along `axis`, each in C order: for a strided array BLAS has other kernels.  n = 0: x as it is."""
    return [xp_of(x).ascontiguousarray(part) for part in cut_in(x, axis, (x.shape[axis] // n,) * n)] if n else [x]


def joined(parts, axis):
    return parts[0] if len(parts) == 1 else xp_of(parts[0]).concatenate(parts, axis=axis)
