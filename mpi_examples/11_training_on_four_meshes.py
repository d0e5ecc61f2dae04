"""One training run on four meshes, and a relay that changes its mesh on the way: all loss curves lie on each other.

    mpirun -n 4 python mpi_examples/11_training_on_four_meshes.py
    python mpi_examples/11_training_on_four_meshes.py --simulate 4      (four threads, no MPI needed)
    ... --plot loss.png                                                 draws the curves (needs matplotlib)

    dp=1     | batch 8, whole layers |                  one rank
    dp=4     |2 |2 |2 |2 |                              samples cut, every rank has the whole model
    dp=2,tp=2|4,½|4,½|4,½|4,½|                          both
    tp=4     |8,¼|8,¼|8,¼|8,¼|                          layers cut, every rank sees all samples

    relay    dp=4 ─ checkpoint ─ dp=2,tp=2 ─ checkpoint ─ tp=4       with the optimizer's state cut over dp (ZeRO-1) where
                                                                     there is dp

Initial weights, the order of the samples and dropout are a hash of global indices, so all five do the same arithmetic, in
another order of summation.  A checkpoint holds global arrays in pieces; whoever reads it takes the pieces that it needs.

What to expect: losses that agree to some 15 digits in the first step, and differences that grow slowly, since training
multiplies rounding errors; the relay is no exception.
"""
import argparse
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from refimpl.comm import Comm, Mesh, SerialComm, launch
from refimpl.commands.pictures import draw_losses
from refimpl.models import Config
from refimpl.text import ByteTokenizer, standard_library
from refimpl.train import Data, Options, Trainer

CFG = Config(vocab_size=256, n_layers=2, n_heads=4, d_model=48, max_seq_len=32, dropout=0.1)
OPTIONS = Options(steps=30, batch_size=8, seq_len=32, lr=1e-3, warmup=5, schedule="cosine", clip=1.0)
LEG = 10                                                # steps of the relay on one mesh
TOLERANCE = 1e-10                                       # one step differs by rounding, 1e-15; training multiplies that


def relay(data: Data, meshes: list[Mesh], folder: Path) -> list[float]:
    """The losses of a run that goes on from its own checkpoint on another mesh, again and again."""
    losses: list[float] = []
    checkpoint = None
    for leg, mesh in enumerate(meshes):
        trainer = Trainer(data, CFG, replace(OPTIONS, zero=mesh.dp.size > 1), mesh, folder)
        if checkpoint:
            trainer.resume(checkpoint)
        losses += [trainer.step(step)[1]["loss"] for step in range(leg * LEG, (leg + 1) * LEG)]
        checkpoint = trainer.save()
    return losses


def main(comm: Comm, plot: Path | None = None) -> None:
    data = Data(ByteTokenizer().encode(standard_library()[:200_000]))
    meshes = [Mesh(dp=comm.size // tp, tp=tp, comm=comm) for tp in (1, 2, 4) if tp <= comm.size]
    runs = {str(mesh): Trainer(data, CFG, OPTIONS, mesh).run().losses for mesh in (Mesh(comm=SerialComm()), *meshes)}
    folder = Path(comm.gather_texts(tempfile.mkdtemp() if comm.rank == 0 else "")[0])      # one that all ranks see
    try:
        runs["relay"] = relay(data, (meshes * 3)[:3], folder)
    finally:
        comm.barrier()
        shutil.rmtree(folder, ignore_errors=True)
    serial = np.array(runs["dp=1"])
    worst = {name: np.abs(np.array(losses) - serial).max() for name, losses in runs.items()}
    assert max(worst.values()) <= TOLERANCE, f"rank {comm.rank}: {worst}"
    if comm.rank == 0:
        print(f"{'step':>6}" + "".join(f"{name:>16}" for name in runs))
        for step in (0, *range(LEG - 1, OPTIONS.steps, LEG)):
            print(f"{step + 1:6}" + "".join(f"{losses[step]:16.12f}" for losses in runs.values()))
        print("differs" + "".join(f"{worst[name]:{15 if i == 0 else 16}.0e}" for i, name in enumerate(runs)))
        if plot:
            plot.parent.mkdir(parents=True, exist_ok=True)
            curves = {name: (range(1, OPTIONS.steps + 1), losses) for name, losses in runs.items()}
            print(draw_losses(plot, curves, "nats per byte", nested=True))
        print(f"\nOK: {len(runs)} runs of {OPTIONS.steps} steps have the same losses, on whatever mesh")


if __name__ == "__main__":
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--plot", type=Path, metavar="FILE", help="draw the loss curves")
    own, rest = flags.parse_known_args()
    launch(lambda comm: main(comm, own.plot), ranks=(2, 4), argv=rest)
