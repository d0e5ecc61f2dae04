"""A ring all-reduce by hand, step by step: no rank sends more than twice its array, however many ranks there are.

    mpirun -n 4 python mpi_examples/06_ring_all_reduce.py
    python mpi_examples/06_ring_all_reduce.py --simulate 4            (four threads, no MPI needed)

Every rank has n numbers, and all want their sum.  The numbers are cut in as many chunks as there are ranks; in every step
each rank sends one chunk to the next rank, and gets one from the rank before it.  On four ranks, with chunks a b c d:

      rank 0 ---> rank 1         in one step, all at the same time:
        ^           |                rank r sends chunk r - step
        |           v                rank r gets chunk r - step - 1, which it sends in the next step
      rank 3 <--- rank 2         (modulo 4; chunk 0 is a)

                  reduce-scatter: 3 steps,                  all-gather: 3 steps,
                  what comes is added                       what comes is kept

     rank 0     [ a | b | c | d ]          [ A | . | . | . ]          [ A | B | C | D ]
     rank 1     [ a | b | c | d ]    -->   [ . | B | . | . ]    -->   [ A | B | C | D ]
     rank 2     [ a | b | c | d ]          [ . | . | C | . ]          [ A | B | C | D ]
     rank 3     [ a | b | c | d ]          [ . | . | . | D ]          [ A | B | C | D ]

     a: a rank's own numbers     A: their sum over all ranks     . : some of the ranks' sum, of no further use

In each phase a rank sends all chunks but one: 2n elements minus two chunks, and 2(p-1)n on all ranks together, also where p
does not divide n.  No all-reduce can do with fewer (Patarasuk and Yuan 2009).  But it takes 2(p-1) rounds, and where n is
small their number decides.

What to expect: what every chunk holds after every step, read off the data themselves; then four ways to make the sum, all
equal to comm.all_reduce, with the rounds and elements that they took, counted, beside the formulas.
"""
from typing import Callable

import numpy as np

from refimpl.comm import Comm, launch, shares
from refimpl.comm.algorithms import recursive_doubling_all_reduce, ring_all_gather, ring_all_reduce, tree, tree_broadcast
from refimpl.rng import draw

N = 10                                                  # numbers of each rank: on four ranks chunks of 3+3+2+2
LENGTHS = (N, 0, 1, 8, 1001)                            # nothing, fewer than ranks, even, uneven
Show = Callable[[str, list[np.ndarray]], None]


def by_hand(comm: Comm, x: np.ndarray, show: Show = lambda title, chunk: None) -> np.ndarray:
    """The loop inside refimpl.comm.algorithms.ring_all_reduce.  x[n] -> the sum over ranks, on every rank"""
    p, r, n = comm.size, comm.rank, shares(len(x), comm.size)
    chunk = np.split(x, np.cumsum(n)[:-1])              # index -1 is the last: Python's lists are rings as well
    show("start", chunk)
    for step in range(1, p):
        came = comm.ring(chunk[r - step], sizes=np.roll(n, step))           # rank q sends n[q - step]
        chunk[r - step - 1] = came + chunk[r - step - 1]                    # reduce-scatter: what comes is added
        show(f"reduce-scatter, step {step}", chunk)
    for step in range(p - 1):
        came = comm.ring(chunk[r - step], sizes=np.roll(n, step))
        chunk[r - step - 1] = came                                          # all-gather: what comes is kept
        show(f"all-gather, step {step + 1}", chunk)
    return np.concatenate(chunk)


def up_and_down_a_tree(comm: Comm, x: np.ndarray) -> np.ndarray:
    total = x
    for pairs in reversed(tree(comm.size)):                                 # up: the children send, the parents add
        came = comm.permute(total, tuple((child, parent) for parent, child in pairs))
        total = total if came is None else total + came
    return tree_broadcast(comm, total)                                      # down


def gather_and_add(comm: Comm, x: np.ndarray) -> np.ndarray:
    return ring_all_gather(comm, x[None]).sum(axis=0)                       # every rank gets everything: (p, n)


def step_by_step(comm: Comm) -> list[str]:
    """The ring on numbers that tell whose they are: rank r has 10^r, and digit r of a sum says how often it is in there."""
    p, account, last = comm.size, [], np.zeros((comm.size, comm.size), np.int64)

    def show(title: str, chunk: list[np.ndarray]) -> None:
        nonlocal last
        assert all((c == c[0]).all() for c in chunk), f"rank {comm.rank}, {title}: {chunk}"
        held = comm.all_gather(np.array([[c[0] for c in chunk]]), axis=0)   # (rank, chunk)
        for r in range(p):
            cells = (f"[{who(a)}]" if a != b and last.any() else f" {who(a)}" for a, b in zip(held[r], last[r]))
            account.append(f"{title if r == 0 else '':24s}rank {r}   " + "".join(f"{cell:12s}" for cell in cells).rstrip())
        last = held

    total = by_hand(comm, np.full(N, 10 ** comm.rank), show)
    assert (total == int("1" * p)).all(), f"rank {comm.rank}: {total}"      # everybody once
    sizes = " + ".join(map(str, shares(N, p)))
    return [f"{p} ranks have {N} numbers each, in chunks of {sizes}: whose are in the sums, what has just come in brackets\n",
            " " * 34 + "".join(f"{c:12s}" for c in "abcd"[:p]).rstrip()] + account


def who(number: int) -> str:
    """1011 -> 0+1+3; a rank that is in there twice is named twice."""
    return "+".join(str(r) for r, times in enumerate(reversed(str(number))) for _ in range(int(times)))


def counts(comm: Comm) -> list[str]:
    """All ways against comm.all_reduce, and what they send against the formulas."""
    p, r = comm.size, comm.rank
    doublings = p.bit_length() - 1                                          # log₂ p
    sends = {2: (1, 1), 4: (2, 2, 1, 1)}[p][r]                              # in the tree: to its children, and to its parent
    account = []
    for n in LENGTHS:
        x, c = draw(f"x {r}", (n,)), shares(n, p)                           # 24-bit numbers: their sums are exact
        right = comm.all_reduce(x)
        ring = 2 * (p - 1), c[0], 2 * n - c[r] - c[(r + 1) % p], 2 * (p - 1) * n, "2(p-1)·n"
        for way, (rounds, longest, wire, wire_of_all, formula) in {         # by the formulas, of this rank and of all
                by_hand: ring, ring_all_reduce: ring,
                recursive_doubling_all_reduce: (doublings, n, doublings * n, p * doublings * n, "p·log₂p·n"),
                up_and_down_a_tree: (2 * doublings, n, sends * n, 2 * (p - 1) * n, "2(p-1)·n"),
                gather_and_add: (p - 1, n, (p - 1) * n, p * (p - 1) * n, "p(p-1)·n")}.items():
            comm.ledger.clear()
            y = way(comm, x)
            counted = comm.ledger.total()
            assert np.array_equal(y, right), f"rank {r}, {way.__name__} of {n}: {y}, but all_reduce says {right}"
            assert (counted.calls, counted.wire) == (rounds, wire), f"rank {r}, {way.__name__} of {n}: counted {counted}"
            sent = comm.all_gather(np.array([counted.wire]), axis=0)        # of all ranks: none has failed
            assert sent.sum() == wire_of_all, f"{way.__name__} of {n}: {sent}, which is not {formula}"
            if n == N:
                account.append(f"{way.__name__:32s}{rounds:>6d}{rounds * longest:>12d}   " + "".join(f"{k:>8d}" for k in sent)
                               + f"{sent.sum():>6d} = {formula}")
    return [f"\nelements that each rank sends, n = {N}; in series: rounds times the longest message, which one waits for\n",
            f"{'':32s}{'rounds':>6s}{'in series':>12s}   " + "".join(f"{f'rank {k}':>8s}" for k in range(p)) + f"{'all':>6s}",
            *account]


def main(comm: Comm) -> None:
    account = step_by_step(comm) + counts(comm)
    if comm.rank == 0:
        print("\n".join(account))
        print("\nOK: every sum equals comm.all_reduce on every rank; the ring sends 2(p-1)n, each rank 2n minus two chunks")


if __name__ == "__main__":
    launch(main, ranks=(2, 4))
