"""A collective under way.

    transfer = comm.start_ring(k)           # returns at once
    ...                                     # compute, and call comm.progress() now and then: MPI moves data only in calls
    k = transfer.wait()
"""
import time
import zlib
from typing import Any, Callable, Protocol

import numpy as np

from refimpl.array import Array
from refimpl.autograd import seam
from refimpl.comm.arguments import CommError


class Moving(Protocol):
    """What a backend knows of a collective under way."""

    def test(self) -> bool:
        """Move it on; whether it has arrived."""

    def wait(self) -> Any:
        """The result, as soon as it has arrived."""


class Transfer:
    """A collective that `comm.start_...` began.  What it was given must not change until `wait`.

    checked  that it has not is an error otherwise (checked mode)
    """

    def __init__(self, moving: Moving, sent: np.ndarray, checked: bool, result: Callable[[Any], Array | None] = lambda y: y,
                 spent: Callable[[float], None] | None = None) -> None:
        self.moving, self.sent, self.result, self.spent, self.done = moving, sent, result, spent, False
        self.changed = False
        self.before = fingerprint(sent) if checked else None
        self.y: Array | None = None

    def test(self) -> bool:
        """Whether it has arrived; moves it on if not."""
        return self.done or self.moving.test()

    @seam
    def wait(self) -> Array | None:
        """The result; waiting again gives it again.  Error: CommError where the array sent was changed under way."""
        if not self.done:
            start = time.perf_counter()
            self.y = self.result(self.moving.wait())
            self.done = True
            if self.spent:
                self.spent(time.perf_counter() - start)             # the seconds that were not hidden
            self.changed = self.before is not None and self.before != fingerprint(self.sent)
        if self.changed:
            what = f"{self.sent.dtype}{list(self.sent.shape)}"
            raise CommError(f"an array of {what} was changed while it travelled: wait() first")
        return self.y


def fingerprint(x: np.ndarray) -> int:
    return zlib.crc32(x.reshape(-1).view(np.uint8).data)


class Arrived:
    """Moving that is over before it began: on one rank, or where the backend can only wait."""

    def __init__(self, y: Any) -> None:
        self.y = y

    def test(self) -> bool:
        return True

    def wait(self) -> Any:
        return self.y
