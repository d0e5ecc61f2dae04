"""One comparison from beginning to end: match, compare, replay, diagnose."""
from collections import Counter
from typing import Sequence

import numpy as np

from refimpl.comm import Comm, run_threads
from refimpl.comm.base import SerialComm
from refimpl.golden.actual import Set
from refimpl.golden.bundle import Bundle
from refimpl.golden.check import Line, check, rung_of, within_locally
from refimpl.golden.diagnose import cause, hidden, relation
from refimpl.golden.emulate import FORMATS
from refimpl.golden.heal import heal
from refimpl.golden.judge import FLOAT64, rho
from refimpl.golden.match import Found, UsageError, matched
from refimpl.golden.names import Names
from refimpl.golden.replay import local, valid_targets
from refimpl.golden.report import Report

DTYPES = ("float64", *FORMATS)
OF = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"} | {d: d for d in DTYPES}
RUNS = 16


def compared(sets: Sequence[Set], bundle: Bundle, dtype: str | None, names: Names | None = None, prefix: str = "",
             locally: bool = False, demand_all: bool = False, command: str = "") -> Report:
    """The report.  Errors: UsageError, ActualError, BundleError."""
    found = matched(sets, bundle, names, prefix)
    dtype = dtype or common(found)
    report = Report(bundle, dtype, check(found, bundle, dtype), command, demand_all)
    values = {(f.key, f.rank): f.read() for f in found if not f.problem}
    heal(report.lines, values, bundle, dtype)
    first = next((line for line in report.lines if line.failed and (line.key, line.rank) in values), None)
    if first:
        report.relation = relation(values[first.key, first.rank], bundle.value(first.key, first.rank))
        report.cause = cause(values, report.lines, bundle, dtype)
    else:
        report.hidden = hidden(values, bundle, dtype)
    if locally:
        report.locally = replayed(found, bundle, dtype)
    return report


def common(found: Sequence[Found]) -> str:
    """The format of most of a stack's arrays."""
    n = Counter(OF[f.dtype] for f in found if f.dtype in OF)
    return n.most_common(1)[0][0] if n else "float64"


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
