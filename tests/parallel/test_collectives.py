"""Localises gradients of a broadcast value that miss a rank's contribution, count one twice, or arrive at the wrong rank.

All numbers are small integers, so float64 is exact and equality is equality.
"""
import numpy as np
import pytest

from refimpl.autograd import Layout, Tensor, value_and_grad
from refimpl.comm import Comm, Mesh
from refimpl.ops import linear, mul, relu
from refimpl.ops import sum as total
from refimpl.parallel import as_partial, broadcast, broadcast_from, copy_to, reduce_from

TP = frozenset({"tp"})


def integers(*shape, seed):
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(float)


X, W = integers(4, 3, seed=0), integers(3, 5, seed=1)


def made(p):
    """What the root computes, and the others with other weights."""
    return relu(linear(Tensor(X), p["w"]))


def of_rank(comm: Comm, root: int):
    """Weights of each rank, of which the root's are W."""
    return {"w": Tensor(W if comm.rank == root else integers(3, 5, seed=2 + comm.rank), Layout(TP), name="w")}


def serial(c):
    """Loss and gradient of Σ c·relu(x·w)."""
    y = np.maximum(X @ W, 0)
    return np.sum(c * y), X.T @ (c * (y > 0))


@pytest.mark.parametrize("root", ["first", "last"])
def test_the_gradient_through_broadcast_from_is_the_serial_one_at_the_root_and_nothing_elsewhere(ranks, root):
    def check(comm: Comm):
        mesh, r, c = Mesh(tp=comm.size, comm=comm), 0 if root == "first" else comm.size - 1, integers(4, 5, seed=9)
        value, grads = value_and_grad(lambda p: total(mul(broadcast_from(made(p), comm=mesh.tp, root=r), Tensor(c))),
                                      of_rank(comm, r))
        loss, dw = serial(c)
        assert value.layout == Layout() and float(value) == loss
        assert np.array_equal(grads["w"].array, dw if comm.rank == r else np.zeros_like(dw))
        assert grads["w"].layout == Layout(TP)
    ranks.run(check)


@pytest.mark.parametrize("root", ["first", "last"])
def test_the_gradient_through_broadcast_adds_up_what_every_rank_did_with_it(ranks, root):
    """Rank s multiplies by c_s: serially that is the sum of all c_s."""
    def check(comm: Comm):
        mesh, r = Mesh(tp=comm.size, comm=comm), 0 if root == "first" else comm.size - 1
        cs = [integers(4, 5, seed=9 + s) for s in range(comm.size)]

        def loss_by(give):
            def loss(p):
                part = total(mul(give(made(p)), Tensor(cs[comm.rank], Layout(TP))))
                return reduce_from(as_partial(part, comm=mesh.tp), comm=mesh.tp)
            return value_and_grad(loss, of_rank(comm, r))
        expected, dw = serial(np.add.reduce(cs))
        for give in (lambda y: broadcast(y, comm=mesh.tp, root=r),
                     lambda y: copy_to(broadcast_from(y, comm=mesh.tp, root=r), comm=mesh.tp)):
            value, grads = loss_by(give)
            assert float(value) == expected
            assert np.array_equal(grads["w"].array, dw if comm.rank == r else np.zeros_like(dw))
    ranks.run(check)


def test_broadcast_is_copy_to_of_broadcast_from(ranks):
    def check(comm: Comm):
        mesh = Mesh(tp=comm.size, comm=comm)
        for shape in ((3, 2), (), (0, 2)):
            for root in range(comm.size):
                x, dy = integers(*shape, seed=comm.rank), integers(*shape, seed=50 + comm.rank)
                (one, one_vjp), (two, two_vjp) = (op.array(x, comm=mesh.tp, root=root) for op in (broadcast, broadcast_from))
                copied, copied_vjp = copy_to.array(two, comm=mesh.tp)
                dx = integers(*shape, seed=50)
                for s in range(1, comm.size):
                    dx = dx + integers(*shape, seed=50 + s)
                assert np.array_equal(one, copied) and np.array_equal(one, integers(*shape, seed=root))
                for got in (one_vjp(dy), two_vjp(copied_vjp(dy))):
                    assert np.array_equal(got, dx if comm.rank == root else np.zeros(shape))
    ranks.run(check)


def test_a_root_that_is_no_rank_is_a_sentence(ranks):
    def check(comm: Comm):
        for op in (broadcast, broadcast_from):
            with pytest.raises(ValueError, match=f"broadcast over world: the root {comm.size} is not one of {comm.size} ranks"):
                op.array(np.ones(2), comm=comm, root=comm.size)
    ranks.run(check)
