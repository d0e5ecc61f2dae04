"""The feed-forward layer with one exchange: cut the first matrix by columns and the second by rows, not the other way.

    mpirun -n 4 python mpi_examples/02_mlp_one_exchange.py
    python mpi_examples/02_mlp_one_exchange.py --simulate 4           (four threads, no MPI needed)

Y = GELU(X A) B, with X[N, D] for N tokens, A[D, F] and B[F, D].  On two ranks:

    columns, then rows                                      rows, then columns

         A                  B                                    A                    B
     +-----+-----+     +-----------+                         +-----------+     +-----+-----+
     |     |     |     |    B_0    | rank 0                  |    A_0    |     |     |     |
     | A_0 | A_1 |     +-----------+                         +-----------+     | B_0 | B_1 |
     |     |     |     |    B_1    | rank 1                  |    A_1    |     |     |     |
     +-----+-----+     +-----------+                         +-----------+     +-----+-----+

     X -f-> GELU(X A_r) B_r  -g-> Y                          X_r -> X_r A_r -g-> GELU -f-> H B_r -> gather -> Y

GELU works on each element of X A alone.  With columns first, a rank has whole elements, and may go on to B without asking
anybody: the one exchange is the sum at the end (g), and one in the backward pass (f).  With rows first, a rank has parts of
sums.  GELU of a sum is not the sum of GELUs, so the parts must be added before GELU, and the columns of Y joined after B:
two exchanges, one of them F wide.

What to expect: first this inequality in numbers, then the error that refuses to forget it, then both orders, equal to the
serial layer in Y and every gradient on every rank, with their exchanges counted.
"""
import numpy as np

from refimpl import ops
from refimpl.autograd import LayoutError, Params, Tensor, value_and_grad
from refimpl.comm import Comm, Mesh, launch
from refimpl.golden import compare
from refimpl.ops import gelu_tanh
from refimpl.parallel import (Cut, Placement, Replicated, column_parallel_linear, copy_to, gather, gather_from, parameter,
                              reduce_from, row_parallel_linear, scatter_to, shard)
from refimpl.rng import draw

N, D, F = 5, 8, 32                                      # tokens, model width, feed-forward width
SHAPES = {"x": (N, D), "a": (D, F), "a_bias": (F,), "b": (F, D), "b_bias": (D,)}


def columns_then_rows(p: Params, tp: Comm) -> Tensor:
    x = copy_to(p["x"], comm=tp)                                            # f: identity | all_reduce
    h = gelu_tanh(column_parallel_linear(x, p["a"], p["a_bias"]))           # (N, F/tp): whole elements
    y = reduce_from(row_parallel_linear(h, p["b"]), comm=tp)                # g: all_reduce | identity
    return y + p["b_bias"]                                                  # once, after the sum


def rows_then_columns(p: Params, tp: Comm) -> Tensor:
    x = scatter_to(p["x"], comm=tp)                                         # (N, D/tp): own columns | all_gather
    h = reduce_from(row_parallel_linear(x, p["a"]), comm=tp)                # g: all_reduce | identity, (N, F) elements
    h = copy_to(gelu_tanh(h + p["a_bias"]), comm=tp)                        # f: identity | all_reduce, (N, F) elements
    return gather_from(column_parallel_linear(h, p["b"], p["b_bias"]), comm=tp)     # (N, D): all_gather | own slice


def placements(order, mesh: Mesh) -> dict[str, Placement]:
    """Who holds what: the two cuts, with the bias of a column cut cut like its columns."""
    if order is columns_then_rows:
        return {"x": Replicated(), "a": Cut.even(1, F, mesh.tp), "a_bias": Cut.even(0, F, mesh.tp),
                "b": Cut.even(0, F, mesh.tp), "b_bias": Replicated()}
    return {"x": Replicated(), "a": Cut.even(0, D, mesh.tp), "a_bias": Replicated(),
            "b": Cut.even(1, D, mesh.tp), "b_bias": Cut.even(0, D, mesh.tp)}


def run(order, mesh: Mesh) -> tuple[dict[str, np.ndarray], list[tuple[int, int]]]:
    """Y and the gradients, whole, by name; and (exchanges, elements) of the forward and of the backward pass."""
    def loss(p: Params) -> tuple[Tensor, Tensor]:
        y = order(p, mesh.tp)
        return ops.sum(y * y), y

    table = placements(order, mesh)
    mesh.ledger.clear()
    (_, y), grads = value_and_grad(loss, shard({name: draw(name, shape) for name, shape in SHAPES.items()}, table, mesh))
    counted = [mesh.ledger.total(phase=phase) for phase in ("forward", "backward")]
    return {"Y": y.array, **gather(grads, table, mesh)}, [(total.calls, total.elements) for total in counted]


def main(comm: Comm) -> None:
    mesh = Mesh(tp=comm.size, comm=comm)

    # By hand: X = [1 1], A = [2; -1].  Rank 0 has the part 2 of the sum, rank 1 the part -1, the others none.
    part = np.array([2.0, -1.0, 0.0, 0.0][comm.rank])
    gelu_of_sum = float(gelu_tanh(Tensor(comm.all_reduce(part))))
    sum_of_gelus = float(comm.all_reduce(gelu_tanh(Tensor(part)).array))
    assert (round(gelu_of_sum, 4), round(sum_of_gelus, 4)) == (0.8412, 1.7958)

    refusal = ""
    try:                                                                    # the same mistake with the layout tags
        a = parameter("a", np.ones((1, 1)), Cut.even(0, comm.size, mesh.tp))
        gelu_tanh(row_parallel_linear(scatter_to(Tensor(np.ones((1, comm.size))), comm=mesh.tp), a))
    except LayoutError as error:
        refusal = str(error)
    assert refusal, f"rank {comm.rank}: the layout tags let GELU of partial sums pass"

    account = [f"GELU(2 + -1) = {gelu_of_sum:.4f}, but GELU(2) + GELU(-1) = {sum_of_gelus:.4f}; refused with this sentence:",
               f"    LayoutError: {refusal}",
               f"\nY = GELU(X A) B with N = {N}, D = {D}, F = {F} on {comm.size} ranks: exchanges, and what a rank hands over",
               f"{'':24s}{'forward':>20s}{'backward':>20s}{'off from serial':>20s}"]
    share = N * D // comm.size
    expected = {columns_then_rows: [(1, N * D), (1, N * D)], rows_then_columns: [(2, N * F + share)] * 2}
    for order, counts in expected.items():
        serial, nothing = run(order, Mesh())
        sharded, counted = run(order, mesh)
        assert nothing == [(0, 0), (0, 0)] and counted == counts, f"rank {comm.rank}: {counted}, expected {counts}"
        worst = compare(sharded, serial)[0]
        assert worst.relative <= 1e-12, f"rank {comm.rank}, {order.__name__}: {worst}"
        largest = comm.all_reduce(np.array(worst.relative), how="max")      # of all ranks: none has failed
        account.append(f"{order.__name__:24s}" + "".join(f"{f'{n}: {size} elements':>20s}" for n, size in counted)
                       + f"{largest:20.0e}")
    if comm.rank == 0:
        print("\n".join(account))
        print("\nOK: Y and all five gradients equal the serial ones on every rank; one exchange a pass, or two")


if __name__ == "__main__":
    launch(main, ranks=(2, 4))
