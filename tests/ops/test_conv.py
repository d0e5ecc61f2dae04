"""Localises taps in the wrong order, a look into the future, and circular wrap-around of the FFT."""
import numpy as np
import pytest

from refimpl.check import check_vjp
from refimpl.ops import depthwise_conv, fft_conv
from refimpl.ops.conv import smooth
from refimpl.rng import draw


def column(*values):
    return np.array(values, float).reshape(1, -1, 1)


def direct(x, k):
    """y_t = Σ_{s ≤ t} k_{t-s}·x_s, with two loops."""
    y = np.zeros_like(x)
    for t in range(x.shape[1]):
        for s in range(t + 1):
            y[:, t] += k[t - s] * x[:, s]
    return y


def test_the_last_tap_is_the_own_position():
    y, vjp = depthwise_conv.array(column(1, 2, 3, 4), column(10, 1)[0])     # w = (10, 1): ten times the one before
    assert y.ravel().tolist() == [1, 2 + 10, 3 + 20, 4 + 30]
    dx, dw = vjp(column(1, 0, 0, 100))
    assert dx.ravel().tolist() == [1, 0, 1000, 100]
    assert dw.ravel().tolist() == [100 * 3, 1 + 100 * 4]


def test_fft_conv_by_hand():
    """(1 + 2z + 3z²)(1 + 10z + 100z²) up to z²."""
    y, vjp = fft_conv.array(column(1, 2, 3), column(1, 10, 100)[0])
    assert y.ravel() == pytest.approx([1, 12, 123], abs=1e-12)
    dx, dk = vjp(column(0, 0, 1))
    assert dx.ravel() == pytest.approx([100, 10, 1], abs=1e-12) and dk.ravel() == pytest.approx([3, 2, 1], abs=1e-12)


@pytest.mark.parametrize("T", [1, 2, 3, 8, 13])
def test_fft_conv_equals_the_direct_sum(T):
    x, k = draw("x", (2, T, 3)), draw("k", (T, 3))
    np.testing.assert_allclose(fft_conv.array(x, k)[0], direct(x, k), rtol=0, atol=1e-14)


@pytest.mark.parametrize("W", [1, 3, 4, 7])
def test_a_short_filter_equals_a_long_kernel_of_zeros(W):
    """The kernel counts from the own position backward, the filter's taps end with it; gradients agree, too."""
    T = 7
    x, w, dy = draw("x", (2, T, 3)), draw("w", (W, 3)), draw("dy", (2, T, 3))
    k = np.zeros((T, 3))
    k[:W] = w[::-1]
    (y, vjp), (long, long_vjp) = depthwise_conv.array(x, w), fft_conv.array(x, k)
    np.testing.assert_allclose(y, long, rtol=0, atol=1e-14)
    (dx, dw), (long_dx, dk) = vjp(dy), long_vjp(dy)
    np.testing.assert_allclose(dx, long_dx, rtol=0, atol=1e-14)
    np.testing.assert_allclose(dw, dk[:W][::-1], rtol=0, atol=1e-13)


@pytest.mark.parametrize("op", [depthwise_conv, fft_conv])
def test_the_future_has_no_influence_and_the_end_does_not_wrap_round(op):
    x, k = draw("x", (1, 8, 2)), draw("k", (8, 2))
    changed = x.copy()
    changed[:, 5:] += 1e6
    np.testing.assert_allclose(op.array(changed, k)[0][:, :5], op.array(x, k)[0][:, :5], rtol=0, atol=1e-8)
    dy = np.zeros_like(x)
    dy[:, 2] = 1
    np.testing.assert_allclose(op.array(x, k)[1](dy)[0][:, 3:], 0, atol=1e-15)


def test_channels_do_not_mix():
    x, w = draw("x", (1, 5, 3)), draw("w", (2, 3))
    for d in range(3):
        one = slice(d, d + 1)
        assert np.array_equal(depthwise_conv.array(x[..., one], w[:, one])[0], depthwise_conv.array(x, w)[0][..., one])


@pytest.mark.parametrize("op, x, w, words", [
    (depthwise_conv, (5, 3), (2, 3), r"must be \[B, T, D\] and \[W, D\] with W > 0"),
    (depthwise_conv, (1, 5, 3), (2, 4), "must be"),
    (depthwise_conv, (1, 5, 3), (0, 3), "W > 0"), (depthwise_conv, (1, 5, 3), (3,), "must be"),
    (fft_conv, (1, 5, 3), (4, 3), r"must be \[B, T, D\] and \[T, D\]"), (fft_conv, (5, 3), (5, 3), "must be"),
    (fft_conv, (1, 5, 3), (5, 1), "must be")])
def test_shapes_that_do_not_fit_are_named(op, x, w, words):
    with pytest.raises(ValueError, match=rf"{op.name}: x\[.*\] and [wk]\[.*\] {words}|{op.name}: .*{words}"):
        op.array(np.zeros(x), np.zeros(w))


def test_check_catches_a_causal_gradient():
    """The gradient of a look back is a look ahead."""
    def wrong(x, k):
        y, vjp = fft_conv.array(x, k)
        return y, lambda dy: (fft_conv.array(dy, k)[0], vjp(dy)[1])

    with pytest.raises(AssertionError, match="argument 0"):
        check_vjp(wrong, draw("x", (2, 5, 3)), draw("k", (5, 3)))


@pytest.mark.parametrize("T", [5, 61, 127])
def test_fft_lengths_have_small_factors_only(T):
    """2T - 1 leaves no room to wrap round; a prime length would be slow."""
    n = smooth(2 * T - 1)
    assert 2 * T - 1 <= n < 1.2 * 2 * T and 2 ** 30 * 3 ** 20 * 5 ** 20 % n == 0
    x, k = draw("x", (1, T, 2)), draw("k", (T, 2))
    np.testing.assert_allclose(fft_conv.array(x, k)[0], direct(x, k), rtol=0, atol=1e-13)
