"""The checks of an op that does not communicate.  check_op makes all of them.

How exact is exact.  J v is taken in several ways: by the complex step Im f(x + i·h·v)/h with h = 2^-66, which subtracts nothing
and is exact to rounding (allowed: 1e-12·scale); and by fourth-order central differences in float64 with h = 2^-13, whose
errors are h⁴/30·f⁽⁵⁾ ≈ 7e-18·f⁽⁵⁾ and 1.5·2^-52/h ≈ 3e-12·|y| (allowed: 1e-6·scale).  The scale is the same contraction
over absolute values, by norms: |dy|·|J v| + |vjp(dy)|·|v|, and |dy|·|y|·|v|/|x|, since a derivative that comes out far
smaller than |y|/|x| does so by cancellation.
"""
import re
from typing import Any

import numpy as np

from refimpl.autograd import residuals
from refimpl.check.tools import (DIFFERENCES, EXACT, backward, by_linearity, cast, compare, complex_step, conditioned,
                                 cotangents, differences, directions, evaluate, floats, is_array, is_float, largest, norm, pull,
                                 strided, title, transposed)

SECTIONS = ("Equation", "Shapes", "VJP", "Residuals", "Reference")


def check_op(op: Any, *arrays: Any, **static: Any) -> None:
    """Everything that can be said about an op without knowing what it computes."""
    check_docstring(op)
    check_vjp(op, *arrays, **static)
    check_purity(op, *arrays, **static)
    check_residuals(op, *arrays, **static)
    check_dtypes(op, *arrays, **static)
    check_views(op, *arrays, **static)


def check_vjp(f: Any, *arrays: Any, **static: Any) -> None:
    """<dy, J v> = <vjp(dy), v> for every float argument, and vjp(a·dy1 + b·dy2) = a·vjp(dy1) + b·vjp(dy2).

    Two random directions v, and for small arrays every single element.  Outputs may be a tuple; integer ones are skipped.
    An op whose vjp is a stated surrogate is only checked for the second.
    """
    args = cast(arrays, np.float64)
    ys, vjp = evaluate(f, args, static)
    dy, other = cotangents(ys, "dy"), cotangents(ys, "other dy")
    dxs = pull(f, vjp, dy, args)
    methods = [("finite differences", differences, DIFFERENCES)]
    if getattr(f, "analytic", False):
        methods.append(("the complex step", complex_step, EXACT))
    if getattr(f, "linearity", None):
        methods.append(("linearity", by_linearity, EXACT))
    for k in floats(args) if not getattr(f, "surrogate", False) else []:
        natural = norm(dy) * norm(ys) / max(norm([args[k]]), 1e-300)
        for what, v in directions(args[k]):
            right = float(np.sum(dxs[k] * v))
            for method, derivative, allowed in methods:
                jv = derivative(f, args, static, k, v)
                left = sum(float(np.sum(dy[i] * jv[i])) for i in floats(ys))
                scale = norm(dy) * norm(jv) + norm([dxs[k]]) * norm([v]) + min(natural * norm([v]), norm(dy) * norm(ys))
                assert abs(left - right) <= allowed * scale, (
                    f"{title(f)}: argument {k}, {what}: <dy, J v> is {left:.15g} by {method}, <vjp(dy), v> is {right:.15g}; "
                    f"they differ by {abs(left - right):.1e}, allowed is {allowed * scale:.1e}")
    both = pull(f, vjp, [np.asarray(0.75 * a - 3 * b) if is_float(a) else a for a, b in zip(dy, other)], args)
    for k, second in enumerate(pull(f, vjp, other, args)):
        if second is not None:
            size = np.abs(dxs[k]).max(initial=0) + 3 * np.abs(second).max(initial=0)
            wrong = np.abs(both[k] - (0.75 * dxs[k] - 3 * second)).max(initial=0)
            assert wrong <= EXACT * (size + largest(dy) * largest(ys) / max(largest([args[k]]), 1e-300)), (
                f"{title(f)}: the vjp is not linear in dy: argument {k} is off by {wrong:.1e}, its size is {size:.1e}")


def check_purity(f: Any, *arrays: Any, **static: Any) -> None:
    """Arguments and dy are not written to, y is no view of an argument (unless the docstring says "view"), and the same
    call gives the same bits: the op twice, and the vjp twice."""
    args = [a.copy() if is_array(a) else a for a in arrays]         # writable: `evaluate` tries read-only ones
    before = [a.tobytes() for a in filter(is_array, args)]
    ys, vjp = evaluate(f, args, static, frozen=False)
    for i, y in enumerate(ys):
        for k, a in enumerate(args):
            assert y is not a, f"{title(f)}: output {i} is argument {k} itself: making it read-only would freeze the caller's"
            assert not is_array(a) or not np.may_share_memory(y, a) or "view" in (f.__doc__ or ""), (
                f"{title(f)}: output {i} shares memory with argument {k}: copy it, or say in the docstring that it is a view")
    dy = cotangents(ys, "dy")
    before += [a.tobytes() for a in [*dy, *ys]]
    dxs = pull(f, vjp, dy, args, frozen=False)
    held = [*(("an argument", a) for a in filter(is_array, args)), *(("dy", a) for a in dy), *(("y", a) for a in ys)]
    for (what, a), b in zip(held, before):
        assert a.tobytes() == b, f"{title(f)} writes to {what}"
    again, vjp2 = evaluate(f, args, static)
    same = [*again, *pull(f, vjp, dy, args), *pull(f, vjp2, dy, args)]
    for a, c in zip([*ys, *dxs, *dxs], same):
        assert a is c is None or a.tobytes() == c.tobytes(), f"{title(f)}: the same call twice gives different values"


def check_dtypes(f: Any, *arrays: Any, **static: Any) -> None:
    """float32 in, float32 out, in y and vjp, also where a static number is a numpy float64 (NumPy 2 promotes by these).

    The float32 error against float64 stays within 8·√n·2^-23 of the scale, n the largest array's size: the roundings of a
    sum of n terms are independent in sign (Higham and Mary 2019).  The scale is the size of the result, and what it moves
    when every input moves by one rounding.
    """
    args = cast(arrays, np.float32)
    numpy_static = {k: np.float64(v) if type(v) is float else v for k, v in static.items()}
    for settings in (static, numpy_static):
        ys, vjp = evaluate(f, args, settings)
        dy = cotangents(ys, "dy")
        for i in floats(ys):
            assert ys[i].dtype == np.float32, f"{title(f)}: float32 arguments gave a {ys[i].dtype} output {i}"
        low = [*ys, *pull(f, vjp, dy, args)]
    high, scales = conditioned(f, cast(args, np.float64), cast(dy, np.float64), static)
    n = max([1, *(a.size for a in filter(is_array, arrays))])
    compare(f, "in float32", low, high, 8 * np.sqrt(n) * 2.0 ** -23, scales)


def check_views(f: Any, *arrays: Any, **static: Any) -> None:
    """Arguments and dy in any memory order give the values of contiguous ones."""
    args = cast(arrays, np.float64)
    dy = cotangents(evaluate(f, args, static)[0], "dy")
    expected, scales = conditioned(f, args, dy, static)
    for view in (transposed, strided, backward):
        seen = [view(a) if is_array(a) else a for a in args]
        ys, vjp = evaluate(f, seen, static, frozen=False)
        got = [*ys, *pull(f, vjp, [view(a) for a in dy], seen, frozen=False)]
        compare(f, f"of {view.__name__} arrays", got, expected, EXACT, scales)


def check_docstring(op: Any) -> None:
    """Equation, Shapes, VJP, Residuals and Reference are all there."""
    missing = [s for s in SECTIONS if not re.search(rf"^ *{s}: +\S", op.__doc__ or "", re.M)]
    assert not missing, f"{title(op)}: the docstring lacks {', '.join(missing)}"


def check_residuals(op: Any, *arrays: Any, **static: Any) -> None:
    """The arrays that the vjp keeps are exactly those on the docstring's `Residuals:` line."""
    _, vjp = evaluate(op, cast(arrays, np.float64), static)
    line = re.search(r"Residuals: +(.*)", op.__doc__ or "")
    text = re.sub(r"\(.*?\)", "", line.group(1)) if line else ""
    documented = {name.strip() for name in text.split(",")} - {"none", ""}
    kept = set(residuals(vjp))
    assert kept == documented, (f"{title(op)}: the vjp keeps {', '.join(sorted(kept)) or 'no array'}, the docstring says "
                                f"{', '.join(sorted(documented)) or 'none'}")
