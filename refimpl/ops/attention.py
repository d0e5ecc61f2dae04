"""Scaled dot-product attention, the naive form that keeps the whole score matrix, and the Mask.

Shape letters: B batch, H heads, T queries, S keys, K head dim.
"""
import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from refimpl.array import xp_of
from refimpl.autograd import op
from refimpl.ops.activations import softmax_array
from refimpl.ops.linear import product


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees.  causal: keys at its own position and before.

    With fewer queries than keys (cached decoding) the queries are the *last* T of the S positions: bottom-right aligned.

    >>> Mask(causal=True).visible(2, 5).astype(int).tolist()
    [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    """
    causal: bool = False

    def visible(self, T: int, S: int) -> np.ndarray | None:
        """bool[T, S], or None where every query sees every key."""
        return self.block(np.arange(S - T, S), np.arange(S)) if self.causal else None

    def block(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """bool[len(queries), len(keys)] for a block of query and key positions."""
        if not self.causal:
            return np.ones((len(queries), len(keys)), bool)
        return keys[None, :] <= queries[:, None]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


CAUSAL = Mask(causal=True)


@op
def attention(q, k, v, mask=Mask(), scale=None):
    """Scaled dot-product attention.  A query that sees no key gives 0 and has gradient 0.

    Equation:   s = scale·q·kᵀ, -inf where masked;  p = softmax(s);  y = p·v   (scale is 1/√K by default)
    Shapes:     q[B, H, T, K], k[B, H, S, K], v[B, H, S, K] -> y[B, H, T, K]
    VJP:        dv = pᵀ·dy;  dp = dy·vᵀ;  ds = p·(dp - Σ p·dp);  dq = scale·ds·k;  dk = scale·dsᵀ·q
    Residuals:  q, k, v, p
    Reference:  Vaswani et al. 2017, eq. 1.  torch scaled_dot_product_attention
    """
    if not q.ndim == k.ndim == 4 or k.shape != v.shape or (*q.shape[:2], q.shape[3]) != (*k.shape[:2], k.shape[3] or None):
        raise ValueError(f"attention: q{list(q.shape)}, k{list(k.shape)}, v{list(v.shape)} must be [B, H, T, K], "
                         f"[B, H, S, K], [B, H, S, K] with K > 0")
    xp = xp_of(q)
    (T, K), S = q.shape[2:], k.shape[2]
    factor = 1 / math.sqrt(K) if scale is None else scale
    s = product(q, k.swapaxes(2, 3))                    # (B, H, T, S)
    s *= factor
    visible = mask.visible(T, S)
    if visible is not None:
        s = xp.where(xp.asarray(visible), s, -xp.inf)
    p = softmax_array(s)
    y = product(p, v)                                   # (B, H, T, K)

    def vjp(dy):
        dv = product(p.swapaxes(2, 3), dy)
        ds = product(dy, v.swapaxes(2, 3))              # dp
        ds -= (p * ds).sum(axis=-1, keepdims=True)
        ds *= p
        ds *= factor
        return product(ds, k), product(ds.swapaxes(2, 3), q), dv
    return y, vjp
