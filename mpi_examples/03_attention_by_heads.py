"""Attention cut by heads: every rank computes whole heads, the output projection adds them up.

    mpirun -n 4 python mpi_examples/03_attention_by_heads.py
    python mpi_examples/03_attention_by_heads.py --simulate 4         (four threads, no MPI needed)

Q = X Wq, K = X Wk, V = X Wv; every head h makes softmax(Q_h K_hᵀ / √width) V_h of its own columns; side by side, the heads
are multiplied by Wo.  Six heads on two ranks:

            Wq                Wk                Wv                        Wo
     +-------+-------+ +-------+-------+ +-------+-------+         +---------------+
     |       |       | |       |       | |       |       |         |  rows of 012  |  rank 0
     |  012  |  345  | |  012  |  345  | |  012  |  345  |         +---------------+
     |       |       | |       |       | |       |       |         |  rows of 345  |  rank 1
     +-------+-------+ +-------+-------+ +-------+-------+         +---------------+
      rank 0  rank 1    rank 0  rank 1    rank 0  rank 1

     X  -f->  Q_r K_r V_r  ->  attention of the own heads: nobody is asked  ->  times Wo_r, a part of the sum  -g->  Y

This is the feed-forward layer's pattern again, columns and then rows, with attention where GELU was: heads do not talk to
each other, as elements did not.  Inside a head everything meets everything, and its scores are sums over its columns: a
cut must not go through a head.  The number of heads need not divide by the number of ranks.

What to expect: one exchange forward (g) and one backward (f), each of B·T·D elements however many heads there are; Y and
the gradients of X and all four matrices equal the serial ones on every rank.
"""
import numpy as np

from refimpl import ops
from refimpl.autograd import Params, Tensor, value_and_grad
from refimpl.comm import Comm, Mesh, launch
from refimpl.golden import compare
from refimpl.ops import CAUSAL, reshape, transpose
from refimpl.parallel import (Cut, Placement, Replicated, column_parallel_linear, copy_to, gather, reduce_from,
                              row_parallel_linear, shard)
from refimpl.rng import draw

B, T, H, K = 2, 5, 6, 4                                 # samples, positions, heads (four ranks: 2+2+1+1), head width
D = H * K                                               # model width
SHAPES = {"x": (B, T, D), "q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D)}


def attention_layer(p: Params, tp: Comm) -> Tensor:
    """x[B, T, D] on every rank -> y[B, T, D] on every rank"""
    x = copy_to(p["x"], comm=tp)                                            # f: identity | all_reduce
    q, k, v = (split_heads(column_parallel_linear(x, p[name])) for name in "qkv")   # (B, H/tp, T, K)
    y = merge_heads(ops.attention(q, k, v, mask=CAUSAL))                    # (B, T, D/tp): nobody is asked
    return reduce_from(row_parallel_linear(y, p["o"]), comm=tp)             # g: all_reduce | identity


def split_heads(x: Tensor) -> Tensor:
    """(B, T, H/tp·K) -> (B, H/tp, T, K)"""
    return transpose(reshape(x, shape=(B, T, -1, K)), axes=(0, 2, 1, 3))


def merge_heads(x: Tensor) -> Tensor:
    """(B, H/tp, T, K) -> (B, T, H/tp·K)"""
    return reshape(transpose(x, axes=(0, 2, 1, 3)), shape=(B, T, -1))


def columns_by_rank(mesh: Mesh) -> tuple[tuple[int, int], ...]:
    """(start, stop) of each rank's columns: those of whole heads."""
    return tuple((first * K, last * K) for first, last in Cut.even(0, H, mesh.tp).bounds)


def placements(mesh: Mesh) -> dict[str, Placement]:
    """Who holds what: heads are columns of q, k and v, and rows of o."""
    columns, rows = Cut(1, columns_by_rank(mesh)), Cut(0, columns_by_rank(mesh))
    return {"x": Replicated(), "q": columns, "k": columns, "v": columns, "o": rows}


def run(mesh: Mesh) -> dict[str, np.ndarray]:
    """Y and the gradients of `sum(Y * Y)`, whole, by name."""
    def loss(p: Params) -> tuple[Tensor, Tensor]:
        y = attention_layer(p, mesh.tp)
        return ops.sum(y * y), y

    params = shard({name: draw(name, shape) for name, shape in SHAPES.items()}, placements(mesh), mesh)
    mesh.ledger.clear()
    (_, y), grads = value_and_grad(loss, params)
    for phase in ("forward", "backward"):                                   # counted on every rank
        total = mesh.ledger.total(phase=phase)
        assert (total.calls, total.elements) == ((1, B * T * D) if mesh.tp.size > 1 else (0, 0)), f"{phase}: {total}"
    return {"Y": y.array, **{f"d{name}": g for name, g in gather(grads, placements(mesh), mesh).items()}}


def main(comm: Comm) -> None:
    mesh = Mesh(tp=comm.size, comm=comm)
    serial, sharded = run(Mesh()), run(mesh)
    differences = {d.name: d.relative for d in compare(sharded, serial)}
    assert max(differences.values()) <= 1e-12, f"rank {comm.rank}: relative to the serial values {differences}"
    worst = comm.all_reduce(np.array([differences[name] for name in serial]), how="max")    # of all ranks: none has failed
    if comm.rank == 0:
        print(f"causal attention with {H} heads of {K} on {comm.size} ranks: X[{B}, {T}, {D}], Wq Wk Wv Wo[{D}, {D}]\n")
        for r, (start, stop) in enumerate(columns_by_rank(mesh)):
            heads = " ".join(map(str, range(start // K, stop // K)))
            print(f"    rank {r}: heads {heads:6s}  columns {start}:{stop} of Wq, Wk and Wv, rows {start}:{stop} of Wo")
        print(f"\n    exchanges: 1 forward (g), 1 backward (f), each {B} x {T} x {D} = {B * T * D} elements\n")
        print("    largest difference from serial on any rank, relative")
        print("    " + "   ".join(f"{name} {d:.0e}" for name, d in zip(serial, worst)))
        print("\nOK: Y and all five gradients equal the serial ones on every rank, with one exchange a pass")


if __name__ == "__main__":
    launch(main, ranks=(2, 4))
