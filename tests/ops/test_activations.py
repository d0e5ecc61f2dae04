"""Localises the wrong GELU (tanh, erf or sigmoid form), overflow and fully masked rows in the softmax family."""
import math

import numpy as np
import pytest

from refimpl.check import check_vjp
from refimpl.ops import exp, gelu_erf, gelu_tanh, log_softmax, logsumexp, mul, quick_gelu, relu, sigmoid, silu, softmax, swiglu
from refimpl.rng import draw

X = np.array([[0.3, -1.2, 0.8], [2.0, 0.1, -0.5]])


def erf_form(x):
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


@pytest.mark.parametrize("x, tanh_form, other", [(1.0, 0.841192, 0.841345), (-2.7, -0.008888, -0.009361), (0.0, 0.0, 0.0)])
def test_gelu_is_the_tanh_form(x, tanh_form, other):
    y, _ = gelu_tanh.array(np.array([x]))
    assert y[0] == pytest.approx(tanh_form, abs=5e-7)
    assert erf_form(x) == pytest.approx(other, abs=5e-7)
    assert gelu_erf.array(np.array([x]))[0] == pytest.approx(other, abs=5e-7)


def test_gelu_forms_differ_by_at_most_4_7e_4():
    x = np.linspace(-6, 6, 4801)
    y, other = gelu_tanh.array(x)[0], gelu_erf.array(x)[0]
    assert np.abs(y - other).max() == pytest.approx(4.73e-4, abs=0.01e-4)
    np.testing.assert_allclose(other, [erf_form(v) for v in x], rtol=0, atol=1e-15)


def test_gelu_slope_at_0_is_a_half_and_far_away_0_or_1():
    _, vjp = gelu_tanh.array(np.array([0.0, 30.0, -30.0]))
    assert vjp(np.ones(3)).tolist() == [0.5, 1, 0]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("op, slope", [(gelu_erf, 0.5), (gelu_tanh, 0.5), (silu, 0.5), (quick_gelu, 0.5), (relu, 0.0)])
def test_units_are_the_identity_far_to_the_right_and_0_far_to_the_left(op, slope, dtype):
    y, vjp = op.array(np.array([0.0, 1e4, -1e4, 30, -30], dtype))
    assert y[:2].tolist() == [0, 1e4] and y[2] == 0 and y[3:] == pytest.approx([30, 0], abs=1e-11)
    assert vjp(np.ones(5, dtype)) == pytest.approx([slope, 1, 0, 1, 0], abs=1e-11)


def test_gelu_erf_is_x_times_the_normal_distribution():
    """Φ(1) = 0.8413447461, Φ(2) = 0.9772498681; the slope is Φ(x) + x·φ(x), φ(1) = 0.2419707245."""
    y, vjp = gelu_erf.array(np.array([1.0, -1, 2]))
    assert y == pytest.approx([0.8413447461, -0.1586552539, 2 * 0.9772498681], abs=1e-9)
    assert vjp(np.ones(3))[0] == pytest.approx(0.8413447461 + 0.2419707245, abs=1e-9)


def test_silu_and_quick_gelu_by_hand():
    """σ(ln 3) = 3/4; silu' = s·(1 + x·(1 - s))."""
    x = math.log(3)
    y, vjp = silu.array(np.array([x]))
    assert y == pytest.approx([0.75 * x]) and vjp(np.ones(1)) == pytest.approx([0.75 * (1 + x / 4)])
    y, vjp = quick_gelu.array(np.array([x / 1.702]))
    assert y == pytest.approx([0.75 * x / 1.702]) and vjp(np.ones(1)) == pytest.approx([0.75 * (1 + x / 4)])


def test_quick_gelu_is_within_2_02e_2_of_gelu():
    x = np.linspace(-6, 6, 4801)
    gap = np.abs(quick_gelu.array(x)[0] - gelu_erf.array(x)[0]).max()
    assert gap == pytest.approx(2.03e-2, abs=0.01e-2)


def test_relu_passes_the_gradient_of_positive_inputs_only():
    y, vjp = relu.array(np.array([-1.0, 0, 2]))
    assert y.tolist() == [0, 0, 2] and vjp(np.array([5.0, 6, 7])).tolist() == [0, 0, 7]


def test_swiglu_by_hand_and_as_silu_times_up():
    x = math.log(3)
    y, vjp = swiglu.array(np.array([x]), np.array([10.0]))
    assert y == pytest.approx([7.5 * x])
    dgate, dup = vjp(np.array([2.0]))
    assert dgate == pytest.approx([20 * 0.75 * (1 + x / 4)]) and dup == pytest.approx([1.5 * x])
    gate, up = draw("gate", (3, 5), 4), draw("up", (3, 5))
    np.testing.assert_allclose(swiglu.array(gate, up)[0], mul.array(silu.array(gate)[0], up)[0], rtol=1e-15)


def test_logsumexp_of_logarithms_and_of_huge_numbers():
    y, vjp = logsumexp.array(np.log([[1.0, 2, 5], [3, 3, 3]]))
    assert y == pytest.approx([math.log(8), math.log(9)])
    assert vjp(np.array([8.0, 3])) == pytest.approx(np.array([[1, 2, 5], [1, 1, 1]]))
    y, vjp = logsumexp.array(np.array([[1e4, 1e4], [-1e4, -1e4], [1e4, -1e4]]))
    assert y == pytest.approx([1e4 + math.log(2), -1e4 + math.log(2), 1e4], abs=1e-11)
    assert vjp(np.ones(3)).tolist() == [[0.5, 0.5], [0.5, 0.5], [1, 0]]


def test_logsumexp_moves_with_its_argument():
    x = draw("x", (3, 5))
    y, _ = logsumexp.array(x + 1e4, keepdims=True)
    assert y.shape == (3, 1)
    np.testing.assert_allclose(y[:, 0] - 1e4, logsumexp.array(x)[0], rtol=0, atol=1e-11)
    assert logsumexp.array(np.array([[2.5]]))[0] == 2.5


def test_log_softmax_is_the_logarithm_of_softmax():
    x = draw("x", (3, 5), 4)
    y, vjp = log_softmax.array(x)
    np.testing.assert_allclose(exp.array(y)[0], softmax.array(x)[0], rtol=1e-14)
    np.testing.assert_allclose(vjp(np.ones((3, 5))), 1 - 5 * softmax.array(x)[0], rtol=0, atol=1e-14)
    y, _ = log_softmax.array(np.array([[1e4, -1e4, 1e4]]))
    assert y[0] == pytest.approx([-math.log(2), -2e4 - math.log(2), -math.log(2)])


def test_fully_masked_rows_of_the_logarithms_are_minus_infinity_with_gradient_0():
    x = np.array([[-np.inf] * 3, [-np.inf, 0, 0]])
    y, vjp = logsumexp.array(x)
    assert y.tolist() == [-np.inf, math.log(2)] and vjp(np.ones(2)).tolist() == [[0, 0, 0], [0, 0.5, 0.5]]
    y, vjp = log_softmax.array(x)
    assert y[0].tolist() == [-np.inf] * 3 and y[1] == pytest.approx([-np.inf, -math.log(2), -math.log(2)])
    assert vjp(np.array([[1.0, 2, 3], [0, 4, 0]])).tolist() == [[0, 0, 0], [0, 2, -2]]


def test_softmax_of_two_is_a_sigmoid():
    x = np.linspace(-40, 40, 81)
    p, _ = softmax.array(np.stack([x, np.zeros_like(x)], axis=-1))
    np.testing.assert_allclose(p[:, 0], sigmoid.array(x)[0], rtol=0, atol=3e-16)


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


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("op", [silu, quick_gelu, gelu_tanh, gelu_erf])
def test_units_of_enormous_numbers_neither_overflow_nor_warn(op, dtype):
    """Squares and cubes overflow, and 0·∞ would be nan."""
    y, vjp = op.array(np.array([-np.inf, -3e38, -1e20, -1e13, 1e13, 1e20, 3e38], dtype))
    assert y[:4].tolist() == [0] * 4 and y[4:] == pytest.approx([1e13, 1e20, 3e38], rel=1e-7)
    assert vjp(np.ones(7, dtype)).tolist() == [0] * 4 + [1] * 3


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_swiglu_of_an_enormous_gate_is_0_to_the_left(dtype):
    y, vjp = swiglu.array(np.array([-np.inf, -1e38, 30], dtype), np.full(3, 2, dtype))
    assert y[:2].tolist() == [0, 0] and y[2] == pytest.approx(60)
    dgate, dup = vjp(np.ones(3, dtype))
    assert dgate[:2].tolist() == dup[:2].tolist() == [0, 0]


@pytest.mark.parametrize("op", [silu, quick_gelu, gelu_tanh, gelu_erf])
def test_a_complex_step_differentiates_units_far_away(op):
    x = np.array([-1e13, -60, -9, 9, 60, 1e13])
    y, vjp = op.array(x)
    np.testing.assert_allclose(op.array(x + 1e-20j)[0].imag / 1e-20, vjp(np.ones(6)), rtol=1e-12, atol=1e-15)


def test_log_softmax_far_from_0_keeps_its_digits():
    """x - (m + ln Σ) would subtract two numbers near 10000: an error of 1e-12."""
    total = math.log(1 + math.exp(1) + math.exp(2))
    y, _ = log_softmax.array(1e4 + np.array([[0.0, 1, 2]]))
    np.testing.assert_allclose(y[0], [-total, 1 - total, 2 - total], rtol=0, atol=1e-15 * 4)
