"""One comparison from beginning to end: match, compare, replay, diagnose."""
from dataclasses import dataclass
from typing import Collection, Sequence

import numpy as np

from refimpl.comm import Comm, run_threads
from refimpl.comm.base import SerialComm
from refimpl.golden.actual import Set
from refimpl.golden.bundle import Bundle
from refimpl.golden.check import Line, check, rung_of, within_locally
from refimpl.golden.conventions import Stated
from refimpl.golden.diagnose import cause, hidden, relation
from refimpl.golden.emulate import FORMATS
from refimpl.golden.factor import hidden_factor
from refimpl.golden.heal import heal
from refimpl.golden.judge import FLOAT64, rho
from refimpl.golden.match import Found, UsageError, left_aside, matched
from refimpl.golden.names import Names
from refimpl.golden.replay import local, valid_targets
from refimpl.golden.report import Report

DTYPES = ("float64", "float32", "float16", "bfloat16")  # the widest first
OF = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"} | {d: d for d in DTYPES}
RUNS = 16


@dataclass(frozen=True)
class How:
    """How a dump is to be compared.

    dtype       the format the stack computes in; None: that of its arrays
    names       whose names the arrays have; None: refimpl's
    prefix      what is missing before each name: "step1/grad"
    stated      what the stack says of its conventions
    locally     replay every op from the stack's own inputs, too
    demand_all  incomplete unless every value of the bundle was given
    command     what was typed, for advice
    """
    dtype: str | None = None
    names: Names | None = None
    prefix: str = ""
    stated: Sequence[Stated] = ()
    locally: bool = False
    demand_all: bool = False
    command: str = ""


def compared(sets: Sequence[Set], bundle: Bundle, how: How) -> Report:
    """The report.  Errors: UsageError, ActualError, BundleError."""
    found = matched(sets, bundle, how.names, how.prefix)
    if not found and not how.stated:
        raise UsageError("there is nothing to compare: no array was found")
    formats = formats_of(found, bundle)
    dtype = how.dtype or formats[0]
    report = Report(bundle, dtype, check(found, bundle, dtype), how.command, how.demand_all, how.stated,
                    [] if how.dtype else formats, left_aside(sets, how.names, how.prefix))
    values = {(f.key, f.rank): f.read() for f in found if not f.problem}
    heal(report.lines, values, bundle, dtype)
    first = next((line for line in report.lines if line.failed and line.rho and (line.key, line.rank) in values), None)
    if first:
        report.relation = relation(values[first.key, first.rank], bundle.value(first.key, first.rank))
        report.cause = cause(values, report.lines, bundle, dtype)
        if not report.relation and not report.cause:
            report.right_in = right_in(found, {line.key for line in report.lines if line.failed}, bundle, dtype)
    else:
        report.hidden = hidden(values, bundle, dtype)
        passed = {(line.key, line.rank) for line in report.lines if line.verdict == "pass"}
        right = {at: a for at, a in values.items() if at in passed}
        report.factor = None if report.hidden else hidden_factor(right, bundle, dtype)
    if how.locally:
        report.locally = replayed(found, bundle, dtype)
    return report


def formats_of(found: Sequence[Found], bundle: Bundle) -> list[str]:
    """The formats of a stack's values, the narrowest first: it computes in that.  Inputs count where there is nothing else."""
    outputs = [f for f in found if rung_of(f.key, bundle.entries[f.key]) != "inputs"]
    formats = {OF[f.dtype] for f in outputs or found if f.dtype in OF}
    return [dtype for dtype in reversed(DTYPES) if dtype in formats] or ["float64"]


def right_in(found: Sequence[Found], failed: Collection[str], bundle: Bundle, dtype: str) -> str:
    """The widest of narrower formats in which all that fails is right; "" where there is none."""
    again = [f for f in found if f.key in failed]
    values = {(f.key, f.rank): f.read() for f in found if not f.problem}
    for narrower in DTYPES[DTYPES.index(dtype) + 1:]:
        fails = any(line.failed for line in check(again, bundle, narrower))
        if not fails and not hidden(values, bundle, narrower) and not hidden_factor(values, bundle, narrower):
            return narrower
    return ""


def replayed(found: Sequence[Found], bundle: Bundle, dtype: str) -> list[Line]:
    """A line for every value but inputs: against what the reference makes of the values before it."""
    recipe, ranks = bundle.recipe, bundle.ranks
    if recipe is None:
        raise UsageError("--local is for traces: op cases have their own inputs")
    if any(f.rank is None for f in found) and ranks > 1:
        raise UsageError("--local needs every rank's own values: one file per rank")
    count = valid_targets(recipe)
    given = [{f.key: f.read() for f in found if (f.rank or 0) == r and not f.problem} for r in range(ranks)]

    def main(comm: Comm) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        with np.errstate(all="ignore"):                 # the stack's own values may be infinite, or no numbers
            return local(recipe, comm, given[comm.rank], count, dtype if dtype in FORMATS else "float32", RUNS)
    results = run_threads(ranks, main) if ranks > 1 else [main(SerialComm())]
    out = []
    for f in found:
        entry, (right, noise) = bundle.entries[f.key], results[f.rank or 0]
        rung = rung_of(f.key, entry)
        if f.problem or rung in ("inputs", "comm") or not np.isfinite(noise[f.key]).all():
            continue
        sigma = noise[f.key] * (1.0 if dtype in FORMATS else FLOAT64)
        r = rho(given[f.rank or 0][f.key], right[f.key], sigma, 2.0 ** -53 * float(np.abs(right[f.key]).max(initial=0.0)),
                dtype)
        may = entry.kind == "gauge" or entry.step > 1
        out.append(Line(f.key, f.rank, rung, entry, "pass" if within_locally(r) else "gauge" if may else "fail", r))
    return sorted(out, key=lambda line: list(bundle.entries).index(line.key))
