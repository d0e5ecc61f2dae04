"""Where the time of ring attention goes: what each rank computes, and what travels meanwhile.

    mpirun -n 4 python mpi_examples/18_ring_timeline.py
    python mpi_examples/18_ring_timeline.py --simulate 4                           (four threads, no MPI needed)
    mpirun -n 2 python mpi_examples/18_ring_timeline.py --plot timeline.png        (and a picture)

    rank 0   |  own keys       |  rank 1's keys   |            computation
               ============>                                   its keys and values travel to rank 1, rank 1's come
    rank 1   |  own keys       |  rank 0's keys   |
               ============>

A block of keys is sent on before the rank works on it, so its journey is hidden as long as the work takes longer: that is so
from c = F/B positions on, for computers of F FLOP/s with B bytes/s between them (Liu et al. 2023, section 3).  Here the heads
go round in two halves, as they do where they are large.  In the backward pass the last message of a half brings dk and dv home:
the first one's while the second half begins, the second one's has nothing to hide behind.

How much is hidden: a message is, if it has come by the time it is wanted, so that `wait` takes less than a quarter of what it
takes when there is nothing to compute.  One that nobody moves on (comm.progress between blocks) has not come nearer by then.
What is not hidden is the journey, and what the other rank takes longer for its work.  Checks are off, unless REFIMPL_CHECKED=1:
to agree on a message, and to see that nobody changes it, takes longer than the journey between two cores.

What to expect: on two ranks forward all are hidden, backward three of four; waiting is 1% of the time or 2%.  Ranks that share
cores wait for each other, and threads take turns at Python: then less is.  The numbers are measured, so they are others in
every run.  And y and the gradients are those of one rank that has it all.
"""
import argparse
import json
import os
import tempfile
from collections import defaultdict
from math import fsum
from pathlib import Path
from statistics import median

import numpy as np

from refimpl.autograd import Layout, Tensor, value_and_grad
from refimpl.comm import Comm, Mesh, launch
from refimpl.comm.trace import Trace
from refimpl.commands.pictures import NO_PICTURE, pyplot
from refimpl.ops import CAUSAL, blockwise_attention, mul, sum
from refimpl.parallel import SequenceLayout, ring_attention
from refimpl.rng import draw

EACH, HEADS, K, TURNS = 2048, 4, 64, 2                   # positions of a rank, float32; how often heads go round
ALONE = 5                                               # messages with nothing to compute
OVER = Layout(frozenset({"cp"}))


def main(comm: Comm, plot: Path | None = None) -> None:
    mesh, layout = Mesh(cp=comm.size, comm=comm), SequenceLayout("zigzag", EACH * comm.size)
    whole = [draw(name, (1, HEADS, layout.length, K)).astype("float32") for name in ("q", "k", "v", "dy")]
    q, k, v, dy = (layout.own(a, mesh.cp, 2) for a in whole)
    params = {name: Tensor(a, OVER, name=name) for name, a in (("q", q), ("k", k), ("v", v))}

    def loss(p):
        return sum(mul(ring_attention(p["q"], p["k"], p["v"], comm=mesh.cp, layout=layout, mask=CAUSAL), Tensor(dy, OVER)))
    _, grads = value_and_grad(loss, params)             # warms up
    for name, right in zip("qkv", blockwise_attention.array(*whole[:3], mask=CAUSAL)[1](whole[3])):
        off = np.abs(grads[name].array - layout.own(right, mesh.cp, 2)).max() / np.abs(right).max()
        assert off < 1e-5, f"rank {comm.rank}: d{name} is off by {off:.0e} of its scale"           # float32: units of 1e-7
    with tempfile.TemporaryDirectory() as folder:
        file = Path(comm.gather_texts(folder)[0]) / "trace.json"
        half = k[:, :HEADS // TURNS]
        with Trace(comm, file):
            for _ in range(ALONE if comm.size > 1 else 0):
                comm.barrier()
                mesh.cp.start_ring(np.concatenate([half.reshape(-1), half.reshape(-1)])).wait()
            comm.barrier()
            value_and_grad(loss, params)
        if comm.rank == 0:
            report(json.loads(file.read_text())["traceEvents"], comm.size, plot)
        comm.barrier()


def report(events: list[dict], ranks: int, plot: Path | None) -> None:
    rows = {e["tid"]: int(e["args"]["name"].split()[1]) for e in events if e["name"] == "thread_name"}     # "rank 0 in flight"
    spans = [e | {"rank": rows[e["tid"]]} for e in events if e["ph"] == "X"]
    flights = [e for e in spans if e["cat"] == "transfer"]
    passes = {phase: [e for e in spans if e["name"] == "ring_attention" and e["args"].get("phase", "backward") == phase]
              for phase in ("forward", "backward")}
    of_ring = {id(f) for calls in passes.values() for f in flights for c in calls if within(f, c)}
    alone = median([f["args"]["exposed_us"] for f in flights if id(f) not in of_ring] or [0.0])
    print(f"\n{EACH} positions a rank, {HEADS} heads of {K}, causal, zigzag, {ranks} ranks; a message alone takes "
          f"{alone / 1e3:.1f} ms\n")
    print(f"{'':10}{'time':>10}{'messages':>10}{'hidden':>10}{'waited for':>12}{'of time':>9}     of a rank, on average")
    for phase, calls in passes.items():
        own, waits, starts = ([e for e in some if any(within(e, c) for c in calls)] for some in (
            flights, *([e for e in spans if e["name"].endswith(end) and e["cat"] != "transfer"]
                       for end in (".wait", ".start_permute"))))
        wanted = TURNS * ranks * (ranks - 1) * (1 if phase == "forward" else 2)
        assert len(own) == len(waits) == wanted, f"{phase}: {len(own)} messages, {len(waits)} waits, not {wanted}"
        took, waited = (fsum(e["dur"] for e in some) for some in (calls, waits + starts))
        hidden = len([e for e in waits if e["dur"] < alone / 4]) / max(1, wanted)
        print(f"{phase:10}{took / ranks / 1e3:7.0f} ms{wanted / ranks:10.0f}{hidden:10.0%}{waited / ranks / 1e3:9.1f} ms"
              f"{waited / took:9.1%}")
    if plot:
        print("\n" + picture(plot, spans, [f for f in flights if id(f) in of_ring], ranks))
    print(f"\nOK: {len(of_ring)} messages, forward p - 1 and backward 2(p - 1) of each rank, for each half of the heads")


def within(e: dict, call: dict) -> bool:
    """Whether it began during a call of the same rank."""
    return call["rank"] == e["rank"] and call["ts"] <= e["ts"] <= call["ts"] + call["dur"]


def picture(file: Path, spans: list[dict], flights: list[dict], ranks: int) -> str:
    """Of each rank a row of what it computes, and below it what is under way."""
    plot = pyplot()
    if plot is None:
        return NO_PICTURE
    bars_of: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for e in spans:
        if e["name"].endswith(".product"):
            bars_of[e["rank"], "products"].append((e["ts"] / 1e3, e["dur"] / 1e3))
        elif e["name"].endswith((".wait", ".start_permute")) and e["cat"] != "transfer":
            bars_of[e["rank"], "waits"].append((e["ts"] / 1e3, e["dur"] / 1e3))
        elif e["name"] == "ring_attention":
            bars_of[e["rank"], "attention"].append((e["ts"] / 1e3, e["dur"] / 1e3))
    for e in flights:
        bars_of[e["rank"], "under way"].append((e["ts"] / 1e3, e["dur"] / 1e3))
    figure, axes = plot.subplots(figsize=(8, 1 + 0.75 * ranks), layout="constrained")
    colours = {"attention": "#c9d8ec", "products": "#1f5fa8", "waits": "#c2452d", "under way": "#7a9a3a"}
    for (rank, what), bars in sorted(bars_of.items(), key=lambda row: list(colours).index(row[0][1])):
        below = what == "under way"
        axes.broken_barh(bars, (rank + (0.55 if below else 0.05), 0.25 if below else 0.45), color=colours[what], label=what)
    axes.set_yticks([rank + 0.4 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
    axes.invert_yaxis()
    axes.set_xlabel("ms: forward, then backward")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels())))
    figure.legend(handles.values(), handles.keys(), ncols=4, loc="outside upper center", frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    plot.close(figure)
    return f"picture: {file}"


if __name__ == "__main__":
    os.environ.setdefault("REFIMPL_CHECKED", "0")
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--plot", type=Path, metavar="FILE")
    own, rest = flags.parse_known_args()
    launch(lambda comm: main(comm, own.plot), ranks=(2, 4), argv=rest)
