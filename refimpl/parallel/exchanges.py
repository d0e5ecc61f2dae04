"""The collectives after which every rank holds what others held: all_to_all, all_to_all_rows, ring_shift.

Nothing is added up and nothing is copied: every element goes from one rank to one rank, and its gradient the same way back.

    all_to_all(x, split=1, join=0) on two ranks                 rank 0       rank 1

        [ a b | c d ]    rank 0's row                           [ a b ]      [ c d ]
        [ e f | g h ]    rank 1's row               ->          [ e f ]      [ g h ]

The table of all collectives is in collectives.py.
"""
import math

from refimpl.array import xp_of
from refimpl.autograd import op
from refimpl.comm.arguments import axis_of, form, shares_of, sizes_of
from refimpl.parallel.collectives import cut_in
from refimpl.parallel.layouts import ANYWHERE, moved_cut, rule


@op(linearity="each", collective=True, cut=moved_cut("join", "split"),
    layout=rule("all_to_all", "varying", "varying", "scatter_to cuts it, and nothing has to travel"))
def all_to_all(x, comm=None, *, split, join, split_sizes=None, join_sizes=None):
    """Change the axis that a value is cut along: from each rank's own tokens of all heads to all tokens of its own heads.

    Equation:   y_r = [x_0⟨r⟩ x_1⟨r⟩ ...] along `join`, where x_s⟨r⟩ is part r of x_s cut along `split`
    Shapes:     x[.., n, .., m_r, ..] Shard(join) -> y[.., n_r, .., Σ m_r, ..] Shard(split), where n lies along `split` and m
                along `join`; `split_sizes` are the n_r, by default `shares(n, size)`, `join_sizes` the m_r if not all equal
    VJP:        dx = all_to_all of dy with `split` and `join`, and their sizes, in each other's place
    Residuals:  none
    Reference:  Jacobs et al. 2023 (DeepSpeed Ulysses), section 3: sequence to heads and back.  Megatron `all_to_all_sp2hp` and
                `all_to_all_hp2sp`, JAX `all_to_all(tiled=True)`
    """
    split, join = axis_of(x, split), axis_of(x, join)
    if split == join:
        raise ValueError(f"all_to_all over {comm.name}: split and join are both axis {join} of x{list(x.shape)}, but x is cut "
                         f"along `join` before and along `split` after; all_to_all_rows moves rows along one axis")
    parts, held = shares_of(x, split, split_sizes, comm.size), sizes_of(x, join, join_sizes, comm.rank, comm.size)
    comm.agree(f"all_to_all over {comm.name}: {form(x, join)}, cut along axis {split} in {parts}, joined along axis {join}, "
               f"where the ranks hold {held}")          # a row of numbers travels, which does not tell axes apart
    y = exchanged(x, comm, split, join, parts, held).view()

    def vjp(dy):
        return exchanged(dy, comm, join, split, held, parts)
    return y, vjp


@op(linearity="each", collective=True, cut=moved_cut(0),
    layout=rule("all_to_all_rows", "varying", "varying", "scatter_to (axis=0) gives each rank its rows"))
def all_to_all_rows(x, comm=None, counts=None):
    """Send every row to the rank that it is for, as a mixture of experts does with tokens.

    The rows change places among the ranks, so those of y are no longer a cut of the global array, and y's cut is unknown.

    Equation:   y_r = [x_0⟨r⟩ x_1⟨r⟩ ...], where x_s⟨r⟩ are the counts[s][r] rows of x_s that come after those for ranks < r
    Shapes:     x[n_r, ...] PerRank -> y[m_r, ...] PerRank; counts[source][target], as lists and the same on every rank: n_r is
                the sum of its row r, m_r that of its column r; None for equal shares
    VJP:        dx = all_to_all_rows of dy by the transposed counts
    Residuals:  none
    Reference:  Lepikhin et al. 2020 (GShard), section 3.  Megatron `all_to_all`, JAX `ragged_all_to_all`
    """
    y = comm.all_to_all(x, counts).view()
    back = None if counts is None else tuple(zip(*counts))

    def vjp(dy):
        return comm.all_to_all(dy, back)
    return y, vjp


@op(linearity="each", collective=True, cut=moved_cut(ANYWHERE),
    layout=rule("ring_shift", "varying", "varying", "every rank has it already"))
def ring_shift(x, comm=None, shift=1, sizes=None):
    """Pass the own value on round the ring.  Another rank's part is no part of this rank's, so y's cut is unknown.

    Equation:   y_r = x_{r - shift}, ranks modulo size
    Shapes:     x[n_r, ...] PerRank -> y[n_{r - shift}, ...] PerRank; `sizes` are the n_r where they are not all equal
    VJP:        dx_r = dy_{r + shift}
    Residuals:  none
    Reference:  Liu et al. 2023 (Ring Attention), section 3.  JAX `ppermute`
    """
    y = comm.ring(x, shift, sizes).view()
    after = None if sizes is None else tuple(sizes[(r - shift) % comm.size] for r in range(comm.size))

    def vjp(dy):
        return comm.ring(dy, -shift, after)
    return y, vjp


def exchanged(x, comm, split, join, parts, held):
    """Part d of x, cut along `split` in `parts`, sent to rank d; what comes, `held` along `join`, joined there."""
    if comm.size == 1:
        return x
    others = math.prod(n for axis, n in enumerate(x.shape) if axis not in (split, join))
    counts = [[others * m * n for n in parts] for m in held]        # of elements: from rank to rank
    xp = xp_of(x)
    came = comm.all_to_all(xp.concatenate([part.reshape(-1) for part in cut_in(x, split, parts)], axis=0), counts)
    shape, blocks = list(x.shape), []
    shape[split] = parts[comm.rank]
    for m, block in zip(held, cut_in(came, 0, [row[comm.rank] for row in counts])):
        shape[join] = m
        blocks.append(block.reshape(tuple(shape)))
    return xp.concatenate(blocks, axis=join)
