"""A collective under way.

    transfer = comm.start_ring(k)           # returns at once
    ...                                     # compute, and call comm.progress() now and then: MPI moves data only in calls
    k = transfer.wait()
"""
import time
from typing import Any, Callable, Protocol

import numpy as np

from refimpl.array import Array
from refimpl.autograd import seam


class Moving(Protocol):
    """What a backend knows of a collective under way."""

    def test(self) -> bool:
        """Move it on; whether it has arrived."""

    def wait(self) -> Any:
        """The result, as soon as it has arrived."""


class Transfer:
    """A collective that `comm.start_...` began.  What it was given is read-only until `wait`."""

    def __init__(self, moving: Moving, sent: np.ndarray, result: Callable[[Any], Array | None] = lambda y: y,
                 spent: Callable[[float], None] | None = None) -> None:
        self.moving, self.sent, self.result, self.spent, self.done = moving, sent, result, spent, False
        self.y: Array | None = None
        hold(sent)

    def test(self) -> bool:
        """Whether it has arrived; moves it on if not."""
        return self.done or self.moving.test()

    @seam
    def wait(self) -> Array | None:
        """The result; waiting again gives it again."""
        if not self.done:
            start = time.perf_counter()
            self.y = self.result(self.moving.wait())
            self.done = True
            release(self.sent)
            if self.spent:
                self.spent(time.perf_counter() - start)             # the seconds that were not hidden
        return self.y


class Arrived:
    """Moving that is over before it began: on one rank, or where the backend can only wait."""

    def __init__(self, y: Any) -> None:
        self.y = y

    def test(self) -> bool:
        return True

    def wait(self) -> Any:
        return self.y


HELD: dict[int, int] = {}                               # id of an array that was writeable -> transfers it is in


def hold(x: np.ndarray) -> None:
    if x.flags.writeable or id(x) in HELD:
        HELD[id(x)] = HELD.get(id(x), 0) + 1
        x.flags.writeable = False


def release(x: np.ndarray) -> None:
    if id(x) in HELD:
        HELD[id(x)] -= 1
        if not HELD[id(x)]:
            del HELD[id(x)]
            x.flags.writeable = True
