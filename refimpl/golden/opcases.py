"""Op cases as a bundle: for every op and collective, on the inputs of refimpl/cases, what it gives and what its vjp gives.

    ops/linear/bias/x0  x1  x2      the arguments, by the hash of the case's name
    ops/linear/bias/y               what it gives (y0, y1 ... where there are several)
    ops/linear/bias/dy              a cotangent
    ops/linear/bias/dx0  dx1  dx2   what the vjp makes of it

    edges/...                       the same on the arrays that break things: ties, huge logits, masked rows, infinities, nan
    exact/...                       dyadic inputs on which nothing is rounded: any difference is a mistake
    collectives/all_gather/matrix/3/x0.1      of three ranks, rank 1's

The static arguments of each case are in the manifest, under "cases".
"""
import json
from contextlib import nullcontext, suppress
from copy import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np

from refimpl.autograd import REGISTRY
from refimpl.autograd.op import call
from refimpl.cases import CASES, EXACT, ON_RANKS, Case, edge_cases
from refimpl.cases.edges import CALLS
from refimpl.comm import Comm, Mesh, run_threads
from refimpl.golden.bundle import write
from refimpl.golden.emulate import FORMATS, NEAREST, Rounding
from refimpl.golden.make import digest, finished, release
from refimpl.golden.manifest import Entry
from refimpl.golden.noise import encoded, sigma
from refimpl.golden.place import Placement
from refimpl.golden.trace import Value
from refimpl.rng import draw
from refimpl.tensorfile import CODES

RUNS = 16
SIZES = (2, 3)                                          # ranks of a collective
INSIDE = 4.0                                            # units of float32 that an op may err by from what it computes inside
MOVES = ("reshape", "transpose", "concat", "split", "slice_axis", "pad", "repeat", "where", "relu", "stop_gradient",
         "straight_through", "copy_to", "gather_from", "scatter_to", "all_to_all", "all_to_all_rows", "ring_shift", "broadcast",
         "broadcast_from", "as_partial")                # ops that compute nothing, but for sums in their vjps
Values = dict[str, Value]


class Turned(nullcontext):
    """In place of a Rounding: arguments and cotangents are the right numbers in other places."""

    def round(self, a: np.ndarray) -> np.ndarray:
        return np.roll(a, 1)


@dataclass(frozen=True)
class OpCase:
    """One call of an op, or of a collective on `ranks` ranks."""
    suite: str
    op: str
    name: str
    static: dict[str, Any]
    run: Callable[[Rounding | Turned | None], Values]

    @property
    def key(self) -> str:
        return f"{self.suite}/{self.op}/{self.name}"


def serial_cases() -> list[tuple[str, dict[str, list[Case]]]]:
    return [("ops", CASES), ("edges", {name: edge_cases(name) for name in CALLS}), ("exact", EXACT)]


def op_cases() -> Iterator[OpCase]:
    for suite, table in serial_cases():
        for name, cases in table.items():
            for case in cases:
                def run(rounding, suite=suite, name=name, case=case):
                    if isinstance(rounding, Rounding) and suite == "exact":
                        rounding.exact = True           # sums of these round nothing, either
                    return values_of(f"{suite}/{name}/{case.name}", name, case.arrays, case.static, rounding)
                yield OpCase(suite, name, case.name, case.static, run)
    for name, rows in ON_RANKS.items():
        for row in rows:
            for n in SIZES:
                def run_on_ranks(rounding, name=name, row=row, n=n):
                    return of_ranks(f"collectives/{name}/{row.name}/{n}", name, row, n, rounding)
                yield OpCase("collectives", name, f"{row.name}/{n}", row.held(n, 0)[1], run_on_ranks)


def values_of(key: str, name: str, arrays: Any, static: dict[str, Any], rounding: Rounding | Turned | None, of_rank: str = ""
              ) -> Values:
    """The arguments and results of one call.  With `rounding` the arguments and cotangents are rounded, too, or turned."""
    held = tuple(rounding.round(a) if rounding and a is not None else a for a in arrays)
    with np.errstate(all="ignore"), rounding or nullcontext():
        y, vjp = call(REGISTRY[name], held, static)
        ys = y if type(y) is tuple else (y,)
        dys = tuple(cotangent(f"{key}/dy{k}{of_rank}", a) for k, a in enumerate(ys))
        dx = vjp(*(rounding.round(dy) if rounding else dy for dy in dys))
    out = {}
    several = len(ys) > 1

    def put(kind: str, values: Any, role: str, phase: str, number: bool) -> None:
        for k, a in enumerate(values):
            if a is not None:
                out[f"{key}/{kind}{k if number else ''}{of_rank}"] = Value(np.asarray(a), role, phase, 0)
    put("x", held, "input", "forward", True)
    put("y", ys, "act", "forward", several)
    put("dy", dys, "input", "backward", several)
    put("dx", dx if type(dx) is tuple else (dx,), "grad", "backward", True)
    return out


@cache
def other_outputs() -> dict[str, np.ndarray]:
    """What the ops and collectives give for the same numbers in other places: what a comparison must not take for right."""
    out: dict[str, np.ndarray] = {}
    for case in op_cases():
        with suppress(ValueError):                      # some places are not allowed
            out |= {key: v.array for key, v in case.run(Turned()).items() if v.role != "input"}
    return out


def cotangent(key: str, y: np.ndarray) -> np.ndarray:
    """Multiples of 1/8, so that nothing is rounded where the op rounds nothing; zeros for integers."""
    if y.dtype.kind != "f":
        return np.zeros(y.shape, y.dtype)
    return np.round(draw(key, y.shape) * 32) / 8


def of_ranks(key: str, name: str, row: Any, n: int, rounding: Rounding | Turned | None) -> Values:
    """One call of a collective on n ranks, as threads: every rank's arguments and results."""
    def main(comm: Comm) -> Values:
        mesh = Mesh(tp=n, comm=comm.fixed_order())
        arrays, static = row.arguments(mesh.tp, "float64")
        return values_of(key, name, arrays, {"comm": mesh.tp, **static}, copy(rounding), f".{comm.rank}")
    return {k: v for values in run_threads(n, main) for k, v in values.items()}


def make(out: Path, runs: int = RUNS) -> None:
    """Write the bundle of all op cases to OUT.  Errors: ValueError where OUT is there already or cannot be written."""
    entries: dict[str, Entry] = {}
    parts: dict[str, dict[int, np.ndarray]] = {}
    said: dict[str, Any] = {}
    for case in op_cases():
        said[case.key] = {"op": case.op, "static": jsonable(case.static)}
        truth = case.run(None)
        noise = {dtype: sigma(truth, (case.run(Rounding(dtype, seed)) for seed in range(runs)), NEAREST) for dtype in FORMATS}
        for key, value in truth.items():
            nothing = case.suite == "exact" or case.op in MOVES
            least = 0.0 if nothing else INSIDE * FORMATS["float32"].u * inside(case, truth, key)
            add(entries, parts, key, value, {dtype: np.maximum(found[key], np.where(np.isfinite(value.array), least, 0.0))
                                             for dtype, found in noise.items() if key in found})
    names = "x, y, dy, dx", "the arguments are x0, x1 ...; y is op(x0, x1, ...); dx0 ... are vjp(dy)"
    about = {"generator": f"refimpl {release()}", "recipe": None, "runs": runs, "cases": said, "conventions": {"names": names}}
    with finished(out) as folder:
        write(folder, about, entries, parts)


def inside(case: OpCase, truth: Values, key: str) -> float:
    """How large numbers get inside an op: as its result, and where 1 and erf or tanh of x cancel, as x."""
    keys = [key] + [f"{case.key}/x0"] * case.op.startswith("gelu")
    return max(float(np.abs(truth[k].array[np.isfinite(truth[k].array)]).max(initial=0.0)) for k in keys)


def add(entries: dict[str, Entry], parts: dict[str, dict[int, np.ndarray]], key: str, value: Value, noise: dict[str, np.ndarray]
        ) -> None:
    largest: dict[str, float | None] = {}
    parts[key] = {0: value.array}
    for dtype, found in noise.items() if value.role != "input" else ():
        top = float(found.max(initial=0.0))
        largest[dtype] = top if np.isfinite(top) else None
        if np.isfinite(top):
            parts[f"{dtype}/{key}"] = {0: encoded(found, top)}
    place = Placement(Mesh().dims, value.array.shape, {}, (tuple((0, n) for n in value.array.shape),))
    entries[key] = Entry(value.role, value.phase, 0, CODES[value.array.dtype], place, "canonical", digest(parts[key]), 0.0,
                         largest, value.terms)


def jsonable(value: Any) -> Any:
    """Static arguments as JSON has them."""
    return json.loads(json.dumps(value, default=lambda v: v.to_dict() if hasattr(v, "to_dict") else np.asarray(v).tolist()))
