"""Localises faults of the judgement: a rounding that is blamed, a mistake that passes, or another element than the worst."""
import numpy as np
import pytest

from refimpl.golden.emulate import FORMATS, rounded
from refimpl.golden.judge import FLOAT64, FLOOR, INSIDE, rho, same_in
from refimpl.golden.limits import LIMITS
from refimpl.rng import draw

INF, NAN = np.inf, np.nan


def arrays(*values):
    return [np.array(v, dtype=float) for v in values]


def test_rho_is_the_error_in_units_of_sigma():
    found = rho(*arrays([[1.0, 2.5], [3.0, 4.0]], [[1.0, 2.0], [3.0, 4.0]], [[0.25, 0.25], [0.25, 0.25]]))
    assert (found.norm, found.element, found.worst) == (1.0, 2.0, (0, 1))       # √(0.5²/4)/0.25
    assert (found.actual, found.expected, found.what, found.infinite) == (2.5, 2.0, "", False)


def test_the_worst_is_so_for_its_sigma_not_the_largest_error():
    found = rho(*arrays([1.5, 1.4], [1.0, 1.0], [0.5, 0.1]))
    assert found.worst == (1,) and found.element == pytest.approx(4.0)
    assert found.norm == pytest.approx(np.sqrt((0.25 + 0.16) / (0.25 + 0.01)))


def test_equal_arrays_have_rho_zero():
    found = rho(*arrays([1.0, 2.0], [1.0, 2.0], [0.1, 0.0]))
    assert (found.norm, found.element, found.infinite) == (0.0, 0.0, False)


def test_a_scalar_has_the_empty_index():
    found = rho(*arrays(3.0, 2.0, 0.5))
    assert (found.norm, found.element, found.worst, found.actual, found.expected) == (2.0, 2.0, (), 3.0, 2.0)


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_nothing_has_no_error(shape):
    found = rho(np.zeros(shape), np.zeros(shape), np.zeros(shape))
    assert (found.norm, found.element, found.worst, found.infinite) == (0.0, 0.0, (), False)


@pytest.mark.parametrize("actual, expected, what", [
    (NAN, 1.0, "nan where a number belongs"), (INF, 1.0, "inf where a number belongs"),
    (-INF, 1.0, "-inf where a number belongs"), (1.0, NAN, "a number where nan belongs"),
    (1.0, INF, "a number where inf belongs"), (1.0, -INF, "a number where -inf belongs"), (INF, -INF, "inf where -inf belongs"),
    (NAN, INF, "nan where inf belongs"), (-INF, NAN, "-inf where nan belongs")])
def test_another_kind_of_number_comes_first_however_large_other_errors_are(actual, expected, what):
    found = rho(*arrays([[1e300, 0.0], [0.0, actual]], [[0.0, 0.0], [0.0, expected]], np.ones((2, 2))))
    assert (found.what, found.worst, found.infinite) == (what, (1, 1), True)
    assert found.norm == found.element == INF
    assert np.array_equal([found.actual, found.expected], [actual, expected], equal_nan=True)


def test_of_several_the_first_place_is_named():
    assert rho(*arrays([1.0, NAN, INF], [1.0, 2.0, 3.0], [1.0, 1.0, 1.0])).worst == (1,)


def test_the_same_kinds_in_the_same_places_are_right():
    found = rho(*arrays([NAN, INF, -INF, 1.5], [NAN, INF, -INF, 1.0], [1.0, 1.0, 1.0, 1.0]))
    assert not found.infinite and found.element == 0.5 and found.worst == (3,)
    assert found.norm == 0.25


def test_where_nothing_is_rounded_any_difference_is_infinite_and_none_is_zero():
    one = np.ones(3)
    assert rho(one, one, np.zeros(3)).norm == rho(one, one, np.zeros(3)).element == 0.0
    found = rho(one + arrays([0, 2.0 ** -52, 0])[0], one, np.zeros(3))
    assert found.norm == found.element == INF and found.worst == (1,) and not found.infinite


def test_the_references_own_error_counts_where_sigma_is_zero():
    found = rho(*arrays([1.0, 1.0 + 2e-16], [1.0, 1.0], [0.0, 0.0]), uncertainty=1e-15)
    assert 0 < found.norm < 1 and 0 < found.element < 1
    both = rho(*arrays([1.5], [1.0], [0.3]), uncertainty=0.4)
    assert both.norm == both.element == pytest.approx(1.0)


def rounded_sum(n=512):
    """x + y rounded to bfloat16 operands, where y cancels all of x but for a rest: elements near zero with errors as of 1."""
    x = 1.5 + draw("x", (n,), 0.5)
    y = 1e-6 * draw("y", (n,)) - x
    fmt = FORMATS["bfloat16"]
    sigma = np.full(n, np.sqrt(2 / 12)) * 2.0 ** -7         # two roundings in [1, 2), each of variance ulp²/12
    return rounded(x, fmt) + rounded(y, fmt), x + y, sigma


def test_near_zero_elements_do_not_fail_for_nothing():
    """A relative error of a thousand, where rounding before a cancellation must make just that."""
    actual, expected, sigma = rounded_sum()
    actual = actual + 2.0 ** -8 * draw("other", actual.shape)           # (x and y cancel, in part, in their errors, too)
    found = rho(actual, expected, sigma)
    assert (np.abs(actual - expected) / np.abs(expected)).max() > 1e3
    assert 0.3 < found.norm < 1.5 and found.element < 4


def test_near_zero_elements_do_not_hide_a_mistake():
    """Elements that are small and exactly known stand beside large, noisy ones: their mistake is nothing to the whole."""
    expected = np.array([100.0] * 63 + [1e-3])
    sigma = np.array([0.1] * 63 + [1e-6])
    right = expected + sigma * draw("error", (64,), np.sqrt(3))
    wrong = right.copy()
    wrong[-1] = -1.0                                    # ten times what the others err, a thousand times itself
    assert rho(right, expected, sigma, 0.0, "float32").element < 2
    found = rho(wrong, expected, sigma, 0.0, "float32")
    assert found.norm < LIMITS.norm and found.worst == (63,)
    assert found.element == pytest.approx(1.001 / (INSIDE * 2.0 ** -24 * 100 * np.sqrt(63 / 64)), rel=1e-6)
    assert found.element > LIMITS.element
    exact = np.where(sigma < 0.1, 0.0, sigma)           # and where nothing is rounded
    found = rho(wrong, expected, exact, 0.0, "float32")
    assert found.element == pytest.approx(1.001 / (FLOOR * 0.1 * np.sqrt(63 / 64)), rel=1e-6)
    assert rho(wrong, expected, np.full(64, 0.1)).element < LIMITS.element      # one sigma for all would not see it


def test_a_floor_keeps_a_tiny_sigma_from_being_taken_at_its_word():
    """An element that was exact in all runs, by chance, may be off by a little: FLOOR of the whole's sigma counts for 1."""
    sigma = np.array([1.0, 1.0, 1.0, 0.0])
    whole = np.sqrt(3 / 4)
    found = rho(np.array([0.0, 0.0, 0.0, FLOOR * whole]), np.zeros(4), sigma)
    assert found.element == pytest.approx(1.0) and found.worst == (3,)


def test_a_mistake_in_all_elements_by_a_part_of_sigma_shows_in_the_norm():
    """Each is within what one element may be off; together they are not."""
    n = 400
    expected, sigma = np.ones(n), np.full(n, 0.01)
    noise = 0.01 * np.sqrt(3) * draw("noise", (n,))
    right, wrong = rho(expected + noise, expected, sigma), rho(expected + 2 * noise, expected, sigma)
    assert right.norm == pytest.approx(1, abs=5 * np.sqrt(0.8 / n) / 2) and wrong.norm == pytest.approx(2 * right.norm)
    assert wrong.element <= 2 * np.sqrt(3)


def test_float64_is_to_float32_as_their_units():
    assert FLOAT64 == np.finfo(np.float64).eps / np.finfo(np.float32).eps


@pytest.mark.parametrize("dtype", [*FORMATS, "float64"])
def test_an_input_is_the_expected_one_or_its_nearest_of_the_format(dtype):
    x = draw("weights", (100,))
    assert same_in(x, x, dtype)
    nearest = rounded(x, FORMATS.get(dtype, FORMATS["float32"]))
    assert same_in(nearest, x, dtype) == (dtype != "float64" or np.array_equal(nearest, x))
    assert not same_in(np.append(nearest[:-1], nearest[-1] + 2.0 ** -6), x, dtype)
    assert not same_in(np.append(x[:-1], np.nan), x, dtype)


def test_an_input_rounded_to_a_coarser_format_than_said_is_another():
    x = draw("weights", (100,))
    coarse = rounded(x, FORMATS["bfloat16"])
    assert same_in(coarse, x, "bfloat16") and not same_in(coarse, x, "float16") and not same_in(coarse, x, "float32")
