"""What travelled: calls, payload elements, bytes and seconds of every collective, by mesh axis and phase.

Payload is what a rank hands to the call: all elements of an all_reduce's or reduce_scatter's input, its own share in an
all_gather.  What an algorithm then puts on the wire (a ring all-reduce: 2(p-1)/p of the payload per rank) is a model, and
is not counted here.  Nothing travels on a mesh axis of size 1, and nothing is counted.
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


class Ledger:
    """Totals by (mesh axes, operation, phase); one ledger serves all communicators of a rank."""

    def __init__(self) -> None:
        self.totals: dict[Key, Total] = defaultdict(Total)

    def add(self, key: Key, elements: int, nbytes: int, seconds: float) -> None:
        total = self.totals[key]
        total.calls += 1
        total.elements += elements
        total.bytes += nbytes
        total.seconds += seconds

    def total(self, axes: str | None = None, operation: str | None = None, phase: str | None = None) -> Total:
        """The sum of the rows that match; None matches everything."""
        out = Total()
        for key, t in self.totals.items():
            if axes in (None, key.axes) and operation in (None, key.operation) and phase in (None, key.phase):
                out = Total(out.calls + t.calls, out.elements + t.elements, out.bytes + t.bytes, out.seconds + t.seconds)
        return out

    def clear(self) -> None:
        self.totals.clear()

    def rows(self) -> Iterator[tuple[Key, Total]]:
        return iter(sorted(self.totals.items()))
