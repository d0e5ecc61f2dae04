"""What is the gradient of an all_reduce: the identity, or another all_reduce?  Both; what is done with the sum decides.

    mpirun -n 4 python mpi_examples/08_adjoint_of_all_reduce.py
    python mpi_examples/08_adjoint_of_all_reduce.py --simulate 4      (four threads, no MPI needed)

Every rank r has x_r, and after the all_reduce every rank has y = Σ_r x_r.  On two ranks:

     Replicated: one value, that all ranks hold              PerRank: a value each, which go different ways

     x_0 --+     +--  y --> l                                x_0 --+     +--  y_0 --> l_0 --+
           +-- Σ +           the same l, counted once              +-- Σ +                  +--> l_0 + l_1
     x_1 --+     +--  y --> l                                x_1 --+     +--  y_1 --> l_1 --+

     dx_r = dl/dy                 the identity               dx_r = Σ_s dl_s/dy_s      an all_reduce
     reduce_from, Megatron's g; mpi4jax.allreduce            copy_to(reduce_from(x)), g and then f;
                                                             torch.distributed.nn.functional.all_reduce

Forward they are the same call.  The vjp is the adjoint under the inner product <a, b>, and the layouts say which: that of a
replicated value counts it once, that of a value per rank adds up over the ranks.  Neither library is wrong, but each answer
is wrong in the other's place: one rank's part of the sum, or p times too large.  Megatron has both places: the last g stands
alone; every other g, with the f of the next layer, is the all_reduce whose gradient is another all_reduce.

What to expect: finite differences, which know of no vjp, decide each case; check_adjoint accepts each answer with its layouts
and refuses it with the other's, in a sentence; in two layers of an MLP a wrong g gives gradients p and p² times too large, and
a wrong f one rank's part.  Asked in NVIDIA/Megatron-LM issue 559 and in Dao-AILab/flash-attention issue 1244.
"""
from typing import Callable

import numpy as np

from refimpl import ops
from refimpl.autograd import LayoutError, Params, Replace, Tensor, op, value_and_grad
from refimpl.check import check_adjoint
from refimpl.comm import Comm, Mesh, launch
from refimpl.golden import compare
from refimpl.ops import gelu_tanh
from refimpl.parallel import (Cut, Placement, Replicated, column_parallel_linear, copy_to, gather, reduce_from,
                              row_parallel_linear, shard)
from refimpl.rng import draw

N, D, F = 5, 6, 11                                      # tokens, model width, feed-forward width: four ranks get 3+3+3+2
SHAPES = {"x": (N, D), "a1": (D, F), "b1": (F, D), "bias1": (D,), "a2": (D, F), "b2": (F, D), "bias2": (D,)}


@op(linearity="each", collective=True)
def all_reduce_per_rank(x, comm=None):
    """The sum over ranks, for every rank to do something else with: g, then f.

    Equation:   y_r = Σ_s x_s on every rank r
    Shapes:     x[...] Partial -> y[...] PerRank
    VJP:        dx_r = Σ_s dy_s  (all_reduce)
    Residuals:  none
    Reference:  torch.distributed.nn.functional.all_reduce
    """
    total, vjp_g = reduce_from.array(x, comm=comm)      # all_reduce | identity
    y, vjp_f = copy_to.array(total, comm=comm)          # identity | all_reduce

    def vjp(dy):
        return vjp_g(vjp_f(dy))
    return y, vjp


ANSWERS = {"identity": reduce_from, "all_reduce": all_reduce_per_rank}      # the vjp of each
RIGHT = {"replicated": "identity", "per_rank": "all_reduce"}                # layout of y -> which of them


def differences(total: Callable[[np.ndarray], np.ndarray], x: np.ndarray, comm: Comm) -> np.ndarray:
    """d total / d x_r for this rank's x_r.  The ranks' x are moved one after the other; all ranks evaluate each time."""
    slopes = []
    for r in range(comm.size):
        up, down = (total(x + step * (r == comm.rank)) for step in (0.125, -0.125))
        slopes.append((up - down) / 0.25)               # exact: the total is a square, and the numbers are short
    return slopes[comm.rank]


def one_number_a_rank(comm: Comm) -> list[str]:
    """Both answers for both layouts, and finite differences as the judge."""
    p, x, c = comm.size, np.array(comm.rank + 1.0), np.array(comm.rank + 1.0)
    y = comm.all_reduce(x)

    def row(what: str, number: np.ndarray, verdict: str = "") -> str:
        return f"   {what:27s}" + "".join(f"{n:8g}" for n in comm.all_gather(number[None], axis=0)) + f"   {verdict}".rstrip()

    account = [f"1  y = Σ x_r = {y:g}".ljust(30) + "".join(f"{f'rank {r}':>8s}" for r in range(p)), row("x_r = r + 1", x)]
    for layout, title, total, dl, wrong in (
            ("replicated", "one loss: l = ½·y²", lambda x: comm.all_reduce(x) ** 2 / 2, y, f"{p} times too large"),
            ("per_rank", "a loss each: Σ_r (r + 1)·½·y_r²", lambda x: comm.all_reduce(c * comm.all_reduce(x) ** 2 / 2), c * y,
             "the rank's own part of the sum")):
        judge = differences(total, x, comm)
        account += [f"\n   {title}", row("finite differences", judge)]
        for name, answer in ANSWERS.items():
            _, vjp = answer.array(x, comm=comm)
            dx = vjp(np.asarray(dl))                    # dl: the gradient of this rank's loss by its y
            assert (dx == judge) == (name == RIGHT[layout]), f"rank {comm.rank}, {layout}: {name} gives {dx}, not {judge}"
            account.append(row(f"vjp = {name}", dx, "right" if name == RIGHT[layout] else wrong))
    return account


def adjoint_tests(comm: Comm) -> list[str]:
    """Both answers with both layouts, on random numbers."""
    account, part = ["\n2  check_adjoint, by the layout of y"], draw(f"part {comm.rank}", (2, 3))
    for layout in RIGHT:
        for name, answer in ANSWERS.items():
            said = "accepted"
            if name == RIGHT[layout]:
                check_adjoint(answer, comm, "partial", layout, part)
            else:
                said = "refused:\n      " + refusal(AssertionError, check_adjoint, answer, comm, "partial", layout, part)
            account.append(f"   {layout:10s}   vjp = {name:10s}   {said}")
    return account


def refusal(error: type[Exception], function: Callable, *args) -> str:
    """The sentence with which `function` refuses; failing to refuse is a failure."""
    try:
        function(*args)
    except error as refused:
        return str(refused).partition(" | ")[0]         # rank 0's part of it
    raise AssertionError(f"{function.__name__} did not notice the mistake")


def two_layers(p: Params, comm: Comm) -> Tensor:
    """x[N, D] on every rank -> y[N, D] on every rank"""
    x = p["x"]
    for k in "12":
        h = gelu_tanh(column_parallel_linear(copy_to(x, comm=comm), p[f"a{k}"]))                    # f
        x = reduce_from(row_parallel_linear(h, p[f"b{k}"]), comm=comm) + p[f"bias{k}"]              # g
    return x


def gradients(mesh: Mesh, end: Callable[[Tensor], Tensor] = lambda y: y) -> dict[str, np.ndarray]:
    """Of sum(Y * Y) by all that SHAPES names, whole.  `end` comes behind Y."""
    table: dict[str, Placement] = {name: Replicated() for name in SHAPES}
    for k in "12":
        table |= {f"a{k}": Cut.even(1, F, mesh.tp), f"b{k}": Cut.even(0, F, mesh.tp)}

    def loss(p: Params) -> Tensor:
        y = end(two_layers(p, mesh.tp))
        return ops.sum(y * y)

    _, grads = value_and_grad(loss, shard({name: draw(name, shape) for name, shape in SHAPES.items()}, table, mesh))
    return gather(grads, table, mesh)


def both_mistakes(mesh: Mesh) -> list[str]:
    """The gradients of two layers of an MLP, with the right f and g, and with each answer in the other's place."""
    serial, p = gradients(Mesh()), mesh.tp.size
    worst = compare(gradients(mesh), serial)[0]
    assert worst.relative <= 1e-12, f"rank {mesh.tp.rank}: {worst}"

    with Replace("reduce_from", "*", all_reduce_per_rank.array):
        wrong_g = gradients(mesh)
    times = {"x": p * p, "a1": p * p, "b1": p * p, "bias1": p, "a2": p, "b2": p, "bias2": 1}         # p for every g behind it
    worst = compare({name: g / times[name] for name, g in wrong_g.items()}, serial)[0]
    assert worst.relative <= 1e-12, f"rank {mesh.tp.rank}, all_reduce as the vjp of g: {worst}"

    with Replace("copy_to", "*", lambda x, comm: (x.view(), lambda dy: dy)):        # so that g, then f, has the identity
        wrong_f = gradients(mesh)
    off = {d.name: d.relative for d in compare(wrong_f, serial)}
    wrong = [name for name in SHAPES if off[name] > 1e-12]
    assert wrong == ["x", "a1", "b1", "bias1"], f"rank {mesh.tp.rank}, identity as the vjp of f: these differ: {wrong}"
    parts = {"bias1": mesh.tp.all_reduce(wrong_f["bias1"])}                 # what lies directly before f
    worst = compare(parts, {"bias1": serial["bias1"]})[0]
    assert worst.relative <= 1e-12, f"rank {mesh.tp.rank}, the parts do not add up: {worst}"

    def row(what: str, words: list[str]) -> str:
        return f"   {what:22s}" + "".join(f"{word:>10s}" for word in words)
    return ["\n3  X -f-> A1 B1 -g-> + bias1 -f-> A2 B2 -g-> + bias2 = Y: the gradients of Σ Y² beside those of one rank",
            row("", list(SHAPES)), row("f and g as they are", ["right"] * len(SHAPES)),
            row("vjp of g = all_reduce", [f"× {n}" if n > 1 else "right" for n in times.values()]),
            row("vjp of f = identity", [f"{off[name]:.0%} off" if name in wrong else "right" for name in SHAPES]),
            "   last row: each rank goes on with its own part of a sum (rank 0 is shown); the parts for bias1 add up to it"]


def main(comm: Comm) -> None:
    mesh = Mesh(tp=comm.size, comm=comm)
    account = one_number_a_rank(mesh.tp) + adjoint_tests(mesh.tp) + both_mistakes(mesh)
    tags = refusal(LayoutError, gradients, mesh, lambda y: copy_to(y, comm=mesh.tp))
    account += ["\n4  with an f behind the last g Y is a value per rank, and so is the loss; the layout tags refuse it:",
                f"   {tags}"]
    comm.barrier()                                                          # all have come this far: none has failed
    if comm.rank == 0:
        print("\n".join(account))
        print("\nOK: the identity where y is one value, an all_reduce where it is a value per rank; each wrong for the other")


if __name__ == "__main__":
    launch(main, ranks=(2, 4))
