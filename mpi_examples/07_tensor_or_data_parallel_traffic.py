"""Tensor or data parallelism, which of them moves more?  It depends on the tokens of a step: at 3h they are equal.

    mpirun -n 4 python mpi_examples/07_tensor_or_data_parallel_traffic.py
    python mpi_examples/07_tensor_or_data_parallel_traffic.py --simulate 4        (four threads, no MPI needed)

With `--plot FILE` it also draws what it has counted.  One step of L layers of width h, on b samples of s tokens (those of the
whole step, wherever they are), on p ranks.  With p = 2 and b = 4:

     data parallel                                     tensor parallel

     rank 0   samples 0 1   [   W   ]   dW_0 --+       rank 0   samples 0 1 2 3   [ W_0 ]   Y_0 --+
                                               | add                                              | add
     rank 1   samples 2 3   [   W   ]   dW_1 --+       rank 1   samples 0 1 2 3   [ W_1 ]   Y_1 --+

     once a step, the gradients of all matrices:       four times a layer, twice forward (g) and twice backward
     a layer has q k v o with h·h and up, down         (f), the activations: b·s·h numbers
     with 4h·h each

     12·L·h²    whatever the batch                     4·L·b·s·h    the more tokens, the more

Both are handed to all_reduces, and a ring puts 2(p-1)/p times as much on the wire: this factor drops out, and so does L.
They are equal where b·s = 3h.  Only the layers' matrices are meant.  The rest is counted apart: in data parallelism the
gradients of the embeddings, the norms and the biases; in tensor parallelism, whose ranks have some words each, 2·b·s·h for the
embedding and the head, and 3 numbers a token for the loss.  Payload is not time: gradients may travel during the backward
pass, but the next layer waits for g.  And data parallelism needs room for all of W on every rank.

What to expect: one decoder on five batches, cut both ways; the same gradients, and on every rank exactly as many elements
as the formulas say, below 3h tokens, at 3h and above.
"""
import argparse
import logging
from collections import namedtuple
from pathlib import Path

import numpy as np

from refimpl.analysis import local_parameters
from refimpl.autograd import Layout, Record, Tensor, value_and_grad
from refimpl.comm import Comm, Mesh, launch
from refimpl.golden import compare
from refimpl.models import Config, Context, decoder, init, placements
from refimpl.parallel import Cut, gather, reduce_gradients
from refimpl.rng import integers, stream

CFG = Config(vocab_size=50, n_layers=2, n_heads=4, d_model=32, max_seq_len=4)
L, h, s = CFG.n_layers, CFG.d_model, CFG.max_seq_len
Sent = namedtuple("Sent", "calls elements")
SAMPLES = (4, 8, 24, 72, 144)                           # b: 16 to 576 tokens, 3h are 96
PUBLISHED = (("GPT-2 small", 768, "512 x 1,024", 512 * 1024, "Radford et al. 2019"),      # name, h, tokens of a step
             ("GPT-3 175B", 12288, "3.2 million", 3.2e6, "Brown et al. 2020, table 2.1"))


def step(b: int, mesh: Mesh) -> tuple[dict[str, np.ndarray], Sent, Sent]:
    """The gradients of the layers' matrices, whole, of one step on b samples; what travelled for the layers, and for the rest.

    The loss is summed over the samples, so that there is nothing to divide.
    """
    rows = np.arange(*Cut.even(0, b, mesh.dp).bounds[mesh.dp.rank])         # this rank's samples: b/dp of them
    text = integers(stream(0, "text"), np.arange(b * (s + 1)).reshape(b, s + 1), below=CFG.vocab_size)[rows]
    tokens, ctx = Tensor(text[:, :-1], Layout(frozenset({"dp"}))), Context(mesh, rows, np.arange(s))
    params = init(CFG, mesh, seed=0)

    mesh.ledger.clear()
    with Record() as record:
        _, grads = value_and_grad(lambda p: decoder.loss(tokens, text[:, 1:], p, CFG, ctx), params)     # tp: f and g
    f_and_g = [call.inputs[1].size for call in record if call.op.name == "all_reduce" and call.name.startswith("layers.")]
    before = mesh.ledger.total()
    matrices = {name: g for name, g in grads.items() if name.startswith("layers.") and name.endswith(".w")}
    reduced = reduce_gradients(matrices, mesh)                                                          # dp: one all_reduce
    after = mesh.ledger.total()
    reduce_gradients({name: g for name, g in grads.items() if name not in matrices}, mesh)
    everything = mesh.ledger.total()

    f_and_g = f_and_g if mesh.tp.size > 1 else []
    layers = Sent(len(f_and_g) + after.calls - before.calls, sum(f_and_g) + after.elements - before.elements)
    rest = Sent(everything.calls - layers.calls, everything.elements - layers.elements)
    return gather(reduced, placements(CFG, mesh), mesh), layers, rest


def main(comm: Comm, plot: Path | None = None) -> None:
    p = comm.size
    dp, tp = Mesh(dp=p, comm=comm), Mesh(tp=p, comm=comm)
    others = local_parameters(CFG, Mesh()) - 12 * L * h ** 2                # embeddings, norms, biases
    account, counted, off = [], [], 0.0
    for b in SAMPLES:
        data, data_layers, data_rest = step(b, dp)
        tensor, tensor_layers, tensor_rest = step(b, tp)
        for name, total, calls, elements in (("dp, layers", data_layers, 1, 12 * L * h ** 2),
                                             ("tp, layers", tensor_layers, 4 * L, 4 * L * b * s * h),
                                             ("dp, the rest", data_rest, 1, others),
                                             ("tp, the rest", tensor_rest, 4, b * s * (2 * h + 3))):
            assert total == (calls, elements), (
                f"rank {comm.rank}, {b} samples, {name}: counted {total}, by the formula {elements} elements in {calls} calls")
        worst = compare(tensor, data)[0]
        assert worst.relative <= 1e-12, f"rank {comm.rank}, {b} samples: {worst}"
        off = max(off, worst.relative)
        counted.append((b * s, data_layers.elements, tensor_layers.elements))
        account.append(f"{f'{b} x {s}':>9s}{b * s:>9d}{data_layers.elements:>18,}{tensor_layers.elements:>18,}"
                       f"{tensor_layers.elements / data_layers.elements:>10.2f}" + ("   <- b·s = 3h" if b * s == 3 * h else ""))

    largest = float(comm.all_reduce(np.array(off), how="max"))              # of all ranks: none has failed
    if comm.rank == 0:
        print(f"a decoder of {L} layers, h = {h}, on {p} ranks: elements that a rank hands over in one step, counted\n")
        print(f"{'b x s':>9s}{'tokens':>9s}{f'dp={p}':>18s}{f'tp={p}':>18s}{'tp / dp':>10s}")
        print("\n".join(account))
        print(f"{'by formula':<18s}{'12·L·h²':>18s}{'4·L·b·s·h':>18s}{'b·s / 3h':>10s}")
        print(f"{'all_reduces':<18s}{1:>18d}{4 * L:>18d}")
        print(f"{'counted apart':<18s}{others:>18,}{'b·s·(2h + 3)':>18s}             embeddings, norms, biases, loss")
        print(f"\non the wire, with a ring, both times 2(p-1)/p = {2 * (p - 1) / p:g}")
        print(f"gradients of all {6 * L} matrices: tp={p} and dp={p} differ by {largest:.0e} at most\n")
        print("by formula, at the size of published models and the tokens that a step of their training had:")
        for name, width, shape, tokens, source in PUBLISHED:
            print(f"    {name:12s} h = {width:6,}   3h = {3 * width:6,}   tokens {shape:12s} "
                  f"tp / dp = {tokens / 3 / width:3.0f}   ({source})")
        if plot:
            print("\n" + picture(plot, p, counted))
        print("\nOK: on every rank the layers' payload is 12·L·h² with dp and 4·L·b·s·h with tp, equal at b·s = 3h")


def picture(file: Path, p: int, counted: list[tuple[int, int, int]]) -> str:
    """Payload against tokens: the two formulas as lines, what was counted as dots.  Says where it is, or what is missing."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        import matplotlib
    except ImportError:
        return "no picture: pip install '.[run]' brings matplotlib"
    matplotlib.use("Agg")
    from matplotlib import pyplot
    tokens, data, tensor = (np.array(column) for column in zip(*counted))
    x = np.array([tokens[0] / 1.5, tokens[-1] * 1.5])
    blue, red = "#1f5fa8", "#c2452d"
    figure, axes = pyplot.subplots(figsize=(7, 4.6), layout="constrained")
    axes.loglog(x, [12 * L * h ** 2] * 2, color=blue, linewidth=1.5)
    axes.loglog(x, 4 * L * x * h, color=red, linewidth=1.5)
    axes.loglog(tokens, data, "o", color=blue, markersize=7)
    axes.loglog(tokens, tensor, "s", color=red, markersize=6)
    axes.axvline(3 * h, color="#999999", linewidth=1, linestyle=":")
    axes.plot(3 * h, 12 * L * h ** 2, "o", markersize=17, markerfacecolor="none", markeredgecolor="black")
    axes.annotate(f"b·s = 3h = {3 * h} tokens", (3 * h, 12 * L * h ** 2), (16, -30), textcoords="offset points", fontsize=11)
    axes.annotate("data parallel: 12·L·h²", (x[0], 12 * L * h ** 2), (8, 8), textcoords="offset points", color=blue,
                  fontsize=11)
    axes.annotate("tensor parallel: 4·L·b·s·h", (tokens[-1], tensor[-1]), (-16, 0), textcoords="offset points", color=red,
                  fontsize=11, ha="right", va="center")
    for where, text in ((tokens[:2], "tensor parallel moves less"), (tokens[-2:], "data parallel moves less")):
        axes.annotate(text, (np.sqrt(where.prod()), 0.03), xycoords=("data", "axes fraction"), ha="center", color="#666666")
    axes.set_xlim(*x)
    axes.set_xticks(tokens, [f"{n}" for n in tokens])
    axes.set_yticks(tensor, [f"{n:,}" for n in tensor])
    axes.minorticks_off()
    axes.set_xlabel("tokens of the step, b·s")
    axes.set_ylabel("payload of the layers (elements per rank and step)")
    axes.set_title(f"{L} layers, h = {h}, {p} ranks: counted (dots) and by formula (lines)", fontsize=11)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
    return f"picture: {file}"


if __name__ == "__main__":
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--plot", type=Path, metavar="FILE")
    own, rest = flags.parse_known_args()
    launch(lambda comm: main(comm, own.plot), ranks=(2, 4), argv=rest)
