"""add and mul with broadcasting, and the operators of Tensor.

Shapes: `...` are any axes; a and b broadcast as numpy's arrays do.
"""
from numbers import Real

from refimpl.array import Array, xp_of
from refimpl.autograd import Tensor, op


def unbroadcast(dy: Array, shape: tuple[int, ...]) -> Array:
    """Sum `dy` over the axes along which an operand of `shape` was repeated by broadcasting."""
    if dy.shape == shape:
        return dy
    extra = dy.ndim - len(shape)
    dy = dy.sum(axis=tuple(range(extra)))
    repeated = tuple(i for i, n in enumerate(shape) if n == 1 and dy.shape[i] != 1)
    return dy.sum(axis=repeated, keepdims=True)


def check_broadcast(op_name, a, b):
    """Error: ValueError where the shapes of a and b do not broadcast."""
    if any(m != n and 1 not in (m, n) for m, n in zip(a.shape[::-1], b.shape[::-1])):
        raise ValueError(f"{op_name}: a{list(a.shape)} and b{list(b.shape)} do not broadcast: counted from the last axis, "
                         f"sizes must be equal or 1")


@op(linearity="joint")
def add(a, b):
    """Sum.

    Equation:   y = a + b
    Shapes:     a[...], b[...] -> y[...], broadcast
    VJP:        da = dy, db = dy, each summed over the axes it was repeated along
    Residuals:  none
    Reference:  numpy broadcasting
    """
    check_broadcast("add", a, b)
    y = a + b
    a_shape, b_shape = a.shape, b.shape

    def vjp(dy):
        return unbroadcast(dy, a_shape), unbroadcast(dy, b_shape)
    return y, vjp


@op(linearity="each")
def mul(a, b):
    """Elementwise product.

    Equation:   y = a·b
    Shapes:     a[...], b[...] -> y[...], broadcast
    VJP:        da = dy·b, db = dy·a, each summed over the axes it was repeated along
    Residuals:  a, b
    Reference:  numpy broadcasting
    """
    check_broadcast("mul", a, b)
    y = a * b

    def vjp(dy):
        return unbroadcast(dy * b, a.shape), unbroadcast(dy * a, b.shape)
    return y, vjp


@op(linearity="each")
def scale(x, by):
    """Multiplication by a number, which keeps the dtype.

    Equation:   y = by·x
    Shapes:     x[...] -> y[...]
    VJP:        dx = by·dy
    Residuals:  none
    Reference:  none needed
    """
    by = float(by)                                      # a numpy float64 would promote float32
    y = x * by

    def vjp(dy):
        return dy * by
    return y, vjp


@op(linearity="each")
def sum(x, axis=None, keepdims=False):
    """Sum over one axis, several (a tuple) or all (None).

    Equation:   y = Σ_axis x
    Shapes:     x[..., n, ...] -> y[..., ...]
    VJP:        dx = dy, repeated along the axes summed over
    Residuals:  none
    Reference:  numpy.sum
    """
    y = x.sum(axis=axis, keepdims=keepdims)
    xp, shape = xp_of(x), x.shape

    def vjp(dy):
        if axis is not None and not keepdims:
            dy = xp.expand_dims(dy, axis)
        return xp.broadcast_to(dy, shape)
    return y, vjp


def multiply(x, by):
    """x * by for a Tensor, an array or a number `by`."""
    return scale(x, by=by) if isinstance(by, Real) else mul(x, by)


Tensor.__add__, Tensor.__mul__, Tensor.__rmul__ = (lambda a, b: add(a, b)), multiply, multiply
