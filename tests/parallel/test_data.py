"""Localises a wrong divisor, a gradient summed over the wrong ranks or twice, and traffic in more pieces than needed."""
import numpy as np
import pytest

from refimpl.autograd import Layout, Tensor, value_and_grad
from refimpl.comm import Comm, Mesh
from refimpl.ops import cross_entropy, linear
from refimpl.ops import sum as total
from refimpl.parallel import as_partial, copy_to, divide_by_count, reduce_from, reduce_gradients, total_over

DP, TP = frozenset({"dp"}), frozenset({"tp"})


# -- the token rule ------------------------------------------------------------------------------------------------

TOKENS = [[2.0] * 10, [1.0] * 100]                      # 10 tokens with loss 2, 100 with loss 1


def gradient_of_mean(mesh: Mesh, own: list[float]) -> tuple[float, float]:
    """Loss and gradient by w of the mean of w·token over the tokens of all ranks, at w = 1."""
    tokens = Tensor(np.array(own), Layout(DP))
    value, grads = value_and_grad(lambda p: total(tokens * p["w"]), {"w": Tensor(np.ones(1))})
    loss, count = total_over(mesh, float(value), len(own))
    gradient = divide_by_count(reduce_gradients(grads, mesh), int(count))["w"].array[0]
    return loss / count, float(gradient)


def test_unequal_ranks_are_weighted_by_their_tokens(ranks):
    def check(comm: Comm):
        mesh = Mesh(dp=comm.size, comm=comm)
        own = TOKENS[comm.rank] if comm.size > 1 and comm.rank < 2 else [] if comm.rank else TOKENS[0] + TOKENS[1]
        loss, gradient = gradient_of_mean(mesh, own)
        assert loss == gradient == 120 / 110                                     # 1.0909, not (2 + 1)/2
        means = [np.mean(t) for t in TOKENS]
        assert np.mean(means) == 1.5
    ranks.run(check)


def test_unequal_micro_batches_are_weighted_by_their_tokens():
    sums, count = 0.0, 0
    for batch in TOKENS:
        value, grads = value_and_grad(lambda p: total(Tensor(np.array(batch)) * p["w"]), {"w": Tensor(np.ones(1))})
        sums, count = sums + grads["w"].array[0], count + len(batch)
    assert divide_by_count({"w": Tensor(np.array(sums))}, count)["w"].array == 120 / 110


def test_a_rank_whose_targets_are_all_ignored_adds_zero(ranks):
    def check(comm: Comm):
        mesh = Mesh(dp=comm.size, comm=comm)
        x = Tensor(np.arange(8.0).reshape(4, 2) / 4 + comm.rank, Layout(DP))
        targets = np.array([0, 2, 1, 2]) if comm.rank == 0 else np.full(4, -100)
        w = {"w": Tensor(np.arange(6.0).reshape(2, 3) / 8)}
        (value, count), grads = value_and_grad(lambda p: cross_entropy(linear(x, p["w"]), targets), w)
        assert comm.rank == 0 or (float(value) == 0 and int(count.array) == 0 and not grads["w"].array.any())
        loss, count = total_over(mesh, float(value), int(count.array))
        mean = divide_by_count(reduce_gradients(grads, mesh), int(count))["w"].array
        first = Tensor(np.arange(8.0).reshape(4, 2) / 4)                         # what rank 0 alone would find
        (alone, _), g = value_and_grad(lambda p: cross_entropy(linear(first, p["w"]), np.array([0, 2, 1, 2])), w)
        assert count == 4 and loss == float(alone) and np.array_equal(mean, g["w"].array / 4)
    ranks.run(check)


def test_a_batch_without_any_target_is_a_sentence_on_every_rank(ranks):
    def check(comm: Comm):
        with pytest.raises(ValueError, match="no valid target: there is nothing to divide by"):
            gradient_of_mean(Mesh(dp=comm.size, comm=comm), [])
    ranks.run(check)


# -- the gradient rule ---------------------------------------------------------------------------------------------


def gradients(mesh: Mesh) -> dict[str, Tensor]:
    """Gradients that are partial over dp, over dp and tp, in two dtypes, and one that is complete."""
    def filled(shape, layout, dtype="float64"):
        return Tensor(np.full(shape, 2.0 ** mesh.world.rank, dtype), layout)
    return {"a": filled((2, 3), Layout(DP, DP)), "both": filled((4,), Layout(DP | TP, DP | TP)),
            "b": filled((5,), Layout(DP, DP)), "cut": filled((1, 7), Layout(DP | TP, DP)),
            "f32": filled((3,), Layout(DP, DP), "float32"), "scalar": filled((), Layout(DP, DP)),
            "done": filled((9,), Layout(TP))}


def test_gradients_are_summed_over_the_axes_they_are_partial_over(ranks):
    def check(mesh: Mesh):
        before = gradients(mesh)
        after = reduce_gradients(before, mesh)
        over_dp = sum(2.0 ** (d * mesh.tp.size + mesh.tp.rank) for d in range(mesh.dp.size))
        over_all = 2.0 ** mesh.world.size - 1
        assert list(after) == list(before)
        for name, g in after.items():
            want = over_all if name == "both" else 2.0 ** mesh.world.rank if name == "done" else over_dp
            assert (g.array == want).all() and g.shape == before[name].shape and g.dtype == before[name].dtype, name
            assert g.partial == frozenset() and g.varies == (TP if name in ("cut", "done") else frozenset()), name
            assert (before[name].array == 2.0 ** mesh.world.rank).all()          # arguments are left alone
    ranks.run_meshes(check)


def test_there_is_one_all_reduce_for_each_set_of_axes_and_dtype(ranks):
    def check(mesh: Mesh):
        grads = gradients(mesh)
        mesh.ledger.clear()
        reduce_gradients(grads, mesh)
        rows = {key.axes: (t.calls, t.elements, t.bytes) for key, t in mesh.ledger.rows()}
        if mesh.tp.size == 1:                           # then over dp and tp is over dp: one bucket of each dtype
            want = {"dp": (2, 6 + 5 + 7 + 1 + 3 + 4, 8 * (6 + 5 + 7 + 1 + 4) + 4 * 3)}
        elif mesh.dp.size == 1:
            want = {"tp": (1, 4, 32)}
        else:
            want = {"dp": (2, 6 + 5 + 7 + 1 + 3, 8 * (6 + 5 + 7 + 1) + 4 * 3), "dp+tp": (1, 4, 32)}
        assert rows == (want if mesh.world.size > 1 else {})
    ranks.run_meshes(check)


def test_on_one_rank_gradients_are_not_copied():
    grads = gradients(Mesh())
    after = reduce_gradients(grads, Mesh())
    assert all(np.shares_memory(after[name].array, g.array) and not after[name].partial for name, g in grads.items())


# -- differentiating through an all-reduce -------------------------------------------------------------------------


@pytest.mark.parametrize("f", (False, True), ids=("gradient rule", "f"))
def test_the_gradient_through_a_sum_over_ranks_depends_on_named_layouts_only(ranks, f):
    """L = Σ_r (w² + 1)·d_r at w = 1, d = [0, 1, ...]: dL/dw = 2·Σ d on every rank; on two ranks [2, 2], not [0, 4].

    With w replicated, the gradient rule sums what each rank found ([0, 2]); with f, the tape does.
    """
    def check(comm: Comm):
        mesh = Mesh(tp=comm.size, comm=comm)
        d = Tensor(np.array(float(comm.rank)), Layout(TP))

        def loss(p):
            w = copy_to(p["w"], comm=mesh.tp) if f else p["w"]
            part = w * w * d + d
            return reduce_from(as_partial(part, comm=mesh.tp), comm=mesh.tp)
        value, grads = value_and_grad(loss, {"w": Tensor(np.array(1.0))})
        everything = sum(range(comm.size))
        assert float(value) == 2 * everything
        assert f or (float(grads["w"]) == 2 * comm.rank and grads["w"].partial == TP)
        assert float(reduce_gradients(grads, mesh)["w"]) == 2 * everything       # 2 on two ranks
    ranks.run(check)
