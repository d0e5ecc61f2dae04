"""One training step beside torch's and HIPS autograd's, interleaved: make bench, or python benchmarks/train.py where torch and
autograd are installed.

The model: GPT of 6 layers, d 384, 6 heads, T 256, V 4096, float32, AdamW, batch 8: 12.3 million parameters.  Each contender is
a process (ours on all cores: one MPI rank a core, ZeRO-1) that sleeps until it is its turn; in every round each makes one step,
in an order drawn anew, so that a slow moment of the machine hits all.  Shown are the medians over the rounds, the ratios to
torch in the same round with quartiles, which share of the measured matrix-product speed 6·N·tokens amounts to, memory at its
peak above what the imports take, and how ours scales with ranks.  All start from the same weights, and must agree about the
losses.
"""
import argparse
import importlib.util
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable

from contenders import CORES, HERE, Contender, leave, machine, rounds, spread, status, take_turns

LAYERS, D, HEADS, T, BATCH, V, LR = 6, 384, 6, 256, 8, 4096, 3e-4
TOLERANCE = 2e-3                                        # of losses


def contend(kind: str, threads: int, folder: Path) -> None:
    """Make a step whenever the parent says so, and write down how long it took."""
    import numpy as np

    from refimpl.autograd import Clock
    from refimpl.comm import Mesh, world
    from refimpl.memory import keep_memory
    from refimpl.models import Config, init
    from refimpl.rng import integers, stream
    from refimpl.train import Data, Options, Trainer
    if kind == "torch":
        import torch  # noqa: F401
    elif kind == "autograd":
        import autograd.numpy  # noqa: F401
    cfg = Config(vocab_size=V, n_layers=LAYERS, n_heads=HEADS, d_model=D, max_seq_len=T)
    if kind == "refimpl":
        keep_memory()                                   # as `python -m refimpl train` does
    comm = world(checked=False) if kind == "refimpl" else None
    mesh = Mesh(dp=comm.size, comm=comm) if comm else Mesh()
    options = Options(steps=10 ** 6, batch_size=BATCH, seq_len=T, lr=LR, dtype="float32", check_replicas=0,
                      zero=mesh.dp.size > 1, attention="blockwise")
    before = status("VmRSS")
    corpus = Data(integers(stream(0, "corpus"), np.arange(100_000), V))
    trainer = Trainer(corpus, cfg, options, mesh)
    run: Callable[[int], float]
    if kind == "refimpl":
        def run(step: int) -> float:
            return trainer.step(step)[1]["loss"]
    else:
        from train_peers import hips_step, torch_step
        weights = {name: p.array for name, p in init(cfg, mesh, 0, "float32").items()}
        trainer.state.params = {}
        step_of = torch_step(cfg, weights, LR, threads) if kind == "torch" else hips_step(cfg, weights, LR)
        del weights

        def run(step: int) -> float:
            batch = next(trainer.sampler.step(step, BATCH, 1, mesh))
            return step_of(batch.tokens, batch.targets)
    step = take_turns(folder, comm, run)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    payload, products = trainer.mesh.ledger.total("dp").elements if kind == "refimpl" else 0, 0.0
    if kind == "refimpl":
        start = time.perf_counter()
        with Clock() as clock:
            run(step)
        products = sum(span.stop - span.start for span in clock.spans if span.op == "product") / (time.perf_counter() - start)
    leave(folder, comm, [peak, payload, products])


def sgemm(threads: int) -> float:
    """Measured FLOP/s of a product of two 2048 x 2048 matrices in float32, the best of ten, in a process of its own."""
    program = ("import numpy as np, time; a = np.ones((2048, 2048), 'f4'); s = []\n"
               "for _ in range(11):\n    t = time.perf_counter(); a @ a; s.append(time.perf_counter() - t)\n"
               "print(2 * 2048 ** 3 / min(s))")
    environment = os.environ | {"OPENBLAS_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    return float(subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True).stdout)


def summed(rows: list[list[float]]) -> tuple[float, float, float]:
    """Peak bytes of all ranks; of rank 0: elements of the last step's payload, and the products' share of a step's time."""
    return sum(peak for peak, _, _ in rows), rows[0][1], rows[0][2]


def import_seconds(module: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True, env=os.environ | {"PYTHONPATH": str(HERE.parent)})
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="rounds (default: %(default)s)")
    parser.add_argument("--slow-rounds", type=int, default=3, help="rounds of HIPS autograd (default: %(default)s)")
    parser.add_argument("--contend", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contend:
        return contend(args.contend[0], int(args.contend[1]), Path(args.contend[2]))
    for module in ("torch", "autograd"):
        if importlib.util.find_spec(module) is None:
            raise SystemExit(f"{module} is not installed here: make bench installs it")
    random.seed(0)
    print(f"{machine(('numpy', 'torch', 'autograd', 'mpi4py', 'mpich'))}; {args.rounds} rounds\n")
    from refimpl.models import Config
    from refimpl.models.placements import count
    tokens = BATCH * T
    n_all = count(Config(vocab_size=V, n_layers=LAYERS, n_heads=HEADS, d_model=D, max_seq_len=T))
    n_inner = n_all - V * D - T * D                     # without the embeddings of words and positions
    with tempfile.TemporaryDirectory() as folder:
        def contender(name: str, kind: str, ranks: int = 1, threads: int = 1) -> Contender:
            where = Path(folder) / name.replace(" ", "-").replace(",", "")
            return Contender(name, __file__, [kind, str(threads)], where, ranks, threads)
        pairs = [(f"all {CORES} cores", contender(f"refimpl, {CORES} ranks", "refimpl", ranks=CORES),
                  contender(f"torch, {CORES} threads", "torch", threads=CORES), CORES),
                 ("one core", contender("refimpl, one core", "refimpl"), contender("torch, one core", "torch"), 1)]
        running = [c for _, ours, theirs, _ in pairs for c in (ours, theirs)]
        peaks = [sgemm(threads) for _, _, _, threads in pairs]
        rounds(running, args.rounds, TOLERANCE)
        peaks = [max(before, sgemm(threads)) for before, (_, _, _, threads) in zip(peaks, pairs)]    # a slow moment is no peak
        ends = {c.name: summed(c.end()) for c in running}
        print(f"N inner {n_inner:,}, all N {n_all:,}; the peak of memory is the sum over ranks")
        columns = {"ms a step": 10, "tokens/s": 10, "torch / ours": 22, "of sgemm: N inner": 20, "all N": 8, "peak MB": 9}
        print(" " * 22 + "".join(f"{title:>{width}}" for title, width in columns.items()))
        for (title, ours, theirs, _), peak in zip(pairs, peaks):
            ratios = [b / a for a, b in zip(ours.seconds, theirs.seconds)]
            for c in (ours, theirs):
                seconds = statistics.median(c.seconds)
                shares = [6 * n * tokens / seconds / peak for n in (n_inner, n_all)]
                print(f"{c.name:22}{seconds * 1e3:10.0f}{tokens / seconds:10,.0f}{spread(ratios) if c is ours else '':>22}"
                      f"{shares[0]:20.0%}{shares[1]:8.0%}{ends[c.name][0] / 1e6:9.0f}")
            print(f"  {title}: measured sgemm {peak / 1e9:.0f} GFLOP/s; products are {ends[ours.name][2]:.0%} of our step's "
                  f"time; memory {ends[ours.name][0] / ends[theirs.name][0]:.2f} of torch's")
        slow = [contender("refimpl, one core again", "refimpl"), contender("HIPS autograd", "autograd")]
        rounds(slow, args.slow_rounds, TOLERANCE)
        ratios = [b / a for a, b in zip(slow[0].seconds, slow[1].seconds)]
        peak = summed(slow[1].end())[0]
        print(f"\nHIPS autograd takes {statistics.median(slow[1].seconds):.1f} s a step, {spread(ratios)} times ours; its peak "
              f"is {peak / 1e6:.0f} MB")
        slow[0].end()
        print(f"\n{'ranks':>8}{'tokens/s':>12}{'payload per rank and step':>28}")
        for ranks in sorted({1, 2, CORES, 4}):
            c = contender(f"scaling, {ranks}", "refimpl", ranks=ranks)
            rounds([c], max(3, args.rounds // 3), TOLERANCE)
            _, payload, _ = summed(c.end())
            note = "   more ranks than cores" if ranks > CORES else ""
            print(f"{ranks:8}{tokens / statistics.median(c.seconds):12,.0f}{payload:28,.0f}{note}")
    imports: dict[str, list[float]] = {"numpy": [], "refimpl": [], "refimpl.train": []}
    for _ in range(9):
        for module, seconds in imports.items():
            seconds.append(import_seconds(module))
    base = statistics.median(imports.pop("numpy"))
    more = (f"import {module} {statistics.median(seconds) - base:+.2f} s" for module, seconds in imports.items())
    print(f"\nimport numpy {base:.2f} s; {'; '.join(more)}")


if __name__ == "__main__":
    main()
