"""A ring with a causal mask: with the sequence cut as it comes, ranks wait for the last one; cut otherwise, all are busy.

    mpirun -n 4 python mpi_examples/14_balanced_layouts.py
    python mpi_examples/14_balanced_layouts.py --simulate 4           (four threads, no MPI needed)
    ... --plot FILE                                                   draws it (needs matplotlib)

A query looks back: early ones have little to do, late ones much.  Which rank has which of 16 positions, on four ranks:

    contiguous    0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3
    zigzag        0 0 1 1 2 2 3 3 3 3 2 2 1 1 0 0       a piece from the front, and one from the back
    striped       0 1 2 3 0 1 2 3 0 1 2 3 0 1 2 3

and the share of a pair (queries of a rank, keys of a rank) that the mask leaves, ½ being a little more on the diagonal:

                     contiguous                      zigzag                       striped
         keys of   0   1   2   3                 0   1   2   3                0   1   2   3
        rank 0     ½   .   .   .                 ½   ½   ½   ½                ½   ½   ½   ½
        rank 1     1   ½   .   .                 ½   ½   ½   ½                ½   ½   ½   ½
        rank 2     1   1   ½   .                 ½   ½   ½   ½                ½   ½   ½   ½
        rank 3     1   1   1   ½                 ½   ½   ½   ½                ½   ½   ½   ½

Each rank takes its row's pairs in turn, one a step (13_ring_attention.py), and the layer is done when the slowest rank is.
What the mask leaves is worth something only where it can be skipped in whole blocks.  With n blocks of queries and of keys a
rank, the diagonal costs d = (n + 1)/2n of a pair, and the ring takes, in pairs (p without a mask):

    contiguous    p - 1 + d                 nearly as long as without a mask, however small the blocks
    zigzag        (p - 1)/2 + d             no block has some of both of a rank's pieces, so n is 2 at least
    striped       p·d

A contiguous ring with whole pairs, n = 1, is busy for (p + 1)/2p of its time: p(p + 1)/2 pairs in p·p rank-steps.

What to expect: the FLOP that each rank has at each step, counted, as a chart; the table above from these counts; the backward
pass 2.5 times as long in every case (five products for two); and for every layout the same y, dq, dk, dv, and traffic.
"""
import argparse
from pathlib import Path
from typing import Any, Callable

import numpy as np

from refimpl import ops
from refimpl.analysis import causal_share
from refimpl.autograd import Count, Layout, Params, Tensor, value_and_grad
from refimpl.comm import Comm, Mesh, launch
from refimpl.commands.pictures import NO_PICTURE, pyplot
from refimpl.golden import compare
from refimpl.ops import CAUSAL
from refimpl.parallel import LAYOUTS, SequenceLayout, ring_attention
from refimpl.rng import draw

B, H, G, K = 1, 2, 1, 16                                # samples, heads of queries, heads of keys and values, head width
S = 128                                                 # positions
BLOCKS = (1, 2, 8)                                      # n: of queries, and of keys, of a rank
OWN_POSITIONS = Layout(frozenset({"cp"}))               # the tag of data that is cut over cp


class Steps(Count):
    """Counts, and notes what has been counted when the next keys are waited for: the end of each step but the last."""

    def __init__(self) -> None:
        super().__init__()
        self.at_ends: list[int] = []

    def call(self, op: Any, run: Callable, *arrays: Any, **static: Any) -> tuple[Any, Any]:
        if op.name == "wait" and not self.flops["backward"]:
            self.at_ends.append(self.flops["forward"])
        return super().call(op, run, *arrays, **static)

    def of_steps(self, p: int) -> list[int]:
        """FLOP of each step of the forward pass."""
        return np.diff([0, *self.at_ends[:p - 1], self.flops["forward"]]).tolist()


def numbers() -> dict[str, np.ndarray]:
    """Queries, keys and values of the whole sequence, and dy."""
    return {name: draw(name, (B, H if name in ("q", "dy") else G, S, K)) for name in ("q", "k", "v", "dy")}


def run(own: dict[str, np.ndarray], attention: Callable) -> dict[str, np.ndarray]:
    """y, dq, dk and dv."""
    def loss(p: Params) -> tuple[Tensor, Tensor]:
        y = attention(p["q"], p["k"], p["v"])
        return ops.sum(y * Tensor(own["dy"], OWN_POSITIONS)), y             # whose gradient by y is dy
    (_, y), grads = value_and_grad(loss, {name: Tensor(own[name], OWN_POSITIONS) for name in "qkv"})
    return {"y": y.array, **{f"d{name}": g.array for name, g in grads.items()}}


def steps_of(kind: str, n: int, mesh: Mesh, serial: dict[str, np.ndarray]) -> np.ndarray:
    """FLOP of the forward pass, (ranks, steps), with one layout and n blocks a rank; everything else is checked."""
    layout, p, size = SequenceLayout(kind, S), mesh.cp.size, S // mesh.cp.size // n
    own = {name: layout.own(a, mesh.cp, axis=2) for name, a in numbers().items()}
    mesh.ledger.clear()
    with Steps() as count:
        ours = run(own, lambda q, k, v: ring_attention(q, k, v, comm=mesh.cp, layout=layout, mask=CAUSAL, block_q=size,
                                                       block_k=size))
    worst = compare(ours, {name: layout.own(a, mesh.cp, axis=2) for name, a in serial.items()})[0]
    assert worst.relative <= 1e-12, f"rank {mesh.cp.rank}, {kind}, {n} blocks: {worst}"
    sent = mesh.ledger.total("cp", "permute").wire
    assert sent == 6 * (p - 1) * B * (S // p) * G * K, f"rank {mesh.cp.rank}, {kind}: sent {sent} elements"
    assert count.flops["backward"] == 2.5 * count.flops["forward"], f"rank {mesh.cp.rank}, {kind}: {count.flops}"
    return mesh.cp.all_gather(np.array([count.of_steps(p)]), axis=0)        # of all ranks: none has failed


def formula(kind: str, n: int, p: int) -> float:
    """How long the ring takes, in pairs."""
    n = max(2, n) if kind == "zigzag" else n
    d = (n + 1) / (2 * n)
    return {"contiguous": p - 1 + d, "zigzag": (p - 1) / 2 + d, "striped": p * d}[kind]


def main(comm: Comm, plot: Path | None = None) -> None:
    mesh, p = Mesh(cp=comm.size, comm=comm), comm.size
    serial = run(numbers(), lambda q, k, v: ops.attention(q, k, v, mask=CAUSAL))
    pair = 4 * B * H * K * (S // p) ** 2                                    # FLOP of q·kᵀ and p·v where nothing is skipped
    taken, table = {}, []
    for n in BLOCKS:
        cells = []
        for kind in LAYOUTS:
            steps = steps_of(kind, n, mesh, serial) / pair                  # (ranks, steps), in pairs
            time = steps.sum(axis=1).max()
            assert time == steps.max(axis=0).sum()                          # also where all wait for each other at every step
            assert time == formula(kind, n, p), f"{kind}, {n} blocks: {time} pairs, by the formula {formula(kind, n, p)}"
            busy = steps.sum() / (p * time)
            assert busy == (1 if kind != "contiguous" else causal_share(p) if n == 1 else busy)
            cells.append(f"{time:10g}{time / p:9.1%}{busy:9.1%}")
            taken[kind] = steps                                             # of the last n
        table.append(f"    {n:3d} {S // p // n:10d}  " + "".join(cells))

    if comm.rank == 0:
        print(f"{S} positions on {p} ranks, {BLOCKS[-1]} blocks a rank; # the rank computes, . it waits, | the next step\n")
        print("\n".join(line for kind in LAYOUTS for line in chart(kind, taken[kind])))
        print("\nhow long the ring takes: in pairs, as a share of its time without a mask, and how much of it ranks are busy\n")
        print(f"{'':20s}" + "".join(f"{kind:>28s}" for kind in LAYOUTS))
        print(f"    {'n':>3s} {'positions':>10s}  " + f"{'pairs':>10s}{'of all':>9s}{'busy':>9s}" * len(LAYOUTS))
        print("\n".join(table))
        print(f"\n(p + 1)/2p = {causal_share(p):.1%};  sent by each rank: {6 * (p - 1) * B * (S // p) * G * K:,} elements, "
              "forward and backward, with any layout")
        if plot:
            print("\n" + picture(plot, taken))
        print("\nOK: with zigzag and striped all ranks are busy all the time, contiguous ones for (p + 1)/2p of it or less")


def chart(kind: str, steps: np.ndarray) -> list[str]:
    """A row for each rank; a pair is 16 characters wide."""
    wide = (16 * steps).round().astype(int)
    assert np.array_equal(wide, 16 * steps)
    rows = ["|".join(("#" * n).ljust(longest, ".") for n, longest in zip(row, wide.max(axis=0))) for row in wide]
    return [f"    {kind if r == 0 else '':12s}rank {r}  {row}" for r, row in enumerate(rows)] + [""]


def picture(file: Path, taken: dict[str, np.ndarray]) -> str:
    """The same chart.  Says where it is, or what is missing."""
    plot = pyplot()
    if plot is None:
        return NO_PICTURE
    p = len(next(iter(taken.values())))
    figure, all_axes = plot.subplots(len(taken), figsize=(7, 1.1 + 0.42 * p * len(taken)), sharex=True, layout="constrained")
    for axes, (kind, steps) in zip(all_axes, taken.items()):
        starts = np.concatenate([[0], steps.max(axis=0).cumsum()])
        for r, row in enumerate(steps):
            axes.barh(r, starts[-1], 0.8, color="#eeeeee")
            for t, length in enumerate(row):
                axes.barh(r, length, 0.8, starts[t], color=("#1f5fa8", "#5b93cf")[t % 2])
        axes.axvline(p, color="#999999", linewidth=1, linestyle=":")
        axes.set_yticks(range(p), [f"rank {r}" for r in range(p)])
        axes.invert_yaxis()
        busy = steps.sum() / (p * starts[-1])
        axes.set_title(f"{kind}: {starts[-1]:g} pairs, ranks busy for {busy:.0%} of the time", fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1].set_xlim(0, p * 1.02)
    all_axes[-1].set_xticks(range(p + 1))
    all_axes[-1].set_xlabel("counted work, in pairs (dotted: a ring without a mask)")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    plot.close(figure)
    return f"picture: {file}"


if __name__ == "__main__":
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--plot", type=Path, metavar="FILE")
    own, rest = flags.parse_known_args()
    launch(lambda comm: main(comm, own.plot), ranks=(2, 4), argv=rest)
