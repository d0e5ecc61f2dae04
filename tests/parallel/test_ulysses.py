"""Localises heads that come back to other ranks or in another order, kv heads that are sent to the wrong query heads, rings of
groups that meet other groups' keys at the wrong positions, and numbers that travel more often than they must.

What is compared with what, and how closely, is as in test_ring.py.
"""
import functools

import numpy as np
import pytest

from refimpl.autograd import Count, value_and_grad
from refimpl.cases.sequences import Cut
from refimpl.comm import Comm, CommError, Mesh, run_threads, shares
from refimpl.ops import CAUSAL, Mask
from refimpl.ops import sum as total
from refimpl.parallel import LAYOUTS, SequenceLayout, all_to_all_attention
from refimpl.parallel.ulysses import Heads
from refimpl.rng import draw

from .test_ring import (OneKey, any_rows, layout_refusals, on_tape, own_tensors, part, refusals, require_equal, require_refusal,
                        require_serial, rows, serially)

KINDS_AND_MASKS = [("contiguous", CAUSAL), ("zigzag", CAUSAL), ("zigzag", Mask(causal=True, window=4, prefix=3)),
                   ("striped", Mask())]


def rings(size):
    """How many groups can form a ring."""
    return [n for n in range(1, size + 1) if size % n == 0]


# -- the same numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, mask", KINDS_AND_MASKS, ids=str)
def test_all_to_all_equals_naive_with_every_ring(ranks, kind, mask):
    cases = [(row, serially(row)) for row in rows(kind, mask) if row.shape[1] != 4]

    def check(comm: Comm):
        for ring in rings(comm.size):
            for case in cases:
                require_serial(all_to_all_attention, comm, *case, ring=ring)
    ranks.run(check)


def test_all_to_all_equals_naive_whatever_the_shapes(ranks):
    cases = [(row, serially(row)) for row in any_rows(ranks.size)]

    def check(comm: Comm):
        for i, case in enumerate(cases):
            require_serial(all_to_all_attention, comm, *case, ring=rings(comm.size)[i % len(rings(comm.size))])
    ranks.run(check)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_all_to_all_equals_naive_on_the_tape(ranks, kind):
    row = Cut("tape", (2, 4, 2, 11, 3), kind, others={"mask": CAUSAL})
    truth = serially(row)

    def check(comm: Comm):
        cp, layout = Mesh(cp=comm.size, comm=comm).cp, SequenceLayout(kind, 11)
        for ring in rings(comm.size):
            on_tape(lambda p: all_to_all_attention(p["q"], p["k"], p["v"], comm=cp, layout=layout, ring=ring), row, cp, truth)
    ranks.run(check)


def test_groups_among_some_of_the_ranks(ranks):
    """tp beside cp: each tp rank has heads of its own, whose tokens change places among the cp ranks."""
    row = Cut("some", (2, 4, 2, 7, 2), "zigzag", others={"mask": CAUSAL})
    dy, right = serially(row)

    def check(comm: Comm):
        mesh, layout = Mesh(cp=comm.size // 2, tp=2, comm=comm), SequenceLayout("zigzag", 7)
        halves = [np.split(a, 2, 1)[mesh.tp.rank] for a in (*row.whole()[:3], dy, *right)]
        for ring in rings(mesh.cp.size):
            q, k, v, d = (layout.own(a, mesh.cp, 2) for a in halves[:4])
            y, vjp = all_to_all_attention.array(q, k, v, comm=mesh.cp, layout=layout, ring=ring)
            require_equal([y, *vjp(d)[:3]], halves[4:], layout, mesh.cp)
    if ranks.size % 2 == 0:
        ranks.run(check)


def test_float32_stays_float32(ranks):
    """And errs by its own rounding, eps 1.2e-7 times sums of 9 terms and of their gradients."""
    row = Cut("single", (1, 6, 2, 9, 4), "zigzag", others={"mask": CAUSAL})
    truth = serially(row)

    def check(comm: Comm):
        (q, k, v), static = row.arguments(comm, "float32")
        for ring in rings(comm.size):
            y, vjp = all_to_all_attention.array(q, k, v, comm=comm, ring=ring, **static)
            got = [y, *vjp(static["layout"].own(truth[0], comm, 2).astype("float32"))[:3]]
            assert {a.dtype for a in got} == {np.dtype("float32")}
            require_equal([a.astype(float) for a in got], truth[1], static["layout"], comm, 1e-5)
    ranks.run(check)


def test_queries_that_see_no_key_give_0_and_get_0(ranks):
    """By hand: a query that sees one key gives its value, and its gradient goes to that value alone."""
    S = 2 * ranks.size

    def check(comm: Comm):
        layout, (q, k, v, dy) = SequenceLayout("zigzag", S), (draw(n, (1, 2, S, 2)) for n in "abcd")
        at, only = layout.positions(comm.rank, comm.size), S // 2
        for ring in rings(comm.size):
            y, vjp = all_to_all_attention.array(*(layout.own(a, comm, 2) for a in (q, k, v)), comm=comm, layout=layout,
                                                ring=ring, mask=OneKey(only=only), block_q=1, block_k=1)
            dq, dk, dv, _ = vjp(layout.own(dy, comm, 2))
            assert np.array_equal(y[0], np.where(at[:, None] >= only, v[0, :, only, None], 0))
            assert np.abs(dq).max() <= 1e-15 and np.abs(dk).max() <= 1e-14
            assert not dq[0, :, at < only].any() and not dk[0, :, at != only].any() and not dv[0, :, at != only].any()
            assert np.abs(dv[0, :, at == only] - dy[0, :, only:].sum(axis=1)).max(initial=0) <= 1e-13
    ranks.run(check)


# -- who has what, and what travels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("H, G, size, of_q, of_kv, repeats", [
    (4, 2, 2, (2, 2), (1, 1), 1),
    (6, 2, 2, (3, 3), (1, 1), 1),
    (6, 2, 4, (2, 2, 1, 1), (2, 2, 1, 1), 3),           # the second rank's heads 2 and 3 have different kv heads
    (3, 1, 2, (2, 1), (2, 1), 3),
    (8, 8, 3, (3, 3, 2), (3, 3, 2), 1),
    (2, 1, 4, (1, 1, 0, 0), (1, 1, 0, 0), 2),           # more ranks than heads
    (2, 2, 4, (1, 1, 0, 0), (1, 1, 0, 0), 1),
    (0, 0, 2, (0, 0), (0, 0), 1)])
def test_heads_are_shared_out_by_hand(H, G, size, of_q, of_kv, repeats):
    def check(comm: Comm):
        for ring in (1, 2):                             # of a ring of two groups each has all heads
            sizes = tuple(range(10, 10 + size * ring))
            whole = comm.sub({"half": 2, "cp": size}, ("cp",)) if ring == 1 else comm
            heads = Heads.of(whole, ring, H, G, sizes)
            assert (heads.of_q, heads.of_kv, heads.repeats) == (of_q, of_kv, repeats)
            first = 0 if ring == 1 else comm.rank // size * size
            assert heads.tokens == sizes[first:first + size]
    run_threads(2 * size, check)


ROWS = (("heads", "all_to_all"), ("heads", "all_gather"), ("ring", "permute"))          # of the ledger


@pytest.mark.parametrize("H, G, S", [(8, 4, 16), (6, 2, 13), (3, 1, 7)])
def test_a_rank_hands_over_what_the_formula_says(ranks, H, G, S):
    """With h of H query heads, g kv heads (as often as they are sent) and n of the group's N tokens a rank hands over,

        forward   B·K·(H + 2·G·repeats)·n of q, k and v, and B·K·h·N of y
        backward  B·K·H·n of dy, and B·K·(h + 2g)·N of dq, dk and dv

    its own share included, and nothing where the group is one rank.  In the ring of groups as in test_ring.py."""
    B, K, p = 2, 3, ranks.size
    row = Cut("sent", (B, H, G, S, K), "zigzag")

    def check(comm: Comm):
        cp = Mesh(cp=p, comm=comm).cp
        params, layout = own_tensors(row, cp)
        documents = layout.own(np.zeros((B, S), np.int64), cp)
        sizes = layout.sizes(p)
        for ring in rings(p):
            group = p // ring
            first, at = cp.rank // group * group, cp.rank % group
            n, N = sizes[cp.rank], sum(sizes[first:first + group])
            following = sum(sizes[(first + group) % p:(first + group) % p + group])
            of_q = shares(H, group)
            repeats = 1 if all(m % (H // G) == 0 for m in of_q) else H // G
            h, g = of_q[at], of_q[at] if repeats > 1 else of_q[at] * G // H
            for ids in (None, documents):
                comm.ledger.clear()
                value_and_grad(lambda t: total(all_to_all_attention(t["q"], t["k"], t["v"], ids, comm=cp, layout=layout,
                                                                    ring=ring)), params)
                at_axis = {"heads": "cp" if ring == 1 else "heads", "ring": "cp" if ring == p else "ring"}
                sent = {phase: [comm.ledger.total(at_axis[axes], operation, phase).elements for axes, operation in ROWS]
                        for phase in ("forward", "backward")}
                extra = 0 if ids is None else B
                keys = (2 * B * g * K + extra) * (S - following) if ring > 1 else 0
                back = keys + (2 * B * g * K * (S - N) if ring > 1 else 0)
                many = group > 1
                assert sent["forward"] == [many * B * K * ((H + 2 * G * repeats) * n + h * N), many * extra * n, keys]
                assert sent["backward"] == [many * B * K * (H * n + (h + 2 * g) * N), 0, back]
                assert sum(map(sum, sent.values())) == comm.ledger.total().elements
                assert comm.ledger.total(operation="all_to_all").calls == 8 * many
    ranks.run(check)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_work_is_shared_out_by_heads(ranks, kind):
    """Whatever the layout: in blocks of 1 each head's causal S(S + 1)/2 pairs, in 2 products of 2K FLOPs and 5 backward."""
    H, S, K = 8, 6, 2

    def check(comm: Comm):
        layout = SequenceLayout(kind, S)
        q, k, v = (layout.own(draw(n, (1, H, S, K)), comm, 2) for n in "qkv")
        with Count() as count:
            y, vjp = all_to_all_attention.array(q, k, v, comm=comm, layout=layout, block_q=1, block_k=1)
            forward = sum(count.flops.values())
            vjp(y)
        pairs = shares(H, comm.size)[comm.rank] * S * (S + 1) // 2
        assert (forward, sum(count.flops.values())) == (4 * K * pairs, 14 * K * pairs)
    ranks.run(check)


def test_a_rank_keeps_its_heads_of_its_groups_tokens(ranks):
    """Of B·N tokens 2h heads of q and y, 2g of k and v, and h numbers lse; and what goes back, n tokens of H heads.  Where
    nothing changes places q, k and v are the arguments, and y is what goes back."""
    B, H, G, K = 2, 8, 4, 3

    def check(comm: Comm):
        cp = Mesh(cp=comm.size, comm=comm).cp
        params, layout = own_tensors(Cut("kept", (B, H, G, 2 * comm.size, K), "zigzag"), cp)
        for ring in rings(comm.size):
            group = comm.size // ring
            of_q = shares(H, group)
            h, g = of_q[cp.rank % group], of_q[cp.rank % group] // (2 if all(m % 2 == 0 for m in of_q) else 1)
            with Count() as count:
                value_and_grad(lambda p: total(all_to_all_attention(p["q"], p["k"], p["v"], comm=cp, layout=layout, ring=ring)),
                               params)
            N, n = 2 * group, 2
            kept = (2 * h + 2 * g) * K + h if group > 1 else h * K + h
            assert count.peak == 8 * (B * N * kept + (B * n * H * K if group > 1 else 0))
    ranks.run(check)


# -- wrong use ------------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_refused_by_all_ranks_before_anything_travels(ranks):
    def check(comm: Comm):
        for ring in rings(comm.size):
            refusals(all_to_all_attention, comm, ring=ring)
    ranks.run(check)


def test_a_ring_that_is_no_divisor_or_not_the_same_on_all_ranks_is_refused(ranks):
    def check(comm: Comm):
        layout = SequenceLayout("zigzag", 16)

        def call(ring):
            return functools.partial(all_to_all_attention.array, *part(comm, layout), comm=comm, layout=layout, ring=ring)
        for ring in (0, -1, comm.size + 1, 2 * comm.size):
            words = f"ring must be a divisor of the {comm.size} ranks, got {ring}$"
            require_refusal(comm, words, call(ring), ValueError)
            if comm.size > 1:
                require_refusal(comm, words[:-1], call(ring if comm.rank == 0 else 1), CommError)
        require_refusal(comm, "ring must be integers, got 1.0", call(1.0), TypeError)
        if comm.size > 1:
            require_refusal(comm, r"rank 0: .* in a ring of 1 .*; rank 1(, \d)*: .* in a ring of \d ",
                            call(comm.size if comm.rank else 1), CommError)
    ranks.run(check)


def test_tensors_that_lie_otherwise_are_refused_also_on_one_rank(ranks):
    ranks.run(lambda comm: layout_refusals(comm, lambda q, k, v, cp, layout: all_to_all_attention(
        q, k, v, comm=cp, layout=layout, ring=comm.size)))
