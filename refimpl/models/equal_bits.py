"""The same bits on 1, 2, 4 or 8 tensor-parallel ranks.

A sum of rounded numbers depends on the order, and a product on the kernel that BLAS takes for its width.  So a run on 4 ranks
agrees with one rank to 15 digits, and not in the last bits.  To have them equal, cut everything in 8, however many ranks there
are, and let each rank do its share of the 8 in the same way:

    products      of 8 blocks of columns, or of rows, one after another                         tp=1: 8 of them, tp=4: 2
    sums          of the 8 parts in pairs, then pairs of pairs: a rank's own first,             (0+1) + (2+3) | (4+5) + (6+7)
                  then those of the ranks, by an all_reduce that does the same

    f             of each product apart: q, k and v would be added up on each rank before, and pieces of all ranks after

    mesh = Mesh(tp=4, comm=comm.fixed_order())
    with EqualBits(cfg, mesh):
        gradients(params, batches, cfg, mesh)

Equal are the loss, the logits and all gradients, on one machine with one BLAS thread and the same number of dp ranks.  It costs
smaller products, copies of their parts, sums in a fixed order, and in the backward pass three all_reduces instead of one for an
attention layer, two for a gated MLP (mpi_examples/10_equal_bits.py measures it).
"""
from typing import Any, Callable

from refimpl.array import Array, in_pairs, xp_of
from refimpl.autograd.frames import Frame
from refimpl.comm import Mesh
from refimpl.models.config import Config
from refimpl.parallel.collectives import cut_in


class EqualBits(Frame):
    """A frame in which the cut products of a model are made of `pieces` parts in all, on any number of tp ranks.

    Error: ValueError where the tp ranks do not share the pieces out evenly, or the model is not cut into as many equal parts,
           or sums over ranks are not made in a fixed order, or the plan is sequence_parallel: gradients of gains would be
           sums over each rank's positions
    """

    def __init__(self, cfg: Config, mesh: Mesh, pieces: int = 8) -> None:
        size = mesh.tp.size
        if pieces < 1 or pieces & (pieces - 1) or pieces % size:
            raise ValueError(f"equal bits need a power of two of pieces, and as many tp ranks or a half, a quarter ... of it: "
                             f"got {pieces} and tp={size}")
        for name in ("n_heads", "n_kv_heads", "d_ff", "padded_vocab"):
            if getattr(cfg, name) % pieces:
                more = " (vocab_multiple pads it)" if name == "padded_vocab" else ""
                raise ValueError(f"equal bits in {pieces} pieces need a multiple of {pieces} as {name}, got "
                                 f"{getattr(cfg, name)}{more}")
        if size > 1 and mesh.tp.order != "fixed":
            raise ValueError("equal bits need sums in a fixed order: Mesh(..., comm=comm.fixed_order())")
        self.own, self.comm = pieces // size, mesh.tp

    def call(self, op: Any, run: Callable, *arrays: Any, **static: Any) -> tuple[Any, Any]:
        if op.name == "copy_to":                        # before column products, each of which has its own f here
            y, _ = run(*arrays, **static)
            return y, lambda dy: dy
        if op.name == "column_parallel_linear":
            return self.with_f(*run(*arrays, pieces=self.own, **static))
        if op.name == "reduce_scatter" and static["comm"].axes == self.comm.axes:
            raise ValueError("equal bits are not to be had with sequence_parallel: gains and biases would get sums over each "
                             "rank's positions")
        if op.name in ("row_parallel_linear", "vocab_parallel_cross_entropy"):
            return run(*arrays, pieces=self.own, **static)
        if op.name in ("layer_norm", "rms_norm") and arrays[0].ndim == 4:
            return self.by_heads(run, *arrays, **static)
        return run(*arrays, **static)

    def with_f(self, y: Array, vjp: Callable) -> tuple[Array, Callable]:
        def f_as_well(dy: Array) -> tuple[Array, ...]:
            dx, *rest = vjp(dy)
            return self.comm.all_reduce(dx), *rest
        return y, f_as_well

    def by_heads(self, run: Callable, x: Array, *gains: Array, **static: Any) -> tuple[Array, Callable]:
        """A norm of q or k [B, H/tp, T, K], whose gains have a gradient that is a sum over heads: a piece after the other."""
        xp, sizes = xp_of(x), (x.shape[1] // self.own,) * self.own
        ys, vjps = zip(*(run(part, *gains, **static) for part in cut_in(x, 1, sizes)))

        def vjp(dy: Array) -> tuple[Array, ...]:
            dxs, *dgains = zip(*(vjp(part) for vjp, part in zip(vjps, cut_in(dy, 1, sizes))))
            return xp.concatenate(dxs, axis=1), *(None if d[0] is None else in_pairs(d) for d in dgains)
        return xp.concatenate(ys, axis=1), vjp
