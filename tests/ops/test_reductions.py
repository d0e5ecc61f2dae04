"""Localises reductions over the wrong axis, gradients not divided or not shared, ties counted twice, nan at a zero vector."""
import numpy as np
import pytest

from refimpl.autograd import Tensor, value_and_grad
from refimpl.check import check_vjp
from refimpl.ops import concat, cumsum, max, mean, mul, norm, power, reshape, sum

X = np.array([[1.0, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize("axis, keepdims, y, dx", [
    (None, False, 3.5, [[1, 1, 1], [1, 1, 1]]), (0, False, [2.5, 3.5, 4.5], [[3, 6, 9], [3, 6, 9]]),
    (-1, True, [[2], [5]], [[2, 2, 2], [4, 4, 4]]), ((0, 1), False, 3.5, [[1, 1, 1], [1, 1, 1]])])
def test_mean_divides_the_gradient_by_the_number_of_elements(axis, keepdims, y, dx):
    got, vjp = mean.array(X, axis=axis, keepdims=keepdims)
    dy = np.full(np.shape(y), 6.0) * (np.arange(1, np.size(y) + 1).reshape(np.shape(y)))
    assert got.tolist() == y
    assert vjp(dy).tolist() == dx


def test_max_of_one_value_twice_has_total_gradient_1():
    """known_failures: d/dx max(stack([x, x])) at x = 3 is 1, not 2: those that tie share equally."""
    def twice(p):
        x = reshape(p["x"], shape=(1,))
        return max(concat(x, x))
    value, grads = value_and_grad(twice, {"x": Tensor(np.array(3.0))})
    assert float(value) == 3 and grads["x"].array == 1


def test_max_shares_among_all_ties_of_a_row():
    y, vjp = max.array(np.array([[3.0, 3, 1, 3], [0, 2, 1, -1], [-0.0, 0.0, -1, -1]]), axis=-1)
    assert y.tolist() == [3, 2, 0]
    assert vjp(np.array([6.0, 5, 4])).tolist() == [[2, 2, 0, 2], [0, 5, 0, 0], [2, 2, 0, 0]]


def test_max_over_two_axes_and_over_all():
    x = np.array([[[1.0, 7], [2, 3]], [[9, 4], [9, 0]]])
    y, vjp = max.array(x, axis=(1, 2))
    assert y.tolist() == [7, 9] and vjp(np.array([1.0, 10])).tolist() == [[[0, 1], [0, 0]], [[5, 0], [5, 0]]]
    y, vjp = max.array(x, keepdims=True)
    assert y.tolist() == [[[9]]] and vjp(np.array([[[1.0]]])).sum() == 1


def test_cumsum_runs_forward_and_its_gradient_from_the_other_end():
    y, vjp = cumsum.array(X)
    assert y.tolist() == [[1, 3, 6], [4, 9, 15]]
    assert vjp(np.array([[1.0, 10, 100], [0, 0, 7]])).tolist() == [[111, 110, 100], [7, 7, 7]]
    y, vjp = cumsum.array(X, axis=0)
    assert y.tolist() == [[1, 2, 3], [5, 7, 9]]
    assert vjp(np.array([[1.0, 0, 0], [0, 2, 0]])).tolist() == [[1, 2, 0], [0, 2, 0]]


def test_norm_of_pythagorean_triples():
    y, vjp = norm.array(np.array([[3.0, 4], [-5, 12]]))
    assert y.tolist() == [5, 13]
    np.testing.assert_allclose(vjp(np.array([5.0, 13])), [[3, 4], [-5, 12]], rtol=1e-15)
    assert norm.array(np.array([[3.0], [4]]), axis=0, keepdims=True)[0].tolist() == [[5]]
    assert norm.array(np.full((2, 2), 2.0), axis=None)[0] == 4


@pytest.mark.parametrize("fn", [lambda x: sum(mul(x, x)), lambda x: sum(power(norm(x), exponent=2.0)), lambda x: sum(norm(x)),
                                lambda x: sum(power(x, exponent=2.0))])
def test_a_norm_and_a_squared_norm_at_the_zero_vector_have_gradient_0(fn):
    value, grads = value_and_grad(lambda p: fn(p["x"]), {"x": Tensor(np.zeros((2, 3)))})
    assert float(value) == 0 and not grads["x"].array.any()


@pytest.mark.parametrize("op", [mean, max])
@pytest.mark.parametrize("shape, axis", [((0,), None), ((3, 0), 1), ((3, 0), (0, 1)), ((0, 3), -2)])
def test_a_mean_or_maximum_over_nothing_is_an_error(op, shape, axis):
    with pytest.raises(ValueError, match=rf"{op.name} over axis .* of x\[.*\]: there is nothing to take the {op.name} of"):
        op.array(np.zeros(shape), axis=axis)


def test_a_mean_of_float32_stays_float32():
    y, vjp = mean.array(np.ones((3, 5), np.float32), axis=0)
    assert y.dtype == vjp(y).dtype == np.float32


def test_check_catches_the_full_gradient_for_each_tie_and_the_forward_cumsum():
    def undivided(x):
        return x.mean(axis=-1), lambda dy: np.broadcast_to(dy[:, None], x.shape)

    def forward(x):
        return np.cumsum(x, axis=-1), lambda dy: np.cumsum(dy, axis=-1)

    for wrong in (undivided, forward):
        with pytest.raises(AssertionError, match="argument 0"):
            check_vjp(wrong, X)


def test_norm_of_squares_that_underflow_is_0_with_gradient_0():
    y, vjp = norm.array(np.array([1e-25, 1e-25], np.float32))
    assert y == 0 and vjp(np.float32(1)).tolist() == [0, 0]
