"""The collectives as ops: each states its layouts, its forward and its vjp.  f is `copy_to`, g is `reduce_from`.

| op | forward layouts | forward | vjp |
|---|---|---|---|
| `copy_to` (f) | Replicated -> PerRank | identity | all_reduce |
| `reduce_from` (g) | Partial -> Replicated | all_reduce | identity |
| `gather_from` | Shard -> Replicated | all_gather | own slice |
| `scatter_to` | Replicated -> Shard | own slice | all_gather |
| `all_gather` | Shard -> PerRank | all_gather | reduce_scatter |
| `reduce_scatter` | Partial -> Shard | reduce_scatter | all_gather |

Replicated: the same value on all ranks, counted once.  Shard(axis): the global array cut along a numpy axis.  Partial:
the value is the sum over ranks.  PerRank: independent values.  The vjps follow from <dy, J v> = <vjp(dy), v>, where the
inner product counts a replicated value once and sums everything else over ranks; tests/ops/test_registry.py
checks this on all ranks.  Why there is no plain differentiable "all_reduce": its gradient depends on the layout of its
output (Replicated: identity; PerRank: all_reduce), so it has to be named.

`comm` is a communicator of a mesh (`mesh.tp`).  Reference: Shoeybi et al. 2019 (Megatron-LM), section 3, figure 3.
"""
from refimpl.autograd import Layout, LayoutError, Tensor, op
from refimpl.autograd.layout import NOWHERE, describe, names
from refimpl.comm import shares


def rule(op_name, before, after):
    """The layout rule of a collective: checks that its input is `before` over comm's axes and makes it `after`."""
    def layout(args, static):
        x, axes = args[0], frozenset(static["comm"].axes)
        if type(x) is not Tensor:                       # a plain array is taken for what the op needs
            return Layout(axes if after != "replicated" else NOWHERE, axes if after == "partial" else NOWHERE)
        varies, partial = x.layout
        state = "partial" if axes & partial else "varying" if axes & varies else "replicated"
        mixed = (axes & varies) not in (axes, frozenset()) or (axes & partial) not in (axes, frozenset())
        if state != before or mixed:
            raise LayoutError(f"{op_name} over {names(axes)} takes a {before} value, but {describe(x)} is {state} there: "
                              f"{ADVICE[before]}")
        if partial - axes and before != "partial":
            raise LayoutError(f"{op_name} of a value that is partial over {names(partial - axes)}: reduce_from it first")
        varies = varies - axes if after == "replicated" else varies | axes
        return Layout(varies, (partial - axes) | (axes if after == "partial" else NOWHERE))
    return layout


def moved_cut(kind):
    """Where a collective's output is cut: "scatter" cuts, "gather" joins, "add" adds up; other mesh axes' cuts stay."""
    def cut(args, static, y):
        axes = static["comm"].axes
        known = getattr(args[0], "cut", {})
        kept = {axis: k for axis, k in known.items() if axis not in axes}
        for axis in axes:
            wanted = static.get("axis", -1) % y.ndim if kind == "gather" else None
            if axis in known and known[axis] != wanted:
                how = f"joined along axis {wanted}" if kind == "gather" else "added up"
                raise LayoutError(f"{describe(args[0])} is cut over {axis} along axis {known[axis]}: its parts cannot be {how}")
        return kept | ({axis: static.get("axis", -1) % y.ndim for axis in axes} if kind == "scatter" else {})
    return cut


ADVICE = {"replicated": "a second f would add its gradient up twice",
          "partial": "only a sum over ranks may be reduced (the product with a row-cut weight is one; as_partial marks others)",
          "varying": "there is nothing to join"}


@op(linearity="each", collective=True, cut=moved_cut("add"), layout=rule("copy_to", "replicated", "varying"))
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


@op(linearity="each", collective=True, cut=moved_cut("add"), layout=rule("reduce_from", "partial", "replicated"))
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


@op(linearity="each", collective=True, cut=moved_cut("gather"), layout=rule("gather_from", "varying", "replicated"))
def gather_from(x, comm=None, axis=-1, sizes=None):
    """Join the shards where every rank then does the same with the whole.

    Equation:   y = [x_0 x_1 ...] along `axis`  (all_gather)
    Shapes:     x[.., n_r, ..] Shard -> y[.., Σ n_r, ..] Replicated
    VJP:        dx_r = rank r's slice of dy
    Residuals:  none
    Reference:  Megatron gather_from_tensor_model_parallel_region
    """
    y = comm.all_gather(x, axis=axis, sizes=sizes).view()
    sizes = sizes or (x.shape[axis],) * comm.size

    def vjp(dy):
        return own_slice(dy, comm, axis, sizes)
    return y, vjp


@op(linearity="each", collective=True, cut=moved_cut("scatter"), layout=rule("scatter_to", "replicated", "varying"))
def scatter_to(x, comm=None, axis=-1, sizes=None):
    """Keep the own slice of a replicated value.

    Equation:   y_r = rank r's slice of x along `axis`
    Shapes:     x[.., n, ..] Replicated -> y[.., n_r, ..] Shard; the shares are `shares(n, size)` by default
    VJP:        dx = [dy_0 dy_1 ...]  (all_gather)
    Residuals:  none
    Reference:  Megatron scatter_to_tensor_model_parallel_region
    """
    sizes = sizes or shares(x.shape[axis], comm.size)
    y = own_slice(x, comm, axis, sizes)

    def vjp(dy):
        return comm.all_gather(dy, axis=axis, sizes=sizes)
    return y, vjp


@op(linearity="each", collective=True, cut=moved_cut("gather"), layout=rule("all_gather", "varying", "varying"))
def all_gather(x, comm=None, axis=-1, sizes=None):
    """Join the shards where every rank then does its own thing with the whole.

    Equation:   y_r = [x_0 x_1 ...] along `axis` on every rank r
    Shapes:     x[.., n_r, ..] Shard -> y[.., Σ n_r, ..] PerRank
    VJP:        dx_r = rank r's slice of Σ_s dy_s  (reduce_scatter)
    Residuals:  none
    Reference:  Megatron gather_from_sequence_parallel_region
    """
    y = comm.all_gather(x, axis=axis, sizes=sizes).view()
    sizes = sizes or (x.shape[axis],) * comm.size

    def vjp(dy):
        return comm.reduce_scatter(dy, axis=axis, sizes=sizes)
    return y, vjp


@op(linearity="each", collective=True, cut=moved_cut("scatter"), layout=rule("reduce_scatter", "partial", "varying"))
def reduce_scatter(x, comm=None, axis=-1, sizes=None):
    """Add the parts up and keep the own slice of the sum.

    Equation:   y_r = rank r's slice of Σ_s x_s along `axis`
    Shapes:     x[.., n, ..] Partial -> y[.., n_r, ..] Shard
    VJP:        dx_r = [dy_0 dy_1 ...] on every rank r  (all_gather)
    Residuals:  none
    Reference:  Megatron reduce_scatter_to_sequence_parallel_region
    """
    sizes = sizes or shares(x.shape[axis], comm.size)
    y = comm.reduce_scatter(x, axis=axis, sizes=sizes).view()

    def vjp(dy):
        return comm.all_gather(dy, axis=axis, sizes=sizes)
    return y, vjp


@op(linearity="each", cut=moved_cut("add"), layout=rule("as_partial", "varying", "partial"))
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
    if sum(sizes) != x.shape[axis] or len(sizes) != comm.size:
        raise ValueError(f"the shares {tuple(sizes)} of {comm.size} ranks do not add up to {x.shape[axis]} along axis {axis} "
                         f"of {x.shape}")
    start = sum(sizes[:comm.rank])
    where = [slice(None)] * x.ndim
    where[axis] = slice(start, start + sizes[comm.rank])
    return x[tuple(where)]
