"""Ring attention, step by step: every rank keeps its queries, and the keys and values travel round a ring.

    mpirun -n 4 python mpi_examples/13_ring_attention.py
    python mpi_examples/13_ring_attention.py --simulate 4             (four threads, no MPI needed)

A sequence of S positions is cut in as many blocks as there are ranks.  A query wants the keys and values of all positions
before it, and no rank has room for those of all.  So in every step each rank attends to one block, passes it on, and goes on
with the sums of its softmax (ops/blockwise.py) when the next one has come.  On four ranks:

                  queries stay      keys and values travel           block of each step

        rank 0      [ Q_0 ]            [ K_0 V_0 ] --+              0    3 .  2 .  1 .      rank r has block r - step
        rank 1      [ Q_1 ]            [ K_1 V_1 ] <-+ --+          1    0    3 .  2 .      (modulo 4)
        rank 2      [ Q_2 ]            [ K_2 V_2 ]     <-+ --+      2    1    0    3 .
        rank 3      [ Q_3 ]            [ K_3 V_3 ]         <-+      3    2    1    0
                                       rank 3 sends to rank 0            . : in the future of all its queries, skipped

A block is on its way to the next rank while it is worked on.  Backward, keys and values go round again, and with them go dk
and dv, to which each rank adds what its queries give, until they are at home.  With G heads of keys and values, K wide, a rank
sends

        forward   2(p-1)·B·(S/p)·G·K elements          backward   4(p-1)·B·(S/p)·G·K          alone   none

however many heads of queries there are, and whatever the mask skips.  Where p does not divide S, it sends of keys and values
all positions but those of the rank behind it, and of dk and dv all but its own.

What to expect: who holds which block at which step, read off the data, and what was computed, read off the counted FLOP; then
ring_attention beside naive attention on one rank: y, dq, dk and dv are equal, and what was sent is what the formulas say.
"""
from typing import Callable

import numpy as np

from refimpl import ops
from refimpl.autograd import Count, Layout, Params, Tensor, value_and_grad
from refimpl.comm import Comm, Mesh, launch
from refimpl.golden import compare
from refimpl.ops import CAUSAL, Mask
from refimpl.ops.blockwise import Blocks, Partial, attend, by_group, scale_of, shared
from refimpl.ops.sight import Sight
from refimpl.parallel import SequenceLayout, ring_attention
from refimpl.rng import draw

B, H, G, K = 2, 4, 2, 8                                 # samples, heads of queries, heads of keys and values, head width
S = 24                                                  # positions: on four ranks blocks of 6
CASES = (("causal", CAUSAL, 24), ("causal", CAUSAL, 27), ("no mask", Mask(), 24))       # on four ranks 27 are 7+7+7+6
OWN_POSITIONS = Layout(frozenset({"cp"}))               # the tag of data that is cut over cp
Show = Callable[[np.ndarray], None]


def by_hand(comm: Comm, q: np.ndarray, k: np.ndarray, v: np.ndarray, layout: SequenceLayout, show: Show) -> np.ndarray:
    """The loop inside refimpl.parallel.ring.  q[B, H, S/p, K], k and v[B, G, S/p, K] of this rank -> y[B, H, S/p, K]"""
    p, r = comm.size, comm.rank
    at = [layout.positions(s, p) for s in range(p)]
    queries, part, held = by_group(q * scale_of(q, None), k), Partial.nothing(q, k), np.stack([k, v])
    for step in range(p):
        coming = comm.start_ring(held) if step < p - 1 else None            # on its way while it is worked on
        seen = Sight(CAUSAL, at[r], at[(r - step) % p])
        attend(part, queries, shared(held[0]), shared(held[1]), seen, Blocks(S, S))
        show(held)
        held = coming.wait() if coming else held
    y, _ = part.finished()
    return y.reshape(q.shape)


def step_by_step(comm: Comm) -> list[str]:
    """The ring by hand: whose block each rank has at each step, and what it computes with it."""
    p, layout, whole = comm.size, SequenceLayout("contiguous", S), numbers(S)
    q, k, v = (layout.own(whole[name], comm, axis=2) for name in "qkv")
    blocks, flops = [], [0]

    def show(held: np.ndarray) -> None:
        whose = [s for s in range(p) if np.array_equal(held[0], whole["k"][:, :, layout.positions(s, p)])]
        blocks.extend(whose)
        flops.append(count.flops["forward"])

    with Count() as count:
        y = by_hand(comm, q, k, v, layout, show)
    right = ops.attention.array(*(whole[name] for name in "qkv"), mask=CAUSAL)[0]
    assert np.allclose(y, layout.own(right, comm, axis=2), rtol=0, atol=1e-13), f"rank {comm.rank}: the ring by hand"
    assert blocks == [(comm.rank - step) % p for step in range(p)], f"rank {comm.rank}: {blocks}"
    computed = np.diff(flops) // (4 * B * H * K * (S // p) ** 2)            # q·kᵀ and p·v of two blocks: one pair
    assert computed.tolist() == [int(block <= comm.rank) for block in blocks], f"rank {comm.rank}: {np.diff(flops)} FLOP"

    has, did = comm.all_gather(np.array([[blocks, computed]]), axis=0).swapaxes(0, 1)      # (rank, step) each
    account = [f"{S} positions on {p} ranks: the block that a rank has, # computed, \\ computed (part is masked), . skipped\n",
               " " * 12 + "".join(f"{f'step {step}':10s}" for step in range(p)).rstrip()]
    marks = [[f"{has[r, t]} " + (".#"[did[r, t]] if has[r, t] != r else "\\") for t in range(p)] for r in range(p)]
    account += [f"    rank {r}    " + "".join(f"{mark:10s}" for mark in marks[r]).rstrip() for r in range(p)]
    account += ["\nthe same by blocks: the step in which queries meet keys\n",
                " " * 17 + "".join(f"{f'keys {s}':8s}" for s in range(p)).rstrip()]
    for r in range(p):
        when = {has[r, t]: str(t) if did[r, t] else "." for t in range(p)}
        account.append(f"    queries {r}      " + "".join(f"{when[s]:8s}" for s in range(p)).rstrip())
    pairs = int(did.sum())
    assert pairs == p * (p + 1) // 2
    return [*account, f"\n{pairs} of {p * p} pairs are computed.  Rank 0 has work in 1 step, rank {p - 1} in {p}: "
                      "14_balanced_layouts.py", ""]


def numbers(length: int) -> dict[str, np.ndarray]:
    """Queries, keys and values of a whole sequence, and dy."""
    return {name: draw(name, (B, H if name in ("q", "dy") else G, length, K)) for name in ("q", "k", "v", "dy")}


def run(mesh: Mesh, layout: SequenceLayout, mask: Mask, naive: bool = False) -> dict[str, np.ndarray]:
    """y, dq, dk and dv of this rank's positions."""
    own = {name: Tensor(layout.own(a, mesh.cp, axis=2), OWN_POSITIONS) for name, a in numbers(layout.length).items()}
    dy = own.pop("dy")

    def loss(p: Params) -> tuple[Tensor, Tensor]:
        q, k, v = p["q"], p["k"], p["v"]
        y = ops.attention(q, k, v, mask=mask) if naive else ring_attention(q, k, v, comm=mesh.cp, layout=layout, mask=mask)
        return ops.sum(y * dy), y                                           # whose gradient by y is dy
    (_, y), grads = value_and_grad(loss, own)
    return {"y": y.array, **{f"d{name}": g.array for name, g in grads.items()}}


def main(comm: Comm) -> None:
    mesh, p, r = Mesh(cp=comm.size, comm=comm), comm.size, comm.rank
    account = step_by_step(mesh.cp)
    account += [f"ring_attention, B = {B}, H = {H}, G = {G}, K = {K}: elements that rank 0 sends, and the largest difference",
                f"{'':22s}{'forward':>12s}{'backward':>12s}{'y':>12s}{'dq':>9s}{'dk':>9s}{'dv':>9s}"]
    for name, mask, length in CASES:
        layout, alone = SequenceLayout("contiguous", length), Mesh()
        serial = run(alone, layout, mask, naive=True)
        same = compare(run(alone, layout, mask), serial)[0]
        assert same.relative <= 1e-12 and alone.ledger.total().calls == 0, f"rank {r}: a ring of one rank: {same}"

        mesh.ledger.clear()
        ours = run(mesh, layout, mask)
        sent = [mesh.ledger.total("cp", "permute", phase).wire for phase in ("forward", "backward")]
        n, each = layout.sizes(p), 2 * B * G * K                            # positions of each rank; elements of one
        expected = [each * (length - n[(r + 1) % p]), each * (2 * length - n[(r + 1) % p] - n[r])]
        assert sent == expected, f"rank {r}, {name}, {length} positions: sent {sent} elements, by the formula {expected}"
        if length % p == 0:
            assert sent == [2 * (p - 1) * B * (length // p) * G * K, 4 * (p - 1) * B * (length // p) * G * K]
        off = {d.name: d.relative for d in compare(ours, {key: layout.own(a, mesh.cp, axis=2) for key, a in serial.items()})}
        assert max(off.values()) <= 1e-12, f"rank {r}, {name}, {length} positions: {off}"
        worst = comm.all_reduce(np.array([off[key] for key in ours]), how="max")            # of all ranks: none has failed
        account.append(f"    {name:8s} S = {length:<6d}" + "".join(f"{k:>12,}" for k in sent) + f"{worst[0]:12.0e}"
                       + "".join(f"{d:9.0e}" for d in worst[1:]))
    account.append(f"    by formula, where {p} divides S, 2(p-1)·B·(S/p)·G·K and 4(p-1)·B·(S/p)·G·K; on one rank nothing")
    if r == 0:
        print("\n".join(account))
        print("\nOK: y, dq, dk and dv equal naive attention's on every rank; every element that was sent is in the formulas")


if __name__ == "__main__":
    launch(main, ranks=(2, 4))
