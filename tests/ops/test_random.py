"""Localises dropout masks that depend on the layout, on the order of calls or on the dtype, and a wrong rate or rescaling."""
import numpy as np
import pytest

from refimpl.check import check_vjp
from refimpl.ops import dropout
from refimpl.rng import draw, stream

SHAPE = (8, 5, 7)
AT = [np.arange(n) for n in SHAPE]
KEY = stream(3, "layers.0.mlp.dropout", step=2)


def test_a_part_of_the_mask_is_the_mask_of_the_part():
    x = draw("x", SHAPE)
    whole, vjp = dropout.array(x, *AT, key=KEY, rate=0.5, shape=SHAPE)
    where = np.array([6, 1]), np.array([0, 3, 4]), np.arange(2, 7)
    part, part_vjp = dropout.array(x[np.ix_(*where)], *where, key=KEY, rate=0.5, shape=SHAPE)
    assert np.array_equal(part, whole[np.ix_(*where)])
    assert np.array_equal(part_vjp(part)[0], vjp(whole)[0][np.ix_(*where)])


def test_the_number_of_samples_does_not_matter():
    x = np.ones(SHAPE)
    assert np.array_equal(dropout.array(x, *AT, key=KEY, rate=0.5, shape=(1, *SHAPE[1:]))[0],
                          dropout.array(x, *AT, key=KEY, rate=0.5, shape=(99, *SHAPE[1:]))[0])


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.75])
def test_elements_are_0_or_rescaled_and_the_rate_is_met(rate):
    n = 40000
    y, vjp = dropout.array(np.ones(n), np.arange(n), key=KEY, rate=rate, shape=(n,))
    assert set(np.unique(y)) == {0, 1 / (1 - rate)}
    assert abs(np.mean(y == 0) - rate) < 5 * np.sqrt(rate * (1 - rate) / n)
    assert np.array_equal(vjp(np.ones(n))[0], y)


def test_streams_of_steps_and_names_differ_and_dtypes_agree():
    def mask(key, dtype="float64"):
        return dropout.array(np.ones(64, dtype), np.arange(64), key=key, rate=0.5, shape=(64,))[0]
    masks = [mask(stream(0, name, step)).tolist() for name in ("a", "b") for step in (None, 0, 1)]
    assert len({tuple(m) for m in masks}) == 6
    assert np.array_equal(mask(KEY), mask(KEY, "float32"))


def test_rate_0_is_the_identity():
    x = draw("x", SHAPE)
    assert np.array_equal(dropout.array(x, *AT, key=KEY, rate=0.0, shape=SHAPE)[0], x)


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5])
def test_wrong_rates_are_named(rate):
    with pytest.raises(ValueError, match=r"dropout: rate must be in \[0, 1\)"):
        dropout.array(np.ones(3), np.arange(3), rate=rate, shape=(3,))


@pytest.mark.parametrize("at, shape", [([np.arange(2)], (3,)), ([np.arange(3)], (3, 3)), ([], (3,)),
                                       ([np.arange(3), np.arange(1)], (3,))])
def test_coordinates_that_do_not_fit_are_named(at, shape):
    with pytest.raises(ValueError, match=r"dropout: x\[3\] needs one coordinate per element along each axis"):
        dropout.array(np.ones(3), *at, rate=0.5, shape=shape)


def test_check_catches_a_gradient_without_the_rescaling():
    def wrong(x, at):
        y, vjp = dropout.array(x, at, key=KEY, rate=0.5, shape=(64,))
        return y, lambda dy: (dy * (y != 0), None)

    with pytest.raises(AssertionError, match="argument 0"):
        check_vjp(wrong, np.ones(64), np.arange(64))
