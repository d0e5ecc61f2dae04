"""sum, mean, max, cumsum and the Euclidean norm along axes.

`axis` is one axis, a tuple or None for all.  mean and max over nothing have no value and are errors.
"""
import math

from refimpl.array import xp_of
from refimpl.autograd import Layout, Tensor, op
from refimpl.autograd.layout import all_or_given_axes, given_axes, join
from refimpl.ops.axes import check_axes, check_axis
from refimpl.ops.corners import silent
from refimpl.ops.linear import column_sum, row_dot


def restore(dy, axis, keepdims, xp):
    """A reduced cotangent with the reduced axes back as size 1, so that it broadcasts."""
    return dy if keepdims or axis is None else xp.expand_dims(dy, axis)


def dropped(y, axis):
    """y, whose reduced axes are kept as size 1, without them.  (A sum over them would make 0.0 of -0.0.)"""
    reduced = check_axes("", y, axis)
    return y.reshape([n for k, n in enumerate(y.shape) if k not in reduced])


def reduced_count(op_name, x, axis):
    """How many elements one output is made of.  Error: ValueError where there is none."""
    n = math.prod(x.shape[a] for a in check_axes(op_name, x, axis))
    if n == 0:
        raise ValueError(f"{op_name} over axis {axis} of x{list(x.shape)}: there is nothing to take the {op_name} of")
    return n


def total(x, axis, keepdims):
    """Σ x over axes that exist; over the leading ones in blocks, see column_sum."""
    axes = sorted(check_axes("sum", x, axis))
    if not 0 < len(axes) < x.ndim or axes != list(range(len(axes))) or x.size == 0:
        return x.sum(axis=axis, keepdims=keepdims)
    left = x.shape[len(axes):]
    y = column_sum(x.reshape(math.prod(x.shape[:len(axes)]), math.prod(left)))
    return y.reshape((1,) * len(axes) + left if keepdims else left)


def reduced_cut(args, static, y):
    """The axes that are left keep their cuts."""
    x = args[0]
    if type(x) is not Tensor:
        return {}
    reduced = all_or_given_axes(static, x.array.ndim)
    left = [k for k in range(x.array.ndim) if static.get("keepdims") or k not in reduced]
    return {mesh_axis: left.index(k) for mesh_axis, k in x.cut.items() if k not in reduced}


def sum_layout(args, static):
    """A sum over an axis that is cut is a part of the whole sum: partial over that mesh axis."""
    x = args[0]
    if type(x) is not Tensor:
        return Layout()
    layout, axes = join(sum, [x]), all_or_given_axes(static, x.array.ndim)
    return Layout(layout.varies, layout.partial | {mesh_axis for mesh_axis, k in x.cut.items() if k in axes})


@op(linearity="each", layout=sum_layout, cut=reduced_cut)
def sum(x, axis=None, keepdims=False):
    """Sum.

    Equation:   y = Σ_axis x
    Shapes:     x[..., n, ...] -> y[..., ...]
    VJP:        dx = dy, repeated along the axes summed over
    Residuals:  none
    Reference:  numpy.sum
    """
    y = total(x, axis, keepdims)
    xp, shape = xp_of(x), x.shape

    def vjp(dy):
        return xp.broadcast_to(restore(dy, axis, keepdims, xp), shape)
    return y, vjp


@op(linearity="each", along=all_or_given_axes)
def mean(x, axis=None, keepdims=False):
    """Arithmetic mean; over nothing it is an error.

    Equation:   y = (1/n)·Σ_axis x
    Shapes:     x[..., n, ...] -> y[..., ...]
    VJP:        dx = dy/n, repeated along the axes averaged over
    Residuals:  none
    Reference:  numpy.mean
    """
    n = reduced_count("mean", x, axis)
    y = total(x, axis, keepdims) / n
    xp, shape = xp_of(x), x.shape

    def vjp(dy):
        return xp.broadcast_to(restore(dy / n, axis, keepdims, xp), shape)
    return y, vjp


@op(along=all_or_given_axes)
def max(x, axis=None, keepdims=False):
    """Maximum; over nothing it is an error.  Elements that tie for it share its gradient equally.

    Equation:   y = max_axis x
    Shapes:     x[..., n, ...] -> y[..., ...]
    VJP:        dx = dy·h/Σ_axis h,  h = [x = y]   (the shares add up to 1, whatever the number of ties)
    Residuals:  winners
    Reference:  a subgradient; torch.amax and jax.numpy.max use the same rule
    """
    reduced_count("max", x, axis)
    xp = xp_of(x)
    top = x.max(axis=axis, keepdims=True)
    winners = x == top                                  # bool: one byte an element
    y = top if keepdims else dropped(top, axis)

    def vjp(dy):
        with silent():                                  # where x has a nan nothing wins, and the gradients are nan
            return winners * (restore(dy, axis, keepdims, xp) / winners.sum(axis=axis, keepdims=True).astype(dy.dtype))
    return y, vjp


@op(linearity="each", along=given_axes)
def cumsum(x, axis=-1):
    """Running sum along one axis.

    Equation:   y_i = Σ_{j ≤ i} x_j
    Shapes:     x[..., n, ...] -> y[..., n, ...]
    VJP:        dx_j = Σ_{i ≥ j} dy_i  (the running sum from the other end)
    Residuals:  none
    Reference:  numpy.cumsum
    """
    check_axis("cumsum", x, axis)
    xp = xp_of(x)
    y = xp.cumsum(x, axis=axis, dtype=x.dtype)

    def vjp(dy):
        return xp.flip(xp.cumsum(xp.flip(dy, axis=axis), axis=axis, dtype=dy.dtype), axis=axis)
    return y, vjp


@op(along=given_axes)
def norm(x, axis=-1, keepdims=False):
    """Euclidean norm along an axis.  At the zero vector its gradient is 0, a subgradient, not nan.

    Squares must neither underflow nor overflow: float32 values between 1e-19 and 1e19 in size, float64 ones between 1e-154
    and 1e154.  Below, y and the gradient are 0; above, y is infinite.

    Equation:   y = √Σ_axis x²
    Shapes:     x[..., n, ...] -> y[..., ...]
    VJP:        dx = dy·x/y, and 0 where y = 0
    Residuals:  x, length
    Reference:  numpy.linalg.norm
    """
    check_axes("norm", x, axis)
    xp = xp_of(x)
    squares = row_dot(x, x) if axis == -1 else (x * x).sum(axis=axis, keepdims=True)
    length = xp.sqrt(squares)
    y = length if keepdims else dropped(length, axis)

    def vjp(dy):
        nothing = length == 0
        safe = xp.where(nothing, xp.ones_like(length), length)
        return x * xp.where(nothing, xp.zeros_like(length), restore(dy, axis, keepdims, xp) / safe)
    return y, vjp
