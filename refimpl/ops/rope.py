"""Rotary position embedding, in its two published pairings.

    "interleaved"   rotates the pairs (0,1), (2,3), ...        Meta's LLaMA and Mistral weights, RoFormer
    "half"          rotates the pairs (0,K/2), (1,K/2+1), ...  Hugging Face, GPT-NeoX, Griffin

They differ by a fixed permutation of the channels (`interleaved_to_half`): weights of one kind give wrong numbers, not
errors, under the other.
"""
import numpy as np

from refimpl.array import xp_of
from refimpl.autograd import op
from refimpl.autograd.layout import last_axis
from refimpl.ops.axes import check_integers

PAIRINGS = ("interleaved", "half")


@op(linearity="each", values=slice(1), along=last_axis)
def rope(x, positions, theta=10000.0, pairing="half", rotated=None):
    """Rotate pairs of channels by position·frequency.  Angles are float64 whatever x's dtype is.

    Equation:   (a, b) -> (a·cos φ - b·sin φ, a·sin φ + b·cos φ),  φ = position·theta^(-2i/R) for pair i of R/2
    Shapes:     x[..., T, K], positions int[T] -> y[..., T, K]; of the K channels the first R = `rotated` (all) turn
    VJP:        dx = dy rotated by -φ
    Residuals:  cos, sin
    Reference:  Su et al. 2021 (RoFormer), section 3.2.2
    """
    if x.ndim < 2 or positions.dtype.kind not in "iu":
        raise ValueError(f"rope: x{list(x.shape)} must be [..., T, K] and positions integers, got {positions.dtype}")
    K = x.shape[-1]
    R = K if rotated is None else rotated
    check_integers("rope", rotated=R)
    if not 0 < theta < np.inf:
        raise ValueError(f"rope: theta must be finite and greater than 0, got {theta}")
    if pairing not in PAIRINGS or R % 2 or not 0 <= R <= K or positions.shape != x.shape[-2:-1]:
        raise ValueError(f"rope: x{list(x.shape)}, positions{list(positions.shape)}, pairing {pairing!r}, rotated {R}: needs "
                         f"one position per row of x, pairing {' or '.join(PAIRINGS)}, and an even rotated of at most {K}")
    xp = xp_of(x)
    frequency = xp.asarray(theta ** (-np.arange(0, R, 2) / max(R, 1)))
    angle = xp.asarray(positions).astype("float64")[:, None] * frequency            # (T, R/2)
    cos, sin = xp.cos(angle).astype(x.dtype.char), xp.sin(angle).astype(x.dtype.char)
    y = rotate(x, cos, sin, pairing, R)

    def vjp(dy):
        return rotate(dy, cos, -sin, pairing, R), None
    return y, vjp


def rotate(x, cos, sin, pairing, R):
    first, second = (slice(0, R, 2), slice(1, R, 2)) if pairing == "interleaved" else (slice(0, R // 2), slice(R // 2, R))
    a, b = x[..., first], x[..., second]
    y = x * 1
    y[..., first] = a * cos - b * sin
    y[..., second] = a * sin + b * cos
    return y


def interleaved_to_half(K):
    """int[K]: channel order that turns weights for "interleaved" into weights for "half": w[:, order] per head.

    >>> interleaved_to_half(6).tolist()
    [0, 2, 4, 1, 3, 5]
    """
    return np.concatenate([np.arange(0, K, 2), np.arange(1, K, 2)])
