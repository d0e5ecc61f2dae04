"""The vocabulary cut over ranks: each has some words' rows of the embedding, and their columns of the logits.

    words            rank 0: a b c               rank 1: d e f
    tokens  b e      w[b]  0                     0  w[e]                   the parts add up: g
    logits           x·w[a]  x·w[b]  x·w[c]      x·w[d]  x·w[e]  x·w[f]
    loss             a maximum, Σ e^logit and the target's logit:          3 numbers a token travel, never its V logits

The vocabulary may be padded with rows that are no words, so that it can be cut evenly: of `n_rows`, the first `n_words` count;
the others are never looked up, and their logits neither count nor win.
Reference: Shoeybi et al. 2019 (Megatron-LM), section 3.
"""
from refimpl.array import xp_of
from refimpl.autograd import Layout, LayoutError, Tensor, op
from refimpl.autograd.layout import describe, join, names
from refimpl.comm import shares
from refimpl.ops import slice_axis
from refimpl.ops.indexing import check_ids, sum_by_id
from refimpl.ops.losses import IGNORE, cross_entropy_sum
from refimpl.parallel.collectives import gather_from
from refimpl.parallel.cuts import even_bounds
from refimpl.parallel.layouts import rule


def lookup_layout(args, static):
    """The same ids on all ranks, each of which has other rows: the parts add up."""
    w, ids, axes = args[0], args[1], frozenset(static["comm"].axes)
    if type(w) is Tensor and any(w.cut.get(axis) != 0 for axis in axes):
        raise LayoutError(f"vocab_parallel_embedding: {describe(w)} must be cut along axis 0 over {names(axes)}, its cut is "
                          f"{dict(w.cut) or 'none'}: embedding looks up in a whole matrix")
    if type(ids) is Tensor and ids.varies & axes:
        raise LayoutError(f"vocab_parallel_embedding: the ids differ between the ranks of {names(ids.varies & axes)}, each of "
                          f"which has other words: all_gather the ids first")
    layout = join(vocab_parallel_embedding, [a for a in args if type(a) is Tensor])
    return Layout(layout.varies | axes, layout.partial | axes)


def cut_of_ids(args, static, y):
    """A row stands where its id does."""
    return dict(getattr(args[1], "cut", {}))


@op(linearity="each", named_by=0, values=slice(1), layout=lookup_layout, cut=cut_of_ids)
def vocab_parallel_embedding(w, ids, comm=None, n_words=0, n_rows=None):
    """Row lookup in a matrix whose rows are cut over the ranks: a rank that does not have the row gives 0.

    Equation:   y_r = w[ids] where rank r has that row, else 0;  Σ_r y_r = w[ids]  (reduce_from makes it)
    Shapes:     w[V/tp, D] Shard(0), ids int[...] Replicated -> y[..., D] Partial
    VJP:        dw[v] = Σ dy over the places where ids = v, for the own rows v
    Residuals:  own, rows
    Error:      ValueError, on every rank, for an id that is not one of the n_words
    Reference:  Megatron VocabParallelEmbedding (which reduces, too)
    """
    start, stop = even_bounds(n_words if n_rows is None else n_rows, comm.size)[comm.rank]
    if w.shape[:1] != (stop - start,) or w.ndim != 2:
        raise ValueError(f"vocab_parallel_embedding: w{list(w.shape)} must be [{stop - start}, D] on rank {comm.rank} of "
                         f"{comm.size}")
    check_ids("vocab_parallel_embedding", ids, n_words)
    xp = xp_of(w)
    flat = xp_of(ids).asarray(ids).reshape(-1)
    own = xp_of(ids).flatnonzero((flat >= start) & (flat < stop))
    own, rows = xp.asarray(own), xp.asarray(flat[own] - start)
    y = xp.zeros((flat.size, w.shape[1]), w.dtype)
    y[own] = w[rows]
    y = y.reshape(*ids.shape, w.shape[1])
    N, D = w.shape

    def vjp(dy):
        return sum_by_id(dy.reshape(-1, D)[own], rows, N), None
    return y, vjp


def loss_layout(args, static):
    """The logits are this rank's columns; the sum of the losses is the same on all ranks."""
    (logits, targets), axes = args[:2], frozenset(static["comm"].axes)
    if type(targets) is Tensor and targets.varies & axes:
        raise LayoutError(f"vocab_parallel_cross_entropy: the targets differ between the ranks of "
                          f"{names(targets.varies & axes)}, each of which has other words of the same tokens")
    if type(logits) is Tensor:
        wrong = [axis for axis in axes & logits.varies if logits.cut.get(axis) != logits.array.ndim - 1]
        if wrong:
            raise LayoutError(f"vocab_parallel_cross_entropy: {describe(logits)} must be cut over {wrong[0]} along its last "
                              f"axis, by words; its cut is {dict(logits.cut) or 'none'}")
    layout, tensors = RULE(args, static), [a for a in args if type(a) is Tensor]
    return Layout(layout.varies | join(vocab_parallel_cross_entropy, tensors).varies - axes, layout.partial)


RULE = rule("vocab_parallel_cross_entropy", "varying", "replicated",
            "it has the columns of all ranks already, which would be counted once per rank: cross_entropy takes it")


@op(values=slice(1), collective=True, layout=loss_layout, cut=lambda args, static, y: {})
def vocab_parallel_cross_entropy(logits, targets, comm=None, n_words=0, n_rows=None, pieces=0, ignore_index=IGNORE,
                                 smoothing=0.0, smoothing_over="all", z_loss=0.0):
    """`cross_entropy` of logits whose columns are cut over the ranks.

    Two all_reduces: of the rows' maxima, and of a stack of Σ e^(logit - max), the target's logit (a rank that does not have it
    gives 0) and, with smoothing, Σ logits.  So B·T·3 elements travel (B·T·4 with smoothing), never the B·T·V logits.

    Equation:   y = Σ (lse - Σ_v t_v·logits_v + z·lse²),  count = number of targets ≠ ignore_index;  v runs over all n_words
    Shapes:     logits[..., V/tp] Shard(-1), targets int[...] Replicated -> y[], count int[] Replicated
    VJP:        dlogits = dy·((1 + 2·z·lse)·softmax(logits) - t), the own columns; 0 in padding and in ignored rows
    Residuals:  e, total, rows, at, columns, lse
    Error:      ValueError, on every rank, for a target that is neither one of the n_words nor ignore_index
    Reference:  Megatron vocab_parallel_cross_entropy (whose smoothing is over the "others")
    """
    n_rows = n_words if n_rows is None else n_rows
    start, stop = even_bounds(n_rows, comm.size)[comm.rank]
    if logits.shape[-1:] != (stop - start,):
        raise ValueError(f"vocab_parallel_cross_entropy: logits{list(logits.shape)} must be [..., {stop - start}] on rank "
                         f"{comm.rank} of {comm.size}")
    if pieces < 0 or pieces and (stop - start) % pieces:
        raise ValueError(f"vocab_parallel_cross_entropy: {stop - start} columns cannot be cut into {pieces} equal pieces")
    return cross_entropy_sum(logits, targets, n_words, start, comm.all_reduce, pieces or 1, ignore_index, smoothing,
                             smoothing_over, z_loss)


def gather_vocab(logits, comm=None, n_words=0, n_rows=None):
    """The logits of all words on every rank: logits[..., V/tp] Shard(-1) -> y[..., n_words] Replicated, without the padding."""
    n_rows = n_words if n_rows is None else n_rows
    y = gather_from(logits, comm=comm, sizes=shares(n_rows, comm.size))
    return slice_axis(y, stop=n_words) if n_rows > n_words else y
