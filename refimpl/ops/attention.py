"""Scaled dot-product attention, the naive form that keeps the whole score matrix.

Shape letters: B batch, H query heads, G kv heads, T queries, S keys, K head dim.  Query head h uses kv head ⌊h/(H/G)⌋:
grouped, 0,0,1,1 for H = 4 and G = 2, never tiled 0,1,0,1.
"""
import math

from refimpl.array import xp_of
from refimpl.autograd import op
from refimpl.ops.linear import product, row_dot
from refimpl.ops.mask import Mask
from refimpl.ops.sight import sight
from refimpl.ops.softmax import softmax_array


def summed_over(static, ndim, number=0):
    """Samples, heads and queries do not talk to each other; keys and channels are summed over."""
    return (ndim - 1,) if number == 0 else (ndim - 2, ndim - 1)


@op(values=slice(3), along=summed_over)
def attention(q, k, v, q_documents=None, k_documents=None, q_positions=None, k_positions=None, mask=Mask(), scale=None):
    """Scaled dot-product attention with grouped kv heads.  A query that sees no key gives 0 and has gradient 0.

    Equation:   s = scale·q·kᵀ, -inf where masked;  p = softmax(s);  y = p·v   (scale is 1/√K by default)
    Shapes:     q[B, H, T, K], k[B, G, S, K], v[B, G, S, K] -> y[B, H, T, K], G divides H;
                q_documents int[B, T], k_documents int[B, S]: a query sees keys of its own document only;
                q_positions int[T], k_positions int[S]: what the mask goes by; without them the queries are the last T of S
    VJP:        dv = pᵀ·dy;  dp = dy·vᵀ;  ds = p·(dp - Σ p·dp);  dq = scale·ds·k;  dk = scale·dsᵀ·q;
                dk and dv are summed over the H/G query heads that share them
    Residuals:  q, k, v, p
    Reference:  Vaswani et al. 2017, eq. 1; Ainslie et al. 2023 (GQA).  torch scaled_dot_product_attention(enable_gqa=True)
    """
    check("attention", q, k, v, q_documents, k_documents, q_positions, k_positions)
    xp = xp_of(q)
    B, H, T, K = q.shape
    G, S = k.shape[1:3]
    n = H // G if G else 0
    factor = 1 / math.sqrt(K) if scale is None else float(scale)
    grouped = (B, G, n * T, K)                          # the query heads of a group, one under the other
    s = product((q * factor).reshape(grouped), k.swapaxes(2, 3)).reshape(B, H, T, S)
    plain = q_documents is None and q_positions is None
    seen = mask.visible(T, S) if plain else sight(mask, T, S, q_documents, k_documents, q_positions, k_positions).whole()
    if seen is not None:
        xp.copyto(s, -xp.inf, where=xp.asarray(~seen)[..., None, :, :])
    p = softmax_array(s, own=True)
    y = product(p.reshape(B, G, n * T, S), v).reshape(q.shape)

    def vjp(dy):
        dy = dy.reshape(grouped)
        pg = p.reshape(B, G, n * T, S)
        dv = product(pg.swapaxes(2, 3), dy)             # the product sums over the group, too
        ds = product(dy, v.swapaxes(2, 3))              # dp
        ds -= row_dot(pg, ds)
        ds *= pg
        dq = product(ds, k).reshape(q.shape)
        dq *= factor                                    # not ds, which is larger
        return dq, product(ds.swapaxes(2, 3), (q * factor).reshape(grouped)), dv, None, None, None, None
    return y, vjp


def check(name, q, k, v, q_documents, k_documents, q_positions, k_positions):
    whole = q.ndim == k.ndim == 4 and k.shape == v.shape and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3] > 0
    if not whole or (q.shape[1] % k.shape[1] if k.shape[1] else q.shape[1]):
        raise ValueError(f"{name}: q{list(q.shape)}, k{list(k.shape)}, v{list(v.shape)} must be [B, H, T, K], [B, G, S, K], "
                         f"[B, G, S, K] with G dividing H and K > 0")
    if (q_documents is None) != (k_documents is None):
        raise ValueError(f"{name}: documents of the queries and of the keys are given together, or not at all")
    for documents, of in ((q_documents, q), (k_documents, k)):
        if documents is not None and (documents.shape != (of.shape[0], of.shape[2]) or documents.dtype.kind not in "iu"):
            raise ValueError(f"{name}: documents {documents.dtype}{list(documents.shape)} must be integers "
                             f"[{of.shape[0]}, {of.shape[2]}]")
    if (q_positions is None) != (k_positions is None):
        raise ValueError(f"{name}: positions of the queries and of the keys are given together, or not at all")
    for positions, of in ((q_positions, q), (k_positions, k)):
        if positions is not None and (positions.shape != of.shape[2:3] or positions.dtype.kind not in "iu"):
            raise ValueError(f"{name}: positions {positions.dtype}{list(positions.shape)} must be integers [{of.shape[2]}]")
