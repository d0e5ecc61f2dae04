"""Where the time of ring attention goes: what each rank computes, and what travels meanwhile.

    mpirun -n 4 python mpi_examples/18_ring_timeline.py
    python mpi_examples/18_ring_timeline.py --simulate 4                           (four threads, no MPI needed)
    mpirun -n 2 python mpi_examples/18_ring_timeline.py --plot timeline.png        (and a picture)

    rank 0   |  own keys       |  rank 1's keys   |            computation
               ============>                                   its keys and values travel to rank 1, rank 1's come
    rank 1   |  own keys       |  rank 0's keys   |
               ============>

A block of keys is sent on before the rank works on it, so its journey is hidden as long as the work takes longer: that is so
from c = F/B positions on, for computers of F FLOP/s with B bytes/s between them (Liu et al. 2023, section 3).  What is not
hidden is spent in `wait`, or where a message starts: there ranks agree that it is the same one (checked mode).  In the
backward pass the last message has nothing to hide behind: it brings dk and dv home.

What to expect: forward, almost all of the time under way is hidden; backward a part is not.  Ranks that share cores wait for
each other, and threads take turns at Python: then less is.  The numbers are measured, so they are others in every run.  And y
and the gradients are those of one rank that has it all.
"""
import argparse
import json
import tempfile
from collections import defaultdict
from math import fsum
from pathlib import Path

import numpy as np

from refimpl.autograd import Layout, Tensor, value_and_grad
from refimpl.comm import Comm, Mesh, launch
from refimpl.comm.trace import Trace
from refimpl.commands.pictures import NO_PICTURE, pyplot
from refimpl.ops import CAUSAL, blockwise_attention, mul, sum
from refimpl.parallel import SequenceLayout, ring_attention
from refimpl.rng import draw

EACH, HEADS, K = 1024, 4, 64                            # positions of a rank, float32
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
        with Trace(comm, file):
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
    print(f"\n{EACH} positions a rank, {HEADS} heads of {K}, causal, zigzag, {ranks} ranks\n")
    print(f"{'':10}{'time':>10}{'messages':>10}{'under way':>12}{'waited for':>12}{'hidden':>9}     of a rank, on average")
    for phase, calls in passes.items():
        starts = [e for e in spans if e["name"].endswith(".start_permute") and e["cat"] == "collective"
                  and e["args"]["phase"] == phase]
        own = [f for f in flights if any(c["rank"] == f["rank"] and c["ts"] <= f["ts"] <= c["ts"] + c["dur"] for c in calls)]
        took, way, waited = (fsum(us) / ranks / 1e3 for us in (
            (c["dur"] for c in calls), (f["dur"] for f in own),
            [*(f["args"]["exposed_us"] for f in own), *(e["dur"] for e in starts)]))
        wanted = ranks * (ranks - 1) * (1 if phase == "forward" else 2)
        assert len(own) == (wanted if ranks > 1 else 0), f"{phase}: {len(own)} messages, not {wanted}"
        hidden = f"{1 - waited / way:.0%}" if way else "-"
        print(f"{phase:10}{took:7.0f} ms{len(own) / ranks:10.0f}{way:9.1f} ms{waited:9.1f} ms{hidden:>9}")
    if plot:
        print("\n" + picture(plot, spans, flights, ranks))
    print(f"\nOK: {len(flights)} messages, forward p - 1 and backward 2(p - 1) of each rank")


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
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--plot", type=Path, metavar="FILE")
    own, rest = flags.parse_known_args()
    launch(lambda comm: main(comm, own.plot), ranks=(2, 4), argv=rest)
