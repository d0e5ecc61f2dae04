"""add, subtract, mul, divide and where with broadcasting, scale, and the operators of Tensor.

Shapes: `...` are any axes; a and b broadcast as numpy's arrays do.
"""
import math
from numbers import Real

from refimpl.array import Array, xp_of
from refimpl.autograd import Tensor, op
from refimpl.ops.corners import annulled, silent
from refimpl.ops.elementwise import power
from refimpl.ops.linear import column_sum


def unbroadcast(dy: Array, shape: tuple[int, ...]) -> Array:
    """Sum `dy` over the axes along which an operand of `shape` was repeated by broadcasting."""
    if dy.shape == shape:
        return dy
    extra = dy.ndim - len(shape)
    if 0 < extra < dy.ndim and dy.size:                 # in blocks: see column_sum
        dy = column_sum(dy.reshape(math.prod(dy.shape[:extra]), math.prod(dy.shape[extra:]))).reshape(dy.shape[extra:])
    else:
        dy = dy.sum(axis=tuple(range(extra)))
    repeated = tuple(i for i, n in enumerate(shape) if n == 1 and dy.shape[i] != 1)
    return dy.sum(axis=repeated, keepdims=True)


def check_broadcast(op_name, a, b, names="ab", own=0):
    """Error: ValueError where the shapes of a and b, but for the last `own` axes, do not broadcast."""
    m, n = a.shape[:a.ndim - own], b.shape[:b.ndim - own]
    if any(i != j and 1 not in (i, j) for i, j in zip(m[::-1], n[::-1])):
        raise ValueError(f"{op_name}: {names[0]}{list(a.shape)} and {names[1]}{list(b.shape)} do not broadcast: counted from "
                         f"{f'axis {-own - 1}' if own else 'the last axis'} on, sizes must be equal or 1")


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


@op(linearity="joint")
def subtract(a, b):
    """Difference.

    Equation:   y = a - b
    Shapes:     a[...], b[...] -> y[...], broadcast
    VJP:        da = dy, db = -dy, each summed over the axes it was repeated along
    Residuals:  none
    Reference:  numpy broadcasting
    """
    check_broadcast("subtract", a, b)
    y = a - b
    a_shape, b_shape = a.shape, b.shape

    def vjp(dy):
        return unbroadcast(dy, a_shape), unbroadcast(-dy, b_shape)
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


@op
def divide(a, b):
    """Elementwise quotient.

    Equation:   y = a/b
    Shapes:     a[...], b[...] -> y[...], broadcast
    VJP:        da = dy/b, db = -dy·y/b, each summed over the axes it was repeated along; 0 where dy = 0
    Residuals:  b, y
    Reference:  numpy broadcasting
    """
    check_broadcast("divide", a, b)
    with silent():
        y = a / b
    a_shape = a.shape

    def vjp(dy):
        with silent():
            da = annulled(dy / b, dy)
            db = annulled(da * y, dy)
            db = -db
        return unbroadcast(da, a_shape), unbroadcast(db, b.shape)
    return y, vjp


@op(linearity="joint", values=slice(1, 3))
def where(condition, a, b):
    """a where the condition holds, b elsewhere.  The branch that is not taken gets gradient 0, and passes nothing on.

    Equation:   y = condition ? a : b
    Shapes:     condition bool[...], a[...], b[...] -> y[...], broadcast
    VJP:        da = dy where the condition holds, else 0; db = dy where not; each summed over the axes it was repeated along
    Residuals:  condition
    Reference:  numpy.where
    """
    if condition.dtype.kind != "b":
        raise TypeError(f"where: the condition must be bool, got {condition.dtype}")
    check_broadcast("where", a, b)
    check_broadcast("where", condition, a, ("condition", "a"))
    check_broadcast("where", condition, b, ("condition", "b"))
    xp = xp_of(a, b)
    y = xp.where(condition, a, b)
    a_shape, b_shape = a.shape, b.shape

    def vjp(dy):
        zero = xp.zeros_like(dy)
        return (None, unbroadcast(xp.where(condition, dy, zero), a_shape), unbroadcast(xp.where(condition, zero, dy), b_shape))
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


def multiply(x, by):
    """x * by for a Tensor, an array or a number `by`."""
    return scale(x, by=by) if isinstance(by, Real) else mul(x, by)


def number(by, x):
    """A number as an array of x's dtype."""
    return xp_of(x.array).full((), float(by), x.dtype)


def plus(x, other):
    """x + other for a Tensor, an array or a number, which takes x's dtype."""
    return add(x, number(other, x) if isinstance(other, Real) else other)


def minus(x, other):
    """x - other.  A number becomes a float first: -uint8(3) would be 253."""
    return plus(x, -float(other)) if isinstance(other, Real) else subtract(x, other)


def from_minus(x, other):
    """other - x."""
    return plus(scale(x, by=-1), other) if isinstance(other, Real) else subtract(other, x)


def over(x, other):
    """x / other.  Error: ZeroDivisionError for the number 0; an array may hold zeros."""
    if not isinstance(other, Real):
        return divide(x, other)
    if other == 0:
        raise ZeroDivisionError(f"divide: a Tensor {list(x.shape)} by the number 0")
    return scale(x, by=1 / float(other))


def from_over(x, other):
    """other / x."""
    return divide(number(other, x) if isinstance(other, Real) else other, x)


def to_the(x, exponent):
    """x ** exponent, a number."""
    return power(x, exponent=float(exponent)) if isinstance(exponent, Real) else NotImplemented


Tensor.__add__, Tensor.__radd__ = plus, plus
Tensor.__sub__, Tensor.__rsub__ = minus, from_minus
Tensor.__mul__, Tensor.__rmul__ = multiply, multiply
Tensor.__truediv__, Tensor.__rtruediv__ = over, from_over
Tensor.__pow__ = to_the
Tensor.__neg__ = lambda a: scale(a, by=-1)
