"""Localises the wrong GELU (tanh or erf form), overflow and fully masked rows in softmax."""
import math

import numpy as np
import pytest

from refimpl.check import check_vjp
from refimpl.ops import gelu_tanh, softmax

X = np.array([[0.3, -1.2, 0.8], [2.0, 0.1, -0.5]])


def erf_form(x):
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


@pytest.mark.parametrize("x, tanh_form, other", [(1.0, 0.841192, 0.841345), (-2.7, -0.008888, -0.009361), (0.0, 0.0, 0.0)])
def test_gelu_is_the_tanh_form(x, tanh_form, other):
    y, _ = gelu_tanh.array(np.array([x]))
    assert y[0] == pytest.approx(tanh_form, abs=5e-7)
    assert erf_form(x) == pytest.approx(other, abs=5e-7)


def test_gelu_forms_differ_by_at_most_4_7e_4():
    x = np.linspace(-6, 6, 4801)
    y, _ = gelu_tanh.array(x)
    gap = np.abs(y - np.array([erf_form(v) for v in x])).max()
    assert gap == pytest.approx(4.73e-4, abs=0.01e-4)


def test_gelu_slope_at_0_is_a_half_and_far_away_0_or_1():
    _, vjp = gelu_tanh.array(np.array([0.0, 30.0, -30.0]))
    assert vjp(np.ones(3)).tolist() == [0.5, 1, 0]


def test_softmax_of_logarithms():
    y, vjp = softmax.array(np.log([1.0, 2, 5]))
    assert y == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=1e-15)
    assert vjp(np.array([1.0, 0, 0])) == pytest.approx([7 / 64, -2 / 64, -5 / 64], abs=1e-15)


def test_softmax_of_equal_and_of_huge_logits():
    y, _ = softmax.array(np.array([[1e4, 1e4, 1e4, 1e4], [1e4, -1e4, 0, 0]]))
    assert y.tolist() == [[0.25] * 4, [1, 0, 0, 0]]


def test_softmax_of_a_fully_masked_row_is_0_with_gradient_0():
    y, vjp = softmax.array(np.array([[-np.inf] * 3, [-np.inf, 0, 0]]))
    assert y.tolist() == [[0, 0, 0], [0, 0.5, 0.5]]
    assert vjp(np.ones((2, 3)) * [1, 2, 3]).tolist() == [[0, 0, 0], [0, -0.25, 0.25]]


def test_softmax_of_a_scalar_is_refused():
    with pytest.raises(ValueError, match="softmax: x"):
        softmax.array(np.array(1.0))


def test_check_catches_dropped_terms():
    def gelu_without_the_inner_slope(x):
        y, _ = gelu_tanh.array(x)
        t = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3))
        return y, lambda dy: dy * 0.5 * (1 + t)

    def softmax_without_the_sum(x):
        y, _ = softmax.array(x)
        return y, lambda dy: y * dy

    def softmax_summed_over_the_wrong_axis(x):
        y, _ = softmax.array(x)
        return y, lambda dy: y * (dy - (y * dy).sum(axis=0, keepdims=True))

    for wrong in (gelu_without_the_inner_slope, softmax_without_the_sum, softmax_summed_over_the_wrong_axis):
        with pytest.raises(AssertionError, match=f"{wrong.__name__}: argument 0, direction 0"):
            check_vjp(wrong, X)
