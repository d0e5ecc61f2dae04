"""Localises swapped axes and missing sums over leading axes in the linear layer, and products that Count cannot see."""
import ast
import math
from pathlib import Path

import numpy as np
import pytest

import refimpl.ops
from refimpl.autograd import Count
from refimpl.check import check_vjp
from refimpl.ops import add, layer_norm, linear, mean, rms_norm, sum
from refimpl.ops.linear import column_dot, column_sum
from refimpl.rng import draw

X, W, B = np.array([[[1.0, 2]], [[3, 4]]]), np.array([[1.0, 0, 2], [0, 1, 3]]), np.array([100.0, 200, 300])


def test_values_by_hand():
    y, vjp = linear.array(X, W, B)
    dx, dw, db = vjp(np.array([[[1.0, 0, 0]], [[0, 1, 1]]]))
    assert y.tolist() == [[[101, 202, 308]], [[103, 204, 318]]]
    assert dx.tolist() == [[[1, 0]], [[2, 4]]]
    assert dw.tolist() == [[1, 3, 3], [2, 4, 4]]
    assert db.tolist() == [1, 1, 1]


def test_no_bias_has_no_gradient():
    y, vjp = linear.array(X, W)
    assert y.tolist() == [[[1, 2, 8]], [[3, 4, 18]]]
    assert vjp(y)[2] is None
    assert np.array_equal(y, linear.array(X, W, None)[0])


def test_no_inputs_give_the_bias():
    y, vjp = linear.array(np.zeros((2, 0)), np.zeros((0, 3)), B)
    assert y.tolist() == [[100, 200, 300]] * 2
    assert [d.shape for d in vjp(np.ones((2, 3)))] == [(2, 0), (0, 3), (3,)]


@pytest.mark.parametrize("x, w, b", [((2, 3), (2, 3), None), ((3,), (3, 2), (3,)), ((), (3, 2), None), ((3,), (3,), None),
                                     ((3,), (3, 2), (1, 2))])
def test_shapes_that_do_not_fit_are_named(x, w, b):
    with pytest.raises(ValueError, match=r"linear: x\[.*\], w\[.*\], b.*: x's last axis must equal w's first"):
        linear.array(np.zeros(x), np.zeros(w), None if b is None else np.zeros(b))


def test_every_product_is_counted():
    with Count() as count:
        linear.array(X, W, B)[1](np.ones((2, 1, 3)))
    assert math.fsum(count.flops.values()) == 3 * 2 * (2 * 2 * 3)         # y, dx and dw: 2mnk each


def test_ops_multiply_matrices_nowhere_else():
    """A product outside `product` would escape the FLOP count."""
    for path in Path(refimpl.ops.__path__[0]).glob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        found = [getattr(node, "attr", "@") for node in nodes if isinstance(getattr(node, "op", 0), ast.MatMult)
                 or getattr(node, "attr", "") in ("einsum", "matmul", "dot", "tensordot")]
        # the two einsums are row_dot and column_dot: sums of a·b along one axis, no matrix products
        assert sorted(found) == (["@", "einsum", "einsum"] if path.name == "linear.py" else []), f"{path.name}: {found}"


def test_check_catches_the_usual_mistakes():
    def variant(dx=lambda dy, x, w: dy @ w.T, dw=lambda dy, x, w: x.T @ dy, db=lambda dy: dy.sum(axis=0)):
        return lambda x, w, b: (x @ w + b, lambda dy: (dx(dy, x, w), dw(dy, x, w), db(dy)))

    x, w, b = draw("x", (3, 3)), draw("w", (3, 3)), draw("b", (3,))
    check_vjp(variant(), x, w, b)
    for wrong, argument in [(variant(dx=lambda dy, x, w: dy @ w), 0), (variant(dw=lambda dy, x, w: x @ dy), 1),
                            (variant(dw=lambda dy, x, w: (x.T @ dy).T), 1), (variant(db=lambda dy: dy.mean(axis=0)), 2),
                            (variant(db=lambda dy: dy.sum(axis=1)), 2), (variant(db=lambda dy: None), 2)]:
        with pytest.raises(AssertionError, match=f"argument {argument}"):
            check_vjp(wrong, x, w, b)


N = 100_000


def off(got, exact):
    """The largest relative error."""
    return float(np.abs(got / exact - 1).max())


def test_float32_sums_over_many_rows_keep_their_digits():
    """Added up one by one the rows are off by 1e-5; by blocks, by less than 1e-6."""
    x, dy = (1 + draw(name, (N, 3), dtype="float32") for name in ("x", "dy"))
    one, exact = np.ones(3, np.float32), dy.sum(axis=0, dtype=np.float64)
    _, db = linear.array(x, np.eye(3, dtype=np.float32), one)[1](dy)[1:]
    _, dg, db_of_norm = layer_norm.array(x, one, one)[1](dy)
    dw = rms_norm.array(x, one)[1](dy)[1]
    xhat = rms_norm.array(x, one)[0].astype(np.float64)
    assert db.dtype == dg.dtype == dw.dtype == np.float32
    assert off(db, exact) < 1e-6 and off(db_of_norm, exact) < 1e-6 and off(dw, (xhat * dy).sum(axis=0)) < 1e-6
    assert off(sum.array(dy, axis=0)[0], exact) < 1e-6
    assert off(sum.array(dy.reshape(100, -1, 3), axis=(0, 1), keepdims=True)[0], exact) < 1e-6
    assert off(mean.array(dy, axis=0)[0], exact / N) < 1e-6
    assert off(add.array(dy, one)[1](dy)[1], exact) < 1e-6


@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (255, 3), (256, 3), (257, 3), (2, 300, 3), (70_000, 1), (300, 0), (3,)])
def test_sums_by_blocks_leave_out_no_row(shape):
    a, b = draw("a", shape), draw("b", shape)
    leading = tuple(range(a.ndim - 1))
    np.testing.assert_allclose(column_sum(a), a.sum(axis=leading), rtol=0, atol=1e-11)
    np.testing.assert_allclose(column_dot(a, b), (a * b).sum(axis=leading), rtol=0, atol=1e-11)
