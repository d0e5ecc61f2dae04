"""Localises keys of other ranks that are missing, seen by the wrong queries or met twice, gradients that do not find their way
home, ranks that wait before they send, numbers that travel more often than they must, and work that is not shared out.

Serial naive attention is what all is compared with, in float64: sums of at most 40 terms of size 1 err by some 1e-15, allowed
is 1e-12 of the largest number.  Positions are cut by test_sequence.py's layouts; adjoints are checked in ops/test_registry.py.
"""
import functools
import importlib
import tracemalloc
from dataclasses import dataclass, replace

import numpy as np
import pytest

from refimpl.autograd import Count, Frame, Layout, LayoutError, Tensor, value_and_grad
from refimpl.cases.sequences import Cut
from refimpl.comm import Comm, CommError, Mesh
from refimpl.comm.transfer import Arrived
from refimpl.ops import CAUSAL, Mask, attention, blockwise, blockwise_attention, mul
from refimpl.ops import sum as total
from refimpl.parallel import ATTENTIONS, LAYOUTS, SequenceLayout, all_to_all_attention
from refimpl.parallel import attention as attention_by_name
from refimpl.parallel import divide_by_count, reduce_gradients, ring_attention
from refimpl.rng import draw

RING = importlib.import_module("refimpl.parallel.ring")
CP, NAMES = frozenset({"cp"}), ("y", "dq", "dk", "dv")
MASKS = [Mask(), CAUSAL, Mask(causal=True, window=3), Mask(window=2), Mask(causal=True, prefix=4),
         Mask(causal=True, window=2, prefix=2)]
DOCUMENTS = [[0] * 3 + [1] * 6 + [2] * 4, [0, 1, 2] * 4 + [7]]          # one after another, and mixed
SHAPES = [((2, 4, 2, 8, 3), 2, 3, None),                # (B, H, G, S, K), block_q, block_k, documents
          ((1, 6, 2, 13, 2), None, None, None),         # 2 kv heads, which 4 ranks cannot share out
          ((1, 3, 1, 3, 2), 1, 1, None),                # one kv head (MQA), and fewer positions than ranks
          ((2, 2, 1, 13, 2), 2, 2, DOCUMENTS)]


def rows(kind, mask):
    for shape, block_q, block_k, documents in SHAPES:
        yield Cut("ring", shape, kind, documents, {"mask": mask, "block_q": block_q, "block_k": block_k})


def serially(row):
    """dy of the whole sequence, and y, dq, dk, dv."""
    q, k, v, documents = row.whole()
    dy = draw("dy", q.shape)
    y, vjp = attention.array(q, k, v, documents, documents, mask=row.others["mask"], scale=row.others.get("scale"))
    return dy, (y, *vjp(dy)[:3])


def require_equal(got, right, layout, comm, tolerance=1e-12):
    """This rank's part of y, dq, dk, dv against the whole ones."""
    for name, mine, whole in zip(NAMES, got, right, strict=True):
        part = layout.own(whole, comm, 2)
        assert (mine.shape, mine.dtype) == (part.shape, part.dtype), name
        assert np.abs(mine - part).max(initial=0) <= tolerance * max(1, np.abs(whole).max(initial=0)), name


def require_serial(op, comm, row, truth, **others):
    """y, dq, dk and dv of `op`, on this rank."""
    arrays, static = row.arguments(comm, "float64")
    y, vjp = op.array(*arrays, comm=comm, **static, **others)
    require_equal([y, *vjp(static["layout"].own(truth[0], comm, 2))[:3]], truth[1], static["layout"], comm)


def own_tensors(row, comm, cut=True):
    """q, k, v by name as parameters that are cut along positions over cp, and their layout."""
    arrays, static = row.arguments(comm, "float64")
    return {n: Tensor(a, Layout(CP), name=n, cut={"cp": 2} if cut else {}) for n, a in zip("qkv", arrays)}, static["layout"]


def on_tape(act, row, comm, truth, cut=True):
    """The same by value_and_grad: act(p) is attention of the Tensors q, k, v of p."""
    params, layout = own_tensors(row, comm, cut)
    dy, ys = layout.own(truth[0], comm, 2), []

    def loss(p):
        ys.append(act(p))
        return total(mul(ys[0], Tensor(dy, Layout(CP))))
    value, grads = value_and_grad(loss, params)
    assert ys[0].layout == Layout(CP) and value.varies == CP and (ys[0].cut == {"cp": 2} or not cut)
    assert not any(g.partial for g in grads.values())
    require_equal([ys[0].array, *(grads[n].array for n in "qkv")], truth[1], layout, comm)


# -- the same numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_ring_equals_naive(ranks, kind, mask):
    cases = [(row, serially(row)) for row in rows(kind, mask)]
    ranks.run(lambda comm: [require_serial(ring_attention, comm, *case) for case in cases])


@pytest.mark.parametrize("kind", LAYOUTS)
def test_ring_equals_naive_on_the_tape(ranks, kind):
    row = Cut("tape", (2, 4, 2, 11, 3), kind, others={"mask": CAUSAL})
    truth = serially(row)

    def check(comm: Comm):
        cp = Mesh(cp=comm.size, comm=comm).cp
        layout = SequenceLayout(kind, 11)
        for cut in (True, False):
            on_tape(lambda p: ring_attention(p["q"], p["k"], p["v"], comm=cp, layout=layout), row, cp, truth, cut)
    ranks.run(check)


@pytest.mark.parametrize("how", ATTENTIONS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_attention_by_any_name_is_the_same(ranks, kind, how):
    """Also on one rank, where the Tensors are cut over cp, too: tags do not depend on sizes."""
    cases = [(row, serially(row)) for row in rows(kind, Mask(causal=True, window=5)) if row.documents is None]

    def check(comm: Comm):
        cp = Mesh(cp=comm.size, comm=comm).cp
        for row, truth in cases:
            on_tape(lambda p: attention_by_name(p["q"], p["k"], p["v"], cp, SequenceLayout(kind, row.shape[3]),
                                                row.others["mask"], how), row, cp, truth)
    ranks.run(check)


def test_a_ring_of_some_of_the_ranks(ranks):
    """dp and tp beside cp: each ring has samples, or heads, of its own."""
    row = Cut("some", (2, 4, 2, 7, 2), "zigzag", others={"mask": CAUSAL})
    dy, right = serially(row)

    def check(comm: Comm):
        for dims in ({"dp": 2, "cp": comm.size // 2}, {"cp": comm.size // 2, "tp": 2}):
            mesh = Mesh(**dims, comm=comm)
            axis, at = (0, mesh.dp.rank) if "dp" in dims else (1, mesh.tp.rank)
            halves = [np.split(a, 2, axis)[at] for a in (*row.whole()[:3], dy, *right)]
            layout = SequenceLayout("zigzag", 7)
            q, k, v, d = (layout.own(a, mesh.cp, 2) for a in halves[:4])
            y, vjp = ring_attention.array(q, k, v, comm=mesh.cp, layout=layout)
            require_equal([y, *vjp(d)[:3]], halves[4:], layout, mesh.cp)
    if ranks.size % 2 == 0:
        ranks.run(check)


def test_on_one_rank_ring_and_all_to_all_are_blockwise_to_the_bit():
    row = Cut("one", (2, 4, 2, 11, 3), "zigzag", others={"mask": CAUSAL})
    (q, k, v), static = row.arguments(Mesh().cp, "float64")
    y, vjp = blockwise_attention.array(q, k, v, mask=CAUSAL, block_q=2, block_k=3)
    for op in (ring_attention, all_to_all_attention):
        ours, back = op.array(q, k, v, comm=Mesh().cp, **static)
        assert np.array_equal(ours, y) and all(map(np.array_equal, back(y)[:3], vjp(y)[:3]))


@pytest.mark.parametrize("shape", [(0, 2, 1, 5, 2), (2, 2, 1, 0, 2), (1, 0, 0, 5, 2)])
def test_no_samples_positions_or_heads_are_nothing_wrong(ranks, shape):
    row = Cut("none", shape, "zigzag", np.zeros((shape[0], shape[3]), int), {"mask": CAUSAL})
    truth = serially(row)

    def check(comm: Comm):
        for op in (ring_attention, all_to_all_attention):
            require_serial(op, comm, row, truth)
    ranks.run(check)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_heads_that_take_turns_get_the_same_bits_from_as_many_elements(ranks, kind, monkeypatch):
    """One head a turn, two, or all; on the way home the gradients of one turn meet the next one's keys."""
    row = Cut("turns", (2, 10, 5, 13, 3), kind, DOCUMENTS, {"mask": CAUSAL})
    each = 2 * 2 * 3 * 8 * max(SequenceLayout(kind, 13).sizes(ranks.size))  # bytes of a head's keys and values
    truth = serially(row)

    def check(comm: Comm):
        found = []
        for size in (1, 2 * each, 5 * each):
            monkeypatch.setattr(RING, "TURN", size)
            arrays, static = row.arguments(comm, "float64")
            comm.ledger.clear()
            y, vjp = ring_attention.array(*arrays, comm=comm, **static)
            got = [y, *vjp(static["layout"].own(truth[0], comm, 2))[:3]]
            require_equal(got, truth[1], static["layout"], comm)
            ids = 2 * sum(np.delete(static["layout"].sizes(comm.size), (comm.rank + 1) % comm.size)) * (comm.size > 1)
            turns = {1: 5, 2 * each: 3, 5 * each: 1}[size]
            found.append(([a.tobytes() for a in got], comm.ledger.total().elements - 2 * ids * turns))
            comm.barrier()                              # before another rank changes what is a turn
        assert found[0] == found[1] == found[2]
    ranks.run(check)


def any_row(seed):
    """A row of any shape, layout, mask, blocks and documents."""
    rng = np.random.default_rng(seed)

    def one(low, high):
        return int(rng.integers(low, high + 1))

    def maybe(value):
        return value if rng.random() < 0.5 else None
    B, n, G, S, K = one(0, 2), one(1, 3), one(1, 3), one(0, 20), one(1, 3)
    causal = rng.random() < 0.7
    mask = Mask(causal, maybe(one(1, 8)), one(0, 6) if causal else 0)
    return Cut(f"any {seed}", (B, n * G, G, S, K), LAYOUTS[one(0, 2)], maybe(rng.integers(0, 3, (B, S))),
               {"mask": mask, "scale": maybe(rng.random()), "block_q": maybe(one(1, 3)), "block_k": maybe(one(1, 3))})


def any_rows(size):
    return [any_row(1000 * size + seed) for seed in range(12)]


def test_ring_equals_naive_whatever_the_shapes(ranks):
    cases = [(row, serially(row)) for row in any_rows(ranks.size)]
    ranks.run(lambda comm: [require_serial(ring_attention, comm, *case) for case in cases])


@pytest.mark.parametrize("kind", LAYOUTS)
def test_float32_stays_float32(ranks, kind):
    """And errs by its own rounding, eps 1.2e-7 times sums of 9 terms and of their gradients."""
    row = Cut("single", (1, 2, 1, 9, 4), kind, others={"mask": CAUSAL})
    truth = serially(row)

    def check(comm: Comm):
        (q, k, v), static = row.arguments(comm, "float32")
        y, vjp = ring_attention.array(q, k, v, comm=comm, **static)
        got = [y, *vjp(static["layout"].own(truth[0], comm, 2).astype("float32"))[:3]]
        assert {a.dtype for a in got} == {np.dtype("float32")}
        require_equal([a.astype(float) for a in got], truth[1], static["layout"], comm, 1e-5)
    ranks.run(check)


# -- what went wrong elsewhere --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [Mask(), CAUSAL], ids=str)
def test_gradients_of_every_ranks_keys_by_differences(ranks, mask):
    """A backward pass that works on the first hop's keys, or leaves dk and dv where they are, gives the right y.

    Central differences with h = 1e-4 err by h² times third derivatives below 1, that is 1e-8, and by 1e-16/h.
    """
    S, h = max(4, ranks.size), 1e-4

    def check(comm: Comm):
        layout, (q, k, v, c) = SequenceLayout("contiguous", S), (draw(n, (1, 1, S, 1)) for n in "qkvc")

        def y(k, v):
            return ring_attention.array(*(layout.own(a, comm, 2) for a in (q, k, v)), comm=comm, layout=layout, mask=mask)

        def loss(k, v):
            return comm.all_reduce(np.sum(y(k, v)[0] * layout.own(c, comm, 2)).reshape(1))[0]
        _, dk, dv, _ = y(k, v)[1](layout.own(c, comm, 2))
        dk, dv = (comm.all_gather(a, axis=2, sizes=layout.sizes(comm.size)) for a in (dk, dv))
        for i in range(S):
            step = np.where(np.arange(S) == i, h, 0.0)[None, None, :, None]
            assert abs((loss(k + step, v) - loss(k - step, v)) / (2 * h) - dk[0, 0, i, 0]) <= 1e-7
            assert abs((loss(k, v + step) - loss(k, v - step)) / (2 * h) - dv[0, 0, i, 0]) <= 1e-7
    ranks.run(check)


def test_scores_0_and_100_merge_in_float32(ranks):
    """One key's score is 100, on each rank in turn: e^100 is no float32, and the others, e^-100, vanish beside it."""
    S = 2 * ranks.size

    def check(comm: Comm):
        layout, one = SequenceLayout("contiguous", S), np.ones((1, 1, 2, 1), "float32")
        v = np.arange(1, S + 1, dtype="float32").reshape(1, 1, S, 1)
        for at in range(S):
            k = np.where(np.arange(S) == at, 100, 0).astype("float32").reshape(1, 1, S, 1)
            y, vjp = ring_attention.array(one, layout.own(k, comm, 2), layout.own(v, comm, 2), comm=comm, layout=layout,
                                          mask=Mask(), scale=1.0)
            dq, dk, dv, _ = vjp(one)
            assert (y == at + 1).all()
            assert np.abs(dq).max() <= 1e-38 and np.abs(dk).max() <= 1e-38          # one key has all the weight
            assert np.abs(dv.ravel() - S * (layout.positions(comm.rank, comm.size) == at)).max() <= 1e-38
    ranks.run(check)


@dataclass(frozen=True)
class OneKey(Mask):
    """No key is visible but one, and that only to queries behind it."""
    only: int = 0

    def block(self, queries, keys):
        return (keys[None, :] == self.only) & (queries[:, None] >= self.only)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_queries_that_see_no_key_give_0_and_get_0(ranks, kind):
    """By hand: a query that sees one key gives its value, and its gradient goes to that value alone.  A block of which
    nothing is seen comes before, or after, that of the one key; nan would come of -inf minus -inf."""
    S = 2 * ranks.size

    def check(comm: Comm):
        layout, (q, k, v, dy) = SequenceLayout(kind, S), (draw(n, (1, 1, S, 2)) for n in "abcd")
        at = layout.positions(comm.rank, comm.size)
        for only in sorted({0, S // 2, S - 1}):
            for block in (1, None):
                y, vjp = ring_attention.array(*(layout.own(a, comm, 2) for a in (q, k, v)), comm=comm, layout=layout,
                                              mask=OneKey(only=only), block_q=block, block_k=block)
                dq, dk, dv, _ = vjp(layout.own(dy, comm, 2))
                assert np.array_equal(y[0, 0], np.where(at[:, None] >= only, v[0, 0, only], 0))
                assert np.abs(dq).max() <= 1e-15 and np.abs(dk).max() <= 1e-14
                assert not dq[0, 0, at < only].any() and not dk[0, 0, at != only].any() and not dv[0, 0, at != only].any()
                assert np.abs(dv[0, 0, at == only] - dy[0, 0, only:].sum(axis=0)).max(initial=0) <= 1e-13
    ranks.run(check)


def test_one_valid_target_weighs_the_same_on_any_number_of_ranks(ranks):
    """The gradient of a mean over valid targets is divided once, by the count of all ranks: not 1/2 on two, 1/4 on four."""
    S = 9
    q, k, v, c = (draw(n, (1, 1, S, 2)) for n in "qkvc")
    valid = (np.arange(S) == 4).astype(float)[None, None, :, None]

    def gradient(comm: Comm):
        mesh = Mesh(cp=comm.size, comm=comm)
        layout = SequenceLayout("zigzag", S)
        own_q, own_k, own_v, own_c = (Tensor(layout.own(a, mesh.cp, 2), Layout(CP)) for a in (q, k, v, c * valid))

        def loss(p):
            return total(mul(own_c, ring_attention(mul(own_q, p["w"]), own_k, own_v, comm=mesh.cp, layout=layout)))
        _, grads = value_and_grad(loss, {"w": Tensor(np.array([0.5, 2.0]), name="w")})
        count = int(mesh.cp.all_reduce(layout.own(valid, mesh.cp, 2).sum().reshape(1))[0])
        return divide_by_count(reduce_gradients(grads, mesh), count)["w"].array

    y, vjp = attention.array(q * [0.5, 2.0], k, v, mask=CAUSAL)
    right = (vjp(c * valid)[0] * q).sum(axis=(0, 1, 2))

    def check(comm: Comm):
        assert np.abs(gradient(comm) - right).max() <= 1e-13
    ranks.run(check)


@pytest.mark.parametrize("elements", (1, 1 << 20))
def test_messages_of_8_bytes_and_of_8_megabytes_arrive(ranks, elements):
    """A rank that waited for its send before it received would hang on large ones only.  Queries of 0 see all keys alike: y is
    the mean of the values, and each value's gradient the mean of all dy.  (Means of p numbers up to p are exact in float32,
    but for one division.)"""
    def check(comm: Comm):
        layout = SequenceLayout("contiguous", comm.size)
        q, k, v, dy = (np.full((1, 1, 1, elements), x, "float32") for x in (0, 1, comm.rank, comm.rank))
        y, vjp = ring_attention.array(q, k, v, comm=comm, layout=layout, mask=Mask())
        assert np.abs(y - (comm.size - 1) / 2).max() <= 1e-6
        if elements == 1 or comm.size <= 4:
            assert np.abs(vjp(dy)[2] - (comm.size - 1) / 2).max() <= 1e-6
        sent = comm.ledger.total(operation="permute")
        assert not sent.calls or sent.bytes // sent.calls == 8 * elements
    if elements == 1 or ranks.size in (1, 2, 4, 8):     # large ones take their time
        ranks.run(check)


# -- what travels ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("per_rank", (2, None))
def test_a_rank_sends_what_the_formula_says(ranks, kind, per_rank):
    """Forward the keys and values of all ranks but the next one's: its block never comes by here.  Backward the same again, and
    dk and dv of all blocks but the own, which stay.  With equal shares: 2(p - 1)·B·(S/p)·G·K and twice that."""
    B, H, G, K = 2, 4, 2, 3
    p = ranks.size
    S = 13 if per_rank is None else p * per_rank
    row = Cut("sent", (B, H, G, S, K), kind, others={"mask": CAUSAL})

    def check(comm: Comm):
        cp = Mesh(cp=p, comm=comm).cp
        params, layout = own_tensors(row, cp)
        n = layout.sizes(p)
        documents = layout.own(np.zeros((B, S), np.int64), cp)
        following, rank = n[(cp.rank + 1) % p], cp.rank
        for ids, extra in ((None, 0), (documents, B)):
            comm.ledger.clear()
            value_and_grad(lambda q: total(ring_attention(q["q"], q["k"], q["v"], ids, comm=cp, layout=layout)), params)
            sent = [comm.ledger.total(axes="cp", operation="permute", phase=phase) for phase in ("forward", "backward")]
            assert sum(t.calls for t in sent) == comm.ledger.total().calls == (3 if ids is None else 5) * (p - 1)
            circled = S - following if p > 1 else 0
            forward = (2 * B * G * K + extra) * circled
            backward = forward + (2 * B * G * K * (S - n[rank]) if p > 1 else 0)
            if per_rank and ids is None:
                assert (forward, backward) == (2 * (p - 1) * B * (S // p) * G * K, 4 * (p - 1) * B * (S // p) * G * K)
            assert [(t.elements, t.wire, t.bytes) for t in sent] == [(e, e, 8 * e) for e in (forward, backward)]
    ranks.run(check)


# -- who computes what ----------------------------------------------------------------------------------------------


def pairs_of(comm, kind, S, block, mask=CAUSAL, K=2):
    """How many pairs of a query and a key each rank computes, forward and backward: int[p, 2].  Two products forward, of 2K
    FLOPs a pair, and five backward."""
    layout = SequenceLayout(kind, S)
    q, k, v = (layout.own(draw(n, (1, 1, S, K)), comm, 2) for n in "qkv")
    with Count() as count:
        y, vjp = ring_attention.array(q, k, v, comm=comm, layout=layout, mask=mask, block_q=block, block_k=block)
        forward = sum(count.flops.values())
        vjp(y)
    both = sum(count.flops.values())
    return comm.all_gather(np.array([[forward // (4 * K), (both - forward) // (10 * K)]]), axis=0)


def test_the_causal_work_of_contiguous_ranks_grows_as_2r_plus_1(ranks):
    """Rank r's T queries see the rT keys before them all, and half of their own: T²(2r + 1)/2 + T/2 pairs."""
    def check(comm: Comm):
        T, r = 4, np.arange(comm.size)
        right = (T * T * (2 * r + 1) + T) // 2
        assert np.array_equal(pairs_of(comm, "contiguous", T * comm.size, 1), np.stack([right, right], axis=1))
    ranks.run(check)


def test_the_useful_share_of_a_causal_contiguous_ring(ranks):
    """With one block a rank, r + 1 of p steps have work: of p² blocks (p + 1)/2p.  0.75 on 2 ranks, 0.625 on 4, 0.5625 on 8
    (the lecture's slides 37-41); the last rank works on all p, and the others wait for it."""
    def check(comm: Comm):
        p, T = comm.size, 3
        blocks = pairs_of(comm, "contiguous", T * p, T)[:, 0] / T ** 2
        assert np.array_equal(blocks, 1 + np.arange(p))
        assert blocks.sum() / p ** 2 == (p + 1) / (2 * p) == {1: 1, 2: 0.75, 4: 0.625, 8: 0.5625}.get(p, (p + 1) / (2 * p))
    ranks.run(check)


@pytest.mark.parametrize("c", (1, 3))
def test_zigzag_shares_the_causal_work_out_equally(ranks, c):
    """2p pieces of c: the r-th sees r + 1 of them, the r-th from behind 2p - r, together 2p + 1 on every rank.  Two of these
    lie on the diagonal, where c(c + 1)/2 pairs are seen: pair by pair it is c²(2p - 1) + c(c + 1)."""
    def check(comm: Comm):
        p = comm.size
        assert (pairs_of(comm, "zigzag", 2 * p * c, c) == (2 * p + 1) * c * c).all()
        assert (pairs_of(comm, "zigzag", 2 * p * c, 1) == c * c * (2 * p - 1) + c * (c + 1)).all()
    ranks.run(check)


def test_striped_shares_the_causal_work_out_but_for_the_diagonal(ranks):
    """Query j of rank r stands at r + jp and sees as many keys and itself: pT(T - 1)/2 + T(r + 1) pairs, so that the ranks are
    less than pT apart, the length of the diagonal."""
    def check(comm: Comm):
        p, T = comm.size, 5
        pairs = pairs_of(comm, "striped", T * p, 1)
        assert np.array_equal(pairs[:, 0], p * T * (T - 1) // 2 + T * (1 + np.arange(p)))
        assert np.array_equal(pairs[:, 1], pairs[:, 0]) and np.ptp(pairs) == T * (p - 1)
    ranks.run(check)


# -- one rank, by itself --------------------------------------------------------------------------------------------


class Alone(Comm):
    """One rank of many, by itself: to what it sends nobody listens, and what comes is made up."""

    def __init__(self, rank, size):
        super().__init__(rank, size, ("cp",))
        self.checked = False

    def _enter(self, operation, what, patience=None):
        pass

    def _start_permute(self, x, source, target, sizes):
        return Arrived(np.full((sizes[source], *x.shape[1:]), 0.5, x.dtype))


@pytest.mark.parametrize("backward", (False, True))
def test_what_a_rank_holds_does_not_grow_with_the_number_of_ranks(backward):
    """T positions a rank, and 4, 8 or 32 ranks: at the peak less than a tenth of a block of keys and values apart.  (Who kept
    what came by would hold as many blocks as there are ranks.)"""
    def peak(size):
        layout = SequenceLayout("contiguous", size * T)
        layout.positions(0, size)                       # kept for all layers, 8 bytes a position
        comm = Alone(size - 1, size)
        tracemalloc.start()
        y, vjp = ring_attention.array(q, k, v, comm=comm, layout=layout)
        if backward:
            tracemalloc.reset_peak()
            vjp(y)
        held = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return held
    T = 64
    q, k, v = (draw(n, (1, 4, T, 32)) for n in "qkv")
    peak(4)                                             # what is made once
    few = peak(4)
    for size in (8, 32):
        assert abs(peak(size) - few) < (k.nbytes + v.nbytes) / 10


@pytest.mark.parametrize("turns", (1, 4))
@pytest.mark.parametrize("size", (2, 3, 8))
def test_a_rank_holds_no_more_blocks_than_it_must(size, turns, monkeypatch):
    """In units of a block of keys and values, of which heads in turn take a part.  Forward: y, a half; the one that is here and
    the one that comes.  Backward: y, dq, dk, dv; these two, dk and dv made here, those that come, those that are sent;
    or, where a turn ends with the second rank, its own on their way home beside two of the next.  0.2 are left for scores."""
    T, G, K = 512, 4, 64
    monkeypatch.setattr(RING, "TURN", 1 if turns > 1 else 1 << 30)
    monkeypatch.setattr(blockwise, "BYTES", 1)          # scores of one head
    q, k, v = (draw(n, (1, G, T, K)) for n in "qkv")
    layout, comm, unit = SequenceLayout("contiguous", size * T), Alone(size - 1, size), k.nbytes + v.nbytes
    layout.positions(0, size)                           # kept for all layers

    def peak(act):
        tracemalloc.reset_peak()
        done = act()
        return done, tracemalloc.get_traced_memory()[1] / unit
    ring_attention.array(q, k, v, comm=comm, layout=layout, block_q=64, block_k=64)     # what is made once
    tracemalloc.start()
    (y, vjp), forward = peak(lambda: ring_attention.array(q, k, v, comm=comm, layout=layout, block_q=64, block_k=64))
    _, backward = peak(lambda: vjp(y))
    tracemalloc.stop()
    assert forward < 0.5 + 2 / turns + 0.2
    assert backward < 2 + {2: 2 if turns == 1 else 4, 3: 4, 8: 5}[size] / turns + 0.2


def test_a_rank_keeps_its_output_and_a_number_for_each_query(ranks):
    """q, k and v are its arguments; y is as large as q, and lse has one number a query and head."""
    def check(comm: Comm):
        cp = Mesh(cp=comm.size, comm=comm).cp
        params, layout = own_tensors(Cut("kept", (2, 4, 2, 4 * comm.size, 3), "zigzag"), cp)
        with Count() as count:
            value_and_grad(lambda p: total(ring_attention(p["q"], p["k"], p["v"], comm=cp, layout=layout)), params)
        y = params["q"].array.size
        assert count.peak == 8 * (y + y // 3)
    ranks.run(check)


class Events(Frame):
    """The names of calls, in the order in which they begin."""

    def __init__(self):
        self.names = []

    def call(self, op, run, *arrays, **static):
        if op.name in ("start_permute", "product", "wait"):
            self.names.append({"start_permute": "send"}.get(op.name, op.name))
        return run(*arrays, **static)


def events_of(comm, T, block, documents=None, heads=1):
    """What happens forward and backward on this rank, without mask."""
    layout = SequenceLayout("striped", T * comm.size)
    q = layout.own(draw("q", (1, heads, T * comm.size, 2)), comm, 2)
    ids = None if documents is None else layout.own(documents, comm)
    events = Events()
    comm.progress = lambda: (events.names.append("progress"), type(comm).progress(comm))
    try:
        with events:
            y, vjp = ring_attention.array(q, q, q, ids, comm=comm, layout=layout, mask=Mask(), block_q=block, block_k=block)
            end = len(events.names)
            vjp(y)
    finally:
        del comm.progress
    return events.names[:end], events.names[end:]


def test_keys_are_sent_before_a_block_is_worked_on_and_waited_for_after(ranks):
    """So they travel meanwhile.  Backward dk and dv of a block set out as soon as this rank has added its own, and those from
    the rank before are waited for no earlier than that."""
    def check(comm: Comm):
        last, forward, backward = comm.size - 1, [], []
        for step in range(comm.size):
            keys = step < last
            forward += ["send"] * keys + ["product"] * 2 + ["progress"] + ["wait"] * keys
            backward += ["send"] * keys + ["product"] * 5 + ["progress"]
            backward += ["wait"] * (step > 1) + ["send"] * (step > 0) + ["wait"] * keys
        assert events_of(comm, 2, 2) == (forward, backward + ["wait"] * (last > 0))
        with_ids = events_of(comm, 2, 2, np.zeros((1, 2 * comm.size), int))[0]
        twice = {"send": 2, "wait": 2}
        assert with_ids == [name for name in forward for _ in range(twice.get(name, 1))]
    ranks.run(check)


def test_gradients_of_one_turn_come_home_while_the_next_one_begins(ranks, monkeypatch):
    monkeypatch.setattr(RING, "TURN", 1)

    def check(comm: Comm):
        last, backward = comm.size - 1, []
        for turn in range(3):
            for step in range(comm.size):
                keys = step < last
                backward += ["send"] * keys + ["product"] * 5 + ["progress"]
                backward += ["wait"] * (turn > 0 and step == 0 and last > 0)            # what comes home
                backward += ["wait"] * (step > 1) + ["send"] * (step > 0) + ["wait"] * keys
        assert events_of(comm, 2, 2, heads=3)[1] == backward + ["wait"] * (last > 0)
    ranks.run(check)


def test_mpi_may_move_what_is_under_way_after_every_block(ranks):
    def check(comm: Comm):
        for names, products in zip(events_of(comm, 3, 1), (2, 5)):
            computed = [name for name in names if name in ("product", "progress")]
            assert computed == (["product"] * products + ["progress"]) * (9 * comm.size)
    ranks.run(check)


# -- wrong use ------------------------------------------------------------------------------------------------------


def require_refusal(comm, words, act, *errors):
    """`act` is the same sentence on every rank, and nothing has travelled."""
    comm.ledger.clear()
    with pytest.raises(errors or (TypeError, ValueError, CommError), match=words) as error:
        act()
    assert not comm.ledger.total().calls
    assert len(set(comm.gather_texts(str(error.value)))) == 1
    assert "\n" not in str(error.value)


def part(comm, layout, B=2, H=4, G=2, K=2):
    n = layout.sizes(comm.size)[comm.rank]
    return [np.ones((B, H, n, K)), np.ones((B, G, n, K)), np.ones((B, G, n, K))]


def wrong_on_one(layout):
    """What is wrong on the last rank: its arguments by a sentence of the refusal."""
    longer = SequenceLayout(layout.kind, layout.length + 2 * 8)
    return {
        "positions cut zigzag over . ranks are": lambda comm: (part(comm, longer), {}),
        "with G dividing H": lambda comm: (part(comm, layout, H=5), {}),
        "layout must be a SequenceLayout, got 'zigzag'": lambda comm: (part(comm, layout), {"layout": "zigzag"}),
        "block_k must be an integer of at least 1, got 0": lambda comm: (part(comm, layout), {"block_k": 0}),
        "block_q must be an integer of at least 1, got 2.5": lambda comm: (part(comm, layout), {"block_q": 2.5}),
        "mask must be a Mask, got 'causal'": lambda comm: (part(comm, layout), {"mask": "causal"}),
        "could not convert string to float": lambda comm: (part(comm, layout), {"scale": "x"}),
        "must be float32 or float64, all the same, got float64, float64, float32": lambda comm: (
            [*part(comm, layout)[:2], part(comm, layout)[2].astype("float32")], {}),
        "must be float32 or float64, all the same, got float16": lambda comm: (
            [a.astype("float16") for a in part(comm, layout)], {}),
        r"documents int64\[9\] must be integers": lambda comm: ([*part(comm, layout), np.zeros(9, int)], {}),
        r"documents <U1\[.*\] must be integers": lambda comm: (
            [*part(comm, layout), np.full((2, part(comm, layout)[0].shape[2]), "a")], {})}


# What each rank could do by itself, but not all together: what the last rank is given, by a sentence of the refusal.
UNLIKE = {
    "mask": lambda comm, layout: (part(comm, layout), {"mask": Mask()}),
    "prefix": lambda comm, layout: (part(comm, layout), {"mask": replace(CAUSAL, prefix=2)}),
    "scale": lambda comm, layout: (part(comm, layout), {"scale": 2.0}),
    "layout": lambda comm, layout: (part(comm, layout), {"layout": SequenceLayout("contiguous", 16)}),
    "documents": lambda comm, layout: ([*part(comm, layout), np.zeros((2, part(comm, layout)[0].shape[2]), int)], {}),
    "samples": lambda comm, layout: (part(comm, layout, B=1), {}),
    "K": lambda comm, layout: (part(comm, layout, K=3), {}),
    "H": lambda comm, layout: (part(comm, layout, H=2), {}),
    "G and K": lambda comm, layout: (part(comm, layout, G=1, K=4), {}),             # as many numbers travel
    "dtype": lambda comm, layout: ([a.astype("float32") for a in part(comm, layout)], {})}


def refusals(op, comm, **others):
    layout = SequenceLayout("zigzag", 16)

    def given(arrays, static):
        return lambda: op.array(*arrays, **({"comm": comm, "layout": layout} | static | others))
    for words, make in wrong_on_one(layout).items():
        require_refusal(comm, words, given(*make(comm)))            # on all ranks
        require_refusal(comm, words, given(*(make(comm) if comm.rank == comm.size - 1 else (part(comm, layout), {}))))
    if comm.size > 1:
        for make in UNLIKE.values():
            unlike = make(comm, layout) if comm.rank == comm.size - 1 else (part(comm, layout), {})
            require_refusal(comm, f"the ranks do not agree .*: {op.name}.* over {comm.name}: ", given(*unlike), CommError)
    same = {"mask": Mask(True, np.int64(3)), "scale": 2} if comm.rank else {"mask": Mask(np.bool_(True), 3), "scale": 2.0}
    op.array(*part(comm, layout), comm=comm, layout=layout, **others | same)            # the same, but for its types
    y, _ = op.array(*part(comm, layout), comm=comm, layout=layout, **others)            # and then they go on
    assert np.abs(y - 1).max(initial=0) <= 1e-15


def test_wrong_arguments_are_refused_by_all_ranks_before_anything_travels(ranks):
    ranks.run(functools.partial(refusals, ring_attention))


def layout_refusals(comm, act):
    """act(q, k, v, comm, layout) of Tensors that lie otherwise than cut by position over cp."""
    mesh = Mesh(cp=comm.size, comm=comm)
    layout = SequenceLayout("zigzag", 16)
    q, k, v = part(mesh.cp, layout)

    def tensors(**wrong):
        return [Tensor(a, wrong.get(f"layout_{n}", Layout(CP)), cut=wrong.get(n)) for n, a in zip("qkv", (q, k, v))]
    for words, wrong in ((r"\(2, 2, \d+, 2\) is replicated over cp: scatter_to cuts it", {"layout_k": Layout()}),
                         (r"\(2, 4, \d+, 2\) is replicated over cp: scatter_to cuts it", {"layout_q": Layout()}),
                         ("must be cut along axis 2 there and nowhere else, over cp it is cut along axis 1", {"k": {"cp": 1}}),
                         ("over cp it is cut along axis 3", {"v": {"cp": 3}}),
                         ("over tp it is cut along axis 2", {"k": {"cp": 2, "tp": 2}}),
                         ("over tp it is cut along axis 3", {"q": {"tp": 3}})):
        comm.ledger.clear()
        with pytest.raises(LayoutError, match=words):
            act(*tensors(**wrong), mesh.cp, layout)
        assert not comm.ledger.total().calls


def test_tensors_that_lie_otherwise_are_refused_also_on_one_rank(ranks):
    ranks.run(lambda comm: layout_refusals(comm, lambda q, k, v, cp, layout: ring_attention(q, k, v, comm=cp, layout=layout)))


def test_attention_by_name_refuses_for_all_ranks(ranks):
    def check(comm: Comm):
        cp, layout = Mesh(cp=comm.size, comm=comm).cp, SequenceLayout("zigzag", 16)
        right, wrong = ([Tensor(a, Layout(CP)) for a in part(cp, of)] for of in (layout, SequenceLayout("zigzag", 32)))
        with pytest.raises(ValueError, match="^attention is one of naive, blockwise, ring, all_to_all, got 'flash'$"):
            attention_by_name(*right, cp, layout, how="flash")
        for how in ATTENTIONS if cp.size > 1 else ():
            for unlike in ((wrong[:1] + right[1:], CAUSAL), (wrong, CAUSAL), (right, Mask())):
                arrays, mask = unlike if cp.rank == 0 else (right, CAUSAL)
                require_refusal(comm, "the ranks do not agree", lambda: attention_by_name(*arrays, cp, layout, mask, how))
    ranks.run(check)
