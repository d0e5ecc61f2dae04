"""One matrix product on several devices: cut the matrix by columns and concatenate, or by rows and add.

    mpirun -n 4 python mpi_examples/01_column_and_row_cut.py
    python mpi_examples/01_column_and_row_cut.py --simulate 4         (four threads, no MPI needed)

Y = X A, with X[N, D] for N tokens and A[D, F].  On two ranks:

    column cut                                      row cut

         X              A                                X                 A
     +-------+     +-----+-----+                    +-----+-----+     +-----------+
     |       |     |     |     |                    |     |     |     |    A_0    |  rank 0
     | every |     | A_0 | A_1 |                    | X_0 | X_1 |     +-----------+
     | rank  |     |     |     |                    |     |     |     |    A_1    |  rank 1
     +-------+     +-----+-----+                    +-----+-----+     +-----------+
                   rank 0  rank 1                   rank 0  rank 1

     Y = [ X A_0 | X A_1 ]    concatenate           Y = X_0 A_0 + X_1 A_1    add

Forward and backward, where dY is the gradient of any loss by Y:

                  forward                              backward
     column cut   Y = [X A_0 | X A_1]   all_gather     dX = Σ_r dY_r A_rᵀ   all_reduce (f)     dA_r = Xᵀ dY_r
     row cut      Y = Σ_r X_r A_r   all_reduce (g)     dX_r = dY A_rᵀ       nothing travels    dA_r = X_rᵀ dY

What to expect: both cuts give the serial Y, dX and dA on every rank, also where the shares are uneven.  What travels is
counted: it is as large as activations (tokens times width).  A and its gradient stay where they are, however large.
"""
from typing import Callable

import numpy as np

from refimpl import ops
from refimpl.autograd import Params, Tensor, value_and_grad
from refimpl.comm import Comm, Mesh, launch, shares
from refimpl.parallel import (Cut, Placement, Replicated, column_parallel_linear, copy_to, gather, gather_from, reduce_from,
                              row_parallel_linear, shard)
from refimpl.rng import draw

N, D, F = 5, 7, 10                                      # tokens, inputs, outputs: on four ranks 2+2+2+1 and 3+3+2+2


def column_cut(p: Params, tp: Comm) -> Tensor:
    """x[N, D] on every rank, a[D, F/tp] -> y[N, F] on every rank"""
    x = copy_to(p["x"], comm=tp)                                            # f: identity | all_reduce
    y = column_parallel_linear(x, p["a"])                                   # (N, F/tp): this rank's columns of Y
    return gather_from(y, comm=tp, axis=1, sizes=shares(F, tp.size))        # all_gather | own slice


def row_cut(p: Params, tp: Comm) -> Tensor:
    """x[N, D/tp], a[D/tp, F] -> y[N, F] on every rank"""
    y = row_parallel_linear(p["x"], p["a"])                                 # (N, F): this rank's part of the sum
    return reduce_from(y, comm=tp)                                          # g: all_reduce | identity


def main(comm: Comm) -> None:
    mesh = Mesh(tp=comm.size, comm=comm)
    # 24-bit numbers: their products, and sums of a few, are exact in float64, so here not even the rounding may differ
    x, a, dy = draw("x", (N, D)), draw("a", (D, F)), draw("dy", (N, F))
    serial = {"y": x @ a, "x": dy @ a.T, "a": x.T @ dy}                     # the formulas, on one device
    tables: dict[Callable, dict[str, Placement]] = {
        column_cut: {"x": Replicated(), "a": Cut.even(1, F, mesh.tp)},
        row_cut: {"x": Cut.even(1, D, mesh.tp), "a": Cut.even(0, D, mesh.tp)}}
    expected = {column_cut: [N * shares(F, comm.size)[comm.rank], N * D], row_cut: [N * F, 0]}
    account = [f"Y = X A with X[{N}, {D}] and A[{D}, {F}], {D * F} elements, on {comm.size} ranks"]

    for cut, table in tables.items():
        params = shard({"x": x, "a": a}, table, mesh)

        def loss(p: Params) -> tuple[Tensor, Tensor]:
            y = cut(p, mesh.tp)
            return ops.sum(y * Tensor(dy)), y                               # a loss whose gradient by Y is dy

        mesh.ledger.clear()
        (_, y), grads = value_and_grad(loss, params)
        sent = [mesh.ledger.total(phase=phase).elements for phase in ("forward", "backward")]
        assert sent == expected[cut], f"rank {comm.rank} handed over {sent} elements, expected {expected[cut]}"

        whole = {"y": y.array, **gather(grads, table, mesh)}                # the shards of dX and dA joined
        for name, right in serial.items():
            assert np.array_equal(whole[name], right), f"rank {comm.rank}: {cut.__name__} differs from serial in {name}"

        # Every rank learns what the others counted; it also means that they have come this far without an error.
        held, forward, backward = comm.all_gather(np.array([[params["a"].array.size], sent[:1], sent[1:]]), axis=1)
        account += [f"\n{cut.__name__:24s}" + "".join(f"{f'rank {r}':>9s}" for r in range(comm.size)),
                    "  elements of A held     " + "".join(f"{n:>9d}" for n in held),
                    "  travel, forward        " + "".join(f"{n:>9d}" for n in forward),
                    "  travel, backward       " + "".join(f"{n:>9d}" for n in backward)]
    if comm.rank == 0:
        print("\n".join(account))
        print("\nOK: Y, dX and dA equal the serial ones bit for bit on every rank; the counts equal the formulas")


if __name__ == "__main__":
    launch(main, ranks=(2, 4))
