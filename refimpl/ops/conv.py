"""Causal convolutions along a sequence: short, one filter a channel (Mamba, Griffin), and long, by FFT (S4).

Shape letters: B batch, T positions, D channels, W filter taps.
"""
from refimpl.array import xp_of
from refimpl.autograd import op


def positions(static, ndim, number=0):
    """The axis before the channels: positions of x, taps of w."""
    return (ndim - 2,)


@op(linearity="each", along=positions)
def depthwise_conv(x, w):
    """Causal depthwise convolution: position t sees t - W + 1 ... t.

    Equation:   y_t = Σ_j w_j·x_{t - (W - 1) + j},  x before the start is 0
    Shapes:     x[B, T, D], w[W, D] -> y[B, T, D]
    VJP:        dx_s = Σ_j w_j·dy_{s + (W - 1) - j};  dw_j = Σ_{b,t} dy_t·x_{t - (W - 1) + j}
    Residuals:  x, w
    Reference:  Gu and Dao 2023 (Mamba), section 3.4; torch Conv1d with groups = D, padding W - 1 and the tail cut off
    """
    if x.ndim != 3 or w.ndim != 2 or w.shape[1] != x.shape[2] or w.shape[0] == 0:
        raise ValueError(f"depthwise_conv: x{list(x.shape)} and w{list(w.shape)} must be [B, T, D] and [W, D] with W > 0")
    W, T = w.shape[0], x.shape[1]
    y = x * w[W - 1]
    for back in range(1, min(W, T)):                    # the tap that looks `back` positions back
        y[:, back:] += x[:, :-back] * w[W - 1 - back]
    xp = xp_of(x)

    def vjp(dy):
        dx = dy * w[W - 1]
        dw = xp.zeros(w.shape, w.dtype)
        dw[W - 1] = (dy * x).sum(axis=(0, 1))
        for back in range(1, min(W, T)):
            dx[:, :-back] += dy[:, back:] * w[W - 1 - back]
            dw[W - 1 - back] = (dy[:, back:] * x[:, :-back]).sum(axis=(0, 1))
        return dx, dw
    return y, vjp


@op(linearity="each", analytic=False, along=positions)
def fft_conv(x, k):
    """Causal convolution with a kernel as long as the sequence, in O(T log T): zero-padded so that nothing wraps round.

    Equation:   y_t = Σ_{s ≤ t} k_{t-s}·x_s
    Shapes:     x[B, T, D], k[T, D] -> y[B, T, D]
    VJP:        dx_s = Σ_{t ≥ s} k_{t-s}·dy_t;  dk_j = Σ_b Σ_{t ≥ j} dy_t·x_{t-j}   (correlations: conjugate spectra)
    Residuals:  x, k
    Reference:  Gu, Goel, Ré 2022 (S4), section 2.4
    """
    if x.ndim != 3 or k.shape != x.shape[1:]:
        raise ValueError(f"fft_conv: x{list(x.shape)} and k{list(k.shape)} must be [B, T, D] and [T, D]")
    xp, T = xp_of(x), x.shape[1]
    n = smooth(2 * T - 1)

    def spectrum(a):                                    # along the last axis: an FFT wants its numbers side by side
        return xp.fft.rfft(a.swapaxes(-1, -2).copy(), n=n, axis=-1)

    def first(s):
        return xp.fft.irfft(s, n=n, axis=-1)[..., :T].swapaxes(-1, -2).astype(x.dtype, copy=False)

    y = first(spectrum(x) * spectrum(k)) if T else x * 1

    def vjp(dy):
        if T == 0:
            return dy * 1, k * 0
        dY = spectrum(dy)
        return first(dY * spectrum(k).conj()), first((dY * spectrum(x).conj()).sum(axis=0))
    return y, vjp


def smooth(n):
    """The smallest integer ≥ n whose prime factors are 2, 3 and 5: an FFT of a prime length is several times slower.

    >>> [smooth(n) for n in (1, 7, 13, 121, 8191)]
    [1, 8, 15, 125, 8192]
    """
    while True:
        rest = n
        for p in (2, 3, 5):
            while rest > 1 and rest % p == 0:
                rest //= p
        if rest <= 1:
            return n
        n += 1
