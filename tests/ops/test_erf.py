"""Localises a wrong coefficient or range boundary of the error function, which numpy lacks."""
import math

import numpy as np
import pytest

from refimpl.ops import erf
from refimpl.ops.erf import erf_array

GRID = np.concatenate([np.linspace(-7, 7, 60001), np.geomspace(1e-300, 1, 2001), [
    np.nextafter(b, b + s) for b in (0.84375, 1.25, 1 / 0.35, 6.0) for s in (-1, 0, 1)]])
EXACT = np.array([math.erf(x) for x in GRID])


def test_float64_is_within_its_stated_error_of_the_c_library():
    """erf.py says: at most 2.3e-16, and one unit in the last place is 1.1e-16 below 1."""
    assert np.abs(erf_array(GRID) - EXACT).max() <= 2.3e-16
    relative = np.abs(erf_array(GRID) / np.where(EXACT == 0, 1, EXACT) - 1)[EXACT != 0]
    assert relative.max() <= 1e-15


def test_float32_is_within_its_stated_error():
    """Against erf of the float32 number itself: 4e-7 of the value, six units in the last place."""
    low = GRID.astype(np.float32)
    exact = np.array([math.erf(float(x)) for x in low])
    y = erf_array(low)
    assert y.dtype == np.float32
    assert (np.abs(y - exact) <= 4e-7 * np.abs(exact) + 2.0 ** -149).all()      # or by one subnormal


@pytest.mark.parametrize("x, y", [                      # Abramowitz and Stegun, table 7.1
    (0.1, 0.1124629160), (0.5, 0.5204998778), (1.0, 0.8427007929), (1.5, 0.9661051465), (2.0, 0.9953222650)])
def test_published_values(x, y):
    assert erf_array(np.array([x, -x])) == pytest.approx([y, -y], abs=5e-11)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_special_values(dtype):
    """Far out it is ±1 exactly: gelu multiplies 1 + erf by x, and -10⁴ times a rounding would not be 0."""
    y = erf_array(np.array([0.0, -0.0, np.inf, -np.inf, 6.0, -30.0, 1e38, np.nan], dtype))
    assert y[:7].tolist() == [0, 0, 1, -1, 1, -1, 1] and np.isnan(y[7])
    assert np.signbit(y[:2]).tolist() == [False, True]


def test_it_is_odd_and_increasing():
    x = np.linspace(0, 7, 20001)
    y = erf_array(x)
    assert np.array_equal(erf_array(-x), -y)
    assert (np.diff(y) >= -1.2e-16).all()               # the last bit may wobble where the ranges meet


def test_its_slope_is_the_gaussian():
    _, vjp = erf.array(np.array([0.0, 1.0, 30.0]))
    assert vjp(np.ones(3)) == pytest.approx([2 / math.sqrt(math.pi), 2 / math.sqrt(math.pi) / math.e, 0], abs=1e-15)
