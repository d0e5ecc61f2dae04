"""Axes and sizes given by number: one check for the ops that take them."""


def check_axis(op_name, x, axis):
    """The axis counted from 0.  Error: ValueError where x has no such axis."""
    if not hasattr(axis, "__index__") or not -x.ndim <= axis < x.ndim:
        raise ValueError(f"{op_name}: x{list(x.shape)} has no axis {axis!r}: " +
                         (f"axes are integers from {-x.ndim} to {x.ndim - 1}" if x.ndim else "it has none"))
    return axis % x.ndim


def check_axes(op_name, x, axis):
    """The axes that `axis` (one, a tuple, None for all) names, counted from 0.  Error: ValueError, also for one named twice."""
    axes = range(x.ndim) if axis is None else [check_axis(op_name, x, a) for a in (axis if type(axis) is tuple else (axis,))]
    if len(set(axes)) < len(axes):
        raise ValueError(f"{op_name}: axis {axis} of x{list(x.shape)} names an axis twice")
    return axes


def check_integers(op_name, **given):
    """Error: TypeError unless each of the static arguments is an integer, or holds integers only."""
    for name, value in given.items():
        values = value if isinstance(value, (tuple, list)) else (value,)
        if not all(hasattr(n, "__index__") for n in values):
            raise TypeError(f"{op_name}: {name} must be {'integers' if values is value else 'an integer'}, got {value!r}")


def check_eps(op_name, eps):
    """Error: ValueError unless eps is finite and at least 0."""
    if not 0 <= eps < float("inf"):
        raise ValueError(f"{op_name}: eps must be finite and at least 0, got {eps}")
