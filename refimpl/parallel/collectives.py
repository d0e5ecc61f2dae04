"""The collectives as ops: each states its layouts, its forward and its vjp.  f is `copy_to`, g is `reduce_from`.

| op | forward layouts | forward | vjp |
|---|---|---|---|
| `copy_to` (f) | Replicated -> PerRank | identity | all_reduce |
| `reduce_from` (g) | Partial -> Replicated | all_reduce | identity |
| `gather_from` | Shard -> Replicated | all_gather | own slice |
| `scatter_to` | Replicated -> Shard | own slice | all_gather |
| `all_gather` | Shard -> PerRank | all_gather | reduce_scatter |
| `reduce_scatter` | Partial -> Shard | reduce_scatter | all_gather |
| `all_to_all` | Shard(join) -> Shard(split) | all_to_all | all_to_all back |
| `all_to_all_rows` | PerRank -> PerRank, rows by counts | all_to_all | all_to_all by the transposed counts |
| `ring_shift` | PerRank -> PerRank | send to rank + shift | send to rank - shift |
| `broadcast_from` | root -> Replicated | broadcast | root takes dy, the others zeros |
| `broadcast` | root -> PerRank | broadcast | reduce to root, zeros on the others |
| `as_partial` | PerRank -> Partial | identity | identity |

Replicated: the same value on all ranks, counted once.  Shard(axis): the global array cut along a numpy axis.  Partial:
the value is the sum over ranks.  PerRank: independent values.  root: that of one rank, the others' do not matter.  The
vjps follow from <dy, J v> = <vjp(dy), v>, where the inner product counts a replicated value once and sums everything else
over ranks; tests/ops/test_registry.py checks this on all ranks.  Why there is no plain differentiable "all_reduce": its
gradient depends on the layout of its output (Replicated: identity; PerRank: all_reduce), so it has to be named.  For the
same reason there are two ways to gather, and two to broadcast.

`comm` is a communicator of a mesh (`mesh.tp`).  The three ops after which every rank holds what others held are in
exchanges.py; what each op refuses, and where its output is cut, is said by layouts.py.
Reference: Shoeybi et al. 2019 (Megatron-LM), section 3, figure 3.
"""
from refimpl.array import xp_of
from refimpl.autograd import op
from refimpl.comm.arguments import shares_of, sizes_of
from refimpl.parallel.layouts import ANYWHERE, moved_cut, rule


@op(linearity="each", collective=True, cut=moved_cut(), layout=rule("copy_to", "replicated", "varying"))
def copy_to(x, comm=None):
    """f: enter a region where every rank works on its own part.

    Equation:   y_r = x on every rank r
    Shapes:     x[...] Replicated -> y[...] PerRank
    VJP:        dx = Σ_r dy_r  (all_reduce)
    Residuals:  none
    Reference:  Megatron copy_to_tensor_model_parallel_region, the f of Shoeybi et al. 2019, figure 3
    """
    y = x.view()

    def vjp(dy):
        return comm.all_reduce(dy)
    return y, vjp


@op(linearity="each", collective=True, cut=moved_cut(), layout=rule("reduce_from", "partial", "replicated"))
def reduce_from(x, comm=None):
    """g: leave the region, adding the parts up.

    Equation:   y = Σ_r x_r  (all_reduce)
    Shapes:     x[...] Partial -> y[...] Replicated
    VJP:        dx_r = dy on every rank r
    Residuals:  none
    Reference:  Megatron reduce_from_tensor_model_parallel_region, the g of Shoeybi et al. 2019, figure 3
    """
    y = comm.all_reduce(x).view()

    def vjp(dy):
        return dy
    return y, vjp


@op(linearity="each", collective=True, cut=moved_cut("axis"), layout=rule("gather_from", "varying", "replicated"))
def gather_from(x, comm=None, axis=-1, sizes=None):
    """Join the shards where every rank then does the same with the whole.

    Equation:   y = [x_0 x_1 ...] along `axis`  (all_gather)
    Shapes:     x[.., n_r, ..] Shard -> y[.., Σ n_r, ..] Replicated
    VJP:        dx_r = rank r's slice of dy
    Residuals:  none
    Reference:  Megatron gather_from_tensor_model_parallel_region
    """
    y = comm.all_gather(x, axis=axis, sizes=sizes).view()
    sizes = sizes_of(x, axis, sizes, comm.rank, comm.size)

    def vjp(dy):
        return own_slice(dy, comm, axis, sizes)
    return y, vjp


@op(linearity="each", collective=True, cut=moved_cut(None, "axis"), layout=rule("scatter_to", "replicated", "varying"))
def scatter_to(x, comm=None, axis=-1, sizes=None):
    """Keep the own slice of a replicated value.

    Equation:   y_r = rank r's slice of x along `axis`
    Shapes:     x[.., n, ..] Replicated -> y[.., n_r, ..] Shard; the shares are `shares(n, size)` by default
    VJP:        dx = [dy_0 dy_1 ...]  (all_gather)
    Residuals:  none
    Reference:  Megatron scatter_to_tensor_model_parallel_region
    """
    sizes = shares_of(x, axis, sizes, comm.size)
    y = own_slice(x, comm, axis, sizes)

    def vjp(dy):
        return comm.all_gather(dy, axis=axis, sizes=sizes)
    return y, vjp


@op(linearity="each", collective=True, cut=moved_cut("axis"), layout=rule("all_gather", "varying", "varying"))
def all_gather(x, comm=None, axis=-1, sizes=None):
    """Join the shards where every rank then does its own thing with the whole.

    Equation:   y_r = [x_0 x_1 ...] along `axis` on every rank r
    Shapes:     x[.., n_r, ..] Shard -> y[.., Σ n_r, ..] PerRank
    VJP:        dx_r = rank r's slice of Σ_s dy_s  (reduce_scatter)
    Residuals:  none
    Reference:  Megatron gather_from_sequence_parallel_region
    """
    y = comm.all_gather(x, axis=axis, sizes=sizes).view()
    sizes = sizes_of(x, axis, sizes, comm.rank, comm.size)

    def vjp(dy):
        return comm.reduce_scatter(dy, axis=axis, sizes=sizes)
    return y, vjp


@op(linearity="each", collective=True, cut=moved_cut(None, "axis"), layout=rule("reduce_scatter", "partial", "varying"))
def reduce_scatter(x, comm=None, axis=-1, sizes=None):
    """Add the parts up and keep the own slice of the sum.

    Equation:   y_r = rank r's slice of Σ_s x_s along `axis`
    Shapes:     x[.., n, ..] Partial -> y[.., n_r, ..] Shard
    VJP:        dx_r = [dy_0 dy_1 ...] on every rank r  (all_gather)
    Residuals:  none
    Reference:  Megatron reduce_scatter_to_sequence_parallel_region
    """
    sizes = shares_of(x, axis, sizes, comm.size)
    y = comm.reduce_scatter(x, axis=axis, sizes=sizes).view()

    def vjp(dy):
        return comm.all_gather(dy, axis=axis, sizes=sizes)
    return y, vjp


@op(linearity="each", collective=True, cut=moved_cut(refusal="one rank holds a part only: gather_from joins them"),
    layout=rule("broadcast_from", "varying", "replicated", "every rank has it already"))
def broadcast_from(x, comm=None, root=0):
    """Give what one rank has made to all, where every rank then does the same with it.

    Equation:   y = x_root
    Shapes:     x[...], equal on all ranks, root -> y[...] Replicated
    VJP:        dx_root = dy, dx_r = 0 on the other ranks
    Residuals:  none
    Reference:  JAX `pbroadcast`
    """
    y = comm.broadcast(x, root).view()

    def vjp(dy):
        return dy if comm.rank == root else xp_of(dy).zeros_like(dy)
    return y, vjp


@op(linearity="each", collective=True, cut=moved_cut(ANYWHERE),
    layout=rule("broadcast", "varying", "varying", "every rank has it already; copy_to lets each do its own thing with it"))
def broadcast(x, comm=None, root=0):
    """Give what one rank has made to all, where every rank then does its own thing with it.

    Equation:   y_r = x_root on every rank r
    Shapes:     x[...], equal on all ranks, root -> y[...] PerRank
    VJP:        dx_root = Σ_r dy_r  (reduce), dx_r = 0 on the other ranks
    Residuals:  none
    Reference:  it is copy_to of broadcast_from.  torch.distributed.nn.functional.broadcast
    """
    y = comm.broadcast(x, root).view()

    def vjp(dy):
        dx = comm.reduce(dy, root)
        return xp_of(dy).zeros_like(dy) if dx is None else dx
    return y, vjp


@op(linearity="each", cut=moved_cut(),
    layout=rule("as_partial", "varying", "partial", "it would be counted once per rank"))
def as_partial(x, comm=None):
    """Say that the true value is the sum of what the ranks hold (a loss summed over each rank's own rows).

    Equation:   y_r = x_r
    Shapes:     x[...] PerRank -> y[...] Partial
    VJP:        dx_r = dy_r
    Residuals:  none
    Reference:  `pvary` and `psum` of JAX's shard_map make the same distinction
    """
    y = x.view()

    def vjp(dy):
        return dy
    return y, vjp


def own_slice(x, comm, axis, sizes):
    """Rank `comm.rank`'s slice of x along `axis`, cut in shares of `sizes`."""
    return cut_in(x, axis, sizes)[comm.rank]


def cut_in(x, axis, sizes):
    """The parts of x along `axis`, one for each of `sizes`."""
    parts, start, where = [], 0, [slice(None)] * x.ndim
    for n in sizes:
        where[axis] = slice(start, start + n)
        parts.append(x[tuple(where)])
        start += n
    return parts
