"""Localises broadcasting mistakes (a repeated operand's gradient must be summed) and NumPy 2's scalar promotion."""
import numpy as np
import pytest

from refimpl.autograd import Tensor, value_and_grad
from refimpl.check import check_vjp
from refimpl.ops import add, divide, mul, scale, subtract, sum, where


def test_add_sums_the_gradient_of_a_repeated_row():
    y, vjp = add.array(np.array([[1.0, 2], [3, 4], [5, 6]]), np.array([10.0, 20]))
    da, db = vjp(np.array([[1.0, 2], [3, 4], [5, 6]]))
    assert y.tolist() == [[11, 22], [13, 24], [15, 26]]
    assert da.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert db.tolist() == [9, 12]


def test_mul_of_a_column_and_a_row():
    y, vjp = mul.array(np.array([[2.0], [3.0]]), np.array([[1.0, 10, 100]]))
    da, db = vjp(np.array([[1.0, 1, 1], [0, 1, 0]]))
    assert y.tolist() == [[2, 20, 200], [3, 30, 300]]
    assert da.tolist() == [[111], [10]]
    assert db.tolist() == [[2, 2 + 3, 2]]


def test_subtract_sends_the_negative_to_its_second_operand():
    y, vjp = subtract.array(np.array([[1.0, 2], [3, 4]]), np.array([10.0, 20]))
    assert y.tolist() == [[-9, -18], [-7, -16]]
    da, db = vjp(np.array([[1.0, 2], [3, 4]]))
    assert da.tolist() == [[1, 2], [3, 4]] and db.tolist() == [-4, -6]


def test_divide_of_a_matrix_by_a_column():
    y, vjp = divide.array(np.array([[6.0, 8], [9, 3]]), np.array([[2.0], [3]]))
    assert y.tolist() == [[3, 4], [3, 1]]
    da, db = vjp(np.array([[2.0, 4], [3, 0]]))
    assert da.tolist() == [[1, 2], [1, 0]]
    assert db.tolist() == [[-(3 * 1 + 4 * 2)], [-3]]        # db = -Σ dy·y/b


def test_divide_by_0_is_infinite_or_nan_without_a_warning():
    y, vjp = divide.array(np.array([1.0, -1, 0]), np.zeros(3))
    assert y[:2].tolist() == [np.inf, -np.inf] and np.isnan(y[2])
    assert [d.tolist() for d in vjp(np.zeros(3))] == [[0, 0, 0], [0, 0, 0]]


def test_where_gives_each_gradient_to_the_branch_taken():
    condition = np.array([[True, False], [False, True]])
    y, vjp = where.array(condition, np.array([1.0, 2]), np.array([[10.0], [20]]))
    assert y.tolist() == [[1, 10], [20, 2]]
    nothing, da, db = vjp(np.array([[1.0, 2], [3, 4]]))
    assert nothing is None and da.tolist() == [1, 4] and db.tolist() == [[2], [3]]


def test_where_passes_on_no_nan_of_the_other_branch():
    y, vjp = where.array(np.array([True, False]), np.array([1.0, np.nan]), np.array([np.inf, 2.0]))
    assert y.tolist() == [1, 2]
    assert [d.tolist() for d in vjp(np.array([3.0, 4]))[1:]] == [[3, 0], [0, 4]]


def test_mul_of_a_value_by_itself_counts_both_uses():
    _, grads = value_and_grad(lambda p: mul(p["x"], p["x"]), {"x": Tensor(np.array(3.0))})
    assert grads["x"].array == 6


@pytest.mark.parametrize("axis, keepdims, y, dx", [
    (None, False, 21.0, [[7, 7, 7], [7, 7, 7]]), (0, False, [5, 7, 9], [[1, 2, 3], [1, 2, 3]]),
    (-1, True, [[6], [15]], [[1, 1, 1], [2, 2, 2]]), ((0, 1), False, 21.0, [[7, 7, 7], [7, 7, 7]])])
def test_sum_repeats_the_gradient_along_what_it_summed(axis, keepdims, y, dx):
    got, vjp = sum.array(np.array([[1.0, 2, 3], [4, 5, 6]]), axis=axis, keepdims=keepdims)
    dy = np.full(np.shape(y), 7.0) if np.size(y) == 1 else np.arange(1.0, np.size(y) + 1).reshape(np.shape(y))
    assert got.tolist() == y
    assert vjp(dy).tolist() == dx


def test_sum_over_nothing_is_0():
    y, vjp = sum.array(np.zeros((2, 0)), axis=1)
    assert y.tolist() == [0, 0]
    assert vjp(np.ones(2)).shape == (2, 0)


@pytest.mark.parametrize("by", [1 / np.sqrt(4), np.float32(0.5), 0.5, 2])
def test_scale_by_any_number_keeps_float32(by):
    x = Tensor(np.ones(3, np.float32))
    for y in (x * by, by * x, scale(x, by=by)):
        assert y.dtype == np.float32
        assert y.array.tolist() == [by] * 3


def test_operators_take_tensors_arrays_and_numbers():
    x, row = Tensor(np.array([[1.0, 2], [3, 4]])), np.array([10.0, 100])
    assert (x + x).array.tolist() == [[2, 4], [6, 8]]
    assert (x + row).array.tolist() == [[11, 102], [13, 104]]
    assert (x * row).array.tolist() == (row * x).array.tolist() == [[10, 200], [30, 400]]
    _, grads = value_and_grad(lambda p: sum(p["x"] * row), {"x": x})
    assert grads["x"].array.tolist() == [[10, 100], [10, 100]]


def test_minus_and_division_work_on_tensors_and_numbers():
    x, y = Tensor(np.array([6.0, 8])), Tensor(np.array([2.0, 4]))
    assert (x - y).array.tolist() == [4, 4] and (x / y).array.tolist() == [3, 2]
    assert (x / 2).array.tolist() == [3, 4] and (-x).array.tolist() == [-6, -8]


@pytest.mark.parametrize("op", [add, mul, subtract, divide])
def test_shapes_that_do_not_broadcast_are_named(op):
    with pytest.raises(ValueError, match=rf"{op.name}: a\[2, 3\] and b\[2\] do not broadcast"):
        op.array(np.ones((2, 3)), np.ones(2))


def test_check_catches_a_broadcast_that_is_not_undone():
    def without_the_sum(a, b):
        return a + b, lambda dy: (dy, dy)

    def with_the_mean(a, b):
        return a + b, lambda dy: (dy, dy.mean(axis=0))

    with pytest.raises(AssertionError, match=r"the cotangent of argument 1 is float64\[3, 5\], the argument float64\[5\]"):
        check_vjp(without_the_sum, np.ones((3, 5)), np.ones(5))
    with pytest.raises(AssertionError, match="argument 1, direction 0"):
        check_vjp(with_the_mean, np.ones((3, 5)), np.ones(5))


@pytest.mark.parametrize("number", [np.uint8(3), np.int64(3), np.float32(3), np.float64(3), 3, 3.0])
def test_operators_take_every_kind_of_number_at_its_value(number):
    """-uint8(3) is 253, and 1/float32(3) has seven digits."""
    x = Tensor(np.array([1.0, 2]))
    results = [(x + number, [4, 5]), (number + x, [4, 5]), (x - number, [-2, -1]), (number - x, [2, 1]), (x * number, [3, 6]),
               (x / number, [1 / 3, 2 / 3]), (number / x, [3, 1.5]), (x ** number, [1, 8])]
    for y, right in results:
        assert type(y) is Tensor and y.dtype == np.float64 and y.array == pytest.approx(right, rel=1e-15)


def test_reflected_operators_and_powers_have_gradients_and_keep_float32():
    x = Tensor(np.array([2.0, 4], np.float32))
    for fn, slope in ((lambda x: 1 - x, [-1, -1]), (lambda x: 1 / x, [-1 / 4, -1 / 16]), (lambda x: x ** 2, [4, 8]),
                      (lambda x: np.float32([3, 5]) - x, [-1, -1]), (lambda x: np.float32([8, 16]) / x, [-2, -1])):
        value, grads = value_and_grad(lambda p: sum(fn(p["x"])), {"x": x})
        assert value.dtype == grads["x"].dtype == np.float32 and grads["x"].array.tolist() == slope


def test_division_by_the_number_0_gets_a_sentence():
    with pytest.raises(ZeroDivisionError, match=r"^divide: a Tensor \[2\] by the number 0"):
        Tensor(np.ones(2)) / 0
    with pytest.raises(TypeError, match="unsupported operand"):
        Tensor(np.ones(2)) ** Tensor(np.ones(2))
