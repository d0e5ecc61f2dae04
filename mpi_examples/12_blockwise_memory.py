"""Attention without its matrix: naive attention needs memory for T² scores, blockwise attention for T outputs.

    mpirun -n 4 python mpi_examples/12_blockwise_memory.py
    python mpi_examples/12_blockwise_memory.py --simulate 4           (four threads, no MPI needed)
    ... --plot FILE                                                   draws it (needs matplotlib)

One head, T queries and T keys, K wide, a causal mask:

         naive          keys                        blockwise       keys
                 +-----------------+                         +-----+-----+-----+
                 | 1               |                         |  ½  |     |     |      a block of scores is made, used,
                 | 1 1             |                         +-----+-----+-----+      and forgotten; one that no query
      queries    | 1 1 1           |              queries    |  1  |  ½  |     |      sees is not made
                 | 1 1 1 1         |                         +-----+-----+-----+
                 | 1 1 1 1 1       |                         |  1  |  1  |  ½  |
                 +-----------------+                         +-----+-----+-----+
                   the whole matrix

      kept for the backward pass,                   the outputs, and of each query the logarithm of its
      besides q, k and v:  T²                       softmax's denominator:  T·(K + 1)

      products, forward and backward:  2 + 4        2 + 5, of the (n + 1)/2n of the blocks that are seen, n of them a side

The fifth product makes the scores again.  Ring attention (13_ring_attention.py) cuts T as well: each of p ranks keeps T/p of
the outputs, and nothing of the keys and values that visit it.

What to expect: T from 256 to 4096.  The same y, dq, dk and dv from all three; what is kept to the byte; and the peak of what is
held beside q, k, v and dy, as Python's tracemalloc sees it: from each T to the next four times as much, or twice.
"""
import argparse
import tracemalloc
from collections import namedtuple
from pathlib import Path

import numpy as np

from refimpl import ops
from refimpl.array import owner
from refimpl.autograd import Count, Op, residuals
from refimpl.comm import Comm, Mesh, launch
from refimpl.commands.pictures import NO_PICTURE, pyplot
from refimpl.golden import compare
from refimpl.ops import CAUSAL
from refimpl.parallel import SequenceLayout, ring_attention
from refimpl.rng import draw

LENGTHS = (256, 512, 1024, 2048, 4096)
B, H, K = 1, 1, 16                                      # samples, heads, head width
BLOCK, FLOAT = 64, 8                                    # queries, and keys, of a block; bytes of a number
NAMES = ("y", "dq", "dk", "dv")
Row = namedtuple("Row", "kept peak flops")              # bytes for backward, bytes at most, FLOP forward and backward


def numbers(T: int) -> dict[str, np.ndarray]:
    return {name: draw(name, (B, H, T, K)) for name in ("q", "k", "v", "dy")}


def run(attention: Op, a: dict[str, np.ndarray], **static) -> tuple[dict[str, np.ndarray], Row]:
    """y, dq, dk and dv, and what they took."""
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    with Count() as count:
        y, vjp = attention.array(a["q"], a["k"], a["v"], mask=CAUSAL, **static)
        inputs = {id(owner(x)) for x in a.values()}
        kept = {id(owner(x)): owner(x).nbytes for x in residuals(vjp).values() if id(owner(x)) not in inputs}
        grads = vjp(a["dy"])
    _, peak = tracemalloc.get_traced_memory()
    return dict(zip(NAMES, (y, *grads))), Row(sum(kept.values()), peak - before, count.flops["forward"])


def main(comm: Comm, plot: Path | None = None) -> None:
    mesh, p = Mesh(cp=comm.size, comm=comm), comm.size
    rows: dict[str, list[Row]] = {"naive": [], "blockwise": [], "ring": []}
    for T in LENGTHS:
        a, layout, n = numbers(T), SequenceLayout("zigzag", T), T // BLOCK
        right, took = {name: np.empty((B, H, T, K)) for name in NAMES}, np.zeros((2, 3), np.int64)
        comm.barrier()
        if comm.rank == 0:                              # the others wait: ranks that are threads share one tracemalloc
            tracemalloc.start()
            right, naive = run(ops.attention, a)
            ours, blockwise = run(ops.blockwise_attention, a, block_q=BLOCK, block_k=BLOCK)
            tracemalloc.stop()
            worst = compare(ours, right)[0]
            assert worst.relative <= 1e-12, f"blockwise, T = {T}: {worst}"
            took = np.array([naive, blockwise])
        right = {name: comm.broadcast(array) for name, array in right.items()}
        own = {name: layout.own(array, mesh.cp, axis=2) for name, array in (a | right).items()}
        ours, ring = run(ring_attention, own, comm=mesh.cp, layout=layout, block_q=BLOCK, block_k=BLOCK)
        worst = compare(ours, {name: own[name] for name in NAMES})[0]
        assert worst.relative <= 1e-12, f"rank {comm.rank}, ring, T = {T}: {worst}"

        naive, blockwise = (Row(*row) for row in comm.broadcast(took).tolist())
        scores, outputs = FLOAT * B * H * T * T, FLOAT * B * H * T * (K + 1)
        kept = naive.kept, blockwise.kept, ring.kept
        assert kept == (scores, outputs, outputs // p), f"rank {comm.rank}, T = {T}: {kept} bytes are kept"
        product = 2 * B * H * T * T * K
        assert (naive.flops, blockwise.flops) == (6 * product, 7 * product * (n + 1) / (2 * n)), f"T = {T}: {took}"
        for name, row in zip(rows, (naive, blockwise, ring)):
            rows[name].append(row)

    peaks = {name: np.array([row.peak for row in rows[name]]) for name in ("naive", "blockwise")}
    times = {name: peak[1:] / peak[:-1] for name, peak in peaks.items()}
    assert abs(times["naive"][-1] - 4) < 0.2 and abs(times["blockwise"][-1] - 2) < 0.2, times
    comm.barrier()                                                          # all have come this far: none has failed
    if comm.rank == 0:
        print(f"attention of one head, {K} wide, blocks of {BLOCK} x {BLOCK}, float64: bytes besides q, k, v and dy\n")
        print(f"{'':8s}{'kept for the backward pass':>45s}{'held at the peak':>28s}{'':8s}{'FLOP':>20s}")
        print(f"{'T':>8s}{'naive':>15s}{'blockwise':>14s}{f'ring, {p} ranks':>16s}{'naive':>15s}{'blockwise':>14s}   "
              f"{'blockwise / naive':>25s}")
        for T, naive, blockwise, ring in zip(LENGTHS, *rows.values()):
            print(f"{T:8d}{naive.kept:15,}{blockwise.kept:14,}{ring.kept:16,}{naive.peak:15,}{blockwise.peak:14,}   "
                  f"{blockwise.flops / naive.flops:25.3f}")
        print(f"{'formula':>8s}{'8·T²':>15s}{'8·T·(K+1)':>14s}{'/ p':>16s}{'measured':>15s}{'measured':>14s}   "
              f"{'7/6 · (n+1)/2n':>25s}")
        print(f"\nfrom T = {LENGTHS[-2]} to {LENGTHS[-1]} the peak grows {times['naive'][-1]:.2f} times, and "
              f"{times['blockwise'][-1]:.2f} times; at {LENGTHS[-1]} naive attention needs "
              f"{peaks['naive'][-1] / peaks['blockwise'][-1]:.0f} times as much")
        if plot:
            print("\n" + picture(plot, p, rows))
        print("\nOK: the same y, dq, dk and dv from all three; naive keeps T² scores, blockwise T outputs, a ring T/p")


def picture(file: Path, p: int, rows: dict[str, list[Row]]) -> str:
    """Bytes against T.  Says where it is, or what is missing."""
    plot = pyplot()
    if plot is None:
        return NO_PICTURE
    figure, axes = plot.subplots(figsize=(7, 4.6), layout="constrained")
    for name, color in (("naive", "#c2452d"), ("blockwise", "#1f5fa8"), ("ring", "#3a8f5c")):
        label = f"ring, one of {p} ranks" if name == "ring" else name
        if name != "ring":
            axes.loglog(LENGTHS, [row.peak for row in rows[name]], "o-", color=color, label=f"{label}: at the peak")
        axes.loglog(LENGTHS, [row.kept for row in rows[name]], "s--", color=color, markersize=5, label=f"{label}: kept")
    axes.set_xticks(LENGTHS, [f"{T:,}" for T in LENGTHS])
    units = {10 ** 4: "10 kB", 10 ** 5: "100 kB", 10 ** 6: "1 MB", 10 ** 7: "10 MB", 10 ** 8: "100 MB"}
    axes.set_yticks(list(units), list(units.values()))
    axes.minorticks_off()
    axes.set_title(f"one head, {K} wide, a causal mask, float64", fontsize=11)
    axes.set_xlabel("queries and keys, T")
    axes.set_ylabel("bytes besides q, k, v and dy")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    plot.close(figure)
    return f"picture: {file}"


if __name__ == "__main__":
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--plot", type=Path, metavar="FILE")
    own, rest = flags.parse_known_args()
    launch(lambda comm: main(comm, own.plot), ranks=(2, 4), argv=rest)
