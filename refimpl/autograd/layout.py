"""The layout tag: over which mesh axes a value differs between ranks, and over which it still has to be summed.

`varies`   mesh axes over which the ranks hold different values (different rows, columns or heads)
`partial`  those of them over which the true value is the *sum* of what the ranks hold

The tag is what makes a wrong sharding an error instead of a wrong number.  It trusts three things it is told: that data which
differs between ranks says so (`Tensor(x, Layout(frozenset({"dp"})))`; a plain array counts as the same on all), that a
parameter's cut is right, and `as_partial`.  An op's output varies where any input does.
Then an input that does not vary there either is a parameter, and its gradient has to be reduced over these axes (it is
recorded, nobody lists it by hand), or it is an activation, and somebody forgot f.  The idea of tagging values with the
axes they vary over is that of JAX's shard_map.  Tags do not depend on sizes: a serial run finds the same mistakes.
"""
from typing import Any, NamedTuple

NOWHERE: frozenset[str] = frozenset()


class Layout(NamedTuple):
    varies: frozenset[str] = NOWHERE
    partial: frozenset[str] = NOWHERE


REPLICATED = Layout()


class LayoutError(ValueError):
    """Values with different layouts meet in a way that would give a wrong number."""


def names(axes: frozenset[str]) -> str:
    return "+".join(sorted(axes))


def join(op: Any, tensors: list[Any]) -> Layout:
    """The layout of the output of an op that does not communicate, from those of its inputs."""
    if not tensors:
        return REPLICATED
    layout = tensors[0].layout
    for t in tensors:
        if t.layout is not layout and t.layout != layout:
            layout = _union(op, tensors)
            break
    if layout.partial and op.linearity is None:
        raise LayoutError(f"{op.name} of a value that is partial over {names(layout.partial)}: reduce before a nonlinearity "
                          f"(reduce_from): {op.name} of a sum is not the sum of {op.name}s")
    if layout.partial and op.linearity == "each" and len(tensors) > 1:
        for a in layout.partial:
            if sum(a in t.layout.varies for t in tensors) > 1:
                raise LayoutError(f"{op.name}: two inputs vary over {a} and one is partial over it; reduce_from it first")
    require(op.name, tensors, layout.varies)
    return layout


def _union(op: Any, tensors: list[Any]) -> Layout:
    varies = frozenset().union(*(t.layout.varies for t in tensors))
    partial = frozenset().union(*(t.layout.partial for t in tensors))
    if partial and op.linearity == "joint":
        for t in tensors:
            if t.layout.partial != partial:
                raise LayoutError(f"{op.name} of a value that is partial over {names(partial)} and {describe(t)}, which is "
                                  f"not: the latter would be counted once per rank; reduce_from before the {op.name}")
    return Layout(varies, partial)


def require(op_name: str, tensors: list[Any], varies: frozenset[str]) -> None:
    """Each input varies over all of `varies`, or is a parameter (its reduction is recorded), or no gradient is wanted.

    A value made of parameters alone only meets its partner later: nothing is recorded before.
    """
    parameters_alone = all(t.leaves for t in tensors)
    for t in tensors:
        if t.tape is None:
            continue
        missing = varies - t.layout.varies
        if t.leaves and not parameters_alone:
            for leaf in t.leaves:
                if missing & leaf.layout.varies:
                    raise LayoutError(f"{op_name}: {describe(t)} was gathered over {names(missing & leaf.layout.varies)} as "
                                      f"one replicated value, its partner varies there: use all_gather (of a root's value: "
                                      f"broadcast), whose vjp adds up")
                t.tape.record_use(op_name, leaf, missing)
        elif missing:
            raise LayoutError(f"{op_name}: {describe(t)} is replicated over {names(missing)}, its partner is not: copy_to it "
                              f"first (f), else its gradient misses the other ranks' contributions")


def require_whole(op: Any, tensors: list[Any], static: dict[str, Any]) -> None:
    """Error: LayoutError for an op that works along a cut axis, of which each rank has a part only."""
    for number, t in enumerate(tensors):
        for mesh_axis, k in t.cut.items():
            if k in op.along(static, t.array.ndim, number):
                raise LayoutError(f"{op.name} works along axis {k} of {describe(t)}, which is cut over {mesh_axis}: each rank "
                                  f"would see its own part only; gather_from it first")


def carried_cut(op: Any, tensors: list[Any], static: dict[str, Any], y: Any) -> dict[str, int]:
    """Along which axis of y the mesh axes cut it, as far as the inputs' cuts tell: where an input's axis and all behind it
    come out with the same sizes, it is the same axis.
    """
    cut: dict[str, int] = {}
    for t in tensors:
        for mesh_axis, k in t.cut.items():
            from_end = k - t.array.ndim
            if y.ndim >= -from_end and y.shape[from_end:] == t.array.shape[from_end:]:
                add_cut(op.name, cut, mesh_axis, y.ndim + from_end)
    return cut


def add_cut(op_name: str, cut: dict[str, int], mesh_axis: str, axis: int) -> None:
    """`mesh_axis` cuts y along `axis`.  Error: LayoutError where it cuts y along another one already."""
    if cut.setdefault(mesh_axis, axis) != axis:
        raise LayoutError(f"{op_name}: by one input axis {cut[mesh_axis]} of the output would be cut over {mesh_axis}, by "
                          f"another axis {axis}: gather one of them over {mesh_axis} first")


def last_axis(static: dict[str, Any], ndim: int, number: int = 0) -> tuple[int, ...]:
    return (ndim - 1,)


def given_axes(static: dict[str, Any], ndim: int, number: int = 0) -> tuple[int, ...]:
    """The axes that the static argument `axis` names; the last one for an op whose axis was left out, all for None."""
    axis = static.get("axis", -1)
    axes = range(ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    return tuple(a % ndim for a in axes) if ndim else ()


def all_or_given_axes(static: dict[str, Any], ndim: int, number: int = 0) -> tuple[int, ...]:
    return given_axes({"axis": static.get("axis")}, ndim)


def first_axis(static: dict[str, Any], ndim: int, number: int = 0) -> tuple[int, ...]:
    return (0,)


def describe(t: Any) -> str:
    kind = f"the parameter {t.name}" if t.name else "an activation"
    return f"{kind} of shape {tuple(t.array.shape)}"
