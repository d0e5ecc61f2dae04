"""Ranks as threads of one process: for unit tests, and for running an example where there is no MPI.

`run_threads(4, fn)` calls `fn(comm)` on four threads.  As strict as MPI: messages are copied, ranks that call different
collectives, or with different shapes, all get the same error; a rank that raises or returns early ends all of them.
"""
import threading
import time
from typing import Any, Callable

import numpy as np

from refimpl.comm.base import Comm, CommError
from refimpl.comm.ledger import Ledger


class World:
    """What the threads share: the rooms they meet in, who failed first and who has left."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.rooms: dict[tuple[int, ...], Room] = {}
        self.lock = threading.Lock()
        self.failure: tuple[int, BaseException] | None = None
        self.left: set[int] = set()

    def room(self, ranks: tuple[int, ...]) -> "Room":
        with self.lock:
            return self.rooms.setdefault(ranks, Room(self, ranks))

    def leave(self, rank: int, error: BaseException | None) -> None:
        with self.lock:
            if error is not None and self.failure is None:
                self.failure = rank, error
            self.left.add(rank)
            rooms = list(self.rooms.values())
        for room in rooms:
            with room.meeting:
                room.meeting.notify_all()


class Room:
    """Where the ranks of one group meet: each puts an item on the table and takes everybody's."""

    def __init__(self, world: World, ranks: tuple[int, ...]) -> None:
        self.world, self.ranks = world, ranks
        self.meeting = threading.Condition()
        self.table: dict[int, Any] = {}
        self.result: list[Any] = []
        self.round = 0

    def exchange(self, rank: int, item: Any, doing: str) -> list[Any]:
        deadline = time.monotonic() + self.world.timeout
        with self.meeting:
            this_round = self.round
            self.table[rank] = item
            if len(self.table) == len(self.ranks):
                self.result, self.table = [self.table[r] for r in range(len(self.ranks))], {}
                self.round += 1
                self.meeting.notify_all()
            while self.round == this_round:
                self.give_up_if_hopeless(rank, doing, deadline)
                self.meeting.wait(max(0.0, deadline - time.monotonic()))
            return self.result

    def give_up_if_hopeless(self, rank: int, doing: str, deadline: float) -> None:
        me = self.ranks[rank]
        absent = [r for i, r in enumerate(self.ranks) if i not in self.table]
        if self.world.failure:
            failed, error = self.world.failure
            raise CommError(f"rank {failed} failed ({type(error).__name__}: {error}) while rank {me} waited in {doing}")
        gone = [r for r in absent if r in self.world.left]
        if gone:
            raise CommError(f"rank {gone[0]} has ended while rank {me} waited for it in {doing}")
        if time.monotonic() > deadline:
            raise CommError(f"rank {absent[0]} did not come within {self.world.timeout:g} s; rank {me} waited in {doing}")


class ThreadComm(Comm):
    """One of `len(ranks)` threads; `ranks` are their numbers in the world."""

    def __init__(self, world: World, ranks: tuple[int, ...], rank: int, axes: tuple[str, ...] = ("world",),
                 ledger: Ledger | None = None) -> None:
        super().__init__(rank, len(ranks), axes, ledger)
        self.world, self.ranks, self.place = world, ranks, world.room(ranks)

    def sub(self, dims: dict[str, int], keep: tuple[str, ...]) -> Comm:
        grid = np.array(self.ranks).reshape(tuple(dims.values()))
        at = self.coordinates(dims)
        ranks = grid[tuple(slice(None) if a in keep else at[a] for a in dims)].ravel()
        return ThreadComm(self.world, tuple(map(int, ranks)), list(ranks).index(self.ranks[self.rank]), keep, self.ledger)

    def meet(self, operation: str, x: np.ndarray, agree: tuple[Any, ...], **terms: Any) -> list[np.ndarray]:
        """Everybody's x.  `agree` must be the same on all ranks, and so must `terms`."""
        doing = f"{operation} over {self.name}"
        claim = (operation, self.name, agree, x.dtype.str, tuple(terms.items()))
        items = self.place.exchange(self.rank, (claim, x.copy()), doing)
        for r, (other, _) in enumerate(items):
            if other != items[0][0]:
                raise CommError("the ranks do not agree on a collective: " + "; ".join(
                    f"rank {self.ranks[k]} is in {c[0]} over {c[1]} with {c[3]}{list(c[2])} {dict(c[4]) or ''}".rstrip()
                    for k, (c, _) in ((0, items[0]), (r, items[r]))))
        return [item for _, item in items]

    def _all_reduce(self, x: np.ndarray, how: str) -> np.ndarray:
        parts = self.meet("all_reduce", x, x.shape, how=how)
        return combine(parts, how)

    def _all_gather(self, x: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
        return np.concatenate(self.meet("all_gather", x, x.shape[1:], sizes=sizes))

    def _reduce_scatter(self, x: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
        start = sum(sizes[:self.rank])
        parts = self.meet("reduce_scatter", x, x.shape, sizes=sizes)
        return combine([p[start:start + sizes[self.rank]] for p in parts], "sum")

    def _broadcast(self, x: np.ndarray, root: int) -> np.ndarray:
        return self.meet("broadcast", x, x.shape, root=root)[root].copy()

    def _barrier(self) -> None:
        self.meet("barrier", np.zeros(0), ())


def combine(parts: list[np.ndarray], how: str) -> np.ndarray:
    """The sum or maximum of the parts, in the order of the ranks: the same bits in every run."""
    total = parts[0].copy()
    for part in parts[1:]:
        (np.add if how == "sum" else np.maximum)(total, part, out=total)
    return total


def run_threads(size: int, fn: Callable[[Comm], Any], timeout: float = 300.0) -> list[Any]:
    """`fn(comm)` on `size` threads -> their results in rank order; the first rank's failure is raised."""
    world = World(size, timeout)
    results: list[Any] = [None] * size

    def body(rank: int) -> None:
        error: BaseException | None = None
        try:
            results[rank] = fn(ThreadComm(world, tuple(range(size)), rank))
        except BaseException as e:                      # also SystemExit: it must end all ranks, not one thread
            error = e
        finally:
            world.leave(rank, error)

    threads = [threading.Thread(target=body, args=(r,), name=f"rank {r}", daemon=True) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if world.failure:
        raise world.failure[1]
    return results
