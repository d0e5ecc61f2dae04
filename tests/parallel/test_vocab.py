"""Localises a cut vocabulary that is not the serial one: words counted twice or not at all, padding that counts, a gradient
that stays on one rank, and logits that travel.

Shape letters: B, T, V words, D.  On 8 ranks some hold no word.  Wrong use: test_vocab_layouts.py.
"""
import math

import numpy as np
import pytest

from refimpl.autograd import LayoutError, Tensor, value_and_grad
from refimpl.comm import Comm, Mesh
from refimpl.ops import cross_entropy, embedding
from refimpl.ops import sum as total
from refimpl.parallel import (Cut, all_gather, gather, gather_from, gather_vocab, reduce_from, reduce_gradients, shard,
                              vocab_parallel_cross_entropy, vocab_parallel_embedding)
from refimpl.rng import draw

IDS = np.array([[0, 7, 5, 5], [7, 3, 2, 0]])            # (B, T)
IGNORED = np.array([[0, -100, 5, 5], [-100, 3, 2, 7]])
VOCABULARIES = {"even": (8, 8), "uneven": (11, 11), "padded": (11, 32)}         # (words, rows)
DTYPES = ("float64", "float32")
FORMS = ({}, {"smoothing": 0.1}, {"smoothing": 0.1, "smoothing_over": "others"}, {"z_loss": 0.01},
         {"smoothing": 0.2, "z_loss": 0.1})
every_vocabulary = pytest.mark.parametrize("n_words, n_rows", VOCABULARIES.values(), ids=VOCABULARIES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def whole_logits(n_words, n_rows, dtype="float64", scale=4.0):
    """(B, T, n_rows): drawn, with padding that would win or make nan of everything if it counted."""
    padding = np.resize(np.array([1e30, np.inf, np.nan], dtype), (2, 4, n_rows - n_words))
    return np.concatenate([draw("logits", (2, 4, n_words), scale, dtype), padding], axis=-1)


def own_columns(logits, comm):
    mesh = Mesh(tp=comm.size, comm=comm)
    table = {"logits": Cut.even(logits.ndim - 1, logits.shape[-1], mesh.tp)}
    return mesh, table, shard({"logits": logits}, table, mesh)


def cut_loss(logits, targets, n_words, comm: Comm, **static):
    """Loss, count and the whole gradient, of logits whose columns are cut over the ranks of `comm`."""
    mesh, table, p = own_columns(logits, comm)
    (value, count), grads = value_and_grad(lambda p: vocab_parallel_cross_entropy(
        p["logits"], targets, comm=mesh.tp, n_words=n_words, n_rows=logits.shape[-1], **static), p)
    assert value.varies == frozenset() and grads["logits"].partial == frozenset() and value.dtype == logits.dtype
    return float(value), int(count), gather(grads, table, mesh)["logits"]


def check_loss(logits, targets, n_words, comm: Comm, **static):
    """The loss and gradient are those of the serial op on the words alone, and 0 in the padding.

    Tolerance: sums of V terms in another order, 32 roundings of the largest number that is added up.
    """
    (want, n), vjp = cross_entropy.array(logits[..., :n_words], targets, **static)
    gradient = vjp(np.ones((), logits.dtype))[0]
    value, count, g = cut_loss(logits, targets, n_words, comm, **static)
    few = 32 * np.finfo(logits.dtype).eps
    assert count == n and (value == want or abs(value - want) <= few * max(1.0, abs(want))), (value, want, static)
    assert np.abs(g[..., :n_words] - gradient).max() <= few * max(1.0, np.abs(gradient).max()), static
    assert not g[..., n_words:].any() and not g[targets == -100].any() and g.dtype == logits.dtype


# -- the loss ------------------------------------------------------------------------------------------------------


@every_dtype
@every_vocabulary
def test_loss_and_gradient_equal_serial(ranks, n_words, n_rows, dtype):
    def check(comm: Comm):
        for targets in (IDS, IGNORED):
            for static in FORMS:
                check_loss(whole_logits(n_words, n_rows, dtype), targets, n_words, comm, **static)
    ranks.run(check)


@every_dtype
@every_vocabulary
def test_huge_and_invisible_logits_equal_serial(ranks, n_words, n_rows, dtype):
    """Rows: a huge one, all huge and equal, all very negative; only one visible, the target invisible, no word visible."""
    def check(comm: Comm):
        logits = whole_logits(n_words, n_rows, dtype)
        logits[0, 0, 7], logits[0, 1, :n_words], logits[0, 2, :n_words] = 1e4, 1e30, -1e30
        logits[0, 3, :n_words], logits[0, 3, 5] = -np.inf, 2.0
        logits[1, 0, 7], logits[1, 1, :n_words] = -np.inf, -np.inf
        check_loss(logits, IDS, n_words, comm)
        visible = np.where([[True] * 4, [False, False, True, True]], IDS, -100)
        value, _, g = cut_loss(logits[:1, :1], visible[:1, :1], n_words, comm)
        assert value == pytest.approx(1e4 - float(logits[0, 0, 0]), rel=1e-6)    # the target is another word
        assert g[0, 0, :8].tolist() == [-1, 0, 0, 0, 0, 0, 0, 1]
        value, _, g = cut_loss(logits[:1, 1:2], visible[:1, 1:2], n_words, comm)
        assert value == pytest.approx(math.log(n_words), rel=1e-6)               # all equal
        value, _, g = cut_loss(logits[:1, 3:4], visible[:1, 3:4], n_words, comm)
        assert value == 0 and not g.any()                                        # the target is the only one
        check_loss(logits, visible, n_words, comm)
    ranks.run(check)


@every_vocabulary
def test_without_a_valid_target_loss_and_gradient_are_0(ranks, n_words, n_rows):
    def check(comm: Comm):
        for static in FORMS:
            value, count, g = cut_loss(whole_logits(n_words, n_rows), np.full((2, 4), -100), n_words, comm, **static)
            assert value == count == 0 and not g.any()
    ranks.run(check)


@pytest.mark.parametrize("static, stack", [({}, 2), ({"z_loss": 0.1}, 2), ({"smoothing": 0.1}, 3)])
def test_three_numbers_a_target_travel_and_never_the_logits(ranks, static, stack):
    """An all_reduce of n maxima and one of n·2 sums (n·3 with smoothing), n targets that count; nothing backward."""
    def check(comm: Comm):
        for V in (11, 1100):
            for targets in (IDS, IGNORED):
                n = np.count_nonzero(targets != -100)
                mesh, _, p = own_columns(draw("logits", (2, 4, V)), comm)
                comm.ledger.clear()
                value_and_grad(lambda p: vocab_parallel_cross_entropy(
                    p["logits"], targets, comm=mesh.tp, n_words=V, **static), p)
                rows = [(*key, t.calls, t.elements) for key, t in comm.ledger.rows()]
                assert rows == ([("tp", "all_reduce", "forward", 2, n + stack * n)] if comm.size > 1 else [])
    ranks.run(check)


@pytest.mark.parametrize("pieces", (2, 4, 8))
def test_sums_made_of_pieces_leave_no_column_out(ranks, pieces):
    """Of padded rows too, whose last pieces are short or missing; a number that does not divide the columns is refused."""
    def check(comm: Comm):
        if 32 % comm.size == 0 and (32 // comm.size) % pieces == 0:
            for n_words in (11, 31, 32):
                logits = np.pad(draw("logits", (2, 4, n_words)), ((0, 0), (0, 0), (0, 32 - n_words)))
                check_pieces(logits, n_words, comm, pieces)
        mesh, _, p = own_columns(np.zeros((2, 4, 11 * comm.size)), comm)
        with pytest.raises(ValueError, match=f"11 columns cannot be cut into {pieces} equal pieces"):
            vocab_parallel_cross_entropy(p["logits"], IDS, comm=mesh.tp, n_words=11 * comm.size, pieces=pieces)
    ranks.run(check)


def check_pieces(logits, n_words, comm, pieces):
    plain = cut_loss(logits, IDS, n_words, comm, smoothing=0.1)
    value, _, g = cut_loss(logits, IDS, n_words, comm, smoothing=0.1, pieces=pieces)
    assert value == pytest.approx(plain[0], rel=1e-14) and np.abs(g - plain[2]).max() <= 1e-14


# -- the embedding -------------------------------------------------------------------------------------------------


def cut_lookup(w, ids, n_words, mesh: Mesh):
    """y, the whole gradient of Σ y·c by w, and c, for a w whose rows are cut over tp."""
    table = {"w": Cut.even(0, len(w), mesh.tp)}
    c = Tensor(draw("c", (*IDS.shape, w.shape[1]), dtype=str(w.dtype)))

    def loss(p):
        y = reduce_from(vocab_parallel_embedding(p["w"], ids, comm=mesh.tp, n_words=n_words, n_rows=len(w)), comm=mesh.tp)
        return total(y * c), y
    (_, y), grads = value_and_grad(loss, shard({"w": w}, table, mesh))
    return y, gather(reduce_gradients(grads, mesh), table, mesh)["w"], c.array


@every_dtype
@every_vocabulary
def test_lookup_and_its_gradient_are_the_serial_ones_bit_for_bit(ranks, n_words, n_rows, dtype):
    """One rank has the row, the others add 0; a row's gradient is added up on its rank, in the serial order."""
    def check(comm: Comm):
        w = np.full((n_rows, 3), np.nan, dtype)         # padding that would be seen
        w[:n_words] = draw("w", (n_words, 3), dtype=dtype)
        y, g, c = cut_lookup(w, IDS, n_words, Mesh(tp=comm.size, comm=comm))
        want, vjp = embedding.array(w[:n_words], IDS)
        assert y.varies == frozenset() and y.dtype == dtype and np.array_equal(y.array, want)
        assert np.array_equal(g[:n_words], vjp(c)[0]) and not g[n_words:].any()
        assert comm.ledger.total("tp", "all_reduce").elements == (want.size if comm.size > 1 else 0)
    ranks.run(check)


def test_ranks_without_a_row_add_nothing(ranks):
    """3 rows: from 4 ranks on some have none at all, not even padding."""
    def check(comm: Comm):
        for targets in (IDS % 3, np.where(IGNORED < 0, IGNORED, IGNORED % 3), np.full((2, 4), -100)):
            for static in FORMS:
                check_loss(draw("logits", (2, 4, 3)), targets, 3, comm, **static)
        w = draw("w", (3, 2))
        y, g, c = cut_lookup(w, IDS % 3, 3, Mesh(tp=comm.size, comm=comm))
        want, vjp = embedding.array(w, IDS % 3)
        assert np.array_equal(y.array, want) and np.array_equal(g, vjp(c)[0])
    ranks.run(check)


# -- all logits on every rank --------------------------------------------------------------------------------------


@every_vocabulary
def test_gathered_logits_are_those_of_the_words(ranks, n_words, n_rows):
    """Padding, though larger than any word or nan, never wins; the gradient is each rank's own columns, 0 in the padding."""
    def check(comm: Comm):
        logits, c = whole_logits(n_words, n_rows), draw("c", (2, 4, n_words))
        mesh, table, p = own_columns(logits, comm)

        def loss(p):
            y = gather_vocab(p["logits"], comm=mesh.tp, n_words=n_words, n_rows=n_rows)
            return total(y * Tensor(c)), y
        (_, y), grads = value_and_grad(loss, p)
        assert y.varies == frozenset() and y.cut == {} and np.array_equal(y.array, logits[..., :n_words])
        g = gather(grads, table, mesh)["logits"]
        assert np.array_equal(g[..., :n_words], c) and not g[..., n_words:].any()
    ranks.run(check)


# -- faults that other projects had --------------------------------------------------------------------------------


def test_logits_gathered_before_are_refused_not_counted_once_per_rank(ranks):
    """zeros(4), TP=2: the sum of e^logit over all ranks gives ln 8 = 2.0794; right is ln 4 = 1.3863."""
    def check(comm: Comm):
        zeros, target = np.zeros((1, 4)), np.array([0])
        mesh, table, p = own_columns(zeros, comm)
        assert cut_loss(zeros, target, 4, comm)[0] == pytest.approx(1.3863, abs=5e-5)
        wrong = math.log(float(comm.all_reduce(np.exp(zeros).sum(axis=-1))[0]))
        assert comm.size != 2 or wrong == pytest.approx(2.0794, abs=5e-5)
        joined = gather_from(p["logits"], comm=mesh.tp, sizes=[b - a for a, b in table["logits"].bounds])
        for logits in (joined, Tensor(zeros), gather_vocab(p["logits"], comm=mesh.tp, n_words=4)):
            with pytest.raises(LayoutError, match="takes a varying value, but an activation of shape .1, 4. is replicated "
                               "there: it has the columns of all ranks already, which would be counted once per rank"):
                vocab_parallel_cross_entropy(logits, target, comm=mesh.tp, n_words=4)
        per_rank = all_gather(p["logits"], comm=mesh.tp, sizes=[b - a for a, b in table["logits"].bounds])
        with pytest.raises(LayoutError, match="must be cut over tp along its last axis, by words; its cut is none"):
            vocab_parallel_cross_entropy(per_rank, target, comm=mesh.tp, n_words=4)
        if comm.size > 1:                               # a plain array has no tag
            with pytest.raises(ValueError, match=rf"must be \[..., {p['logits'].shape[-1]}\] on rank {comm.rank}"):
                vocab_parallel_cross_entropy(zeros, target, comm=mesh.tp, n_words=4)
    ranks.run(check)


@pytest.mark.parametrize("over, right", [("others", 2.0024), ("all", 1.9907)])
def test_smoothing_is_over_the_words_of_all_ranks(ranks, over, right):
    """α = 0.1, target 1: over the others (Megatron) or all (PyTorch) of 8 words; by the 4 of a rank, 1.9762 or 2.0595."""
    def check(comm: Comm):
        logits = np.array([[2, 1, 0, -1, -2, 0.5, 1.5, -0.5]])
        value, _, g = cut_loss(logits, np.array([1]), 8, comm, smoothing=0.1, smoothing_over=over)
        assert value == pytest.approx(right, abs=5e-5) and abs(g.sum()) < 1e-15  # Σ softmax = Σ t = 1
        logp = logits[0] - np.log(np.exp(logits).sum())
        own = logp[:4] if comm.rank == 0 else logp[4:]
        wrong = -(1 - 0.1 * 4 / 3) * logp[1] - 0.1 * 4 / 3 * own.mean()          # the mistake on two ranks, by hand
        assert comm.size != 2 or wrong == pytest.approx((1.9762, 2.0595)[comm.rank], abs=5e-5)
    ranks.run(check)


def test_every_rank_gets_its_share_of_the_softmax_as_gradient(ranks):
    """V = 4, target 0: [-3/4, 1/4 | 1/4, 1/4].  An all_reduce without a vjp gives rank 1 of two the gradient 0."""
    def check(comm: Comm):
        mesh, table, p = own_columns(np.zeros((1, 4)), comm)
        _, grads = value_and_grad(lambda p: vocab_parallel_cross_entropy(
            p["logits"], np.array([0]), comm=mesh.tp, n_words=4)[0], p)
        start, stop = table["logits"].bounds[comm.rank]
        assert grads["logits"].array.tolist() == [[-0.75, 0.25, 0.25, 0.25][start:stop]]
        assert grads["logits"].partial == frozenset() and grads["logits"].varies == frozenset({"tp"})
    ranks.run(check)
