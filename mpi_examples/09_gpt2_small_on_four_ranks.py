"""GPT-2 small, whole, on four ranks: who holds what, and a few steps of training.

    mpirun -n 4 python mpi_examples/09_gpt2_small_on_four_ranks.py
    python mpi_examples/09_gpt2_small_on_four_ranks.py --simulate 4          (four threads, no MPI needed)

124,439,808 parameters in float32 are 498 MB, and with gradients and AdamW's two moments 2 GB; on four ranks each holds a
quarter, but for the position table, the norms and the biases that are added after a sum.  What is cut, and how:

                       rank 0        rank 1        rank 2        rank 3
    embed.w    words |  0 ..      |  12565 ..  |  25129 ..  |  37693 ..  |     rows: a word's vector is on one rank
    attn.q k v heads |  0 1 2     |  3 4 5     |  6 7 8     |  9 10 11   |     columns: heads do not talk to each other
    attn.o     heads |  0 1 2     |  3 4 5     |  6 7 8     |  9 10 11   |     rows: the products add up (g)
    mlp.up     units |  0 ..      |  768 ..    |  1536 ..   |  2304 ..   |     columns: GELU of a unit needs no other
    mlp.down   units |  0 ..      |  768 ..    |  1536 ..   |  2304 ..   |     rows: the products add up (g)
    the rest         |  all of it |  all of it |  all of it |  all of it |     0.7% of the model

50257 words do not divide by four: the first rank has one more.  --layers and --tokens make it smaller.

What to expect: the table above with counted elements; the loss of the first step near ln 50257 = 10.82, as nothing is learned
yet (the initial logits of the text's 16 words differ by about 0.5), then less of it, as the text repeats; and the elements that
a rank hands over, exactly those of the formula.
"""
import argparse
import math
import time
from dataclasses import replace

import numpy as np

from refimpl.analysis import step_payload
from refimpl.comm import Comm, Mesh, launch
from refimpl.models import GPT2_SMALL, count, init, parameters
from refimpl.parallel import Cut, box, check_replicas, clip, gradient_norm
from refimpl.rng import integers, stream
from refimpl.train import AdamW, Batch, gradients

STEPS, B = 3, 1


def main(comm: Comm, layers: int, tokens: int) -> None:
    mesh, cfg = Mesh(tp=comm.size, comm=comm), replace(GPT2_SMALL, n_layers=layers, dropout=0.0)
    table = {name: row.placement for name, row in parameters(cfg, mesh).items()}
    say(comm, who_holds_what(cfg, mesh))

    params, optimizer = init(cfg, mesh, seed=0, dtype="float32"), AdamW(lr=5e-5, weight_decay=0.0)
    text = integers(stream(0, "text"), np.arange(tokens + 1)[None] % 16, below=cfg.vocab_size)         # 16 words, over and over
    losses = []
    for step in range(STEPS):
        mesh.ledger.clear()
        start = time.perf_counter()
        g = gradients(params, [Batch(np.arange(B), text[:, :-1], text[:, 1:])], cfg, mesh)
        sent = mesh.ledger.total("tp").elements
        norm = gradient_norm(g.grads, table, mesh)
        params = optimizer.step(params, clip(g.grads, norm, 1.0))
        losses.append(g.loss)
        say(comm, f"step {step + 1}: loss {g.loss:.4f}, norm {norm:.2f}, {time.perf_counter() - start:.1f} s, "
                  f"{sent:,} elements a rank over tp")
        expected = step_payload(cfg, mesh, B, tokens).get("tp", (0,))[0]
        assert sent == expected, f"counted {sent} elements, by the formula {expected}"
    check_replicas(params, table, mesh)
    assert abs(losses[0] - math.log(cfg.vocab_size)) < 0.6 and losses[-1] < losses[0] - 0.5, losses
    say(comm, f"OK: {count(cfg):,} parameters on {comm.size} ranks; ln {cfg.vocab_size} = {math.log(cfg.vocab_size):.2f}; what "
              "all ranks hold is the same on all")


def who_holds_what(cfg, mesh: Mesh) -> str:
    """One line for each kind of parameter: its shape, and what each rank has of it."""
    lines = [f"{'parameter':22}{'shape':>15}{'':4}" + "".join(f"{f'rank {r}':>14}" for r in range(mesh.tp.size))]
    rows = parameters(cfg, mesh)
    for name, row in rows.items():
        if name.startswith("layers.") and not name.startswith("layers.0."):
            continue
        cut = isinstance(row.placement, Cut)
        parts = [f"{a}:{b}" for a, b in row.placement.bounds] if cut else ["all"] * mesh.tp.size
        axis = ("rows" if row.placement.axis == 0 and len(row.shape) == 2 else "cols") if cut else ""
        lines.append(f"{name.replace('layers.0', 'layers.*'):22}{'x'.join(map(str, row.shape)):>15} {axis:3} "
                     + "".join(f"{part:>14}" for part in parts))
    own = sum(math.prod(s.stop - s.start for s in box(row.placement, row.shape, mesh)) for row in rows.values())
    every = mesh.tp.all_gather(np.array([own]), axis=0)
    lines.append(f"{'elements in all':22}{count(cfg):>15,}    " + "".join(f"{n:>14,}" for n in every))
    return "\n".join(lines) + "\n"


def say(comm: Comm, text: str) -> None:
    if comm.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--layers", type=int, default=GPT2_SMALL.n_layers)
    parser.add_argument("--tokens", type=int, default=64)
    own, rest = parser.parse_known_args()
    launch(lambda comm: main(comm, own.layers, own.tokens), ranks=(2, 4), argv=rest)
