"""Localises nan that leaks out of the branch that `where` did not take, through whole expressions."""
import numpy as np
import pytest

from refimpl.autograd import Tensor, value_and_grad
from refimpl.ops import add, concat, divide, exp, linear, log, mul, norm, power, scale, softmax, sqrt, sum, tanh, where
from refimpl.ops.corners import annulled, silent

ONE = np.array(1.0)


def guarded(fn, x, taken, otherwise=lambda x: scale(x, by=3.0)):
    """The gradient of Σ where(taken, fn(x), otherwise(x))."""
    value, grads = value_and_grad(lambda p: sum(where(taken, fn(p["x"]), otherwise(p["x"]))), {"x": Tensor(np.array(x))})
    return float(value), grads["x"].array


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("fn, at, slope_at_2", [
    (log, 0.0, 0.5), (log, -1.0, 0.5), (sqrt, 0.0, 0.5 / np.sqrt(2)), (sqrt, -1.0, 0.5 / np.sqrt(2)), (exp, 1e4, np.exp(2)),
    (lambda x: power(x, exponent=0.5), 0.0, 0.5 / np.sqrt(2)), (lambda x: power(x, exponent=-1), 0.0, -0.25),
    (lambda x: divide(Tensor(np.ones(2, x.dtype)), x), 0.0, -0.25),
    (lambda x: divide(x, scale(x, by=2.0)), 0.0, 0.0),
    (lambda x: log(scale(x, by=1.0)) * 2, 0.0, 1.0),                    # a chain: log of something, then a multiple
    (lambda x: log(sqrt(x)), 0.0, 0.25), (lambda x: sqrt(log(x)), 0.5, 0.25 / np.sqrt(np.log(2))),
    (lambda x: tanh(log(x)), 0.0, 0.5 / np.cosh(np.log(2)) ** 2), (lambda x: exp(exp(x)), 1e4, np.exp(2 + np.exp(2)))])
def test_the_branch_not_taken_leaks_nothing(fn, at, slope_at_2, dtype):
    """x = (2, at): fn is taken at 2 only, and 3x, whose slope is 3, at the corner."""
    _, dx = guarded(fn, np.array([2, at], dtype), np.array([True, False]))
    assert dx.dtype == dtype
    assert dx == pytest.approx([slope_at_2, 3], rel=1e-6)


def test_entropy_with_a_guarded_operand_is_finite_at_0():
    """Σ -x·ln x: mul keeps numpy's 0·∞ = nan, so the logarithm's argument is guarded, not the product."""
    def entropy(p):
        x = p["x"]
        positive = x.array > 0
        safe = where(positive, x, Tensor(np.ones(3)))
        return -sum(mul(x, log(safe)))
    value, grads = value_and_grad(entropy, {"x": Tensor(np.array([0.5, 0.5, 0]))})
    assert float(value) == pytest.approx(np.log(2))
    assert grads["x"].array == pytest.approx([np.log(2) - 1, np.log(2) - 1, 0])


def test_parameters_behind_a_corner_get_finite_gradients():
    """A row of zeros is normalised by a guarded norm: its weights still train."""
    x = Tensor(np.array([[3.0, 4], [0, 0]]))

    def fn(p):
        y = linear(x, p["w"])
        length = norm(y, keepdims=True)
        nonzero = length.array > 0
        return sum(where(nonzero, divide(y, length), y))
    value, grads = value_and_grad(fn, {"w": Tensor(np.eye(2))})
    assert float(value) == pytest.approx(0.6 + 0.8)
    # d(y/|y|) = (dy - ŷ(ŷ·dy))/|y| with dy = (1, 1): (0.16, -0.12)/5, times xᵀ
    assert grads["w"].array == pytest.approx(np.array([[3 * 0.16, -3 * 0.12], [4 * 0.16, -4 * 0.12]]) / 5)


def test_a_softmax_over_guarded_logarithms():
    def fn(p):
        x = p["x"]
        logits = where(x.array > 0, log(x), Tensor(np.full(3, -np.inf)))
        return sum(mul(softmax(logits), Tensor(np.array([1.0, 2, 7]))))
    value, grads = value_and_grad(fn, {"x": Tensor(np.array([1.0, 3, 0]))})        # softmax(ln x) = x/Σx
    assert float(value) == 1.75
    assert grads["x"].array == pytest.approx([(1 - 1.75) / 4, (2 - 1.75) / 4, 0])


def test_a_corner_that_is_taken_is_infinite_not_hidden():
    _, dx = guarded(sqrt, [0.0, 4.0], np.array([True, True]))
    assert dx.tolist() == [np.inf, 0.25]


def test_the_rule_itself():
    def times(dy, slope):
        with silent():
            return annulled(np.array(dy) * np.array(slope), np.array(dy))
    assert times([0.0, 0, 2, 0], [np.inf, np.nan, 3, -np.inf]).tolist() == [0, 0, 6, 0]
    assert np.isnan(times([np.nan, 1], [1, np.nan])).all(), "a real nan is never hidden"


def test_joint_gradients_of_both_branches_add_up():
    """The same parameter in both branches: each element gets the slope of its own."""
    value, grads = value_and_grad(lambda p: sum(where(np.array([True, False, True]), mul(p["x"], p["x"]), add(p["x"], p["x"]))),
                                  {"x": Tensor(np.array([5.0, 6, 7]))})
    assert float(value) == 25 + 12 + 49 and grads["x"].array.tolist() == [10, 2, 14]
    value, _ = value_and_grad(lambda p: sum(concat(p["x"], p["x"])), {"x": Tensor(np.array([5.0]))})
    assert float(value) == 10
