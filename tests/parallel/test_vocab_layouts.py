"""Localises a cut vocabulary that takes what it must refuse, and tags that forget over which ranks a value differs."""
import numpy as np
import pytest

from refimpl.autograd import Layout, Tensor, value_and_grad
from refimpl.comm import Comm, Mesh
from refimpl.ops import cross_entropy, embedding
from refimpl.ops import sum as total
from refimpl.parallel import (Cut, Replicated, gather, reduce_from, reduce_gradients, scatter_to, shard,
                              vocab_parallel_cross_entropy, vocab_parallel_embedding)
from refimpl.rng import draw

DP, TP = frozenset({"dp"}), frozenset({"tp"})
IDS = np.array([[0, 7, 5, 5], [7, 3, 2, 0]])            # (B, T)


def parts(comm: Comm, n_rows=11):
    """A mesh over tp, this rank's columns of logits (B, T, n_rows) and its rows of w (n_rows, D)."""
    mesh = Mesh(tp=comm.size, comm=comm)
    table = {"logits": Cut.even(2, n_rows, mesh.tp), "w": Cut.even(0, n_rows, mesh.tp)}
    p = shard({"logits": np.zeros((2, 4, n_rows)), "w": np.ones((n_rows, 3))}, table, mesh)
    return mesh, p["logits"], p["w"]


# -- refused on every rank -----------------------------------------------------------------------------------------


def refused_on_all(comm: Comm, words: str, fn):
    """`fn()` raises the same ValueError on every rank, and what the ranks do next still works."""
    with pytest.raises(ValueError, match=words) as caught:
        fn()
    assert len(set(comm.gather_texts(str(caught.value)))) == 1
    assert comm.all_reduce(np.ones(1))[0] == comm.size


@pytest.mark.parametrize("n_rows", (11, 32))
@pytest.mark.parametrize("bad", (-1, 11, 31, 32, -99))
def test_targets_and_ids_that_are_no_word_are_refused_on_every_rank(ranks, bad, n_rows):
    def check(comm: Comm):
        wrong = np.where(IDS == 3, bad, IDS)
        mesh, logits, w = parts(comm, n_rows)
        got = f"got {min(bad, 0)} to {max(bad, 7)}"
        refused_on_all(comm, rf"targets must be in \[0, 11\) or -100, {got}", lambda: vocab_parallel_cross_entropy(
            logits, wrong, comm=mesh.tp, n_words=11, n_rows=n_rows))
        refused_on_all(comm, rf"ids must be in \[0, 11\), {got}", lambda: vocab_parallel_embedding(
            w, wrong, comm=mesh.tp, n_words=11, n_rows=n_rows))
    ranks.run(check)


def test_an_embedding_that_is_whole_or_cut_otherwise_is_refused(ranks):
    def check(comm: Comm):
        mesh = Mesh(tp=comm.size, comm=comm)
        D = 2 * comm.size                               # equal shares: the sentence says their shape
        p = shard({"whole": np.ones((11, D)), "columns": np.ones((11, D))},
                  {"whole": Replicated(), "columns": Cut.even(1, D, mesh.tp)}, mesh)
        for name, cut in (("whole", "none"), ("columns", "{'tp': 1}")):
            refused_on_all(comm, rf"{name} of shape .* must be cut along axis 0 over tp, its cut is {cut}",
                           lambda: vocab_parallel_embedding(p[name], IDS, comm=mesh.tp, n_words=11))
    ranks.run(check)


def test_ids_that_differ_between_the_ranks_are_refused(ranks):
    """Each rank would answer about tokens that the others were not asked about."""
    def check(comm: Comm):
        mesh, _, w = parts(comm)
        refused_on_all(comm, "the ids differ between the ranks of tp", lambda: vocab_parallel_embedding(
            w, Tensor(IDS, Layout(TP)), comm=mesh.tp, n_words=11))
    ranks.run(check)


def test_targets_that_differ_between_the_ranks_are_refused(ranks):
    def check(comm: Comm):
        mesh, logits, _ = parts(comm)
        refused_on_all(comm, "the targets differ between the ranks of tp", lambda: vocab_parallel_cross_entropy(
            logits, Tensor(IDS, Layout(TP)), comm=mesh.tp, n_words=11))
    ranks.run(check)


def test_logits_cut_along_another_axis_or_partial_are_refused(ranks):
    def check(comm: Comm):
        mesh = Mesh(tp=comm.size, comm=comm)
        by_tokens = scatter_to(Tensor(np.zeros((comm.size, 11))), comm=mesh.tp, axis=0)
        zeros, cut = np.zeros((1, 11)), {"tp": 1}
        for logits, words in ((by_tokens, "must be cut over tp along its last axis, by words; its cut is {'tp': 0}"),
                              (Tensor(zeros, Layout(TP)), "must be cut over tp along its last axis, by words; its cut is none"),
                              (Tensor(zeros, Layout(TP, TP), cut=cut), "is partial there: reduce_from it first"),
                              (Tensor(zeros, Layout(TP | DP, DP), cut=cut), "partial over dp: reduce_from it first")):
            refused_on_all(comm, words, lambda: vocab_parallel_cross_entropy(
                logits, np.array([0]), comm=mesh.tp, n_words=11))
    ranks.run(check)


# -- samples of one's own on each dp rank --------------------------------------------------------------------------


def test_ids_may_differ_over_dp(ranks):
    """Samples of their own on each dp rank: the gradient is the sum of theirs.  (c is in eighths, so sums are exact.)"""
    def check(mesh: Mesh):
        w, c, ids = draw("w", (11, 3)), np.arange(24.0).reshape(2, 4, 3) / 8, [(IDS + d) % 11 for d in range(mesh.dp.size)]
        table = {"w": Cut.even(0, 11, mesh.tp)}
        mine = Tensor(ids[mesh.dp.rank], Layout(DP))

        def loss(p):
            y = reduce_from(vocab_parallel_embedding(p["w"], mine, comm=mesh.tp, n_words=11), comm=mesh.tp)
            return total(y * Tensor(c)), y
        (_, y), grads = value_and_grad(loss, shard({"w": w}, table, mesh))
        assert y.varies == DP and grads["w"].varies == DP | TP and grads["w"].partial == DP
        assert np.array_equal(gather(reduce_gradients(grads, mesh), table, mesh)["w"],
                              sum(embedding.array(w, i)[1](c)[0] for i in ids))
    ranks.run_meshes(check)


def test_targets_may_differ_over_dp(ranks):
    """A loss of samples of one's own differs over dp, whether the logits say so or the targets: its gradient is summed."""
    def check(mesh: Mesh):
        logits, table = draw("logits", (2, 4, 11)), {"logits": Cut.even(2, 11, mesh.tp)}
        targets = [(IDS + d) % 11 for d in range(mesh.dp.size)]
        (value, _), grads = value_and_grad(lambda p: vocab_parallel_cross_entropy(
            p["logits"], Tensor(targets[mesh.dp.rank], Layout(DP)), comm=mesh.tp, n_words=11),
            shard({"logits": logits}, table, mesh))
        assert value.varies == DP and grads["logits"].partial == DP
        want = sum(cross_entropy.array(logits, t)[1](np.ones(()))[0] for t in targets)
        assert np.abs(gather(reduce_gradients(grads, mesh), table, mesh)["logits"] - want).max() <= 1e-14 * mesh.dp.size
    ranks.run_meshes(check)
