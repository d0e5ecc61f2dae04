"""The timeline of all ranks in one file, to open at ui.perfetto.dev: who computes what, who waits for whom.

    with Trace(comm, "trace.json"):                     # on every rank; rank 0 writes the file, and says so
        ...

Every rank has a row, with a span for each call of an op, of its vjp, of a seam and of a collective, under the name that
frames know it by (`layers.0.attn.q`).  Spans nest as calls do: `attn.reduce_from` holds `attn.reduce_from.all_reduce`.  Below
it, "in flight", is what `comm.start_...` began, up to the end of `wait`; `exposed_us` is what of it was spent in `wait`.

A collective's span says what it adds to the ledger (axes, elements, bytes, and wire where we send ourselves); of a transfer,
the bar in flight does.  So all is said once, and adds up to the ledger of the traced time, which is in the file's otherData.

Measured: when a rank called and when the call returned.  Not known: how much of a collective was waiting for the others (it
ends for all at about the same time, and who began last did not wait), and when a transfer arrived.  Ranks as threads take
turns at Python, which shows; a device is given its work and runs on, so there a span is the giving.

Cost: 4 to 5 µs a call, 2 % of a step of the demo's model (215 calls in 50 ms on one rank).  Memory: 200 bytes a span, LIMIT
spans a rank and then no more; 150 in the file, which rank 0 fetches from one rank after the other.  A run that fails leaves no
file: its error says which rank waits where, and nobody is asked to wait for a rank that may not come.

Format: Chrome's Trace Event Format, as Perfetto reads it.  Spans of one row that overlap in part, and times before 0, are
dropped; of two spans that begin together the outer one comes first; times are in µs, to three decimals; no row is called 0.
"""
import copy
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np

from refimpl.autograd import Clock, Span, stack
from refimpl.comm.base import Comm
from refimpl.comm.ledger import SENT_BY_US, Ledger, Total
from refimpl.comm.transfer import Transfer

LIMIT = 100_000                                         # spans a rank
ROUNDS = 8                                              # barriers to compare the clocks by
PROCESS = 1                                             # all rows are one group in the viewer
CATEGORIES = {"op": "op", "vjp": "backward", "seam": "seam"}


class TraceError(ValueError):
    """The file cannot be written."""


@dataclass
class Flight:
    """A transfer under way: from the start of `start_...` to the end of `wait`."""
    begun: Span
    key: tuple[str, str, str]
    facts: dict[str, Any]
    stop: float = float("inf")                          # nobody has waited for it


class Trace(Clock):
    """Times what runs inside, and writes it at the end.  All ranks of `comm` make, enter and leave it together.

    Error: TraceError on all ranks where rank 0 cannot write `file`: at once, before anything is computed
    """

    def __init__(self, comm: Comm, file: Path | str, limit: int = LIMIT) -> None:
        super().__init__()
        self.comm, self.file, self.limit = copy.copy(comm), Path(file), limit
        self.comm.ledger = Ledger()                     # what the trace itself exchanges does not count
        self.part = Path(f"{self.file}.part")
        self.ledger, self.full = Ledger(), False
        self.facts: dict[int, dict[str, Any]] = {}      # what collectives add to the ledger, by the number of the span
        self.flights: list[Flight] = []
        self.under_way: dict[int, tuple[Transfer, Flight]] = {}
        self.on_first(self.prepare)

    def __enter__(self) -> "Trace":
        self.zero, self.error = compare_clocks(self.comm)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None or isinstance(error[1], SystemExit) and not error[1].code:
            self.write()

    def stop(self) -> None:
        """Time no more calls; those that have begun still end."""
        super().__exit__(None)

    # -- while the program runs --------------------------------------------------------------------------------

    def call(self, op: Any, run: Callable, *arrays: Any, **static: Any) -> tuple[Any, Any]:
        if len(self.spans) >= self.limit:
            self.full = True
            self.stop()
            return run(*arrays, **static)
        if arrays and isinstance(arrays[0], Comm):
            return self.collective(arrays[0], op, run, *arrays, **static)
        result = super().call(op, run, *arrays, **static)
        if arrays and isinstance(arrays[0], Transfer):
            self.waited(arrays[0])
        return result

    def collective(self, comm: Comm, op: Any, run: Callable, *arrays: Any, **static: Any) -> tuple[Any, Any]:
        key = comm.name, op.name.removeprefix("start_"), stack.phase
        before = replace(comm.ledger.totals.get(key, Total()))
        y, _ = super().call(op, run, *arrays, **static)
        facts: dict[str, Any] = {"axes": comm.name}
        self.facts[len(self.spans) - 1] = facts
        after = comm.ledger.totals.get(key, before)
        if after.calls > before.calls:                  # nothing travels on one rank, or in a barrier
            wire = after.wire - before.wire
            sent = {"elements": after.elements - before.elements, "bytes": after.bytes - before.bytes}
            self.ledger.totals[key].add(sent["elements"], sent["bytes"], after.seconds - before.seconds, wire)
            sent |= {"wire": wire} if key[1] in SENT_BY_US else {}
            if isinstance(y, Transfer):
                self.flights.append(Flight(self.spans[-1], key, facts | sent))
                self.under_way[id(y)] = y, self.flights[-1]
            else:
                facts.update(sent)
        return y, None

    def waited(self, transfer: Transfer) -> None:
        """The last span is the wait for `transfer`: the first, or there is nothing to say."""
        span = self.spans[-1]
        _, flight = self.under_way.pop(id(transfer), (None, None))
        if flight:
            seconds, flight.stop = span.stop - span.start, span.stop
            flight.facts["exposed_us"] = round(1e6 * seconds, 3)
            self.ledger.totals[flight.key].seconds += seconds
            self.facts[len(self.spans) - 1] = {"axes": flight.facts["axes"], "for": flight.begun.name}

    # -- the file ----------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Gather all ranks' spans in the file; rank 0 says what it has written.  Error: TraceError on all ranks."""
        lanes = in_lanes(self.flights)
        mine = {"rows": 1 + len(lanes), "spans": len(self.spans), "full": self.full, "ledger": self.ledger.to_dicts()}
        ranks = [json.loads(text) for text in self.comm.gather_texts(json.dumps(mine))]
        row = 1 + sum(rank["rows"] for rank in ranks[:self.comm.rank])
        text = bytearray(self.head(ranks) if self.comm.rank == 0 else b"")
        for event in self.events(row, lanes):
            text += b",\n" + json.dumps(event, separators=(",", ":")).encode()
        failure = ""
        for piece in self.pieces(np.frombuffer(text, np.uint8)):
            failure = failure or self.append(piece)
        self.on_first(lambda: self.finish(failure))
        if self.comm.rank == 0:
            spans = f"{sum(rank['spans'] for rank in ranks):,} spans of {len(ranks)} rank{'s' * (len(ranks) > 1)}"
            left_out = f", no more than about {self.limit:,} of each" if any(rank["full"] for rank in ranks) else ""
            print(f"rank 0, while traced:\n{self.ledger}\ntrace: {self.file}, {spans}{left_out}: open it at ui.perfetto.dev",
                  flush=True)

    def head(self, ranks: list[dict[str, Any]]) -> bytes:
        """What stands before the events of the ranks."""
        other = {"clock_error_us": round(1e6 * self.error, 3), "full": any(rank["full"] for rank in ranks),
                 "ledger": [rank["ledger"] for rank in ranks]}
        name = meta("process_name", PROCESS, name=f"refimpl, {len(ranks)} ranks")
        return f'{{"otherData":{json.dumps(other)},\n"traceEvents":[\n{json.dumps(name)}'.encode()

    def events(self, row: int, lanes: list[list[Flight]]) -> Iterator[dict[str, Any]]:
        """The names of this rank's rows, the first of which has the number `row`, and what is in them."""
        title, end = f"rank {self.comm.rank}", max((span.stop for span in self.spans), default=self.zero)
        for k in range(len(lanes) + 1):
            yield meta("thread_name", row + k, name=title + (f" in flight {k}" if k > 1 else " in flight" if k else ""))
            yield meta("thread_sort_index", row + k, sort_index=row + k)
        for i in sorted(range(len(self.spans)), key=lambda i: (self.spans[i].start, -self.spans[i].stop, -i)):
            span = self.spans[i]                        # (an inner call ends, and is numbered, before the outer one)
            category = "collective" if i in self.facts else CATEGORIES[span.kind]
            yield self.event(span, category, span.stop, row, {"phase": span.phase, "op": span.op, **self.facts.get(i, {})})
        for k, lane in enumerate(lanes, 1):
            for flight in lane:
                yield self.event(flight.begun, "transfer", min(flight.stop, end), row + k, flight.facts)

    def event(self, span: Span, category: str, stop: float, row: int, args: dict[str, Any]) -> dict[str, Any]:
        """Rounded to whole ns, so that what is inside stays inside."""
        start, stop = (max(0, round(1e9 * (t - self.zero))) for t in (span.start, stop))
        return {"name": span.name, "cat": category, "ph": "X", "ts": start / 1000, "dur": (stop - start) / 1000,
                "pid": PROCESS, "tid": row, "args": args}

    def pieces(self, mine: np.ndarray) -> Iterator[bytes]:
        """On rank 0 every rank's text in turn; nothing on the others, which send theirs."""
        if self.comm.rank == 0:
            yield mine.tobytes()
        sizes = self.comm.all_gather(np.array([mine.size]), axis=0).tolist()
        for r in range(1, self.comm.size):
            part = self.comm.permute(mine if self.comm.rank == r else mine[:0], ((r, 0),),
                                     [n * (q == r) for q, n in enumerate(sizes)])
            if part is not None:
                yield part.tobytes()

    def on_first(self, act: Callable[[], None]) -> None:
        def attempt() -> None:
            try:
                act()
            except OSError as error:
                raise ValueError(error.strerror) from None
        try:
            self.comm.on_first(attempt)
        except ValueError as error:
            raise TraceError(f"the trace cannot be written to {self.file}: {error}") from None

    def prepare(self) -> None:
        """See that the file can be made, and take away an old one, which must not pass for this."""
        if self.file.exists() and not self.file.is_file():
            raise ValueError("it is there, and not a file")
        if not self.file.parent.exists():
            self.file.parent.mkdir(parents=True)
        failure = self.append(b"")
        self.part.unlink(missing_ok=True)
        if failure:
            raise ValueError(failure)
        self.file.unlink(missing_ok=True)

    def append(self, piece: bytes) -> str:
        """Write on, under another name first: never half a file.  What went wrong, if anything."""
        try:
            with open(self.part, "ab") as file:
                file.write(piece)
        except OSError as error:
            return str(error.strerror)
        return ""

    def finish(self, failure: str) -> None:
        failure = failure or self.append(b"\n]}\n")
        if failure:
            self.part.unlink(missing_ok=True)
            raise ValueError(failure)
        self.part.replace(self.file)


def meta(what: str, row: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": PROCESS, "tid": row, "args": args}


def in_lanes(flights: list[Flight]) -> list[list[Flight]]:
    """Rows of transfers of which no two are under way together, as few as will do."""
    lanes: list[list[Flight]] = []
    for flight in flights:                              # in the order in which they began
        free = next((lane for lane in lanes if lane[-1].stop <= flight.begun.start), None)
        if free is None:
            lanes.append(free := [])
        free.append(flight)
    return lanes


def compare_clocks(comm: Comm) -> tuple[float, float]:
    """What this rank's time.perf_counter shows at one moment that is common to all ranks, and by how much that may be wrong.

    Nobody leaves a barrier before all have come.  So where rank r's clock is d ahead of rank 0's, enter_r - d <= leave_0 and
    enter_0 <= leave_r - d, in every round: bounds on d, of which the middle is taken.  Where they allow d = 0 the clock is the
    same one, as it is for all ranks of a machine, and the error none; else it is half the time that the quickest barrier
    took, and what the clocks drift apart afterwards (up to some 50 µs a second), which is not corrected.
    """
    times = np.empty((1, ROUNDS, 2))
    for k in range(ROUNDS):
        times[0, k, 0] = time.perf_counter()
        comm.barrier()
        times[0, k, 1] = time.perf_counter()
    enter, leave = np.moveaxis(comm.all_gather(times, axis=0), 2, 0)        # (ranks, ROUNDS)
    low, high = (enter - leave[0]).max(axis=1), (leave - enter[0]).min(axis=1)
    other = (low > 0) | (high < 0)
    ahead, error = np.where(other, (low + high) / 2, 0.0), np.where(other, (high - low) / 2, 0.0)
    return float(leave[0, -1] + ahead[comm.rank]), float(error.max())


def traced(main: Callable[[Comm], Any], file: str) -> Callable[[Comm], Any]:
    """`main`, inside a Trace."""
    def run(comm: Comm) -> Any:
        with Trace(comm, file):
            return main(comm)
    return run
