"""Localises gradients of repeated tokens that get lost, and ids that wrap round instead of being refused."""
import numpy as np
import pytest

from refimpl.check import check_vjp
from refimpl.ops import embedding

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
