"""Localises a sharded matrix product that is not the serial one: lost or doubled terms forward, in dx, dw or db.

All numbers are small integers, so float64 is exact in any order of summation and equality is equality.
Shape letters: N rows, D inputs, F outputs.  The sizes do not divide; on 8 ranks some hold nothing.
"""
import numpy as np
import pytest

from refimpl.autograd import LayoutError, Tensor, value_and_grad
from refimpl.comm import Comm, Mesh
from refimpl.ops import gelu_tanh, linear
from refimpl.ops import sum as total
from refimpl.parallel import (Cut, Replicated, column_parallel_linear, copy_to, gather, gather_from, reduce_from,
                              reduce_gradients, row_parallel_linear, scatter_to, shard)

N, D, F = 3, 5, 7


def integers(*shape, seed):
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(float)


WHOLE = {"x": integers(N, D, seed=0), "w": integers(D, F, seed=1), "b": integers(F, seed=2)}
C = integers(N, F, seed=3)                              # the cotangent of y
Y = WHOLE["x"] @ WHOLE["w"] + WHOLE["b"]
GRADS = {"x": C @ WHOLE["w"].T, "w": WHOLE["x"].T @ C, "b": C.sum(axis=0)}


def check_layer(comm: Comm, w_axis: int, b_is_cut: bool, layer):
    """y and every gradient of `layer(p, tp)`, whose x is replicated and y is replicated, are the serial ones."""
    mesh = Mesh(tp=comm.size, comm=comm)
    table = {"x": Replicated(), "w": Cut.even(w_axis, WHOLE["w"].shape[w_axis], mesh.tp),
             "b": Cut.even(0, F, mesh.tp) if b_is_cut else Replicated()}

    def loss(p):
        y = layer(p, mesh.tp)
        return total(y * Tensor(C)), y
    (_, y), grads = value_and_grad(loss, shard(WHOLE, table, mesh))
    assert y.varies == frozenset() and np.array_equal(y.array, Y)
    back = gather(reduce_gradients(grads, mesh), table, mesh)
    for name in WHOLE:
        assert np.array_equal(back[name], GRADS[name]), name


def column_layer(p, tp):
    y = column_parallel_linear(copy_to(p["x"], comm=tp), p["w"], p["b"])
    return gather_from(y, comm=tp, sizes=[stop - start for start, stop in Cut.even(1, F, tp).bounds])


def row_layer(p, tp):
    return reduce_from(row_parallel_linear(scatter_to(p["x"], comm=tp), p["w"]), comm=tp) + p["b"]


def test_column_cut_equals_serial(ranks):
    ranks.run(lambda comm: check_layer(comm, 1, True, column_layer))


def test_row_cut_equals_serial(ranks):
    ranks.run(lambda comm: check_layer(comm, 0, False, row_layer))


# -- the bias of a row-parallel layer ------------------------------------------------------------------------------

PRODUCT, BIAS = np.array([30.0, 70.0, 110.0]), np.array([100.0, 200.0, 300.0])


def known_layer(comm: Comm):
    """x·w = [30, 70, 110], its ten terms shared out over the ranks."""
    mesh = Mesh(tp=comm.size, comm=comm)
    table = {"w": Cut.even(0, 10, mesh.tp), "b": Replicated()}
    p = shard({"w": np.outer(np.ones(10), PRODUCT / 10), "b": BIAS}, table, mesh)
    return mesh, scatter_to(Tensor(np.ones((1, 10))), comm=mesh.tp), p


def test_row_parallel_bias_is_added_once(ranks):
    def check(comm: Comm):
        mesh, x, p = known_layer(comm)
        y = reduce_from(row_parallel_linear(x, p["w"]), comm=mesh.tp) + p["b"]
        assert y.array.tolist() == [[130, 270, 410]]
        once_per_rank = comm.all_reduce(x.array @ p["w"].array + BIAS)           # the mistake, by hand
        assert comm.size != 2 or once_per_rank.tolist() == [[230, 470, 710]]
    ranks.run(check)


def test_a_bias_before_the_reduction_is_refused(ranks):
    def check(comm: Comm):
        mesh, x, p = known_layer(comm)
        with pytest.raises(LayoutError, match="its bias would be added once per rank: add it after reduce_from"):
            linear(x, p["w"], p["b"])
        with pytest.raises(LayoutError, match="would be counted once per rank"):
            row_parallel_linear(x, p["w"]) + p["b"]
    ranks.run(check)


# -- how many exchanges --------------------------------------------------------------------------------------------

H = 6                                                   # the width between the two layers


def two_layers(comm: Comm, first_axis: int):
    """The parameters of x·a, gelu, ·b, with a cut along first_axis and b along the other."""
    mesh = Mesh(tp=comm.size, comm=comm)
    second_axis = 1 - first_axis
    table = {"a": Cut.even(first_axis, (D, H)[first_axis], mesh.tp), "b": Cut.even(second_axis, (H, F)[second_axis], mesh.tp)}
    whole = {"a": integers(D, H, seed=5) / 8, "b": integers(H, F, seed=6)}
    serial = gelu_tanh.array(WHOLE["x"] @ whole["a"])[0] @ whole["b"]
    return mesh, shard(whole, table, mesh), serial


def exchanges(comm: Comm):
    return comm.ledger.total(axes="tp", phase="forward").calls, comm.ledger.total(axes="tp", phase="forward").elements


def test_columns_then_rows_need_one_exchange(ranks):
    def check(comm: Comm):
        mesh, p, serial = two_layers(comm, 1)
        x = copy_to(Tensor(WHOLE["x"]), comm=mesh.tp)
        y = reduce_from(row_parallel_linear(gelu_tanh(column_parallel_linear(x, p["a"])), p["b"]), comm=mesh.tp)
        assert np.abs(y.array - serial).max() <= 1e-12 * np.abs(serial).max()
        assert exchanges(comm) == ((1, N * F) if comm.size > 1 else (0, 0))
    ranks.run(check)


def test_rows_then_columns_need_two_exchanges(ranks):
    def check(comm: Comm):
        mesh, p, serial = two_layers(comm, 0)
        x = scatter_to(Tensor(WHOLE["x"]), comm=mesh.tp)
        h = reduce_from(row_parallel_linear(x, p["a"]), comm=mesh.tp)
        y = column_parallel_linear(copy_to(gelu_tanh(h), comm=mesh.tp), p["b"])
        own = y.shape[-1]
        y = gather_from(y, comm=mesh.tp, sizes=[stop - start for start, stop in Cut.even(1, F, mesh.tp).bounds])
        assert np.abs(y.array - serial).max() <= 1e-12 * np.abs(serial).max()
        assert exchanges(comm) == ((2, N * H + N * own) if comm.size > 1 else (0, 0))
    ranks.run(check)


def test_gelu_of_sums_is_not_the_sum_of_gelus(ranks):
    """Rows first and no reduction before the nonlinearity: a wrong number by hand, an error with Tensors."""
    def check(comm: Comm):
        mesh, p, serial = two_layers(comm, 0)
        x = scatter_to(Tensor(WHOLE["x"]), comm=mesh.tp)
        part = row_parallel_linear(x, p["a"])
        with pytest.raises(LayoutError, match="gelu_tanh of a sum is not the sum of gelu_tanhs"):
            gelu_tanh(part)
        right = gelu_tanh.array(comm.all_reduce(part.array))[0]
        wrong = comm.all_reduce(gelu_tanh.array(part.array)[0])
        assert (np.abs(right - wrong).max() > 0.1) == (comm.size > 1)
    ranks.run(check)


def test_backward_of_a_column_cut_exchanges_dx_whatever_the_width(ranks):
    """f: N·D elements, however many columns the matrix has."""
    def check(comm: Comm):
        for width in (8, 800):
            comm.ledger.clear()
            mesh = Mesh(tp=comm.size, comm=comm)
            p = shard({"x": WHOLE["x"], "w": np.ones((D, width))}, {"x": Replicated(), "w": Cut.even(1, width, mesh.tp)}, mesh)
            value_and_grad(lambda p: reduce_from(total(column_parallel_linear(copy_to(p["x"], comm=mesh.tp), p["w"])),
                                                 comm=mesh.tp), p)
            assert comm.ledger.total(axes="tp", phase="backward").elements == (N * D if comm.size > 1 else 0)
    ranks.run(check)


# -- wrong use -----------------------------------------------------------------------------------------------------


def test_a_weight_with_the_wrong_cut_is_refused(ranks):
    def check(comm: Comm):
        mesh = Mesh(tp=comm.size, comm=comm)
        p = shard({"columns": np.ones((D, F)), "rows": np.ones((D, F)), "whole": np.ones((D, F))},
                  {"columns": Cut.even(1, F, mesh.tp), "rows": Cut.even(0, D, mesh.tp), "whole": Replicated()}, mesh)
        x = Tensor(WHOLE["x"])
        layers = ((column_parallel_linear, 1, ("rows", "whole")), (row_parallel_linear, 0, ("columns", "whole")))
        for layer, axis, others in layers:
            for name in others:
                with pytest.raises(LayoutError, match=f"{layer.name}: {name} must be cut along axis {axis}"):
                    layer(x, p[name])
    ranks.run(check)


def test_a_forgotten_f_is_refused_not_a_wrong_dx(ranks):
    def check(comm: Comm):
        mesh = Mesh(tp=comm.size, comm=comm)
        p = shard({"v": np.ones(D), "w": WHOLE["w"]}, {"v": Replicated(), "w": Cut.even(1, F, mesh.tp)}, mesh)
        with pytest.raises(LayoutError, match="copy_to it first"):
            value_and_grad(lambda p: total(column_parallel_linear(Tensor(WHOLE["x"]) * p["v"], p["w"])), p)
    ranks.run(check)
