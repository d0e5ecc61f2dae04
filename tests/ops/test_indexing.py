"""Localises gradients of repeated tokens that get lost, and ids that wrap round instead of being refused."""
import numpy as np
import pytest

from refimpl.check import check_vjp
from refimpl.ops import embedding, gather, scatter_add
from refimpl.rng import draw

W = np.array([[1.0, 2], [3, 4], [5, 6]])


def test_repeated_ids_get_every_gradient():
    y, vjp = embedding.array(W, np.array([1, 1, 2]))
    assert y.tolist() == [[3, 4], [3, 4], [5, 6]]
    dw, dids = vjp(np.ones((3, 2)))
    assert dw.tolist() == [[0, 0], [2, 2], [1, 1]] and dids is None


def test_ids_of_any_shape():
    y, vjp = embedding.array(W, np.array([[2], [0]]))
    assert y.tolist() == [[[5, 6]], [[1, 2]]]
    assert vjp(np.array([[[1.0, 2]], [[3, 4]]]))[0].tolist() == [[3, 4], [0, 0], [1, 2]]
    assert embedding.array(W, np.array(1))[0].tolist() == [3, 4]
    assert embedding.array(W, np.zeros((2, 0), int))[0].shape == (2, 0, 2)


@pytest.mark.parametrize("ids, error, words", [
    ([0, 3], ValueError, r"ids must be in \[0, 3\), got 0 to 3"),
    ([-1, 2], ValueError, r"ids must be in \[0, 3\), got -1 to 2"),
    ([0.0, 1.0], TypeError, "ids must be integers, got float64"),
    ([True, False, True], TypeError, "ids must be integers, got bool")])
def test_wrong_ids_are_named(ids, error, words):
    with pytest.raises(error, match="embedding: " + words):
        embedding.array(W, np.array(ids))


def test_gather_picks_slices_in_any_order():
    y, vjp = gather.array(W, np.array([2, 0, 2]))
    assert y.tolist() == [[5, 6], [1, 2], [5, 6]]
    assert vjp(np.array([[1.0, 0], [0, 10], [100, 0]]))[0].tolist() == [[0, 10], [0, 0], [101, 0]]


def test_scatter_add_adds_up_equal_ids_and_leaves_the_rest_0():
    """known_failures: y[ids] += x would give [0, 1, 1]."""
    y, vjp = scatter_add.array(np.ones(3), np.array([1, 1, 2]), n=4)
    assert y.tolist() == [0, 2, 1, 0]
    assert vjp(np.array([5.0, 6, 7, 8]))[0].tolist() == [6, 6, 7]


def test_each_is_the_transpose_of_the_other():
    """The vjp of gather is scatter_add and the other way round, bit for bit; <y, gather x> = <scatter_add y, x>."""
    x, y, ids = draw("x", (5, 3)), draw("y", (7, 3)), np.array([4, 0, 0, 2, 4, 4, 1])
    gathered, gather_vjp = gather.array(x, ids)
    scattered, scatter_vjp = scatter_add.array(y, ids, n=5)
    assert np.array_equal(gather_vjp(y)[0], scattered) and np.array_equal(scatter_vjp(x)[0], gathered)
    assert np.sum(y * gathered) == pytest.approx(np.sum(scattered * x), abs=1e-14)


def test_scatter_add_equals_add_at():
    x, ids = draw("x", (101, 3)), np.arange(101) ** 2 % 7
    expected = np.zeros((9, 3))
    np.add.at(expected, ids, x)
    np.testing.assert_allclose(scatter_add.array(x, ids, n=9)[0], expected, rtol=0, atol=1e-13)


def test_every_integer_dtype_works():
    for dtype in ("int8", "uint8", "int16", "uint32", "int64", "uint64"):
        ids = np.array([2, 0, 2], dtype)
        assert gather.array(W, ids)[0].tolist() == embedding.array(W, ids)[0].tolist() == [[5, 6], [1, 2], [5, 6]]
        assert scatter_add.array(W, ids, n=3)[0].tolist() == [[3, 4], [0, 0], [6, 8]]


def test_check_catches_the_lost_repeat():
    def wrong(w, ids):
        def vjp(dy):
            dw = np.zeros_like(w)
            dw[ids] += dy                               # keeps one of equal ids
            return dw, None
        return w[ids], vjp

    check_vjp(wrong, W, np.array([0, 1, 2]))
    with pytest.raises(AssertionError, match="argument 0"):
        check_vjp(wrong, W, np.array([1, 1, 2]))
