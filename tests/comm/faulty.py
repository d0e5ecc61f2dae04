"""A program in which one rank does something wrong at some moment: python faulty.py FAULT MOMENT FOLDER [bare | --simulate N].

Rank 1 does it and says when on stderr ("fault at SECONDS", by the machine's clock); where it is a disagreement, another
call comes before the right one.  Each process locks a file in FOLDER, which holds its number, for as long as it lives.
"""
import fcntl
import os
import signal
import sys
import time
from collections import deque
from itertools import repeat
from pathlib import Path

import numpy as np

from refimpl.autograd import Tensor, op, value_and_grad
from refimpl.comm import CommError, Mesh, launch, world
from refimpl.ops import sum as total

FAULTY = 1
X = np.ones(3)
LARGE = np.ones(1 << 19)                                # 4 MiB: it travels in many packets


class Return(Exception):
    """Out of main, from wherever it is raised."""


def deafen():
    """A call that does not end and keeps Python's lock: no other thread of this process, such as its watch, gets anywhere."""
    deque(repeat(0), maxlen=0)


@op
def meeting(x, rank=None):
    def vjp(dy):
        rank.when_all_wait()
        return rank.mesh.tp.all_reduce(dy)              # waits: backward
    return x.copy(), vjp


class Rank:
    """One rank of the program."""

    def __init__(self, fault, comm, folder):
        self.fault, self.comm, self.rank, self.mark = fault, comm, comm.rank, Path(folder) / "away"
        self.watch = getattr(comm, "watch", None) or comm.world
        self.mesh = Mesh(dp=2, tp=2, comm=comm) if comm.size == 4 else Mesh(tp=comm.size, comm=comm)

    def here(self):
        """The faulty rank does what is wrong, the others nothing."""
        if self.rank == FAULTY:
            sys.stderr.write(f"fault at {time.monotonic()}\n")
            sys.stderr.flush()
        if self.rank == FAULTY or self.fault == "order" and self.rank == 2:
            getattr(self, "do_" + self.fault, lambda: None)()

    def when_all_wait(self, *ahead):
        """The same, as soon as each other rank, as is known here, waits in a collective so many further on (None: need not)."""
        if self.rank == FAULTY and self.fault != "order":
            while not all(self.waits(r, n) for r, n in enumerate(ahead or (1, None, 1)) if n is not None):
                time.sleep(1e-3)
        self.here()

    def when_away(self):
        """As soon as rank 2 has left the collective before."""
        while self.rank == FAULTY and not self.mark.exists():
            time.sleep(1e-3)

    def waits(self, r, ahead):
        report, threads = self.watch.reports.get(r), not hasattr(self.watch, "links")
        mine = self.watch.counts[FAULTY] if threads else self.watch.counts
        if threads:                                     # count the agreement on a collective as one
            ahead = max(1, 2 * ahead - 1)
        return report and report.n and sum(report.counts.values()) == sum(mine.values()) + ahead

    # -- faults ------------------------------------------------------------------------------------------------

    def do_raise(self):
        raise ValueError("the cause")

    def do_assert(self):
        assert self.rank != FAULTY, "the cause"

    def do_text(self):
        sys.exit("the cause")

    def do_status(self):
        sys.exit(3)

    def do_system_exit(self):
        raise SystemExit(3)

    def do_early(self):
        raise Return

    def do_kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def do_gone(self):
        os._exit(0)

    def do_stop(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def do_sleep(self):
        time.sleep(100)

    def do_deaf(self):
        deafen()

    def do_operation(self):
        self.mesh.tp.broadcast(X)

    def do_shape(self):
        self.mesh.tp.all_reduce(np.ones(4))

    def do_dtype(self):
        self.mesh.tp.all_reduce(np.ones(3, np.float32))

    def do_argument(self):
        self.mesh.tp.all_reduce([1.0, 1.0, 1.0])

    def do_axis(self):
        self.mesh.dp.all_reduce(X)                      # waits: axis

    do_order = do_axis

    # -- moments -----------------------------------------------------------------------------------------------

    def at_first(self):
        self.here()
        self.mesh.tp.all_reduce(X)                      # waits: first

    def at_between(self):
        for _ in range(3):
            self.mesh.tp.all_reduce(X)
        self.when_all_wait()
        self.mesh.tp.all_reduce(X)                      # waits: between

    def at_sub(self):
        """Ranks 0 and 1 are a tp group, 2 and 3 another."""
        self.when_all_wait(1, None, 2, 2)
        self.mesh.tp.all_reduce(X)                      # waits: tp
        self.mesh.dp.all_reduce(X)                      # waits: dp

    def at_cross(self):
        self.here()
        self.mesh.tp.all_reduce(X)                      # waits: cross
        self.comm.barrier()                             # waits: barrier

    def at_backward(self):
        value_and_grad(lambda p: total(meeting(p["x"], rank=self)), {"x": Tensor(X)})

    def at_data(self):
        """The ranks have agreed; the faulty one's data do not come."""
        carry_out = self.mesh.tp._all_reduce

        def late(*args):
            self.when_all_wait(0, None, 0)
            return carry_out(*args)
        if self.rank == FAULTY:
            self.mesh.tp._all_reduce = late
        self.mesh.tp.all_reduce(LARGE)                  # waits: data

    def at_transfer(self):
        transfer = self.mesh.tp.start_ring(LARGE)       # waits: start
        self.here()
        transfer.wait()                                 # waits: transfer

    def at_busy(self):
        """Rank 2 computes and comes to no collective."""
        self.mesh.tp.all_reduce(X)
        if self.rank == 2:
            all(iter(lambda: not self.mark.touch(), False))         # waits: busy
        self.when_away()
        self.when_all_wait(1)
        self.mesh.tp.all_reduce(X)                      # waits: idle

    def at_deaf(self):
        """Rank 2 is deaf, and mute."""
        self.mesh.tp.all_reduce(X)
        if self.rank == 2:
            self.mark.touch()
            deafen()
        self.when_away()
        self.when_all_wait(1)
        self.mesh.tp.all_reduce(X)                      # waits: deaf

    def at_end(self):
        """The other ranks have come to their end."""
        self.mesh.tp.all_reduce(X)
        while self.rank == FAULTY and len(self.watch.ended) < self.comm.size - 1:
            time.sleep(1e-3)
        self.here()


def program(fault, moment, folder, threads):
    locks = []                                          # open for as long as this process lives

    def main(comm):
        if not threads or comm.rank == 0:
            locks.append(open(Path(folder) / str(comm.rank), "w"))
            fcntl.flock(locks[-1], fcntl.LOCK_EX)
            print(os.getpid(), file=locks[-1], flush=True)
        try:
            getattr(Rank(fault, comm, folder), "at_" + moment)()
        except Return:
            return
        except CommError as error:
            if threads:                                 # there only the first error is printed
                sys.stderr.write(f"rank {comm.rank} ends: {error}\n")
            raise
    return main


if __name__ == "__main__":
    fault, moment, folder, *how = sys.argv[1:]
    main = program(fault, moment, folder, "--simulate" in how)
    if "bare" in how:
        main(world())
    else:
        launch(main, argv=how)
