"""Ranks as threads of one process: for unit tests, and for running an example where there is no MPI.

`run_threads(4, fn)` calls `fn(comm)` on four threads.  As strict as MPI: messages are copied, ranks that call different
collectives, or with different shapes, all get the same error; a rank that raises or returns early ends all of them.  Sums are
made in pairs of neighbours: the same bits in every run.
"""
import threading
import time
from collections import Counter, defaultdict
from typing import Any, Callable

import numpy as np

from refimpl.array import in_pairs
from refimpl.comm.arguments import CommError, require_agreement
from refimpl.comm.base import Comm
from refimpl.comm.ledger import Ledger
from refimpl.comm.transfer import Moving
from refimpl.comm.verdict import LATE, Fault, Report, blamed, failed, fault_of, place, sentence

GRACE = 2.0                                             # seconds that the other ranks have to end after a failure
LOOK = 0.25                                             # seconds between two looks at the clock
Call = tuple[str, int]                                  # group, and the number of the exchange in that group


class World:
    """What the threads share: the tables they meet at, who waits where, who failed first and who has ended.

    Ranks here are numbers in the world.  `changed` guards everything and is notified of every change.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.changed = threading.Condition()
        self.tables: dict[Call, dict[int, Any]] = defaultdict(dict)     # what the ranks have put down and not all have taken
        self.left: Counter[Call] = Counter()                        # ranks that have taken theirs
        self.counts: dict[int, Counter[str]] = defaultdict(Counter)     # rank -> group -> exchanges begun
        self.reports: dict[int, Report] = {}                        # of the ranks that wait, and those that have ended
        self.doing: dict[int, str] = {}                             # rank -> what it waits in
        self.threads: dict[int, int] = {}                           # rank -> its thread
        self.ended: set[int] = set()
        self.failure: tuple[int, BaseException] | None = None        # of the first rank that failed
        self.fault: Fault | None = None
        self.verdict = ""                                           # why nobody needs to wait any longer

    def put(self, group: str, rank: int, item: Any) -> Call:
        """`item` on the table of this rank's next exchange in `group`."""
        with self.changed:
            self.counts[rank][group] += 1
            call = group, self.counts[rank][group]
            self.tables[call][rank] = item
            self.changed.notify_all()
            return call

    def complete(self, call: Call, ranks: tuple[int, ...]) -> bool:
        return len(self.tables[call]) == len(ranks)

    def take(self, call: Call, ranks: tuple[int, ...], rank: int, doing: str, patience: float | None = None) -> list[Any]:
        """What the `ranks` put down, in their order, as soon as all have."""
        with self.changed:
            start = time.monotonic()
            deadline = start + self.timeout
            while not self.complete(call, ranks):
                self.doing[rank] = doing
                self.reports[rank] = Report(dict(self.counts[rank]), call[1], call[0], ranks)
                self.require_hope([r for r in ranks if r not in self.tables[call]], deadline)
                if patience and time.monotonic() - start > patience:
                    raise CommError(f"rank {rank} waited {patience:g} s for the others: {doing}")
                self.changed.wait(max(0.0, min(LOOK, deadline - time.monotonic())))
            self.doing.pop(rank, None)
            self.reports.pop(rank, None)
            items = [self.tables[call][r] for r in ranks]
            self.left[call] += 1
            if self.left[call] == len(ranks):
                del self.tables[call], self.left[call]
            return items

    def require_hope(self, absent: list[int], deadline: float) -> None:
        """Error: CommError, the same for all who wait, once the absent ranks cannot come any more."""
        if not self.fault:
            self.fault = fault_of(self.reports)
            if not self.fault and time.monotonic() > deadline:
                self.fault = Fault(absent[0], f"{LATE} {self.timeout:g} s")
        if self.fault and not self.verdict:
            states = {r: self.state(r) for r in range(self.size)}
            self.fault = blamed(self.fault, states)
            self.verdict = sentence(self.fault, states)
            self.changed.notify_all()
        if self.verdict:
            raise CommError(self.verdict)

    def state(self, rank: int) -> str:
        if rank in self.ended:
            return "has ended"
        where = place(self.threads.get(rank), rank in self.doing)
        return f"waits in {self.doing[rank]} ({where})" if rank in self.doing else f"is at {where}"

    def end(self, rank: int, error: BaseException | None) -> None:
        with self.changed:
            if error is not None and self.failure is None:
                self.failure, self.fault = (rank, error), self.fault or failed(rank, error)
            self.ended.add(rank)
            self.reports[rank] = Report(dict(self.counts[rank]))
            self.changed.notify_all()

    def wait_for_all(self) -> None:
        """Return when all ranks have ended; after a failure a rank that goes on computing is given GRACE to end."""
        with self.changed:
            self.changed.wait_for(lambda: self.failure or len(self.ended) == self.size)
            self.changed.wait_for(lambda: len(self.ended) == self.size, GRACE)


class ThreadComm(Comm):
    """One of `len(ranks)` threads; `ranks` are their numbers in the world."""

    def __init__(self, world: World, ranks: tuple[int, ...], rank: int, axes: tuple[str, ...] = ("world",),
                 ledger: Ledger | None = None) -> None:
        super().__init__(rank, len(ranks), axes, ledger)
        self.world, self.ranks, self.group = world, ranks, f"{'+'.join(axes)}:{','.join(map(str, ranks))}"

    def exchange(self, item: Any, doing: str, patience: float | None = None) -> list[Any]:
        me = self.ranks[self.rank]
        return self.world.take(self.world.put(self.group, me, item), self.ranks, me, doing, patience)

    def _enter(self, operation: str, what: Callable[[], str], patience: float | None = None) -> None:
        claim = self.claim(operation, what)
        require_agreement(self.exchange(claim, claim, patience), self.ranks)

    def _sub(self, dims: dict[str, int], keep: tuple[str, ...]) -> Comm:
        grid = np.array(self.ranks).reshape(tuple(dims.values()))
        at = self.coordinates(dims)
        ranks = tuple(grid[tuple(slice(None) if a in keep else at[a] for a in dims)].ravel().tolist())
        return ThreadComm(self.world, ranks, ranks.index(self.ranks[self.rank]), keep, self.ledger)

    def everybodys(self, x: np.ndarray) -> list[np.ndarray]:
        """The ranks' arrays.  Copies travel: the sender may change its array as soon as the call returns."""
        return self.exchange(x.copy(), f"a collective over {self.name}")

    def _all_reduce(self, x: np.ndarray, how: str) -> np.ndarray:
        return combine(self.everybodys(x), how)

    def _reduce(self, x: np.ndarray, root: int) -> np.ndarray | None:
        parts = self.everybodys(x)
        return combine(parts, "sum") if self.rank == root else None

    def _all_gather(self, x: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
        return np.concatenate(self.everybodys(x))

    def _reduce_scatter(self, x: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
        start = sum(sizes[:self.rank])
        return combine([part[start:start + sizes[self.rank]] for part in self.everybodys(x)], "sum")

    def _all_to_all(self, x: np.ndarray, table: np.ndarray | None) -> np.ndarray:
        if table is None:
            table = np.full((self.size, self.size), len(x) // self.size)
        ends = np.cumsum(table, axis=1)[:, self.rank]
        return np.concatenate([part[end - n:end] for part, end, n in zip(self.everybodys(x), ends, table[:, self.rank])])

    def _broadcast(self, x: np.ndarray, root: int) -> np.ndarray:
        return self.everybodys(x)[root].copy()

    def _barrier(self) -> None:
        """To agree on the barrier was one."""

    def _permute(self, x: np.ndarray, source: int | None, target: int | None, sizes: tuple[int, ...]) -> np.ndarray | None:
        return self._start_permute(x, source, target, sizes).wait()

    def _start_permute(self, x: np.ndarray, source: int | None, target: int | None, sizes: tuple[int, ...]) -> Moving:
        def result(parts: list[np.ndarray]) -> np.ndarray | None:
            return None if source is None else parts[source].copy()
        return Put(self, x, result)

    def _start_all_reduce(self, x: np.ndarray, how: str) -> Moving:
        return Put(self, x, lambda parts: combine(parts, how))


class Put:
    """Moving on the world's tables."""

    def __init__(self, comm: ThreadComm, x: np.ndarray, result: Callable[[list[np.ndarray]], Any]) -> None:
        self.comm, self.result = comm, result
        self.call = comm.world.put(comm.group, comm.ranks[comm.rank], x.copy())

    def test(self) -> bool:
        with self.comm.world.changed:
            return self.comm.world.complete(self.call, self.comm.ranks)

    def wait(self) -> Any:
        comm = self.comm
        return self.result(comm.world.take(self.call, comm.ranks, comm.ranks[comm.rank],
                                           f"a transfer over {comm.name}"))


def combine(parts: list[np.ndarray], how: str) -> np.ndarray:
    """The sum or maximum of the parts: neighbours in pairs, then pairs of pairs."""
    if how == "sum":
        return in_pairs(parts)
    total = parts[0].copy()
    for part in parts[1:]:
        np.maximum(total, part, out=total)
    return total


def run_threads(size: int, fn: Callable[[Comm], Any], timeout: float = 300.0) -> list[Any]:
    """`fn(comm)` on `size` threads -> their results in rank order.

    Error: the first rank's failure, on which it is noted which rank that was.  sys.exit(0) on a rank is a return.
    """
    world = World(size, timeout)
    results: list[Any] = [None] * size

    def body(rank: int) -> None:
        world.threads[rank] = threading.get_ident()
        error: BaseException | None = None
        try:
            results[rank] = fn(ThreadComm(world, tuple(range(size)), rank))
        except SystemExit as status:                    # would end this thread only
            error = status if status.code else None
        except BaseException as e:
            error = e
        finally:
            world.end(rank, error)

    for r in range(size):
        threading.Thread(target=body, args=(r,), name=f"rank {r}", daemon=True).start()
    world.wait_for_all()
    if world.failure:
        rank, error = world.failure
        if size > 1 and hasattr(error, "add_note"):
            error.add_note(f"This is rank {rank} of {size} ranks as threads.")
        raise error
    return results
