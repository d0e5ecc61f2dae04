"""How a program under MPI ends: together.

A rank that fails takes all down: an uncaught exception and a non-zero `sys.exit` print what they have to say and abort
the job, instead of leaving the other ranks in a collective for ever.

No hook sees `raise SystemExit(3)`, nor a rank that simply comes to its end early.  Such a rank says at its exit how many
collectives it took part in, and stays until all have ended.  A rank that waits in one more is told, and fails; a rank
that only computes is left to finish.
"""
import atexit
import sys
import time
import traceback
from functools import cache
from types import TracebackType
from typing import Any, Sequence

import numpy as np

from refimpl.comm.base import CommError

FORWARDING = 0.5                                        # seconds for the launcher to pass on what a rank said before it aborts

INTERRUPTED = 130                                       # what a shell reports of a program that Ctrl-C ended


class Ending:
    """Which ranks of the world have ended, and after how many collectives with each of the others.

    Shapes: met, ended int64[ranks]: the collectives this rank has begun with each of the others, and those that each of the
    others had begun with this one when it ended (-1: it has not ended).
    """

    def __init__(self, MPI: Any) -> None:
        self.MPI, self.raw = MPI, MPI.COMM_WORLD.Dup()  # a communicator of its own: nothing else is mixed up with it
        self.met, self.ended = np.zeros(self.raw.size, np.int64), np.full(self.raw.size, -1)

    def require_hope(self, ranks: Sequence[int], claim: str) -> None:
        """Error: CommError, the same on all ranks that wait, where one of `ranks` has ended and so cannot come to `claim`."""
        status = self.MPI.Status()
        while self.raw.Iprobe(self.MPI.ANY_SOURCE, 0, status):
            self.raw.Recv(self.ended[status.source:status.source + 1], status.source)
        for r in ranks:
            if 0 <= self.ended[r] < self.met[r]:
                raise CommError(f"rank {r} has ended, and the others wait for it in {claim}")

    def meet(self) -> None:
        """Tell everybody that this rank ends, and stay until everybody does."""
        if self.MPI.Is_finalized():
            return
        others = [r for r in range(self.raw.size) if r != self.raw.rank]
        requests = [self.raw.Isend(self.met[r:r + 1], r) for r in others]
        requests += [self.raw.Irecv(self.ended[r:r + 1], r) for r in others if self.ended[r] < 0]
        while not self.MPI.Request.Testall(requests):
            time.sleep(1e-3)                            # the others may need this core


@cache
def end_together(MPI: Any) -> Ending:
    """Install the hooks of this file, once.  All ranks of the world call it together."""
    ending = Ending(MPI)
    atexit.register(ending.meet)
    sys.excepthook = AbortingHook(MPI)
    sys.exit = AbortingExit(MPI)                        # type: ignore[assignment]
    return ending


class AbortingHook:
    """sys.excepthook that prints the traceback under the rank's number and aborts the job."""

    def __init__(self, MPI: Any) -> None:
        self.MPI = MPI

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            abort(self.MPI, INTERRUPTED, "was interrupted", "")
        else:
            abort(self.MPI, 1, "failed", "".join(traceback.format_exception(kind, error, trace)))


class AbortingExit:
    """sys.exit that aborts the job when the status says failure: Python calls no hook for SystemExit."""

    def __init__(self, MPI: Any) -> None:
        self.MPI = MPI

    def __call__(self, status: Any = None) -> None:
        if status is None or status == 0:
            raise SystemExit(status)
        number = status if isinstance(status, int) else 1
        abort(self.MPI, number, f"exits with status {number}", "" if number is status else f"{status}\n")


def abort(MPI: Any, code: int, what: str, text: str) -> None:
    """Say why and end all ranks now."""
    sys.stdout.flush()
    sys.stderr.write(f"rank {MPI.COMM_WORLD.Get_rank()} {what}, all ranks end:\n{text}" if text else
                     f"rank {MPI.COMM_WORLD.Get_rank()} {what}, all ranks end\n")
    sys.stderr.flush()
    time.sleep(FORWARDING)
    MPI.COMM_WORLD.Abort(code)
