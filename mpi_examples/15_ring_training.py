"""Training with the sequence cut: ring attention and a zigzag layout on three meshes, beside one rank.

    mpirun -n 4 python mpi_examples/15_ring_training.py
    python mpi_examples/15_ring_training.py --simulate 4              (four threads, no MPI needed)

    one rank     | 8 samples, whole, all of the layers       |
    cp=4         | 8 samples, ¼ of each, all of the layers   |  four times
    dp=2,cp=2    | 4 samples, ½ of each, all of the layers   |  four times
    cp=2,tp=2    | 8 samples, ½ of each, ½ of the layers     |  four times        (on two ranks there is cp=2 alone)

    zigzag, cp=2   positions     0..7   8..15   16..23   24..31       a piece from the front and one from the back, so that
                   cp rank        0       1       1        0          a causal mask leaves all the same work

Norms, feed-forward, embedding and loss treat each position by itself: cut positions change nothing for them.  In attention keys
and values go round the ring (13_ring_attention.py).  At the end the gradients, each of a part of the positions, are summed over
cp as they are over dp.  In one step a rank of cp = p, with b samples of T tokens and a width D, so sends

    6·L·(p-1)·b·(T/p)·D/tp      keys and values forward, and backward, with dk and dv, in L layers
    its share of the model      the payload of an all_reduce over all ranks that have other tokens: gradients, loss and count

Dropout, RoPE and targets go by global positions: who asks for position 17 gets the same wherever it lies.

What to expect: the same losses to some 15 digits, step by step; the same gradients; and what travelled, equal to the formulas.
"""
from dataclasses import replace

import numpy as np

from refimpl.analysis import local_parameters
from refimpl.comm import Comm, Mesh, SerialComm, launch
from refimpl.golden import compare
from refimpl.models import Config, placements
from refimpl.parallel import gather
from refimpl.text import ByteTokenizer, standard_library
from refimpl.train import Data, Options, Trainer

CFG = Config(vocab_size=256, n_layers=2, n_heads=4, d_model=48, max_seq_len=32, positions="rope", dropout=0.1)
L, D, T, B = CFG.n_layers, CFG.d_model, CFG.max_seq_len, 8
OPTIONS = Options(steps=12, batch_size=B, seq_len=T, lr=1e-3, attention="ring", layout="zigzag")
SERIAL = replace(OPTIONS, attention="naive", layout="contiguous")
TOLERANCE = 1e-12                                       # a step differs by rounding, 1e-15; training multiplies that


def train(data: Data, options: Options, mesh: Mesh) -> tuple[list[float], list[dict[str, np.ndarray]], list[int]]:
    """The losses; gradients, whole, of the first and the last step; what went round the ring, and the gradients' payload."""
    trainer, table, losses, grads = Trainer(data, CFG, options, mesh), placements(CFG, mesh), [], []
    for step in range(options.steps):
        local, row = trainer.step(step)
        losses.append(row["loss"])
        sent = [mesh.ledger.total("cp", "permute").wire, mesh.ledger.total("dp+cp" if mesh.dp.size > 1 else "cp",
                                                                           "all_reduce").elements]
        if step in (0, options.steps - 1):
            grads.append(gather(local, table, mesh))
    return losses, grads, sent


def main(comm: Comm) -> None:
    data = Data(ByteTokenizer().encode(standard_library()[:200_000]))
    serial, serial_grads, sent = train(data, SERIAL, Mesh(comm=SerialComm()))
    assert sent == [0, 0]
    runs, facts = {"one rank": serial}, []
    for cp, tp in ((comm.size, 1), (2, 1), (2, 2))[:1 if comm.size == 2 else 3]:
        mesh = Mesh(dp=comm.size // (cp * tp), cp=cp, tp=tp, comm=comm)
        losses, grads, sent = train(data, OPTIONS, mesh)
        by_loss = float(np.abs(np.array(losses) - serial).max())
        assert by_loss <= TOLERANCE, f"rank {comm.rank}, {mesh}: losses differ by {by_loss:.0e}"
        by_grad = max((compare(*pair)[0] for pair in zip(grads, serial_grads)), key=lambda d: d.relative)
        assert by_grad.relative <= TOLERANCE, f"rank {comm.rank}, {mesh}: {by_grad}"
        expected = [6 * L * (cp - 1) * (B // mesh.dp.size) * (T // cp) * D // tp, local_parameters(CFG, mesh) + 2]
        assert sent == expected, f"rank {comm.rank}, {mesh}: sent {sent} elements, by the formulas {expected}"
        runs[str(mesh)] = losses
        facts.append((by_loss, by_grad.relative, *sent))
    largest = comm.all_reduce(np.array(facts), how="max")                   # of all ranks: none has failed
    if comm.rank == 0:
        print(" " * 34 + "".join(f"{name:>20s}" for name in runs))
        for step in (0, OPTIONS.steps // 2 - 1, OPTIONS.steps - 1):
            print(f"{f'loss, step {step + 1}':>34s}" + "".join(f"{losses[step]:20.14f}" for losses in runs.values()))
        for what, numbers, form in zip(("all losses differ by", "gradients, first and last step, by", "elements round the ring",
                                        "gradients and (loss, count)"), largest.T, (".0e", ".0e", ",.0f", ",.0f")):
            print(f"{what:>34s}{'':20s}" + "".join(f"{n:20{form}}" for n in numbers))
        print(f"\nOK: {OPTIONS.steps} steps with ring attention and zigzag give one rank's losses and gradients on every mesh")


if __name__ == "__main__":
    launch(main, ranks=(2, 4))
