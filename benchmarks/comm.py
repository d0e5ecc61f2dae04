"""What the communicator costs beside bare mpi4py: make bench-comm, or python benchmarks/comm.py [part ...] [--ranks 2].

    wrapper  each collective, 1 kB to 64 MB a rank, checked mode off, beside the same call of mpi4py.  Both make the array
             that the result goes into (ours always do; `reused` is mpi4py with one that is there already)
    checked  checked mode beside unchecked
    order    sums in a fixed order beside the library's
    overlap  a transfer of 32 MB behind matrix products: alone, the products alone, and together, with progress() and without

In every round all contenders run, in an order drawn anew, so that a slow moment of the machine hits all; the tables show
medians of the rounds and quartiles of their ratios.  A time is rank 0's for many calls in a row, divided by their number.
"""
import argparse
import os
import platform
import random
import subprocess
import sys
import time
from functools import partial
from typing import Any, Callable

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np  # noqa: E402  the thread counts must be set before BLAS is loaded

from refimpl.comm.launch import library, mpirun_command  # noqa: E402
from refimpl.comm.mpi import MpiComm  # noqa: E402
from refimpl.comm.mpi_world import mpi_world  # noqa: E402

SIZES = tuple(1 << k for k in range(10, 27, 2))         # bytes: 1 kB to 64 MB
Table = dict[str, Callable[[], Any]]


def rounds(comm: MpiComm, contenders: Table, calls: int, n: int) -> dict[str, np.ndarray]:
    """Seconds a call of each contender, float64[n rounds]; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    draw = random.Random(0)                             # the same order on all ranks
    for _ in range(n + 1):
        for name in draw.sample(list(contenders), len(contenders)):     # what ran before one varies
            call = contenders[name]
            comm.raw.Barrier()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            seconds[name].append((time.perf_counter() - start) / calls)
    return {name: np.array(s[1:]) for name, s in seconds.items()}


def calls_for(nbytes: int) -> int:
    return int(np.clip(3e7 / (nbytes + 3e4), 3, 1000))


def spread(a: np.ndarray, b: np.ndarray) -> str:
    low, ratio, high = np.percentile(a / b, [25, 50, 75])
    return f"{ratio:7.3f} {f'{low:.2f}-{high:.2f}':>10}"


def collectives(comm: MpiComm, nbytes: int) -> dict[str, tuple[Callable, Callable, Callable]]:
    """name -> (ours, mpi4py's into a new array, and into one that is there), each of nbytes that a rank hands over."""
    raw, p, r = comm.raw, comm.size, comm.rank
    n = nbytes // 8 // p * p
    x = np.arange(float(n))
    same, whole, part = np.empty(n), np.empty(n * p), np.empty(n // p)

    def bcast(y: np.ndarray) -> None:
        if r == 0:
            y[:] = x
        raw.Bcast(y, 0)

    def shift(y: np.ndarray) -> None:
        raw.Sendrecv(x, (r + 1) % p, 0, y, (r - 1) % p, 0)

    return {
        "all_reduce": (lambda: comm.all_reduce(x), lambda: raw.Allreduce(x, np.empty(n)), lambda: raw.Allreduce(x, same)),
        "all_gather": (lambda: comm.all_gather(x, 0), lambda: raw.Allgather(x, np.empty(n * p)),
                       lambda: raw.Allgather(x, whole)),
        "reduce_scatter": (lambda: comm.reduce_scatter(x, 0), lambda: raw.Reduce_scatter_block(x, np.empty(n // p)),
                           lambda: raw.Reduce_scatter_block(x, part)),
        "all_to_all": (lambda: comm.all_to_all(x), lambda: raw.Alltoall(x, np.empty(n)), lambda: raw.Alltoall(x, same)),
        "broadcast": (lambda: comm.broadcast(x), lambda: bcast(np.empty(n)), lambda: bcast(same)),
        "reduce": (lambda: comm.reduce(x), lambda: raw.Reduce(x, np.empty(n) if r == 0 else None),
                   lambda: raw.Reduce(x, same if r == 0 else None)),
        "ring": (lambda: comm.ring(x), lambda: shift(np.empty(n)), lambda: shift(same)),
    }


def wrapper(comm: MpiComm, n: int) -> None:
    say(comm, f"{'':16}{'bytes':>10}{'ours, us':>12}{'mpi4py':>10}{'reused':>10}{'more, us':>10}{'ratio':>8} {'quartiles':>10}")
    for name in collectives(comm, 1 << 10):
        for nbytes in SIZES:
            ours, new, reused = collectives(comm, nbytes)[name]
            t = rounds(comm, {"ours": ours, "new": new, "reused": reused}, calls_for(nbytes), n)
            us = {k: float(np.median(v)) * 1e6 for k, v in t.items()}
            say(comm, f"{name:16}{nbytes:10,}{us['ours']:12.1f}{us['new']:10.1f}{us['reused']:10.1f}"
                      f"{np.median(t['ours'] - t['new']) * 1e6:10.1f} {spread(t['ours'], t['new'])}")


def checked(comm: MpiComm, n: int) -> None:
    safe = MpiComm(comm.raw.Dup(), ("checked",), watch=comm.watch)
    say(comm, f"{'all_reduce':16}{'bytes':>10}{'checked, us':>12}{'unchecked':>10}{'ratio':>8} {'quartiles':>10}")
    for nbytes in SIZES:
        x = np.arange(nbytes / 8)
        t = rounds(comm, {"checked": partial(safe.all_reduce, x), "un": partial(comm.all_reduce, x)}, calls_for(nbytes), n)
        say(comm, f"{'':16}{nbytes:10,}{np.median(t['checked']) * 1e6:12.1f}{np.median(t['un']) * 1e6:10.1f} "
                  f"{spread(t['checked'], t['un'])}")


def order(comm: MpiComm, n: int) -> None:
    fixed = comm.fixed_order()
    say(comm, f"{'':16}{'bytes':>10}{'fixed, us':>12}{'any':>10}{'ratio':>8} {'quartiles':>10}")
    for name, args in (("all_reduce", ()), ("reduce_scatter", (0,))):
        for nbytes in SIZES:
            x = np.arange(nbytes / 8)
            t = rounds(comm, {"fixed": partial(getattr(fixed, name), x, *args), "any": partial(getattr(comm, name), x, *args)},
                       calls_for(nbytes), n)
            say(comm, f"{name:16}{nbytes:10,}{np.median(t['fixed']) * 1e6:12.1f}{np.median(t['any']) * 1e6:10.1f} "
                      f"{spread(t['fixed'], t['any'])}")


def overlap(comm: MpiComm, n: int) -> None:
    """Exposed: what is left of the transfer after the products (the wait), and what the whole takes longer than they do."""
    k, a = np.ones(1 << 22), np.ones((512, 512))        # 32 MB; products of about 10 ms
    products = 40
    waited: list[float] = []

    def alone() -> None:
        comm.ring(k)

    def compute() -> None:
        for _ in range(products):
            a @ a

    def together(polls: bool) -> None:
        transfer = comm.start_ring(k)
        for _ in range(products):
            a @ a
            if polls:
                comm.progress()
        start = time.perf_counter()
        transfer.wait()
        waited.append(time.perf_counter() - start)

    for what, polls in (("progress() between the products", True), ("nobody polls", False)):
        waited.clear()
        t = rounds(comm, {"alone": alone, "compute": compute, "both": partial(together, polls)}, 1, n)
        bare, wait = np.median(t["alone"]), np.array(waited[1:])
        low, exposed, high = np.percentile(wait / bare, [25, 50, 75])
        longer = np.median(t["both"] - t["compute"]) / bare
        say(comm, f"{what:34} 32 MB alone {bare * 1e3:.1f} ms, products {np.median(t['compute']) * 1e3:.0f} ms, together "
                  f"{np.median(t['both']) * 1e3:.0f} ms: waited {exposed:.1%} ({low:.1%}-{high:.1%}) of the bare time, "
                  f"longer than the products by {longer:.0%} of it")


PARTS = {"wrapper": wrapper, "checked": checked, "order": order, "overlap": overlap}


def say(comm: MpiComm, text: str) -> None:
    if comm.rank == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--started", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.started:
        sys.exit(subprocess.call([*mpirun_command(args.ranks), sys.executable, __file__, *sys.argv[1:], "--started"]))
    comm = mpi_world(checked=False)
    say(comm, f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {comm.size} ranks, "
              f"numpy {np.__version__}, {library(comm.MPI)}")
    for part in args.parts or PARTS:
        say(comm, f"\n{part}")
        PARTS[part](comm, args.rounds)


if __name__ == "__main__":
    main()
