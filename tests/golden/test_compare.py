"""Localises faults of the comparison: a difference that is missed, blamed on the wrong array, or invented."""
import numpy as np
import pytest

from refimpl.golden import compare, gauge_scales


def test_the_difference_is_relative_to_the_arrays_scale_and_the_worst_comes_first():
    a = {"small": np.array([1.0, 2.0]), "large": np.array([[1e6, 0.0]])}
    b = {"small": np.array([1.0, 2.5]), "large": np.array([[1e6, 1.0]])}
    first, second = compare(b, a)
    assert (first.name, first.relative, first.index) == ("small", 0.25, (1,))
    assert (second.name, second.relative, second.index) == ("large", 1e-6, (0, 1))


def test_a_scalar_is_compared_as_an_array_of_one_element():
    assert compare({"loss": np.float64(3.0)}, {"loss": np.array(2.0)})[0].relative == 0.5


def test_equal_sets_have_difference_zero_also_at_nan_and_infinity():
    a = {"x": np.array([1.0, np.nan, np.inf, -np.inf])}
    assert compare(a, a)[0].relative == 0


@pytest.mark.parametrize("actual", [[1.0, np.nan], [1.0, np.inf], [np.nan, 2.0]])
def test_unmatched_nan_and_infinity_are_infinitely_wrong(actual):
    assert compare({"x": np.array(actual)}, {"x": np.array([1.0, 2.0])})[0].relative == np.inf


def test_an_array_that_should_be_zero_has_no_scale_of_its_own():
    k = {"attn.k.b": np.full(2, 1e-17), "attn.k.w": np.full((2, 2), 0.1)}
    zero = dict(k, **{"attn.k.b": np.zeros(2)})
    assert compare(k, zero)[0].relative == np.inf
    assert compare(k, zero, gauge_scales({"attn.k.b"}))[0].relative == pytest.approx(1e-16)


def test_sets_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="do not have the same names: b"):
        compare({"a": np.ones(1)}, {"a": np.ones(1), "b": np.ones(1)})
    with pytest.raises(ValueError, match="both are empty"):
        compare({}, {})
    with pytest.raises(ValueError, match=r"a: shapes \[1\] and \[2\]"):
        compare({"a": np.ones(1)}, {"a": np.ones(2)})
