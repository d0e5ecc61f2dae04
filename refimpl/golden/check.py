"""Compare a stack's values with a bundle: every value by rho, in the order of the ladder, each with its negative controls.

    inputs       initial parameters, tokens, targets, arguments: the same numbers, exactly, or to the nearest of the format
    exact        op cases in which nothing is rounded
    ops          the other op cases, edges and collectives
    trace        what the ops of a model gave, and the loss
    comm         what collectives were given and gave
    gradients    by activations and parameters, and their norm
    optimizer    moments, parameters after each step, later losses

A rung that fails makes those above it fail, so the first is the one to mend.
"""
from collections import Counter
from dataclasses import dataclass, replace
from typing import Callable, Iterator, Mapping, Sequence

import numpy as np

from refimpl.autograd import Frame
from refimpl.comm import Comm, run_threads
from refimpl.comm.base import SerialComm
from refimpl.golden.bundle import Bundle
from refimpl.golden.emulate import FORMATS, Rounding
from refimpl.golden.judge import FLOAT64, Rho, rho, same_in
from refimpl.golden.limits import LIMITS
from refimpl.golden.manifest import BundleError, Entry
from refimpl.golden.match import Found
from refimpl.golden.opcases import other_outputs
from refimpl.golden.recipe import Recipe
from refimpl.golden.trace import trace

RUNGS = ("inputs", "exact", "ops", "trace", "comm", "gradients", "optimizer")
ROUNDING = 16.0                                         # times its limit: what is more is no rounding, in a gauge's gradient
ALIKE = 1e-12                                           # relative difference of what differs by rounding in float64 only
Key = tuple[str, int | None]                           # a value, and a rank where it is its part
Parts = list[dict[str, np.ndarray]]                     # every rank's values


@dataclass
class Line:
    """One comparison, of the whole value (rank None) or of one rank's part.

    verdict  "pass" or "fail"; "gauge" and "partial" differ as they may; "no power": zeros or another seed would pass, too;
             "left out": nothing can be said, `note` says why
    """
    key: str
    rank: int | None
    rung: str
    entry: Entry
    verdict: str
    rho: Rho | None = None
    note: str = ""

    @property
    def failed(self) -> bool:
        return self.verdict == "fail"


def check(found: Sequence[Found], bundle: Bundle, dtype: str) -> list[Line]:
    """A line for every value, in the order of the ladder."""
    wrong = every_rank(replace(bundle.recipe, seed=bundle.recipe.seed + 1)) if bundle.recipe else [other_outputs()]
    if bundle.recipe and (strange := bundle.entries.keys() - wrong[0].keys()):
        raise BundleError(f"{bundle.folder} has a value {min(strange)[:100]!r}, which its model has not")
    lines = [examined(f, bundle, dtype, wrong) for f in found]
    for key, parts in of_all_ranks(found, bundle):      # parts of a sum, which a stack may cut otherwise
        whole = Found(key, None, "the sum of the ranks' parts", "float64", lambda: bundle.entries[key].place.whole(parts))
        lines.append(examined(whole, bundle, dtype, wrong))
    place = {key: k for k, key in enumerate(bundle.entries)}
    return sorted(lines, key=lambda line: (RUNGS.index(line.rung), place[line.key]))


def rung_of(key: str, entry: Entry) -> str:
    if entry.role == "input" or (entry.role == "param" and entry.phase == "forward"):
        return "inputs"
    if not entry.step:
        return "exact" if key.startswith("exact/") else "ops"
    if entry.step > 1 or entry.phase == "update":
        return "optimizer"
    return "comm" if entry.role == "comm" else "gradients" if entry.phase == "backward" else "trace"


def every_rank(recipe: Recipe, frames: Sequence[Frame] = (), rounding: Callable[[], Rounding] | None = None) -> Parts:
    """What each rank has, computed here, on threads."""
    def values(comm: Comm) -> dict[str, np.ndarray]:
        run = trace(recipe, comm, rounding() if rounding else None, frames)
        return {key: value.array for key, value in run.items()}
    n = int(np.prod(list(recipe.mesh.values())))
    return run_threads(n, values) if n > 1 else [values(SerialComm())]


def of_all_ranks(found: Sequence[Found], bundle: Bundle) -> list[tuple[str, dict[int, np.ndarray]]]:
    """Of the parts of sums: those of which every holder's is there."""
    parts: dict[str, dict[int, Found]] = {}
    for f in found:
        if f.rank is not None and not f.problem and bundle.entries[f.key].kind == "partial":
            parts.setdefault(f.key, {})[f.rank] = f
    return [(key, {r: f.read() for r, f in held.items()}) for key, held in parts.items()
            if set(bundle.entries[key].place.holders()) <= held.keys()]


def examined(f: Found, bundle: Bundle, dtype: str, wrong: Parts) -> Line:
    entry = bundle.entries[f.key]
    line = Line(f.key, f.rank, rung_of(f.key, entry), entry, "fail", note=f.problem)
    if f.problem:
        return line
    actual, expected = f.read(), bundle.value(f.key, f.rank).astype(np.float64)
    if line.rung == "inputs":
        line.rho = rho(actual, expected, np.zeros(expected.shape))
        if same_in(actual, expected, dtype):
            line.verdict, line.rho = "pass", Rho(0.0, 0.0, line.rho.worst, line.rho.actual, line.rho.expected)
        return line
    sigma = sigma_in(bundle, f.key, f.rank, dtype)
    if sigma is None:
        line.verdict, line.note = "left out", f"the reference overflows in {dtype}"
        return line
    line.rho = rho(actual, expected, sigma, entry.uncertainty, dtype)
    if not within(line.rho) and not (sigma.any() or not same_in(actual, expected, dtype)):     # nothing is rounded but itself
        line.rho = Rho(0.0, 0.0, line.rho.worst, line.rho.actual, line.rho.expected)
    if not within(line.rho):
        zero = entry.role == "grad" and line.rho.norm > ROUNDING * LIMITS.norm      # of a gauge: it is 0, but for rounding
        may = entry.kind if entry.kind == "gauge" and not zero or f.rank is not None and entry.kind == "partial" else ""
        line.verdict = may or "fail"
    else:
        passed = [what for what, control in controls(f, expected, bundle, wrong)
                  if within(rho(control, expected, sigma, entry.uncertainty, dtype))]
        line.verdict, line.note = ("no power", f"{passed[0]} would pass, too") if passed else ("pass", "")
    return line


def controls(f: Found, expected: np.ndarray, bundle: Bundle, wrong: Parts) -> Iterator[tuple[str, np.ndarray]]:
    """What a comparison must fail on: zeros, the right numbers in wrong places (unless they are all alike), other inputs' (of a
    trace, another seed's; unless it does not depend on what is other)."""
    yield "zeros", np.zeros_like(expected)
    moved = np.roll(expected, 1)
    if not alike(moved, expected):
        yield "the right numbers in wrong places", moved
    if same_form(wrong, bundle, f.key):
        other = part_of(wrong, bundle, f.key, f.rank)
        if not alike(other, expected):
            yield "the values of other inputs", other


def alike(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether they are the same but for rounding in float64."""
    return np.allclose(a, b, rtol=ALIKE, atol=0.0, equal_nan=True)


def same_form(run: Parts, bundle: Bundle, key: str) -> bool:
    """Whether a run has a value in the bundle's shapes.  (Where other targets are ignored, a collective has other rows.)"""
    return all(key in values and values[key].shape == bundle.shape(key, r) for r, values in enumerate(run))


def part_of(run: Parts, bundle: Bundle, key: str, rank: int | None) -> np.ndarray:
    """A value of a run: the whole of it (rank None), or one rank's part."""
    if rank is not None:
        return run[rank][key]
    return run[0][key] if bundle.ranks == 1 else bundle.entries[key].place.whole([parts[key] for parts in run])


def sigma_in(bundle: Bundle, key: str, rank: int | None, dtype: str) -> np.ndarray | None:
    if dtype in FORMATS:
        return bundle.sigma(key, dtype, rank)
    sigma = bundle.sigma(key, "float32", rank)
    return None if sigma is None else sigma * FLOAT64


def within(r: Rho) -> bool:
    return r.norm <= LIMITS.norm and r.element <= LIMITS.element


def within_locally(r: Rho) -> bool:
    return r.norm <= LIMITS.local_norm and r.element <= LIMITS.local_element


def counts(lines: Sequence[Line]) -> Mapping[str, int]:
    return Counter(line.verdict for line in lines)
