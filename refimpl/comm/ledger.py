"""What travelled: calls, payload elements, bytes and seconds of every collective, by mesh axis and phase.

Payload is what a rank hands to the call: all elements of an all_reduce's or reduce_scatter's input, its own share in an
all_gather.  What an algorithm of the MPI library then puts on the wire (a ring all-reduce: 2(p-1)/p of the payload per rank)
is a model, and not counted here.  Wire elements are those that this package itself sends to another rank: permute and ring,
and so all of algorithms.py.  Nothing travels on a mesh axis of size 1, and nothing is counted.  The seconds are those in
which a rank could do nothing else: of a transfer under way, its start and what is left to wait.
"""
from collections import defaultdict
from dataclasses import dataclass
from typing import Iterator, NamedTuple


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
