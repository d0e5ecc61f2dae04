"""Sequence parallelism: between a layer's matrices, tensor-parallel ranks share the positions, and nothing more travels.

    mpirun -n 4 python mpi_examples/16_sequence_parallel.py
    python mpi_examples/16_sequence_parallel.py --simulate 4          (four threads, no MPI needed)

Tensor parallelism cuts the matrices.  What lies between them, norms, dropout and residual sums, every rank computes and keeps
for all positions, the same as the others.  But there each position is treated by itself, so ranks may share them.  Four
positions on two ranks:

                 norm             q k v, attention, o        dropout, sum, norm          up, GELU, down

    tp    rank 0   0 1 2 3   f      0 1 2 3 of heads 0 1   g   0 1 2 3          f        0 1 2 3 of units 0 ..    g
          rank 1   0 1 2 3          0 1 2 3 of heads 2 3       0 1 2 3                   0 1 2 3 of units F/2 ..

    +sp   rank 0   0 1       f'     0 1 2 3 of heads 0 1   g'  0 1              f'       0 1 2 3 of units 0 ..    g'
          rank 1   2 3              0 1 2 3 of heads 2 3       2 3                       0 1 2 3 of units F/2 ..

          forward              backward                              forward                backward
    f     nothing              all_reduce                      f'    all_gather             reduce_scatter
    g     all_reduce           nothing                         g'    reduce_scatter         all_gather

A ring makes an all_reduce of a reduce_scatter and an all_gather (06_ring_all_reduce.py), so f' and g' send as much as f and g.
One thing is added: a gain or a bias that is used between the matrices meets other positions on each rank, and its gradient must
be summed over tp.  That does not grow with the tokens.

Behind f' the input of the matrices is whole again.  It may be kept so for the backward pass; or of it, too, 1/p, if it is
gathered once more then (Plan.regather).

What to expect: the same loss and gradients in all ways, equal to one rank's, also where the positions do not divide; what
travels for activations, with a ring, equal to the element, and with regather one all_gather more for each f'; and the bytes
that a layer keeps for the backward pass: between the matrices 1/p, with regather 1/p of all, Korthikanti's 34/t.
Reference: Korthikanti et al. 2022, section 4.2.2
"""
from typing import Any, Callable

import numpy as np

from refimpl.array import owner
from refimpl.autograd import Frame, Params, Tensor, residuals, stack
from refimpl.comm import Comm, Mesh, launch
from refimpl.golden import compare
from refimpl.models import Config, Context, Plan, decoder, init, placements
from refimpl.parallel import gather
from refimpl.rng import integers, stream
from refimpl.train import Batch, gradients

CFG = Config(vocab_size=50, n_layers=2, n_heads=4, d_model=32, max_seq_len=64, dropout=0.1)
L, D, F, H = CFG.n_layers, CFG.d_model, CFG.d_ff, CFG.n_heads
B, T = 2, 64                                            # samples, positions
UNEVEN = 27                                             # positions: on four ranks 7+7+7+6
FLOAT, BOOL = 8, 1                                      # bytes of an element; of one of a dropout mask
WAYS = {"tp": Plan(), "tp, sp": Plan(sequence_parallel=True), "regather": Plan(sequence_parallel=True, regather=True)}
PLACES = {"between the matrices": ("layer_norm", "dropout"), "their input, whole": ("attn.q", "mlp.up"), "inside": ("",)}


class Kept(Frame):
    """The arrays that vjps keep, each under the name of the first call that keeps it; not the parameters."""

    def __init__(self, params: dict[str, Tensor]) -> None:
        self.arrays: dict[int, tuple[str, np.ndarray]] = {}
        self.parameters = {id(owner(t.array)) for t in params.values()}

    def call(self, op: Any, run: Callable, *arrays: Any, **static: Any) -> tuple[Any, Any]:
        y, vjp = run(*arrays, **static)
        for a in map(owner, residuals(vjp).values() if vjp else ()):
            if id(a) not in self.parameters:
                self.arrays.setdefault(id(a), (stack.name, a))
        return y, vjp


def batch(length: int) -> Batch:
    text = integers(stream(0, "text"), np.arange(B * (length + 1)).reshape(B, length + 1), below=CFG.vocab_size)
    return Batch(np.arange(B), text[:, :-1], text[:, 1:])


def step(mesh: Mesh, plan: Plan, length: int = T) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The loss and all gradients, whole, of one step, and what it sent."""
    params = init(CFG, mesh, seed=0)
    mesh.ledger.clear()
    g = gradients(params, [batch(length)], CFG, mesh, seed=0, step=0, plan=plan)
    sent = wire(mesh)
    return {"loss": np.array(g.loss), **gather(g.grads, placements(CFG, mesh), mesh)}, sent


def wire(mesh: Mesh) -> dict[str, float]:
    """Elements that a ring would send from a rank, by operation: a model, since MPI does the sending."""
    p = mesh.tp.size
    times = {"all_reduce": 2 * (p - 1) / p, "reduce_scatter": (p - 1) / p, "all_gather": p - 1}     # of the counted payload
    return {operation: times[operation] * mesh.ledger.total("tp", operation).elements for operation in times}


def kept(mesh: Mesh, plan: Plan) -> dict[str, int]:
    """Bytes that a layer keeps for the backward pass: between the matrices, as their input, and inside."""
    data, params = batch(T), init(CFG, mesh, seed=0)
    with Kept(params) as found:
        decoder.loss(Tensor(data.tokens), data.targets, Params(params), CFG, Context.over(mesh, data.rows, T, plan, step=0))
    sizes = dict.fromkeys(PLACES, 0)
    for name, a in found.arrays.values():
        if name.startswith("layers.0."):
            sizes[next(place for place, ends in PLACES.items() if name.endswith(ends))] += a.nbytes
    return sizes


def main(comm: Comm) -> None:
    mesh, p, r = Mesh(tp=comm.size, comm=comm), comm.size, comm.rank
    gauges = [name for name in placements(CFG, mesh) if name.endswith("attn.k.b")]         # their gradients are rounding alone
    off, travelled = 0.0, dict[tuple[int, str], dict[str, float]]()
    for length in (T, UNEVEN):
        serial, _ = step(Mesh(), Plan(), length)
        for name, plan in WAYS.items():
            ours, sent = step(mesh, plan, length)
            worst = compare(*({k: a for k, a in grads.items() if k not in gauges} for grads in (ours, serial)))[0]
            assert worst.relative <= 1e-12, f"rank {r}, {name}, {length} positions: {worst}"
            off = max(off, worst.relative)
            travelled[length, name] = sent
    exchanges, n = 4 * L + 2, B * T * D                 # f and g of each sublayer, g of the embedding, f of the head
    of_loss = 2 * (p - 1) / p * 3 * B * T               # 3 numbers a token: the vocabulary is cut, too
    shared = 2 * (p - 1) / p * (D * CFG.max_seq_len + (6 * L + 2) * D)      # gradients: positions, gains, biases behind g
    half, once_more = (p - 1) / p * exchanges * n, (p - 1) / p * (2 * L + 1) * n
    want = {"tp": {"all_reduce": 2 * half + of_loss, "reduce_scatter": 0, "all_gather": 0},
            "tp, sp": {"all_reduce": of_loss + shared, "reduce_scatter": half, "all_gather": half},
            "regather": {"all_reduce": of_loss + shared, "reduce_scatter": half, "all_gather": half + once_more}}
    for way in WAYS:
        assert travelled[T, way] == want[way], f"rank {r}, {way}: {travelled[T, way]}, expected {want[way]}"

    bytes_kept = {way: kept(mesh, plan) for way, plan in WAYS.items()}
    formulas = dict(zip(PLACES, (2 * (FLOAT * (B * T * D + B * T) + BOOL * B * T * D),      # x̂ and r of a norm; a mask
                                 2 * FLOAT * B * T * D,
                                 FLOAT * (4 * B * T * D + B * H * T * T + 2 * B * T * F) // p)))     # q k v y, p; up, GELU
    for name in formulas:
        assert bytes_kept["tp"][name] == formulas[name], f"rank {r}: {name}: {bytes_kept['tp']}, expected {formulas}"
        for way, cut in (("tp, sp", ("between the matrices",)), ("regather", ("between the matrices", "their input, whole"))):
            share = p if name in cut else 1
            assert bytes_kept[way][name] * share == formulas[name], f"rank {r}, {way}: {name}: {bytes_kept[way]}"

    largest = float(comm.all_reduce(np.array(off), how="max"))              # of all ranks: none has failed
    if r == 0:
        print(f"a decoder of {L} layers, D = {D}, on {B} x {T} tokens and {p} ranks\n")
        print(f"{'elements that a rank sends in one step, with a ring':54s}" + "".join(f"{way:>12s}" for way in WAYS))
        for what, numbers in (("activations, all_reduce", (2 * half, 0, 0)),
                              ("activations, reduce_scatter", (0, half, half)),
                              ("activations, all_gather", (0, half, half + once_more)),
                              ("together: 2(p-1)/p · (4L + 2)·B·T·D", (2 * half, 2 * half, 2 * half + once_more)),
                              ("gradients of gains, biases and positions", (0, shared, shared)),
                              ("the loss", (of_loss,) * 3)):
            print(f"    {what:50s}" + "".join(f"{x:12,.0f}" for x in numbers))
        print(f"\n{'bytes that a rank keeps of one layer for backward':54s}" + "".join(f"{way:>12s}" for way in WAYS))
        for name in formulas:
            print(f"    {name:50s}" + "".join(f"{sizes[name]:12,}" for sizes in bytes_kept.values()))
        print(f"    {'together':50s}" + "".join(f"{sum(sizes.values()):12,}" for sizes in bytes_kept.values()))
        print(f"\nloss and gradients, {T} and {UNEVEN} positions: off from one rank's by {largest:.0e} at most")
        print(f"\nwith regather 1/{p} of all that a layer keeps, and an all_gather more for each f")
        print(f"\nOK: equal gradients; sequence parallelism: as much travels, 1/{p} of what lies between matrices is kept")


if __name__ == "__main__":
    launch(main, ranks=(2, 4))
