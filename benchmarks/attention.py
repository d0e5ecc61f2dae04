"""Long attention beside torch's, interleaved: make bench-attention, or python benchmarks/attention.py where torch is installed.

Forward and backward, causal, 4 heads of 64, float32, at T = 4,096, 8,192 and 16,384: blockwise attention on one core, and ring
attention (zigzag) on one rank a core, against torch's scaled_dot_product_attention with as many threads.  Shown are medians
over rounds, the ratio to torch in the same round with quartiles, and the memory that a step takes at its peak beside what is
given and wanted: q, k, v, dy, y, dq, dk and dv; then how both grow with T, and how much of ideal speed the ring has.
"""
import argparse
import importlib.util
import random
import statistics
import tempfile
from pathlib import Path
from typing import Callable

from contenders import CORES, Contender, forget_peak, leave, machine, rounds, spread, status, take_turns

HEADS, K, LENGTHS = 4, 64, (4096, 8192, 16384)


def contend(kind: str, T: int, threads: int, folder: Path) -> None:
    import numpy as np

    from refimpl.comm import world
    from refimpl.memory import keep_memory
    from refimpl.ops import CAUSAL, blockwise_attention
    from refimpl.parallel import SequenceLayout, ring_attention
    from refimpl.rng import draw
    comm = world(checked=False) if kind == "ring" else None
    layout = SequenceLayout("zigzag", T)
    q, k, v, dy = (draw(name, (1, HEADS, T, K)).astype("float32") for name in ("q", "k", "v", "dy"))
    if comm:
        q, k, v, dy = (np.ascontiguousarray(layout.own(a, comm, 2)) for a in (q, k, v, dy))
    run: Callable[[int], float]
    if kind == "torch":
        import torch
        torch.set_num_threads(threads)
        given = [torch.tensor(a, requires_grad=True) for a in (q, k, v)]
        upstream = torch.tensor(dy)

        def run(step: int) -> float:
            y = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True)
            dq, dk, dv = torch.autograd.grad(y, given, upstream)
            return sum(float(a.flatten().dot(a.flatten())) for a in (dq, dv))
    else:
        keep_memory()

        def run(step: int) -> float:
            if comm:
                y, vjp = ring_attention.array(q, k, v, comm=comm, layout=layout, mask=CAUSAL)
            else:
                y, vjp = blockwise_attention.array(q, k, v, mask=CAUSAL)
            dq, dk, dv = vjp(dy)[:3]
            mine = np.array(sum(float(a.reshape(-1).dot(a.reshape(-1))) for a in (dq, dv)))
            return float(comm.all_reduce(mine) if comm else mine)
    before = forget_peak()                              # what q, k, v and dy took to be made is not a step's
    take_turns(folder, comm, run)
    leave(folder, comm, [status("VmHWM") - before])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds (default: %(default)s)")
    parser.add_argument("--contend", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contend:
        kind, T, threads, folder = args.contend
        return contend(kind, int(T), int(threads), Path(folder))
    if importlib.util.find_spec("torch") is None:
        raise SystemExit("torch is not installed here: make bench-attention installs it")
    random.seed(0)
    print(f"{machine(('numpy', 'torch', 'mpi4py', 'mpich'))}; {args.rounds} rounds\n")
    columns = {"ms": 8, "torch / ours": 22, "extra MB": 10, "of torch's": 12}
    print(" " * 32 + "".join(f"{title:>{width}}" for title, width in columns.items()))
    seconds: dict[tuple[str, int], list[float]] = {}
    memory: dict[tuple[str, int], float] = {}
    for T in LENGTHS:
        with tempfile.TemporaryDirectory() as folder:
            def contender(name: str, kind: str, ranks: int = 1, threads: int = 1) -> Contender:
                where = Path(folder) / name.replace(" ", "-").replace(",", "")
                return Contender(name, __file__, [kind, str(T), str(threads)], where, ranks, threads)
            alone = (contender("blockwise, one core", "blockwise"), contender("torch, one core", "torch"))
            ring = (contender(f"ring, {CORES} ranks", "ring", ranks=CORES),
                    contender(f"torch, {CORES} threads", "torch", threads=CORES))
            running = [*alone, *ring]
            rounds(running, args.rounds, 0.1 * T)
            for c in running:
                wanted = 4 * 4 * HEADS * T * K              # bytes of y, dq, dk, dv
                seconds[c.name, T], memory[c.name, T] = c.seconds, sum(peak for peak, in c.end()) - wanted
        for ours, theirs in (alone, ring):
            ratios = [b / a for a, b in zip(ours.seconds, theirs.seconds)]
            for c in (ours, theirs):
                share = f"{memory[c.name, T] / memory[theirs.name, T]:.2f}" if c is ours else ""
                print(f"T {T:6,}  {c.name:22}{statistics.median(c.seconds) * 1e3:8.0f}{spread(ratios) if c is ours else '':>22}"
                      f"{memory[c.name, T] / 1e6:10.0f}{share:>12}")
    middle = {key: statistics.median(values) for key, values in seconds.items()}
    print(f"\n{'from T to 2T':22}{'time grows by':>18}{'memory by':>14}")
    for name in (alone[0].name, ring[0].name, alone[1].name):
        print(f"{name:22}" + f"{', '.join(f'{middle[name, 2 * T] / middle[name, T]:.2f}' for T in LENGTHS[:-1]):>18}"
              f"{', '.join(f'{memory[name, 2 * T] / memory[name, T]:.2f}' for T in LENGTHS[:-1]):>14}")
    ideal = [a / CORES / b for a, b in zip(seconds[alone[0].name, LENGTHS[-1]], seconds[ring[0].name, LENGTHS[-1]])]
    print(f"\nring on {CORES} ranks at T {LENGTHS[-1]:,}: {spread(ideal)} of {CORES} times one core's speed")


if __name__ == "__main__":
    main()
