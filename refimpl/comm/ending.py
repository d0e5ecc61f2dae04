"""How a program under MPI ends: together.

A rank that fails takes all down: an uncaught exception and a non-zero `sys.exit` print what they have to say, the other
ranks say where they were (watch.py), and the job is aborted, instead of leaving ranks in a collective for ever.

No hook sees `raise SystemExit(3)`, nor a rank that simply comes to its end early.  Such a rank stays until all have ended; if
one waits for it, that is a fault like the others, and a rank that only computes is left to finish.
"""
import atexit
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from types import TracebackType
from typing import Any

from refimpl.comm.arguments import CommError
from refimpl.comm.verdict import Fault, failed
from refimpl.comm.watch import FORWARDING, Watch

ABORTED = 2.0                                           # seconds for the launcher to end all ranks after one has aborted
INTERRUPTED = 130                                       # what a shell reports of a program that Ctrl-C ended


class Ending:
    """Ends all ranks, with `watch` as soon as, and where, there is one."""

    def __init__(self, MPI: Any) -> None:
        self.MPI, self.rank, self.process = MPI, MPI.COMM_WORLD.Get_rank(), os.getpid()
        self.watch: Watch | None = None
        self.status = 0                                 # of a child of this process

    def install(self) -> None:
        sys.excepthook = self.on_exception
        sys.exit = self.on_exit                         # type: ignore[assignment]
        atexit.register(self.on_end)

    def on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """sys.excepthook: the traceback, under the rank's number; of a verdict, the verdict."""
        if os.getpid() != self.process:
            self.status = 1                             # a child of this rank: its end is its own
            sys.__excepthook__(kind, error, trace)
        elif self.watch and self.watch.verdict and str(error) == self.watch.verdict:
            self.end_as_told()
        elif issubclass(kind, KeyboardInterrupt):
            self.abort(Fault(self.rank, "was interrupted", INTERRUPTED), "")
        else:
            self.abort(failed(self.rank, error), "".join(traceback.format_exception(kind, error, trace)), error)

    def on_exit(self, status: Any = None) -> None:
        """sys.exit, which aborts the job when the status says failure: Python calls no hook for SystemExit.

        So it cannot be caught; nor does it reach other threads than the main one, and children, whose end is their own.
        """
        if os.getpid() != self.process:
            self.status = failed(self.rank, SystemExit(status)).status if status else 0
        foreign = os.getpid() != self.process or threading.current_thread() != threading.main_thread()
        if status is None or status == 0 or foreign:
            raise SystemExit(status)
        fault = failed(self.rank, SystemExit(status))
        self.abort(fault, "" if isinstance(status, int) else f"{status}\n")

    def on_end(self) -> None:
        """Stay until all ranks have come to their ends.  A child goes at once: to finalize MPI it would have to be the rank."""
        if os.getpid() != self.process:
            self.say("")
            os._exit(self.status)
        if self.watch and not self.watch.end():
            self.end_as_told()

    def abort(self, fault: Fault, text: str, error: BaseException | None = None) -> None:
        """Tell the other ranks, say why, and end them all."""
        if self.watch:
            self.watch.fail(fault)
        what = fault.what.partition(" (")[0]
        self.say("" if fault.quiet else f"rank {fault.rank} {what}, all ranks end{':' if text else ''}\n{text}")
        if self.watch and self.watch.verdict and self.watch.fault.rank != self.rank and not isinstance(error, CommError):
            self.end_as_told()
        self.leave(fault.status)

    def end_as_told(self) -> None:
        """Another rank is the cause: say what the verdict is."""
        assert self.watch
        self.say("" if self.watch.fault.quiet else f"rank {self.rank} ends: {self.watch.verdict}\n")
        self.leave(self.watch.fault.status)

    def say(self, text: str) -> None:
        """What was printed before, then this."""
        for act in (lambda: sys.stdout.flush(), lambda: sys.stderr.write(text), lambda: sys.stderr.flush()):
            with suppress(OSError, ValueError, AttributeError):     # it is closed, or None
                act()

    def leave(self, status: int) -> None:
        if self.watch:
            status = self.watch.goodbye()
            if self.rank != self.watch.aborts():
                time.sleep(ABORTED)                     # by then that rank's abort has ended this one, or never will
        else:
            time.sleep(FORWARDING)
        if not self.MPI.Is_finalized():
            self.MPI.COMM_WORLD.Abort(status)
        os._exit(status)                                # (some MPI's Abort returns)
