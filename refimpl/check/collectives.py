"""The check of a collective, on all ranks: its vjp is the adjoint of its forward under the layouts that it states."""
from typing import Any

import numpy as np

from refimpl.check.pure import check_docstring, check_residuals
from refimpl.check.tools import (DIFFERENCES, differences, draw_like, evaluate, floats, frozen_copy, is_array, largest, pull,
                                 title)
from refimpl.comm import Comm


def check_adjoint(op: Any, comm: Comm, before: Any, after: Any, *arrays: Any, **static: Any) -> None:
    """<dy, J v> = <vjp(dy), v> for a collective, over all ranks of `comm`; every rank calls it and gets the same verdict.

    before, after  the layout of each argument and output (one name where there is one): "replicated", "shard", "partial"
                   or "per_rank"; None for integers.  `arrays` are this rank's, with the same values on all where replicated

    The inner product counts a replicated value once and sums all others over ranks; the cotangent of a partial value is
    replicated.  What should be equal on all ranks is checked to be.  J v of a linear op is op(v), else a difference.
    Error allowed: 16·size·eps of the dtype times the contraction over absolute values.
    """
    check_docstring(op)
    ins, outs = ((how if isinstance(how, (tuple, list)) else (how,)) for how in (before, after))
    arrays = tuple(map(frozen_copy, arrays))
    bits = [a.tobytes() for a in filter(is_array, arrays)]
    ys, vjp = evaluate(op, arrays, {"comm": comm, **static}, frozen=False)
    dy = [on_rank(comm, f"dy {i}", y, how != "per_rank" and how != "shard") for i, (y, how) in enumerate(zip(ys, outs))]
    dxs = pull(op, vjp, dy, arrays)
    problems = [f"output {i} is argument {k} itself" for i, y in enumerate(ys) for k, a in enumerate(arrays) if y is a]
    problems += [f"output {i} is {ys[i].dtype}, argument 0 {arrays[0].dtype}" for i in floats(ys)
                 if ys[i].dtype != arrays[0].dtype]
    for what, values, alike in (("output", ys, [how == "replicated" for how in outs]),
                                ("cotangent", dxs, [how in ("replicated", "partial") for how in ins])):
        for i, a in enumerate(values):
            if a is not None and alike[i] and not largest([a - comm.broadcast(a)]) <= tolerance(comm, a) * largest([a]):
                problems.append(f"{what} {i} should be equal on all ranks and is not")
    for k in floats(arrays):
        v = on_rank(comm, f"v {k}", arrays[k], ins[k] == "replicated")
        if op.linearity is None:
            jv, allowed = differences(op, arrays, {"comm": comm, **static}, k, v), DIFFERENCES
            size = jv
        else:
            jv, size = (evaluate(op, [*arrays[:k], w, *arrays[k + 1:]], {"comm": comm, **static})[0] for w in (v, np.abs(v)))
            allowed = tolerance(comm, v)
        left = sum(total(comm, outs[i], dy[i] * jv[i]) for i in floats(ys))
        allowed *= sum(total(comm, outs[i], np.abs(dy[i] * size[i])) for i in floats(ys))
        right = total(comm, ins[k], dxs[k] * v)
        if not abs(left - right) <= allowed:
            problems.append(f"argument {k}, {ins[k]} -> {', '.join(map(str, outs))}: <dy, J v> is {left:.9g}, <vjp(dy), v> is "
                            f"{right:.9g}; they differ by {abs(left - right):.1e}, allowed is {allowed:.1e}")
    if bits != [a.tobytes() for a in filter(is_array, arrays)]:
        problems.append("an argument was written to")
    said = comm.gather_texts("; ".join(problems))
    assert not any(said), f"{title(op)} on {comm.size} ranks: " + " | ".join(f"rank {r}: {s}" for r, s in enumerate(said) if s)
    check_residuals(op, *arrays, comm=comm, **static)


def on_rank(comm: Comm, name: str, y: np.ndarray, alike: bool) -> np.ndarray:
    return draw_like(name if alike else f"{name} on rank {comm.rank}", y)


def tolerance(comm: Comm, a: np.ndarray) -> float:
    return 16 * comm.size * float(np.finfo(a.dtype).eps)


def total(comm: Comm, layout: str | None, terms: np.ndarray) -> float:
    """The sum of `terms`, over all ranks unless they are replicated."""
    here = terms.sum(dtype=np.float64)
    return float(here) if layout == "replicated" else float(comm.all_reduce(np.array([here]))[0])
