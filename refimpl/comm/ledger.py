"""What travelled: calls, payload elements, bytes and seconds of every collective, by mesh axis and phase.  `print(ledger)`

Counted: the payload, which is what a rank hands to the call (all elements of an all_reduce's or reduce_scatter's input, its
own share in an all_gather; where numbers of 8 or 16 bits are added up, their 32 bits), and the wire elements, those that this
package itself sends to another rank: permute and ring, and so all of algorithms.py.  Nothing travels on a mesh axis of size 1,
and nothing is counted.

Measured: the seconds in which a rank could do nothing else, the wait for the other ranks included; of a transfer under way,
its start and what is left to wait.

Not here, for it would be a model: what the MPI library puts on the wire inside a collective of its own (a ring all-reduce:
2(p-1)/p of the payload per rank).
"""
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Iterator, NamedTuple

SENT_BY_US = ("permute",)                               # what the package sends itself, rather than the MPI library
LEGEND = ("elements, bytes: what this rank hands to the calls;  wire: elements that refimpl itself sends, - where the MPI "
          "library does")


class Key(NamedTuple):
    axes: str                                           # "tp", "dp+cp"
    operation: str                                      # "all_reduce"
    phase: str                                          # "forward", "backward", "recompute"


@dataclass
class Total:
    calls: int = 0
    elements: int = 0
    bytes: int = 0
    seconds: float = 0.0
    wire: int = 0

    def add(self, elements: int, nbytes: int, seconds: float, wire: int = 0, calls: int = 1) -> None:
        self.calls += calls
        self.elements += elements
        self.bytes += nbytes
        self.seconds += seconds
        self.wire += wire


class Ledger:
    """Totals by (mesh axes, operation, phase); one ledger serves all communicators of a rank."""

    def __init__(self) -> None:
        self.totals: dict[tuple[str, str, str], Total] = defaultdict(Total)      # by the parts of a Key

    def total(self, axes: str | None = None, operation: str | None = None, phase: str | None = None) -> Total:
        """The sum of the rows that match; None matches everything."""
        out = Total()
        for key, t in self.rows():
            if axes in (None, key.axes) and operation in (None, key.operation) and phase in (None, key.phase):
                out.add(t.elements, t.bytes, t.seconds, t.wire, t.calls)
        return out

    def clear(self) -> None:
        self.totals.clear()

    def rows(self) -> Iterator[tuple[Key, Total]]:
        return ((Key(*key), total) for key, total in sorted(self.totals.items()))

    def by_axes(self) -> dict[str, int]:
        """Elements of the payload, by mesh axes."""
        return {axes: self.total(axes).elements for axes in sorted({key.axes for key, _ in self.rows()})}

    def to_dicts(self) -> list[dict[str, Any]]:
        """The rows by column; wire is None where the MPI library sends."""
        return [{**key._asdict(), "calls": t.calls, "elements": t.elements, "bytes": t.bytes,
                 "wire": t.wire if t.wire or key.operation in SENT_BY_US else None, "seconds": t.seconds}
                for key, t in self.rows()]

    def __str__(self) -> str:
        """A table of the rows, and a line that says how to read it."""
        rows = self.to_dicts()
        if not rows:
            return "nothing travelled"
        table = [list(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*table)]
        names = len(Key._fields)                        # on the left; numbers are aligned on the right
        return "\n".join(["  ".join([*map(str.ljust, line[:names], widths), *map(str.rjust, line[names:], widths[names:])])
                          for line in table] + [LEGEND])


def cell(value: str | int | float | None) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:.6f}" if isinstance(value, float) else f"{value:,}"
