"""The same elements elsewhere: reshape, transpose, concat, split, slice_axis, pad, repeat, stop_gradient, straight_through.

Their vjps move the cotangent back; only repeat adds.
"""
from refimpl.array import xp_of
from refimpl.autograd import Tensor, op
from refimpl.autograd.layout import given_axes
from refimpl.ops.axes import check_axis, check_integers


def reshaped_cut(args, static, y):
    """Axes are joined and split in groups of equal size.  A cut of a group's outermost axis stays with the outermost one:
    columns cut between heads become heads that are cut.  A cut further in is scattered, and no longer known."""
    x = args[0]
    if type(x) is not Tensor:
        return {}
    cut, i, j, old, new = {}, 0, 0, x.array.shape, y.shape
    while i < len(old) and j < len(new):
        first, onto, m, n = i, j, old[i], new[j]
        i, j = i + 1, j + 1
        while m != n:
            if (i if m < n else j) == len(old if m < n else new):
                return {}                               # an axis of size 0 tells nothing of how the others are grouped
            if m < n:
                m, i = m * old[i], i + 1
            else:
                n, j = n * new[j], j + 1
        cut.update({mesh_axis: onto for mesh_axis, k in x.cut.items() if k == first})
    return cut


@op(linearity="each", cut=reshaped_cut)
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


def transposed_cut(args, static, y):
    axes = [a % y.ndim for a in static.get("axes", ())]
    return {mesh_axis: axes.index(k) for mesh_axis, k in args[0].cut.items()} if type(args[0]) is Tensor else {}


@op(linearity="each", cut=transposed_cut)
def transpose(x, axes=()):
    """Axes in another order.

    Equation:   y[i_axes[0], i_axes[1], ...] = x[i_0, i_1, ...]   (a view of x)
    Shapes:     x[n_0, n_1, ...] -> y[n_axes[0], n_axes[1], ...]
    VJP:        dx = dy with the inverse order of axes
    Residuals:  none
    Reference:  numpy.transpose
    """
    if sorted(a % x.ndim if -x.ndim <= a < x.ndim else -1 for a in axes) != list(range(x.ndim)):
        raise ValueError(f"transpose: axes {axes} must name each of the {x.ndim} axes of x{list(x.shape)} once")
    y = x.transpose(axes)
    inverse = [0] * len(axes)
    for new, old in enumerate(axes):
        inverse[old] = new

    def vjp(dy):
        return dy.transpose(inverse)
    return y, vjp


@op(linearity="joint", along=given_axes)
def concat(*parts, axis=-1):
    """Join arrays along one axis.

    Equation:   y = [x_0 x_1 ...]
    Shapes:     x_k[.., n_k, ..] -> y[.., Σ n_k, ..]
    VJP:        dx_k = the part of dy that x_k became
    Residuals:  none
    Reference:  numpy.concatenate
    """
    if not parts:
        raise ValueError("concat: got no array, needs one or more")
    check_axis("concat", parts[0], axis)
    try:
        y = xp_of(*parts).concatenate(parts, axis=axis)
    except ValueError:
        shapes = [list(p.shape) for p in parts]
        raise ValueError(f"concat along axis {axis} of {shapes}: all other axes must be equal") from None
    sizes = [p.shape[axis] for p in parts]

    def vjp(dy):
        return cut(dy, sizes, axis)
    return y, vjp


@op(linearity="each", along=given_axes)
def split(x, sizes=(), axis=-1):
    """Cut an array along one axis into parts of the given sizes.

    Equation:   [y_0 y_1 ...] = x   (a view of x)
    Shapes:     x[.., Σ n_k, ..] -> y_k[.., n_k, ..], a tuple
    VJP:        dx = [dy_0 dy_1 ...]
    Residuals:  none
    Reference:  numpy.split, torch.split
    """
    check_axis("split", x, axis)
    check_integers("split", sizes=sizes)
    if sum(sizes) != x.shape[axis] or min(sizes, default=0) < 0 or not sizes:
        raise ValueError(f"split: the sizes {tuple(sizes)} must be one or more, at least 0, and add up to the {x.shape[axis]} "
                         f"along axis {axis} of x{list(x.shape)}")
    y = cut(x, sizes, axis)
    xp = xp_of(x)

    def vjp(*dys):
        return xp.concatenate(dys, axis=axis)
    return y, vjp


def cut(x, sizes, axis):
    """x in parts of the given sizes along `axis`."""
    parts, start = [], 0
    for n in sizes:
        parts.append(x[along(x, axis, start, start + n)])
        start += n
    return tuple(parts)


def along(x, axis, start, stop):
    """The index of start:stop along `axis`."""
    where = [slice(None)] * x.ndim
    where[axis] = slice(start, stop)
    return tuple(where)


@op(linearity="each", along=given_axes)
def slice_axis(x, axis=-1, start=0, stop=None):
    """The elements start..stop-1 along one axis.

    Equation:   y_i = x_{start + i}   (a view of x)
    Shapes:     x[.., n, ..] -> y[.., stop - start, ..]
    VJP:        dx = dy inside, 0 outside
    Residuals:  none
    Reference:  numpy's slices; torch.narrow
    """
    check_axis("slice_axis", x, axis)
    stop = x.shape[axis] if stop is None else stop
    check_integers("slice_axis", start=start, stop=stop)
    if not 0 <= start <= stop <= x.shape[axis]:
        raise ValueError(f"slice_axis: {start}..{stop} is not inside axis {axis} of x{list(x.shape)}")
    where, shape = along(x, axis, start, stop), x.shape
    y = x[where]
    xp = xp_of(x)

    def vjp(dy):
        dx = xp.zeros(shape, dy.dtype)
        dx[where] = dy
        return dx
    return y, vjp


@op(linearity="each", along=given_axes)
def pad(x, before=0, after=0, axis=-1):
    """Zeros before and after, along one axis.

    Equation:   y = [0 x 0]
    Shapes:     x[.., n, ..] -> y[.., before + n + after, ..]
    VJP:        dx = the part of dy that x became
    Residuals:  none
    Reference:  numpy.pad
    """
    check_axis("pad", x, axis)
    check_integers("pad", before=before, after=after)
    if before < 0 or after < 0:
        raise ValueError(f"pad: before and after must be at least 0, got {before} and {after}")
    shape = list(x.shape)
    shape[axis] += before + after
    where = along(x, axis, before, before + x.shape[axis])
    y = xp_of(x).zeros(shape, x.dtype)
    y[where] = x

    def vjp(dy):
        return dy[where]
    return y, vjp


def kept_cut(args, static, y):
    return getattr(args[0], "cut", {})


@op(linearity="each", cut=kept_cut)
def repeat(x, times=1, axis=-1):
    """Every element `times` times in a row, along one axis: kv heads 0,0,1,1 for grouped attention (never tiled 0,1,0,1).

    Equation:   y_i = x_{⌊i/times⌋}
    Shapes:     x[.., n, ..] -> y[.., n·times, ..]
    VJP:        dx_j = Σ dy_i over the `times` copies of j
    Residuals:  none
    Reference:  numpy.repeat; torch.repeat_interleave
    """
    axis = check_axis("repeat", x, axis)
    check_integers("repeat", times=times)
    if times < 0:
        raise ValueError(f"repeat: times must be at least 0, got {times}")
    y = xp_of(x).repeat(x, times, axis=axis)
    shape = x.shape[:axis + 1] + (times,) + x.shape[axis + 1:]

    def vjp(dy):
        return dy.reshape(shape).sum(axis=axis + 1)
    return y, vjp


@op(linearity="each", surrogate=True)
def stop_gradient(x):
    """The value without its gradient.

    Equation:   y = x   (a view of x)
    Shapes:     x[...] -> y[...]
    VJP:        dx = 0
    Residuals:  none
    Reference:  jax.lax.stop_gradient, torch detach
    """
    y = x.view()

    def vjp(dy):
        return xp_of(dy).zeros_like(dy)                 # not dy·0, which is nan where dy is infinite
    return y, vjp


@op(surrogate=True)
def straight_through(hard, soft):
    """The value of `hard` with the gradient of `soft`: how a rounding or a codebook lookup is trained.

    Equation:   y = hard   (a view of it)
    Shapes:     hard[...], soft[...] -> y[...]
    VJP:        dhard = 0;  dsoft = dy
    Residuals:  none
    Reference:  Bengio, Léonard, Courville 2013, section 3; van den Oord et al. 2017 (VQ-VAE), section 3.2
    """
    if hard.shape != soft.shape or hard.dtype != soft.dtype:
        raise ValueError(f"straight_through: hard {hard.dtype}{list(hard.shape)} and soft {soft.dtype}{list(soft.shape)} must "
                         f"have one shape and dtype")
    y = hard.view()

    def vjp(dy):
        return None, dy
    return y, vjp
