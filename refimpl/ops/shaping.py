"""reshape and transpose: the same elements in another order.  Heads are split and merged with these two."""
from refimpl.autograd import op


@op(linearity="each")
def reshape(x, shape=()):
    """The same elements in C order under another shape; one size may be -1.

    Equation:   y = x   (a view of x where numpy can make one)
    Shapes:     x[...] -> y[shape]
    VJP:        dx = dy under x's shape
    Residuals:  none
    Reference:  numpy.reshape
    """
    try:
        y = x.reshape(shape)
    except ValueError:
        raise ValueError(f"reshape: x{list(x.shape)} has {x.size} elements, which do not fill the shape {shape}") from None
    old = x.shape

    def vjp(dy):
        return dy.reshape(old)
    return y, vjp


@op(linearity="each")
def transpose(x, axes=()):
    """Axes in another order.

    Equation:   y[i_axes[0], i_axes[1], ...] = x[i_0, i_1, ...]   (a view of x)
    Shapes:     x[n_0, n_1, ...] -> y[n_axes[0], n_axes[1], ...]
    VJP:        dx = dy with the inverse order of axes
    Residuals:  none
    Reference:  numpy.transpose
    """
    if sorted(a % x.ndim for a in axes) != list(range(x.ndim)):
        raise ValueError(f"transpose: axes {axes} must name each of the {x.ndim} axes of x{list(x.shape)} once")
    y = x.transpose(axes)
    inverse = [0] * len(axes)
    for new, old in enumerate(axes):
        inverse[old] = new

    def vjp(dy):
        return dy.transpose(inverse)
    return y, vjp
