"""What an MPI library does inside a collective, written out with `comm.permute` and `comm.ring` alone: equal, and counted.

Every rank calls every step, also where it neither sends nor receives.  In the docstrings p is the number of ranks and r this
one; n are the elements, n_c those of chunk c, the share of rank c; P is the largest power of two up to p.  Wire: the elements
sent, by rank r and by all ranks.  Time: of rounds in which a message of m elements takes α + β·m.

The ring all-reduce on three ranks.  Rank 0 sends to 1, 1 to 2, 2 to 0.  The digits say whose contributions a chunk holds, in
the order in which they were added; what has just come is in brackets:

                      rank 0                  rank 1                  rank 2
     chunk         0     1     2           0     1     2           0     1     2
     start         0     0     0           1     1     1           2     2     2
     reduce-       0   [20]    0           1     1   [01]        [12]    2     2
     scatter    [120]   20     0           1  [201]   01          12     2  [012]     rank c has the sum of chunk c
     all-        120    20  [012]       [120]  201    01          12  [201]  012
     gather      120  [201]  012         120   201  [012]       [120]  201   012      every rank has all sums

Bits: a + b is b + a exactly, but (a + b) + c is not a + (b + c).  The ring adds chunk c up once, in the order c+1, c+2 .. c,
and then copies it: all ranks hold the same bits, but the same numbers in another chunk may have another sum.  In recursive
doubling every rank adds for itself, a + b where its partner has b + a: the same bits on all ranks again (up to the payload of
a nan), in the order (0+1) + (2+3): where their number is a power of two, that of `comm.fixed_order()`.  The ring's differs.

Patarasuk, Yuan 2009: "Bandwidth optimal all-reduce algorithms for clusters of workstations".  Thakur, Rabenseifner, Gropp
2005: "Optimization of collective communication operations in MPICH", which measures which algorithm wins where.
"""
from itertools import accumulate
from typing import Sequence

from refimpl.array import Array, xp_of
from refimpl.comm.arguments import (Pairs, as_dtype, axis_of, check_array, check_rank, check_reduction, collective, form,
                                    shares, shares_of, sizes_of, widened)
from refimpl.comm.base import Comm


@collective
def ring_reduce_scatter(comm: Comm, x: Array, sizes: Sequence[int] | None = None) -> Array:
    """The sum over ranks of x, cut along axis 0: every rank gets its chunk.

    Equation:   y_r = chunk r of Σ_q x_q
    Shapes:     x[N, ...] -> y[N_r, ...] of N rows; `sizes` are the shares N_r, by default `shares(N, p)`
    Steps:      in step s = 1 .. p-1 rank r sends chunk r-s, and adds what comes to chunk r-s-1
    Wire:       n - n_r, all chunks but its own; (p-1)·n by all
    Time:       p-1 rounds, (p-1)·(α + β·max n_c)
    Wins:       for large n: nothing sends less.  Recursive halving sends as much in log₂p rounds, where p = P
    Reference:  Patarasuk, Yuan 2009
    """
    check_array(x)
    check_reduction(x)
    p, r, n = comm.size, comm.rank, shares_of(x, axis_of(x, 0), sizes, comm.size)
    comm.agree(f"ring_reduce_scatter over {comm.name}: {form(x)}, shares {n}")
    chunk = cut(widened(x), n)
    for step in range(1, p):                            # index -1 is p-1: Python's lists are rings as well
        came = comm.ring(chunk[r - step], sizes=sent(n, step))
        chunk[r - step - 1] = came + chunk[r - step - 1]
    return as_dtype(chunk[r], x.dtype)


@collective
def ring_all_gather(comm: Comm, x: Array, sizes: Sequence[int] | None = None) -> Array:
    """The ranks' arrays joined along axis 0, on every rank.

    Equation:   y = [x_0 x_1 ..]
    Shapes:     x[N_r, ...] -> y[N_0 + N_1 + .., ...]; `sizes` are the N_r where they are not all equal
    Steps:      in step s = 0 .. p-2 rank r sends chunk r-s, its own or what came last, and gets chunk r-s-1
    Wire:       n - n_{r+1}, all chunks but that of the rank it sends to; (p-1)·n by all
    Time:       p-1 rounds, (p-1)·(α + β·max n_c)
    Wins:       for large n, where neighbours are near.  Bruck's algorithm sends as much in ⌈log₂p⌉ rounds, but further
    Reference:  Thakur, Rabenseifner, Gropp 2005, allgather
    """
    check_array(x)
    p, r, n = comm.size, comm.rank, sizes_of(x, axis_of(x, 0), sizes, comm.rank, comm.size)
    comm.agree(f"ring_all_gather over {comm.name}: {form(x, 0)}, sizes {n}")
    chunk = [x] * p                                     # only chunk r is in its place
    for step in range(p - 1):
        chunk[r - step - 1] = comm.ring(chunk[r - step], sizes=sent(n, step))
    return xp_of(x).concatenate(chunk)


@collective
def ring_all_reduce(comm: Comm, x: Array) -> Array:
    """The sum over ranks of x, on every rank: a reduce-scatter, then an all-gather.

    Equation:   y = Σ_q x_q
    Shapes:     x[...] -> y[...]; the chunks are `shares(n, p)` of its elements, whatever its axes
    Wire:       2n - n_r - n_{r+1}; exactly 2(p-1)·n by all, also where p does not divide n
    Time:       2(p-1) rounds, 2(p-1)·(α + β·⌈n/p⌉)
    Wins:       for large n: at most 2n per rank, however many ranks, and no all-reduce sends less.  On two ranks doubling
                sends as much in one round
    Reference:  Patarasuk, Yuan 2009
    """
    check_array(x)
    check_reduction(x)
    comm.agree(f"ring_all_reduce over {comm.name}: {form(x)}")
    n = shares(x.size, comm.size)
    mine = ring_reduce_scatter(comm, x.reshape(-1), n)
    return ring_all_gather(comm, mine, n).reshape(x.shape)


@collective
def recursive_doubling_all_reduce(comm: Comm, x: Array) -> Array:
    """The sum over ranks of x, on every rank: in every round partners exchange all they have, and are then twice as far apart.

    Equation:   y = Σ_q x_q
    Shapes:     x[...] -> y[...]
    Steps:      fold: rank P+k gives its x to rank k (in the paper: to a neighbour); then for d = 1, 2, 4 .. P/2 ranks
                r and r^d, who differ in one bit, exchange their sums and add; unfold: rank k gives the sum to rank P+k
    Wire:       n·log₂P where r < P, and n more where r < p-P; n where r ≥ P; n·(P·log₂P + 2(p-P)) by all
    Time:       log₂P rounds, and 2 more where p > P, each of α + β·n
    Wins:       for small n, where the number of rounds decides, and on two ranks
    Reference:  Thakur, Rabenseifner, Gropp 2005, allreduce
    """
    check_array(x)
    check_reduction(x)
    comm.agree(f"recursive_doubling_all_reduce over {comm.name}: {form(x)}")
    p, total = comm.size, widened(x).reshape(-1)
    P = 1 << (p.bit_length() - 1)
    fold = [tuple((P + k, k) for k in range(p - P))] if p > P else []
    for pairs in fold + [tuple((q, q ^ d) for q in range(P)) for d in powers_below(P)]:
        came = comm.permute(total, pairs)
        total = total if came is None else total + came
    if p > P:                                           # unfold
        came = comm.permute(total, tuple((k, P + k) for k in range(p - P)))
        total = total if came is None else came
    return as_dtype(total, x.dtype).reshape(x.shape)


@collective
def tree_broadcast(comm: Comm, x: Array, root: int = 0) -> Array:
    """Rank `root`'s x, on every rank: in every round all who have it send it on.

    Equation:   y = x_root
    Shapes:     x[...] -> y[...]; the others' x gives shape and dtype only
    Steps:      those of a binomial tree, see `tree`
    Wire:       n for each child, of which the root has ⌈log₂p⌉; (p-1)·n by all: each rank but the root gets it once
    Time:       ⌈log₂p⌉ rounds, each of α + β·n
    Wins:       for small n.  For large n a scatter and then a ring all-gather take about 2β·n, however many ranks
    Reference:  Thakur, Rabenseifner, Gropp 2005, broadcast
    """
    check_array(x)
    check_rank(root, comm.size)
    comm.agree(f"tree_broadcast over {comm.name}: {form(x)} from rank {root}")
    y = x.copy().reshape(-1)
    for pairs in tree(comm.size, root):
        came = comm.permute(y, pairs)
        y = y if came is None else came
    return y.reshape(x.shape)


def tree(p: int, root: int = 0) -> list[Pairs]:
    """The rounds of a binomial tree, as (from, to): in each, the ranks that have it reach as many others.

    >>> tree(6)
    [((0, 1),), ((0, 2), (1, 3)), ((0, 4), (1, 5))]
    """
    return [tuple(((root + v) % p, (root + v + d) % p) for v in range(min(d, p - d))) for d in powers_below(p)]


def powers_below(p: int) -> list[int]:
    """1, 2, 4 .. below p: ⌈log₂p⌉ of them."""
    return [1 << k for k in range((p - 1).bit_length())]


def cut(x: Array, n: Sequence[int]) -> list[Array]:
    """x cut along axis 0: chunk c has n[c] rows."""
    return [x[end - rows:end] for rows, end in zip(n, accumulate(n))]


def sent(n: Sequence[int], step: int) -> list[int]:
    """The rows that each rank q sends in this step of a ring, those of chunk q - step."""
    return [n[q - step] for q in range(len(n))]
