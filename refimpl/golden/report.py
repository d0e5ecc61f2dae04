"""What a comparison has found, in 80 columns, and as JSON; and the exit status.

    0  everything that was compared is right
    1  something is wrong
    2  it was not possible to compare: usage
    3  incomplete: nothing was compared but inputs, or a rank's part is missing, or, with --all, any value
    4  the bundle is damaged, or of a version that is not known
    5  no power: wrong values would have passed every comparison
"""
import json
import math
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Sequence

from refimpl.golden.bundle import Bundle
from refimpl.golden.check import RUNGS, Line
from refimpl.golden.conventions import FILE, Stated, text_of
from refimpl.golden.diagnose import Cause, Hidden
from refimpl.golden.factor import Factor
from refimpl.golden.limits import LIMITS

PASS, MISMATCH, USAGE, INCOMPLETE, DAMAGED, NO_POWER = range(6)
WORDS = {PASS: "PASS", MISMATCH: "MISMATCH", INCOMPLETE: "INCOMPLETE", NO_POWER: "NO POWER"}
WIDTH = 80
COLUMNS = {"pass": 6, "fail": 6, "gauge": 7, "partial": 9, "no power": 10, "left out": 10}       # and their widths


@dataclass
class Report:
    """What was found.

    lines       every comparison; locally: those of local replay, whose first failure is the op that errs
    stated      the conventions of which the stack says what it does
    formats     those of its values, the narrowest first, where it was not said in which it computes
    left_aside  its arrays that are no value of the bundle
    right_in    a narrower format in which all that fails would be right
    """
    bundle: Bundle
    dtype: str
    lines: list[Line]
    command: str
    demand_all: bool = False
    stated: Sequence[Stated] = ()
    formats: Sequence[str] = ()
    left_aside: Sequence[str] = ()
    locally: list[Line] = field(default_factory=list)
    relation: str = ""
    cause: Cause | None = None
    hidden: Sequence[Hidden] = ()
    factor: Factor | None = None
    right_in: str = ""

    @property
    def missing(self) -> list[str]:
        """Values of the bundle of which nothing was given."""
        given = {line.key for line in self.lines}
        return [key for key in self.bundle.entries if key not in given]

    @property
    def lacking(self) -> dict[str, list[int]]:
        """Values of which some rank's part was given, and the ranks whose part was not."""
        ranks: dict[str, set[int]] = {}
        for line in self.lines:
            if line.rank is not None:
                ranks.setdefault(line.key, set()).add(line.rank)
        return {key: lacks for key, found in ranks.items() if (lacks := sorted(set(range(self.bundle.ranks)) - found))}

    @property
    def other_conventions(self) -> list[Stated]:
        return [s for s in self.stated if not s.agrees]

    def keys(self, verdict: str) -> list[str]:
        return list(dict.fromkeys(line.key for line in self.lines if line.verdict == verdict))

    @property
    def status(self) -> int:
        outputs = [line for line in self.lines if line.rung != "inputs"]
        if self.other_conventions or self.hidden or self.factor or any(line.failed for line in (*self.lines, *self.locally)):
            return MISMATCH
        nothing = all(line.verdict == "left out" for line in outputs)
        if nothing or self.lacking or self.demand_all and self.missing:
            return INCOMPLETE
        if not any(line.verdict == "pass" for line in outputs):
            return NO_POWER
        return PASS

    def text(self) -> str:
        lines = (line if line.startswith("    python -m") else clipped(line).rstrip() for line in self.paragraphs())
        return "\n".join(lines) + "\n"

    def paragraphs(self) -> list[str]:
        out = [f"refimpl golden check: {WORDS[self.status]}", ""]
        for s in self.other_conventions:
            out += wrapped("conventions", f"{s.name}: the stack says {text_of(s.value)}, the bundle has {text_of(s.right)}: "
                           f"{s.sentence}") + [""]
        first = next((line for line in self.lines if line.failed), None)
        op = next((line for line in self.locally if line.failed), None)
        if first:
            out += described("first wrong", first) + ([row("it is", self.relation)] if self.relation else []) + [""]
        if op:
            out += described("op that errs", op, "from the stack's own inputs") + [""]
        elif self.locally and first:
            out += [row("no op errs", "each is right for the inputs that it was given, as far as they were dumped:"),
                    row("", "what was put into one of them is not what came before it"), ""]
        if self.cause:
            out += [*wrapped("probably", f"{self.cause.what} ({self.cause.explained:.0%} of the error)"), ""]
        for h in self.hidden:
            out += [*wrapped("hidden", f"{h.what}: rounding hides it in every number, but {h.amount:.0%} of its error is there "
                             f"in all of {h.key} together, {h.z:.0f} times what rounding does"), ""]
        if self.factor:
            f = self.factor
            out += [*wrapped("hidden", f"{f.key} is the right value times {f.times:.3g}: rounding hides it in every number, "
                             f"but it is there in all of them together, {f.z:.0f} times what rounding does"), ""]
        out += self.table() + ["", *self.agreed()]
        if len(self.formats) > 1:
            out += wrapped("formats", f"{' and '.join(self.formats)}: compared as {self.formats[0]}, the narrowest, "
                           "unless --dtype says another")
        lacking = [f"{key} of rank {' and '.join(map(str, ranks))}" for key, ranks in self.lacking.items()]
        for what, keys in (("may differ", self.keys("gauge")), ("no power", self.keys("no power")),
                           ("parts missing", lacking), ("left aside", self.left_aside)):
            if keys:
                out += wrapped(what, ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else ""))
        out.append(row("not given", f"{len(self.missing)} of the {len(self.bundle.entries)} values of the bundle"))
        advice = self.advice(first, op)
        return out + ([row("next", ""), f"    {advice}"] if advice.startswith("python -m") else wrapped("next", advice))

    def agreed(self) -> list[str]:
        """The row of the conventions."""
        n, known = len(self.stated), len(self.bundle.conventions)
        if not n:
            return wrapped("conventions", f"none of {known} stated in {FILE}; `golden show` lists them")
        return [row("conventions", f"{n} of {known} stated, {n - len(self.other_conventions)} agree")]

    def table(self) -> list[str]:
        """How many of each verdict, and the largest rho, by rung."""
        out = [f"  {'rung':<11}" + "".join(f"{name:>{width}}" for name, width in COLUMNS.items()) + f"{'rho':>8}{'element':>9}"]
        for rung in RUNGS:
            lines = [line for line in self.lines if line.rung == rung]
            if lines:
                n, rhos = Counter(line.verdict for line in lines), [line.rho for line in lines if line.rho]
                norm, element = (max((getattr(r, part) for r in rhos), default=0.0) for part in ("norm", "element"))
                out.append(f"  {rung:<11}" + "".join(f"{n[name]:>{width}}" for name, width in COLUMNS.items())
                           + f"{number(norm):>8}{number(element):>9}")
        out.append(f"  in {self.dtype}; right is rho up to {LIMITS.norm:g} of the whole, {LIMITS.element:g} of any element")
        if self.locally:
            out.append(f"  with --local up to {LIMITS.local_norm:g} of the whole, {LIMITS.local_element:g} of any element")
        return out

    def advice(self, first: Line | None, op: Line | None) -> str:
        case, ours = self.bundle.recipe is None, "`refimpl golden show`"
        if self.status == PASS:
            return "nothing: what was compared is right" + (", up to what was not given" if self.missing else "")
        if self.status == INCOMPLETE:
            return f"dump more: {ours} lists what there is"
        if self.status == NO_POWER:
            if all(line.entry.kind == "gauge" for line in self.lines if line.verdict == "no power"):
                return "dump other values: these are rounding alone in every stack, for the loss does not depend on them"
            return "compare in a wider format, or values that are not zero"
        if self.other_conventions:
            return "do as the bundle does, or make one that does as the stack: all numbers depend on the conventions"
        if first and first.rho is None:
            where = "its shape" if case else "weight_layout"
            return f"dump {first.key.rpartition('/')[2]} as the bundle has it: see {where} in {ours}"
        if first and first.rung == "inputs":
            made = "the bundle has them" if case else "`refimpl golden init-code` makes them"
            return f"mend the inputs: all that follows depends on them ({made})"
        if self.right_in:
            return f"right in {self.right_in}: if the stack computes in it, say --dtype {self.right_in}"
        if first and case:
            return f"run {first.key.rpartition('/')[0]} alone: the bundle has its arguments x and cotangents dy"
        if op:
            return f"look at {op.key.rpartition('/')[2]}: from what was dumped before it comes another result"
        if not first and (self.hidden or self.factor):
            return "mend what is hidden, or dump more, in a wider format: there it shows"
        if not self.locally:
            return f"{self.command} --local"
        return "dump the values between the last right one and the first wrong one"

    def to_dict(self) -> dict[str, Any]:
        return {"verdict": WORDS[self.status], "status": self.status, "dtype": self.dtype, "limits": vars(LIMITS),
                "conventions": [{**vars(s), "agrees": s.agrees} for s in self.stated],
                "counts": Counter(line.verdict for line in self.lines), "not_given": self.missing,
                "parts_missing": self.lacking, "left_aside": self.left_aside, "formats": self.formats,
                "relation": self.relation, "cause": vars(self.cause) if self.cause else None,
                "right_in": self.right_in,
                "hidden": [vars(h) for h in self.hidden], "factor": vars(self.factor) if self.factor else None,
                "lines": [as_json(line) for line in self.lines], "locally": [as_json(line) for line in self.locally]}


def described(what: str, line: Line, how: str = "") -> list[str]:
    rank = "" if line.rank is None else f", rank {line.rank}"
    where = f"{line.rung}, {line.entry.phase}, step {line.entry.step}{rank}"
    out = [row(what, line.key), row("", f"{where}, {how}" if how else where)]
    if line.rho is None:
        return out + wrapped("", line.note)
    r, place = line.rho, line.entry.place
    shape = list(place.shape) if line.rank is None else [stop - start for start, stop in place.boxes[line.rank]]
    if r.what:
        return out + [row("there is", f"{r.what}, at {list(r.worst)}: {r.actual:.9g} for {r.expected:.9g}")]
    return out + [row("rho", f"{number(r.norm)} of the whole, {number(r.element)} at {list(r.worst)} of {shape}"),
                  row("there is", f"{r.actual:.9g} where {r.expected:.9g} belongs")]


def as_json(line: Line) -> dict[str, Any]:
    out = {"key": line.key, "rank": line.rank, "rung": line.rung, "verdict": line.verdict, "note": line.note}
    if line.rho:
        out |= {name: value if isinstance(value, (tuple, str)) or math.isfinite(value) else str(value)
                for name, value in vars(line.rho).items()}
    return out


def number(x: float) -> str:
    """Short: 0.98, 12.3, 758, 3e+05."""
    if math.isinf(x):
        return "inf"
    return f"{x:.2f}" if x < 10 else f"{x:.1f}" if x < 100 else f"{x:.0f}" if x < 1e4 else f"{x:.0e}"


def row(what: str, text: str) -> str:
    return f"  {what:<13} {text}"


def wrapped(what: str, text: str) -> list[str]:
    """A row, or several where it is long."""
    first, *rest = textwrap.wrap(text, WIDTH - 16, break_on_hyphens=False) or [""]
    return [row(what, first), *(row("", line) for line in rest)]


def clipped(line: str) -> str:
    return line if len(line) <= WIDTH else line[:WIDTH - 3] + "..."


def json_text(report: Report) -> str:
    return json.dumps(report.to_dict(), indent=1, allow_nan=False) + "\n"
