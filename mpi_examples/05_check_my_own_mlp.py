"""Check a sharded layer of your own: a gated MLP with a new op, and two mistakes that the checks find and name.

    mpirun -n 4 python mpi_examples/05_check_my_own_mlp.py
    python mpi_examples/05_check_my_own_mlp.py --simulate 4           (four threads, no MPI needed)

The layer is Y = (U ⊙ G σ(G)) Wdown with U = X̂ Wup, G = X̂ Wgate and X̂ = layer_norm(X).  On two ranks:

                 Wup               Wgate              Wdown
           +-------+-------+  +-------+-------+  +---------------+
           |       |       |  |       |       |  |   F/2 rows    |  rank 0
           |  F/2  |  F/2  |  |  F/2  |  F/2  |  +---------------+
           |       |       |  |       |       |  |   F/2 rows    |  rank 1
           +-------+-------+  +-------+-------+  +---------------+
            rank 0  rank 1     rank 0  rank 1     X, the gain and the bias of the norm, Y: whole on every rank

     X -> norm -f-> U_r, G_r -> gate -> times Wdown_r -g-> Y        Wup and Wgate are cut at the same columns

Copy this file and put your layer in its place.  In this order, each check rests on the ones before:

     1  check_op        the new op alone, on one device: is its vjp the transpose of its Jacobian?
     2  check_adjoint   the collectives, on all ranks: the same question, with the inner product that the layouts ask for
     3  compare         the sharded layer against the same function on one rank: Y and every gradient

What to expect: all three pass on every rank.  Then f is left out, and the layout tags refuse it; then f forgets its
all_reduce in the backward pass, which no tag can see: Y is right, check 3 shows which gradients are not, check 2 names f.
"""
import numpy as np

from refimpl import ops
from refimpl.autograd import LayoutError, Op, Params, Replace, Tensor, op, value_and_grad
from refimpl.check import check_adjoint, check_op
from refimpl.comm import Comm, Mesh, launch
from refimpl.golden import compare
from refimpl.ops import layer_norm
from refimpl.parallel import (Cut, Placement, Replicated, column_parallel_linear, copy_to, gather, reduce_from,
                              row_parallel_linear, shard)
from refimpl.rng import draw

N, D, F = 5, 6, 11                                      # tokens, model width, feed-forward width: four ranks get 3+3+3+2
SHAPES = {"x": (N, D), "gain": (D,), "bias": (D,), "up": (D, F), "gate": (D, F), "down": (F, D)}


@op
def swish_gate(u, g):
    """Gate of a SwiGLU layer.

    Equation:   y = u·g·s,  s = σ(g) = ½·(1 + tanh(g/2))
    Shapes:     u[...], g[...] -> y[...]
    VJP:        du = dy·g·s;  dg = dy·u·s·(1 + g·(1 - s))
    Residuals:  u, g, s
    Reference:  Shazeer 2020, "GLU Variants Improve Transformer", eq. 6
    """
    s = 0.5 * (1 + np.tanh(0.5 * g))
    y = u * g * s

    def vjp(dy):
        return dy * g * s, dy * u * s * (1 + g * (1 - s))
    return y, vjp


def gated_mlp(p: Params, tp: Comm) -> Tensor:
    x = copy_to(layer_norm(p["x"], p["gain"], p["bias"]), comm=tp)          # f: identity | all_reduce
    return reduce_from(gated_product(x, p), comm=tp)                        # g: all_reduce | identity


def gated_product(x: Tensor, p: Params) -> Tensor:
    h = swish_gate(column_parallel_linear(x, p["up"]), column_parallel_linear(x, p["gate"]))    # (N, F/tp)
    return row_parallel_linear(h, p["down"])                                # (N, D): this rank's part of the sum


def gated_mlp_without_f(p: Params, tp: Comm) -> Tensor:
    return reduce_from(gated_product(layer_norm(p["x"], p["gain"], p["bias"]), p), comm=tp)


def forgetful_f(x, comm=None):
    return x.view(), lambda dy: dy                      # each rank keeps its own part of the gradient


forgetful_f.__doc__ = copy_to.__doc__                   # it claims to be f


def run(layer, mesh: Mesh) -> dict[str, np.ndarray]:
    """Y and the gradients of `sum(Y * Y)`, whole, by name."""
    columns, rows, whole = Cut.even(1, F, mesh.tp), Cut.even(0, F, mesh.tp), Replicated()
    table: dict[str, Placement] = {"x": whole, "gain": whole, "bias": whole, "up": columns, "gate": columns,
                                   "down": rows}

    def loss(p: Params) -> tuple[Tensor, Tensor]:
        y = layer(p, mesh.tp)
        return ops.sum(y * y), y

    (_, y), grads = value_and_grad(loss, shard({k: draw(k, shape) for k, shape in SHAPES.items()}, table, mesh))
    return {"Y": y.array, **{f"d{name}": g for name, g in gather(grads, table, mesh).items()}}


def refusal(error: type[Exception], function, *args) -> str:
    """The sentence with which `function` refuses; failing to refuse is a failure."""
    try:
        function(*args)
    except error as refused:
        return f"{error.__name__}: {refused}"
    raise AssertionError(f"{function.__name__} did not notice the mistake")


def main(comm: Comm) -> None:
    mesh = Mesh(tp=comm.size, comm=comm)
    x, part = draw("x", (N, D)), draw(f"part {comm.rank}", (N, D))

    check_op(swish_gate, draw("u", (N, F)), draw("g", (N, F)))
    check_adjoint(copy_to, mesh.tp, "replicated", "per_rank", x)
    check_adjoint(reduce_from, mesh.tp, "partial", "replicated", part)
    serial = run(gated_mlp, Mesh())
    worst = compare(run(gated_mlp, mesh), serial)[0]
    assert worst.relative <= 1e-12, f"rank {comm.rank}: {worst}"

    no_f = refusal(LayoutError, run, gated_mlp_without_f, mesh)
    wrong_f = refusal(AssertionError, check_adjoint, Op(forgetful_f, linearity="each"), mesh.tp, "replicated", "per_rank", x)
    with Replace("copy_to", "*", forgetful_f):
        off = {d.name: d.relative for d in compare(run(gated_mlp, mesh), serial)}
    wrong = [name for name in serial if off[name] > 1e-12]
    assert wrong == ["dx", "dgain", "dbias"], f"rank {comm.rank}: with the wrong f these differ: {wrong}"

    largest = comm.all_reduce(np.array(worst.relative), how="max")          # of all ranks: none has failed
    if comm.rank == 0:
        print("1  check_op        swish_gate: its vjp is the transpose of its Jacobian, and keeps the arrays it says")
        print(f"2  check_adjoint   copy_to (f) and reduce_from (g): <dy, J v> = <vjp(dy), v> over {comm.size} ranks")
        print(f"3  compare         {', '.join(serial)} are off from serial by {largest:.0e} at most\n")
        print(f"f is left out.  Refused by the layout tags:\n    {no_f}\n")
        print("f forgets its all_reduce in the backward pass.  Found by compare, in all that comes before f:")
        for name in serial:
            print(f"    {name:6s} " + (f"wrong, by {off[name]:.0%}" if name in wrong else "right"))
        print("and named by check_adjoint (rank 0's part of the sentence):\n    " + wrong_f.partition(" | ")[0])
        print("\nOK: the layer passes all three checks on every rank, and both mistakes are found and named")


if __name__ == "__main__":
    launch(main, ranks=(2, 4))
