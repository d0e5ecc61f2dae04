"""Localises overflow, wrong slopes and wrong limits in the functions of one number."""
import math

import numpy as np
import pytest

from refimpl.check import check_vjp
from refimpl.ops import exp, log, power, sigmoid, softplus, sqrt, tanh

LN2 = math.log(2)


@pytest.mark.parametrize("op, static, x, y, slope", [
    (exp, {}, LN2, 2, 2), (exp, {}, 0.0, 1, 1), (log, {}, math.e, 1, 1 / math.e), (log, {}, 0.25, -2 * LN2, 4),
    (sqrt, {}, 9.0, 3, 1 / 6), (sqrt, {}, 0.25, 0.5, 1), (tanh, {}, 0.0, 0, 1), (tanh, {}, math.log(3) / 2, 0.5, 0.75),
    (sigmoid, {}, 0.0, 0.5, 0.25), (sigmoid, {}, math.log(3), 0.75, 3 / 16), (softplus, {}, 0.0, LN2, 0.5),
    (softplus, {}, math.log(3), 2 * LN2, 0.75), (power, {}, -3.0, 9, -6), (power, {"exponent": 3}, -2.0, -8, 12),
    (power, {"exponent": -0.5}, 4.0, 0.5, -1 / 16), (power, {"exponent": 1}, 0.0, 0, 1), (power, {"exponent": 0}, 0.0, 1, 0),
    (power, {"exponent": 0}, 5.0, 1, 0)])
def test_values_and_slopes_by_hand(op, static, x, y, slope):
    got, vjp = op.array(np.array([x]), **static)
    assert got == pytest.approx([y], abs=1e-15)
    assert vjp(np.array([2.0])) == pytest.approx([2 * slope], abs=1e-15)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("op, y, slope", [(sigmoid, [0, 1], [0, 0]), (softplus, [0, 1e4], [0, 1]), (tanh, [-1, 1], [0, 0])])
def test_huge_arguments_reach_the_limits_without_a_warning(op, y, slope, dtype):
    got, vjp = op.array(np.array([-1e4, 1e4], dtype))
    assert got.dtype == dtype and got.tolist() == y
    assert vjp(np.ones(2, dtype)).tolist() == slope


def test_softplus_has_no_threshold():
    """torch replaces it by x above 20; e^-21 is still visible in float64."""
    y, _ = softplus.array(np.array([21.0, -40.0]))
    assert y[0] - 21 == pytest.approx(math.exp(-21), rel=1e-5)
    assert y[1] == pytest.approx(math.exp(-40), rel=1e-14)


def test_sigmoid_identities():
    x = np.linspace(-30, 30, 601)
    s, slope = sigmoid.array(x)[0], softplus.array(x)[1](np.ones_like(x))
    np.testing.assert_allclose(s + sigmoid.array(-x)[0], 1, rtol=0, atol=2.3e-16)        # one unit in the last place
    np.testing.assert_allclose(slope, s, rtol=0, atol=2e-16)             # the slope of softplus is sigmoid
    np.testing.assert_allclose(softplus.array(x)[0] - softplus.array(-x)[0], x, rtol=0, atol=1e-14)


@pytest.mark.parametrize("op, static, y", [(log, {}, -np.inf), (sqrt, {}, 0.0), (power, {"exponent": 0.5}, 0.0),
                                           (power, {"exponent": -1}, np.inf), (power, {"exponent": -0.5}, np.inf)])
def test_at_0_the_slope_is_infinite_but_a_zero_cotangent_stays_zero(op, static, y):
    got, vjp = op.array(np.zeros(2), **static)
    assert got.tolist() == [y, y]
    dx = vjp(np.array([0.0, 1.0]))
    assert dx[0] == 0 and np.isinf(dx[1])


def test_outside_the_domain_is_nan_without_a_warning():
    for op, static in ((log, {}), (sqrt, {}), (power, {"exponent": 0.5})):
        y, vjp = op.array(np.array([-1.0]), **static)
        assert np.isnan(y).all()
        assert vjp(np.array([0.0])).tolist() == [0]


def test_exp_overflows_to_infinity_and_underflows_to_0():
    y, vjp = exp.array(np.array([1e4, -1e4]))
    assert y.tolist() == [np.inf, 0]
    assert vjp(np.array([0.0, 1])).tolist() == [0, 0]


def test_check_catches_a_slope_that_lacks_a_factor():
    def sqrt_without_the_half(x):
        return np.sqrt(x), lambda dy: dy / np.sqrt(x)

    def sigmoid_slope_without_one_factor(x):
        y, _ = sigmoid.array(x)
        return y, lambda dy: dy * y

    for wrong in (sqrt_without_the_half, sigmoid_slope_without_one_factor):
        with pytest.raises(AssertionError, match="argument 0"):
            check_vjp(wrong, np.array([0.5, 1, 2]))


@pytest.mark.parametrize("dtype, x", [("float32", -80), ("float64", -700)])
def test_sigmoid_is_exact_to_the_left_and_0_where_nothing_is_left(dtype, x):
    y, vjp = sigmoid.array(np.array([x, -np.inf, -1e38], dtype))
    assert y[0] == pytest.approx(math.exp(x), rel=1e-6 if dtype == "float32" else 1e-15) and y[1:].tolist() == [0, 0]
    assert vjp(np.ones(3, dtype))[1:].tolist() == [0, 0]


def test_a_complex_step_differentiates_sigmoid_far_away():
    y, _ = sigmoid.array(np.array([-1e4, -30, 1e4]) + 1e-20j)
    assert y.imag / 1e-20 == pytest.approx([0, math.exp(-30), 0], rel=1e-12, abs=1e-300)
    assert np.isfinite(y).all()


def test_the_power_0_has_no_slope_even_for_an_infinite_cotangent():
    assert power.array(np.array([0.0, 2]), exponent=0)[1](np.array([np.inf, np.nan])).tolist() == [0, 0]
