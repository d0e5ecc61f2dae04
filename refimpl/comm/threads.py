"""Ranks as threads of one process: for unit tests, and for running an example where there is no MPI.

`run_threads(4, fn)` calls `fn(comm)` on four threads.  As strict as MPI: messages are copied, ranks that call different
collectives, or with different shapes, all get the same error; a rank that raises or returns early ends all of them.
And more: ranks that all wait for one another are found at once, not by a time limit.
"""
import threading
import time
from typing import Any, Callable

import numpy as np

from refimpl.comm.base import Comm, CommError, require_agreement
from refimpl.comm.ledger import Ledger

GRACE = 10.0                                            # seconds that the other ranks have to end after a failure


class World:
    """What the threads share: the tables they meet at, who waits where, who failed first and who has ended.

    Ranks here are numbers in the world.  `changed` guards everything and is notified of every change.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.changed = threading.Condition()
        self.tables: dict[tuple[int, ...], dict[int, Any]] = {}     # group -> what its ranks have put down so far
        self.waiting: dict[int, str] = {}                           # rank -> what it is doing
        self.ended: set[int] = set()
        self.failure: tuple[int, BaseException] | None = None
        self.verdict = ""                                           # why nobody needs to wait any longer

    def exchange(self, group: tuple[int, ...], rank: int, item: Any, doing: str) -> list[Any]:
        """Each rank of `group` puts an item on their table and takes everybody's, in the group's order."""
        with self.changed:
            table = self.tables.setdefault(group, {})
            table[rank] = item
            if len(table) == len(group):
                del self.tables[group]                              # the next round gets a table of its own
                for r in group:
                    self.waiting.pop(r, None)
                self.changed.notify_all()
            else:
                self.waiting[rank] = doing
                deadline = time.monotonic() + self.timeout
                while len(table) < len(group):
                    self.require_hope([r for r in group if r not in table], deadline)
                    self.changed.wait(max(0.0, deadline - time.monotonic()))
            return [table[r] for r in group]

    def require_hope(self, absent: list[int], deadline: float) -> None:
        """Error: CommError, the same for all who wait, once the absent ranks cannot come any more."""
        gone = [r for r in absent if r in self.ended]
        reason = ""
        if self.failure:
            rank, error = self.failure
            reason = f"rank {rank} failed ({type(error).__name__}: {error})"
        elif gone:
            reason = f"rank {gone[0]} has ended"
        elif len(self.waiting) + len(self.ended) == self.size:
            reason = "the ranks wait for one another"
        elif time.monotonic() > deadline:
            reason = f"rank {absent[0]} did not come within {self.timeout:g} s"
        if reason and not self.verdict:
            self.verdict = "; ".join([reason, *(f"rank {r} waits in {doing}" for r, doing in sorted(self.waiting.items()))])
            self.changed.notify_all()
        if self.verdict:
            raise CommError(self.verdict)

    def end(self, rank: int, error: BaseException | None) -> None:
        with self.changed:
            if error is not None and self.failure is None:
                self.failure = rank, error
            self.ended.add(rank)
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
        self.world, self.ranks = world, ranks

    def exchange(self, item: Any, doing: str) -> list[Any]:
        return self.world.exchange(self.ranks, self.ranks[self.rank], item, doing)

    def _agree(self, claim: str, patience: float | None = None) -> None:
        require_agreement(self.exchange(claim, claim), self.ranks)

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

    def _all_gather(self, x: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
        return np.concatenate(self.everybodys(x))

    def _reduce_scatter(self, x: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
        start = sum(sizes[:self.rank])
        return combine([part[start:start + sizes[self.rank]] for part in self.everybodys(x)], "sum")

    def _broadcast(self, x: np.ndarray, root: int) -> np.ndarray:
        return self.everybodys(x)[root].copy()

    def _barrier(self) -> None:
        """To agree on the barrier was one."""


def combine(parts: list[np.ndarray], how: str) -> np.ndarray:
    """The sum or maximum of the parts, in the order of the ranks: the same bits in every run."""
    total = parts[0].copy()
    for part in parts[1:]:
        (np.add if how == "sum" else np.maximum)(total, part, out=total)
    return total


def run_threads(size: int, fn: Callable[[Comm], Any], timeout: float = 300.0) -> list[Any]:
    """`fn(comm)` on `size` threads -> their results in rank order.

    Error: the first rank's failure, on which it is noted which rank that was.  sys.exit(0) on a rank is a return.
    """
    world = World(size, timeout)
    results: list[Any] = [None] * size

    def body(rank: int) -> None:
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
