"""The same bits on any number of ranks, and what they cost.

    mpirun -n 4 python mpi_examples/10_equal_bits.py
    python mpi_examples/10_equal_bits.py --simulate 4         (four threads, no MPI needed)

(a + b) + c is not a + (b + c) once each sum is rounded.  A row-cut product on four ranks adds four parts where one rank adds
none, so the last bits of everything depend on the number of ranks:

    one rank     x0·w0 + x1·w1 + ... + x7·w7 in the order of a BLAS kernel
    four ranks   (x0·w0 + x1·w1) + (x2·w2 + x3·w3) + ... in the order of a kernel, and then of an all_reduce

With EqualBits everything is cut in eight, whoever computes it, and added up in pairs:

    one rank     ((p0 + p1) + (p2 + p3)) + ((p4 + p5) + (p6 + p7))
    four ranks   |rank 0 |   |rank 1 |     |rank 2 |   |rank 3 |        the inner sums here, the outer ones by the all_reduce

It serves to find faults: whatever differs then between two meshes is one, not rounding.

What to expect: without it, nearly every gradient of one step differs in some bits from one rank's (by rounding alone); with
it, none, nor the loss.  A step takes longer: eight small products for a large one, and more all_reduces.
"""
import time
from contextlib import nullcontext

import numpy as np

from refimpl.comm import Comm, Mesh, SerialComm, launch
from refimpl.models import Config, EqualBits, init, placements
from refimpl.parallel import gather
from refimpl.rng import integers, stream
from refimpl.train import Batch, gradients

CFG = Config(vocab_size=250, n_layers=2, n_heads=8, d_model=128, max_seq_len=64, vocab_multiple=8, dropout=0.1)
B, ROUNDS = 4, 5
TEXT = integers(stream(0, "text"), np.arange(B * 65).reshape(B, 65), below=CFG.vocab_size)


def step(comm: Comm, equal: bool) -> tuple[dict[str, np.ndarray], float]:
    """The loss and every gradient, whole, of one step; and the seconds that it took, the least of some rounds."""
    mesh = Mesh(tp=comm.size, comm=comm.fixed_order())
    params, seconds = init(CFG, mesh, seed=0), []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        with EqualBits(CFG, mesh) if equal else nullcontext():
            g = gradients(params, [Batch(np.arange(B), TEXT[:, :-1], TEXT[:, 1:])], CFG, mesh, seed=0, step=1)
        seconds.append(time.perf_counter() - start)
    return {"loss": np.array(g.loss), **gather(g.grads, placements(CFG, mesh), mesh)}, min(seconds)


def main(comm: Comm) -> None:
    account = []
    for equal in (False, True):
        (alone, alone_seconds), (ours, seconds) = step(SerialComm(), equal), step(comm, equal)
        differ = [name for name in alone if alone[name].tobytes() != ours[name].tobytes()]
        worst = max(float(np.abs(ours[name] - a).max() / np.abs(a).max()) for name, a in alone.items()
                    if "attn.k.b" not in name)          # whose gradient is rounding alone
        assert worst <= 1e-12, f"rank {comm.rank}: off by {worst:.0e}, which is not rounding alone"
        assert (len(differ) > len(alone) / 2) if not equal else not differ, f"rank {comm.rank}: {differ}"
        account.append(f"{'equal bits' if equal else 'as it comes':14}{len(differ):>6} of {len(alone)}{worst:>14.0e}"
                       f"{1e3 * alone_seconds:>12.0f}{1e3 * seconds:>12.0f}")
    if comm.rank == 0:
        print(f"one training step of a decoder of {CFG.n_layers} layers, one rank against tp={comm.size}\n")
        print(f"{'':14}{'differ':>12}{'by at most':>12}{'ms, 1 rank':>12}{f'ms, tp={comm.size}':>12}")
        print("\n".join(account))
        print(f"\nOK: with EqualBits the loss and all gradients have the same bits on {comm.size} ranks as on one")


if __name__ == "__main__":
    launch(main, ranks=(2, 4))
