"""One matrix cut over the ranks of a mesh axis: by columns, or by rows.

    column cut (axis 1)                         row cut (axis 0)

         A = [ A_0 | A_1 ]                       A = [ A_0 ]      X = [ X_0 | X_1 ]
                                                     [ A_1 ]
    Y_r = X A_r     X on every rank             X_r A_r on rank r is a part of the sum
    Y = [ Y_0 | Y_1 ]    concatenate            Y = X_0 A_0 + X_1 A_1        add

A layer pair needs one exchange: columns first, the nonlinearity on each rank's own columns, then rows.  These two
functions are plain products; f (`copy_to`) before the first and g (`reduce_from`) after the second stand in the model,
where a reader looks for them.  Reference: Shoeybi et al. 2019 (Megatron-LM), section 3.
"""
from refimpl.autograd import LayoutError, Tensor
from refimpl.ops import linear


def column_parallel_linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """This rank's columns of x @ w + b.

    Shapes:    x[..., D] PerRank (after f), w[D, F/tp], b[F/tp] -> y[..., F/tp] Shard
    Error:     LayoutError where w is not cut along axis 1
    Reference: Megatron ColumnParallelLinear with gather_output=False
    """
    require_cut("column_parallel_linear", w, 1)
    return linear(x, w, b)


def row_parallel_linear(x: Tensor, w: Tensor) -> Tensor:
    """This rank's part of the sum x @ w.  A bias is added once, after the reduction.

    Shapes:    x[..., F/tp] Shard, w[F/tp, D] -> y[..., D] Partial
    Error:     LayoutError where w is not cut along axis 0
    Reference: Megatron RowParallelLinear with input_is_parallel=True
    """
    require_cut("row_parallel_linear", w, 0)
    return linear(x, w)


def require_cut(name: str, w: Tensor, axis: int) -> None:
    if axis not in w.cut.values():
        raise LayoutError(f"{name}: {w.name or 'the weight'} must be cut along axis {axis} over a mesh axis, its cut is "
                          f"{dict(w.cut) or 'none'}")
