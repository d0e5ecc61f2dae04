"""The layout and the cut of a collective's output, and the sentences that refuse an input which would give a wrong number.

`rule` makes an op's layout rule, `moved_cut` its cut rule; collectives.py gives each op one of both.  What they say depends on
tags alone, so it is the same on every rank and on any number of ranks.
"""
from typing import Any, Callable

from refimpl.autograd import Layout, LayoutError, Tensor
from refimpl.autograd.layout import NOWHERE, describe, names

PARTIAL_WANTED = "only a sum over ranks may be reduced (the product with a row-cut weight is one; as_partial marks others)"
ADVICE = {("replicated", "varying"): "a second f would add its gradient up twice",
          ("replicated", "partial"): "reduce_from it first", ("varying", "partial"): "reduce_from it first",
          ("partial", "replicated"): PARTIAL_WANTED, ("partial", "varying"): PARTIAL_WANTED}
ANYWHERE = "anywhere"                                   # any cut is taken


def rule(op_name: str, before: str, after: str, whole: str = "there is nothing to join") -> Callable[..., Layout]:
    """The layout rule of a collective: checks that its input is `before` over comm's axes and makes it `after`.

    `whole` is the advice of an op that takes a varying value and is given a replicated one.
    """
    def layout(args: Any, static: dict[str, Any]) -> Layout:
        x, axes = args[0], frozenset(static["comm"].axes)
        if type(x) is not Tensor:                       # a plain array is taken for what the op needs
            return Layout(axes if after != "replicated" else NOWHERE, axes if after == "partial" else NOWHERE)
        varies, partial = x.layout
        there = {"partial": axes & partial, "varying": axes & varies - partial, "replicated": axes - varies}
        if there[before] != axes:
            held = {state: over for state, over in there.items() if over}
            words = " and ".join(state if over == axes else f"{state} over {names(over)}" for state, over in held.items())
            wrong = next(state for state in held if state != before)
            raise LayoutError(f"{op_name} over {names(axes)} takes a {before} value, but {describe(x)} is {words} there: "
                              f"{ADVICE.get((before, wrong), whole)}")
        if partial - axes and before != "partial":
            raise LayoutError(f"{op_name} of a value that is partial over {names(partial - axes)}: reduce_from it first")
        varies = varies - axes if after == "replicated" else varies | axes
        return Layout(varies, (partial - axes) | (axes if after == "partial" else NOWHERE))
    return layout


def moved_cut(before: str | int | None = None, after: str | None = None,
              refusal: str = "its parts cannot be added up") -> Callable[..., dict[str, int]]:
    """The cut rule of a collective.  Cuts over other mesh axes than comm's stay.

    before   along what the input must be cut over comm's axes, as far as that is known: the static argument that names the
             axis, or its number; None: not at all; ANYWHERE: along any axis, or in no way that is known
    after    the static argument that names the axis along which the output is cut there; None: it is not cut any more
    refusal  what is said of an input that is cut where it must not be at all
    """
    def cut(args: Any, static: dict[str, Any], y: Any) -> dict[str, int]:
        axes = static["comm"].axes
        known = getattr(args[0], "cut", {})
        wanted = static.get(before, -1) % y.ndim if isinstance(before, str) and before != ANYWHERE else before
        for axis in axes:
            if axis in known and known[axis] != wanted != ANYWHERE:
                raise LayoutError(f"{describe(args[0])} is cut over {axis} along axis {known[axis]}: " + (
                    refusal if wanted is None else f"its parts cannot be joined along axis {wanted}, only along the former"))
        kept = {axis: k for axis, k in known.items() if axis not in axes}
        return kept | ({axis: static.get(after, -1) % y.ndim for axis in axes} if after else {})
    return cut
