"""Attention a block at a time: the matrix of scores is never whole (FlashAttention-2's order).

For a block of queries, over the blocks of keys that it sees:

    s = q·kᵀ                                the scores of a block with a block
    m' = max(m, rows' max s)                the largest score so far: exponentials stay below 1
    l' = e^(m - m')·l + Σ e^(s - m')        the softmax's denominator so far
    o' = e^(m - m')·o + e^(s - m')·v        the output so far, not divided yet

At the end y = o/l, and of all scores only lse = m + ln l is kept: with it the backward pass makes every block's probabilities
again, p = e^(s - lse).  Ring attention (parallel/ring.py) does the same with keys that come from other ranks.

Shape letters as in attention.py: B batch, H heads, G kv heads, T queries, S keys, K head dim; n = H/G.  Inside, scores are
kept as [B, G, n, S, T], keys down and queries across: so maxima and sums over keys take whole rows, several numbers at a time.
Reference: Milakov and Gimelshein 2018 (online softmax); Dao 2023 (FlashAttention-2), algorithms 1 and 2.
"""
import math
from dataclasses import dataclass
from itertools import product as corners
from typing import Any, Callable, Iterator

from refimpl.array import Array, xp_of
from refimpl.autograd import op
from refimpl.comm.arguments import shares
from refimpl.ops.attention import check, summed_over
from refimpl.ops.linear import product, row_dot
from refimpl.ops.mask import Mask
from refimpl.ops.sight import Sight, sight

SMALLEST, LARGEST = 64, 320                             # queries and keys of a block
BYTES = 1 << 20                                         # the scores of a block, of some heads at once: they fit a core's cache
Pause = Callable[[], None]                              # what is done between blocks, such as comm.progress


@op(values=slice(3), along=summed_over)
def blockwise_attention(q, k, v, q_documents=None, k_documents=None, q_positions=None, k_positions=None, mask=Mask(),
                        scale=None, block_q=None, block_k=None):
    """`attention`, whose memory grows as T instead of T²: the same numbers, but for rounding.

    Equation:   s = scale·q·kᵀ, -inf where masked;  p = softmax(s);  y = p·v   (scale is 1/√K by default)
    Shapes:     q[B, H, T, K], k[B, G, S, K], v[B, G, S, K] -> y[B, H, T, K], G divides H;
                documents and positions as `attention` takes them;  block_q, block_k: queries and keys of a block
    VJP:        p = e^(s - lse);  D = Σ y·dy;  dv = pᵀ·dy;  ds = p·(dy·vᵀ - D);  dq = scale·ds·k;  dk = scale·dsᵀ·q
    Residuals:  q, k, v, y, lse  (lse is the logarithm of the softmax's denominator, [B, G, H/G, 1, T])
    Reference:  Dao 2023 (FlashAttention-2), algorithms 1 and 2.  torch scaled_dot_product_attention, flash_attn_func
    """
    check("blockwise_attention", q, k, v, q_documents, k_documents, q_positions, k_positions)
    factor = scale_of(q, scale)
    seen = sight(mask, q.shape[2], k.shape[2], q_documents, k_documents, q_positions, k_positions)
    blocks = Blocks.of(max(q.shape[2], k.shape[2]), block_q, block_k)
    part = Partial.nothing(q, k)
    attend(part, by_group(q, k), shared(k), shared(v), seen, blocks, factor)
    y, lse = part.finished()
    y = y.reshape(q.shape)

    def vjp(dy):
        dq, dk, dv = (xp_of(a).zeros_like(a) for a in (q, k, v))
        attend_vjp(by_group(dq, k), shared(dk), shared(dv), by_group(q, k), shared(k), shared(v),
                   Upstream.by_group(dy, y, lse, k), seen, blocks, factor)
        dq *= factor
        return dq, dk, dv, None, None, None, None
    return y, vjp


def scale_of(q: Array, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)


def by_group(a: Array, k: Array) -> Array:
    """(B, H, T, K) -> (B, G, H/G, T, K): query heads by the kv head that they share."""
    B, H, T, K = a.shape
    G = k.shape[1]
    return a.reshape(B, G, H // G if G else 0, T, K)


def shared(a: Array) -> Array:
    """(B, G, S, K) -> (B, G, 1, S, K), a view."""
    return a[:, :, None]


@dataclass(frozen=True)
class Blocks:
    """At most so many queries and keys of a block, of one piece: `piece` positions lie together, or (None) all of them."""
    queries: int
    keys: int
    piece: int | None = None

    @classmethod
    def of(cls, S: int, block_q: int | None, block_k: int | None, piece: int | None = None) -> "Blocks":
        """The given sizes, or a quarter of S positions: larger products are faster, but of a diagonal block half is masked.

        Error: ValueError for a size below 1
        """
        for name, size in (("block_q", block_q), ("block_k", block_k)):
            if size is not None and (not hasattr(size, "__index__") or size < 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {size!r}")
        side = min(LARGEST, max(SMALLEST, S // 4))
        return cls(block_q or side, block_k or side, piece)

    def heads(self, q: Array, k: Array) -> Iterator[tuple[slice, slice, slice]]:
        """Samples, kv heads, and query heads of each, a few after the others: so many that their scores take BYTES."""
        B, G, n, T, _ = q.shape
        scores = min(T, self.queries) * min(k.shape[3], self.keys)
        most = max(1, BYTES // max(1, q.dtype.itemsize * scores))
        sizes = (max(1, most // max(1, G * n)), max(1, most // max(1, n)), most)
        for b, g, h in corners(*(range(0, whole, size) for whole, size in zip((B, G, n), sizes))):
            yield slice(b, b + sizes[0]), slice(g, g + sizes[1]), slice(h, h + sizes[2])

    def visible(self, seen: Sight) -> Iterator[tuple[slice, slice, Any]]:
        """The pairs of a block of queries and a block of keys that it sees, and how: True or bool[B or 1, T, S]."""
        of_keys = list(self.cut(len(seen.k_positions), self.keys))
        for queries in self.cut(len(seen.q_positions), self.queries):
            for keys in of_keys:
                view = seen.block(queries, keys)
                if view is not False:
                    yield queries, keys, view

    def cut(self, n: int, most: int) -> Iterator[slice]:
        """n positions, in slices of nearly equal sizes within each piece."""
        for start in range(0, n, max(1, self.piece or n)):
            length = min(self.piece or n, n - start)
            for size in shares(length, -(-length // most)):
                yield slice(start, start + size)
                start += size


@dataclass
class Partial:
    """The softmax over the keys met so far, of each query.

    out[B, G, n, T, K] = Σ e^(s - top)·v
    total[B, G, n, 1, T] = Σ e^(s - top)
    top[B, G, n, 1, T] = max s, -inf before any key
    """
    out: Array
    total: Array
    top: Array

    @classmethod
    def nothing(cls, q: Array, k: Array) -> "Partial":
        """Before any key."""
        xp = xp_of(q)
        out = by_group(xp.zeros(q.shape, q.dtype), k)
        total = xp.zeros((*out.shape[:3], 1, out.shape[3]), q.dtype)
        return cls(out, total, xp.full_like(total, -xp.inf))

    def of(self, heads: tuple[slice, slice, slice]) -> "Partial":
        """Of some heads, as views."""
        return Partial(self.out[heads], self.total[heads], self.top[heads])

    def add(self, queries: slice, s: Array, v: Array) -> None:
        """Some queries meet keys: their scores s[B, G, n, S, T] (written to), and values v[B, G, 1, S, K]."""
        xp = xp_of(s)
        out, total, before = self.out[..., queries, :], self.total[..., queries], self.top[..., queries]
        top = xp.maximum(before, s.max(axis=-2, keepdims=True))
        shift = xp.where(top == -xp.inf, xp.zeros_like(top), top)           # nothing seen yet: e^(-inf - 0) is 0, not nan
        s -= shift
        xp.exp(s, out=s)
        fade = xp.exp(before - shift)
        total *= fade
        total += s.sum(axis=-2, keepdims=True)
        out *= fade.swapaxes(-1, -2)
        out += product(s.swapaxes(-1, -2), v)
        before[...] = top

    def finished(self) -> tuple[Array, Array]:
        """(y[B, G, n, T, K], lse[B, G, n, 1, T]).  A query that has seen no key gives 0, and its lse is -inf."""
        xp = xp_of(self.out)
        empty = self.total == 0
        total = xp.where(empty, xp.ones_like(self.total), self.total)
        self.out /= total.swapaxes(-1, -2)
        return self.out, self.top + xp.log(total)


def attend(part: Partial, q: Array, k: Array, v: Array, seen: Sight, blocks: Blocks, factor: float = 1.0,
           pause: Pause = lambda: None) -> None:
    """All queries q[B, G, n, T, K] meet all keys k[B, G, 1, S, K] that they see.  Scores are factor·q·kᵀ."""
    for heads in blocks.heads(q, k):
        some, qh, (kh, vh) = part.of(heads), q[heads], (a[heads[:2]] for a in (k, v))
        for queries, keys, view in blocks.visible(seen.of(heads[0])):
            some.add(queries, scores(qh[..., queries, :] * factor, kh[..., keys, :], view), vh[..., keys, :])
            pause()


def scores(q: Array, k: Array, view: Any) -> Array:
    """k·qᵀ [B, G, n, S, T], -inf where a key is not seen."""
    xp = xp_of(q)
    s = product(k, q.swapaxes(-1, -2))
    if view is not True:
        xp.copyto(s, -xp.inf, where=xp.asarray(~view).swapaxes(-1, -2)[:, None, None])
    return s


@dataclass(frozen=True)
class Upstream:
    """What the queries bring to the backward pass: dy[B, G, n, T, K], lse and inner = Σ y·dy [B, G, n, 1, T]."""
    dy: Array
    lse: Array
    inner: Array

    def of(self, heads: tuple[slice, slice, slice]) -> "Upstream":
        """Of some heads, as views."""
        return Upstream(self.dy[heads], self.lse[heads], self.inner[heads])

    @classmethod
    def by_group(cls, dy: Array, y: Array, lse: Array, k: Array) -> "Upstream":
        """Of dy[B, H, T, K], y[B, H, T, K] and lse[B, G, n, 1, T]."""
        xp = xp_of(dy)
        inner = by_group(row_dot(y, dy), k).swapaxes(-1, -2)
        return cls(by_group(dy, k), xp.where(lse == -xp.inf, xp.zeros_like(lse), lse), inner)


def attend_vjp(dq: Array, dk: Array, dv: Array, q: Array, k: Array, v: Array, up: Upstream, seen: Sight, blocks: Blocks,
               factor: float = 1.0, pause: Pause = lambda: None) -> None:
    """Add to dq[B, G, n, T, K] (by factor·q), dk and dv[B, G, 1, S, K] what comes of all pairs of a query and a key."""
    xp = xp_of(q)
    for heads in blocks.heads(q, k):
        qh, dqh, (kh, vh, dkh, dvh), of = q[heads], dq[heads], (a[heads[:2]] for a in (k, v, dk, dv)), up.of(heads)
        for queries, keys, view in blocks.visible(seen.of(heads[0])):
            qb, kb, vb, dy = qh[..., queries, :] * factor, kh[..., keys, :], vh[..., keys, :], of.dy[..., queries, :]
            p = scores(qb, kb, view)
            p -= of.lse[..., queries]
            xp.exp(p, out=p)
            dvh[..., keys, :] += over_group(product(p, dy))
            ds = product(vb, dy.swapaxes(-1, -2))
            ds -= of.inner[..., queries]
            ds *= p
            dqh[..., queries, :] += product(ds.swapaxes(-1, -2), kb)
            dkh[..., keys, :] += over_group(product(ds, qb))
            pause()


def over_group(a: Array) -> Array:
    """The sum over the query heads that share a kv head: (B, G, n, S, K) -> (B, G, 1, S, K)."""
    return a if a.shape[2] == 1 else a.sum(axis=2, keepdims=True)
