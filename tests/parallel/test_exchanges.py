"""Localises parts that come back in another order, to another rank or along another axis, and gradients that take another way.

All numbers are small integers, so float64 is exact and equality is equality; only attention rounds.  The sizes do not divide;
on many ranks some hold nothing.
"""
import numpy as np
import pytest

from refimpl.autograd import Layout, Tensor, value_and_grad
from refimpl.comm import Comm, CommError, Mesh, shares
from refimpl.ops import CAUSAL, Mask, attention, concat
from refimpl.ops import gather as gather_rows
from refimpl.ops import linear, mul
from refimpl.ops import sum as total
from refimpl.ops import transpose
from refimpl.parallel import (Cut, all_gather, all_to_all, all_to_all_rows, box, gather, parameter, reduce_gradients,
                              ring_shift, shard)

B, H, T, K = 2, 3, 7, 4                                 # samples, heads, tokens, head width
CP, DP = frozenset({"cp"}), frozenset({"dp"})


def integers(*shape, seed):
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(float)


def rolled(sizes, steps):
    """What each rank holds after `steps` shifts by one."""
    return tuple(sizes[(r - steps) % len(sizes)] for r in range(len(sizes)))


def differentiated(fn, whole, table, mesh):
    """The sum over ranks of the scalar fn(p), and its global gradients, from parameters that are cut as `table` says."""
    value, grads = value_and_grad(fn, shard(whole, table, mesh))
    loss = mesh.comm(*value.varies).all_reduce(value.array) if value.varies else value.array
    return float(loss), gather(reduce_gradients(grads, mesh), table, mesh)


# -- there and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split, join", [(1, 0), (0, 1), (2, 1), (1, 2)])
def test_all_to_all_there_and_back_is_the_identity(ranks, split, join):
    def check(comm: Comm):
        mesh, whole, c = Mesh(cp=comm.size, comm=comm), {"x": integers(5, 6, 7, seed=0)}, integers(5, 6, 7, seed=1)
        n, m = (shares(whole["x"].shape[axis], comm.size) for axis in (split, join))
        table = {"x": Cut.even(join, sum(m), mesh.cp)}
        local = shard({"c": c}, {"c": table["x"]}, mesh)["c"]

        def loss(p):
            there = all_to_all(p["x"], comm=mesh.cp, split=split, join=join, split_sizes=n, join_sizes=m)
            assert np.array_equal(there.array, shard(whole, {"x": Cut.even(split, sum(n), mesh.cp)}, mesh)["x"].array)
            back = all_to_all(there, comm=mesh.cp, split=join, join=split, split_sizes=m, join_sizes=n)
            assert np.array_equal(back.array, p["x"].array) and back.cut == p["x"].cut == {"cp": join}
            return total(mul(back, local))
        value, grads = differentiated(loss, whole, table, mesh)
        assert value == np.sum(whole["x"] * c) and np.array_equal(grads["x"], c)
    ranks.run(check)


def test_all_to_all_sends_every_element_once_each_way(ranks):
    def check(comm: Comm):
        mesh = Mesh(cp=comm.size, comm=comm)
        x = Tensor(np.ones((4, 6 * comm.size)), Layout(CP), name="x", cut={"cp": 0})
        comm.ledger.clear()
        value_and_grad(lambda p: total(all_to_all(p["x"], comm=mesh.cp, split=1, join=0)), {"x": x})
        for phase in ("forward", "backward"):
            sent = comm.ledger.total(axes="cp", phase=phase)
            assert (sent.calls, sent.elements) == ((1, x.array.size) if comm.size > 1 else (0, 0))
    ranks.run(check)


def test_the_default_shares_are_even_ones(ranks):
    def check(comm: Comm):
        y, vjp = all_to_all.array(np.full((1, 2, 5), float(comm.rank)), comm=comm, split=2, join=1)
        assert y.shape == (1, 2 * comm.size, shares(5, comm.size)[comm.rank])
        assert (y[0].T == np.repeat(np.arange(comm.size), 2)).all() and (vjp(y) == comm.rank).all()
    ranks.run(check)


def test_a_ring_of_as_many_shifts_as_ranks_is_the_identity(ranks):
    def check(comm: Comm):
        mesh, whole, c = Mesh(cp=comm.size, comm=comm), {"x": integers(T, 2, seed=0)}, integers(T, 2, seed=1)
        sizes, table = shares(T, comm.size), {"x": Cut.even(0, T, mesh.cp)}
        local = shard({"c": c}, table | {"c": table["x"]}, mesh)["c"].array

        def loss(p, step):
            x = p["x"]
            for i in range(comm.size):
                x = ring_shift(x, comm=mesh.cp, shift=step, sizes=rolled(sizes, i * step))
                at = (comm.rank - step * (i + 1)) % comm.size
                assert np.array_equal(x.array, whole["x"][sum(sizes[:at]):sum(sizes[:at + 1])])
            return total(mul(x, Tensor(local, Layout(CP))))
        for step in (1, -1):
            value, grads = differentiated(lambda p: loss(p, step), whole, table, mesh)
            assert value == np.sum(whole["x"] * c) and np.array_equal(grads["x"], c)
    ranks.run(check)


# -- the algorithms they are made for -------------------------------------------------------------------------------


def by_heads(p, cp, mask, heads, tokens):
    """Tokens to heads, attention of all tokens for the own heads, heads to tokens (Ulysses)."""
    q, k, v = (all_to_all(p[name], comm=cp, split=1, join=2, split_sizes=heads, join_sizes=tokens) for name in "qkv")
    y = attention(q, k, v, mask=mask)
    assert y.cut == {"cp": 1} and y.shape == (B, heads[cp.rank], T, K)
    return all_to_all(y, comm=cp, split=2, join=1, split_sizes=tokens, join_sizes=heads)


def by_queries(p, cp, mask, heads, tokens):
    """The own queries; the keys and values of all come to them."""
    return attention(p["q"], *(all_gather(p[name], comm=cp, axis=2, sizes=tokens) for name in "kv"), mask=mask)


def by_ring(p, cp, mask, heads, tokens):
    """The same, but the keys and values pass by; in which order attention sees them does not matter."""
    keys, values = [], []
    for name, passed in (("k", keys), ("v", values)):
        rows = transpose(p[name], axes=(2, 0, 1, 3))    # a ring passes rows
        for step in range(cp.size):
            rows = ring_shift(rows, comm=cp, sizes=rolled(tokens, step))
            passed.append(rows)
    return attention(p["q"], *(transpose(concat(*parts, axis=0), axes=(1, 2, 0, 3)) for parts in (keys, values)), mask=mask)


@pytest.mark.parametrize("way, mask", [(by_heads, Mask()), (by_heads, CAUSAL), (by_queries, Mask()), (by_ring, Mask())])
def test_attention_cut_by_heads_by_queries_and_by_ring_equals_serial(ranks, way, mask):
    whole = {name: integers(B, H, T, K, seed=i) / 8 for i, name in enumerate("qkv")}
    c = integers(B, H, T, K, seed=3)
    y, vjp = attention.array(*whole.values(), mask=mask)
    expected = dict(zip("qkv", vjp(c)))

    def check(comm: Comm):
        mesh, heads, tokens = Mesh(cp=comm.size, comm=comm), shares(H, comm.size), shares(T, comm.size)
        table = dict.fromkeys("qkvcy", Cut.even(2, T, mesh.cp))
        local = shard({"c": c, "y": y}, table, mesh)

        def loss(p):
            out = way(p, mesh.cp, mask, heads, tokens)
            assert out.cut == {"cp": 2} and np.abs(out.array - local["y"].array).max(initial=0) <= 1e-12 * np.abs(y).max()
            return total(mul(out, local["c"]))
        value, grads = differentiated(loss, whole, table, mesh)
        assert abs(value - np.sum(y * c)) <= 1e-12 * np.abs(y * c).sum()
        for name, g in expected.items():
            assert np.abs(grads[name] - g).max() <= 1e-12 * np.abs(g).max(), name
    ranks.run(check)


def test_rows_sent_to_experts_and_back_equal_the_loop_over_rows(ranks):
    """Row i is multiplied by the matrix of expert i·i mod size, and each rank holds one expert; some get no row."""
    D = 3

    def check(comm: Comm):
        mesh, n = Mesh(dp=comm.size, comm=comm), 5
        expert = np.arange(n) ** 2 % comm.size
        x, w, c = integers(n, D, seed=0), integers(comm.size, D, D, seed=1), integers(n, D, seed=2)
        cut = Cut.even(0, n, mesh.dp)
        rows = np.arange(n)[box(cut, (n,), mesh)]
        sent = [[int(np.sum(expert[slice(*bounds)] == target)) for target in range(comm.size)] for bounds in cut.bounds]
        order = np.argsort(expert[rows], kind="stable")

        def loss(p):
            there = all_to_all_rows(gather_rows(p["x"], order), comm=mesh.dp, counts=sent)
            assert len(there) == np.sum(expert == comm.rank) and not there.cut
            back = all_to_all_rows(linear(there, p["w"]), comm=mesh.dp, counts=np.transpose(sent).tolist())
            return total(mul(gather_rows(back, np.argsort(order)), Tensor(c[rows], Layout(DP))))
        own = Tensor(w[comm.rank], Layout(DP), name="w")
        value, grads = value_and_grad(loss, {"x": parameter("x", x[rows], cut), "w": own})
        y, dx, dw = np.zeros((n, D)), np.zeros((n, D)), np.zeros((comm.size, D, D))
        for i, e in enumerate(expert):
            y[i], dx[i] = x[i] @ w[e], w[e] @ c[i]
            dw[e] += np.outer(x[i], c[i])
        assert float(value) == np.sum(y[rows] * c[rows])
        assert np.array_equal(grads["x"].array, dx[rows]) and np.array_equal(grads["w"].array, dw[comm.rank])
        assert not grads["x"].partial and not grads["w"].partial
    ranks.run(check)


# -- wrong use ------------------------------------------------------------------------------------------------------


def test_ranks_that_cut_along_different_axes_are_told_so(ranks):
    """The numbers that travel are as many either way."""
    def check(comm: Comm):
        if comm.size > 1:
            split = int(comm.rank == 0)
            with pytest.raises(CommError, match=r"do not agree .*cut along axis 1 in \(1, .*, joined along axis 0, where"):
                all_to_all.array(np.ones((comm.size, comm.size)), comm=comm, split=split, join=1 - split,
                                 join_sizes=(comm.size,) * comm.size)
    ranks.run(check)


def test_sizes_that_are_wrong_or_missing_are_a_sentence_on_every_rank(ranks):
    def check(comm: Comm):
        size, x = comm.size, np.ones((2, 3))
        for static, words in (({"split": 1, "split_sizes": (1,) * size}, r"the shares \(1.*\) of \d ranks do not add up to 3"),
                              ({"split": 1, "join_sizes": (3,) * size}, r"rank \d of \d holds 2 along axis 0, sizes say \(3"),
                              ({"split": 2}, r"there is no axis 2 in an array of shape \(2, 3\)"),
                              ({"split": 0}, r"split and join are both axis 0 of x\[2, 3\]")):
            if (size, static.get("split_sizes")) != (3, (1, 1, 1)):             # which are right
                with pytest.raises(ValueError, match=words):
                    all_to_all.array(x, comm=comm, **{"join": 0, **static})
        with pytest.raises((ValueError, CommError), match=r"all_to_all over world: rank 0 holds 2 rows, its counts .* are 0"):
            all_to_all_rows.array(x, comm=comm, counts=[[0] * size] * size)
        with pytest.raises(ValueError, match=r"there is no axis 0 in an array of shape \(\)"):
            ring_shift.array(np.array(1.0), comm=comm)
        if size > 1:
            with pytest.raises(CommError, match="rank 0: .* rank 1"):           # uneven, and nobody says so
                all_to_all.array(np.ones((1 + comm.rank, 3)), comm=comm, split=1, join=0)
            with pytest.raises(CommError, match="rank 0: .* rank 1"):
                ring_shift.array(np.ones(1 + comm.rank), comm=comm)
    ranks.run(check)


def test_a_table_given_as_an_array_is_refused_with_advice():
    with pytest.raises(TypeError, match=r"counts is a ndarray given by name: .* a table of sizes as lists \(.tolist\(\)\)"):
        all_to_all_rows(Tensor(np.ones((2, 3)), Layout(DP)), comm=Mesh().dp, counts=np.array([[2]]))
