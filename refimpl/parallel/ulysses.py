"""All-to-all attention (DeepSpeed Ulysses): exchange tokens for heads, attend, exchange back.

    before and after      rank 0: tokens 0 1 of heads a b c d        rank 1: tokens 2 3 of heads a b c d
    between               rank 0: tokens 0 1 2 3 of heads a b        rank 1: tokens 0 1 2 3 of heads c d

Heads do not talk to each other, so between the exchanges nothing travels.  Three all_to_all go in (q, k, v) and one goes out;
backward they go the other way.  The number of ranks is limited by the number of heads; with `ring` > 1 it is not: ranks that
exchange heads form groups, and the groups form a ring, in which keys and values travel (USP).
"""
from dataclasses import dataclass

import numpy as np

from refimpl.array import Array, xp_of
from refimpl.autograd import op
from refimpl.comm import Comm, shares
from refimpl.comm.arguments import integers, refused_by_all
from refimpl.ops.blockwise import Blocks, scale_of
from refimpl.ops.mask import CAUSAL
from refimpl.parallel.exchanges import exchanged
from refimpl.parallel.ring import Ring, check_part, cut_by_position, require_alike


@op(values=slice(3), collective=True, layout=cut_by_position)
def all_to_all_attention(q, k, v, documents=None, comm=None, layout=None, ring=1, mask=CAUSAL, scale=None, block_q=None,
                         block_k=None):
    """`attention` of a sequence that is cut over ranks, by heads in between.

    Equation:   s = scale·q·kᵀ, -inf where masked;  p = softmax(s) over the keys of all ranks;  y = p·v
    Shapes:     q[B, H, T_r, K], k[B, G, T_r, K], v[B, G, T_r, K] -> y[B, H, T_r, K], all Shard(2), G divides H; T_r are this
                rank's positions;  documents int[B, T_r];  ring: how many groups form a ring, a divisor of the ranks
                Heads are shared out as evenly as they go.  Where kv heads cannot be shared out with their query heads, each is
                sent once for every query head
    VJP:        p = e^(s - lse);  D = Σ y·dy;  ds = p·(dy·vᵀ - D);  dq = scale·ds·k;  dk = scale·dsᵀ·q and dv = pᵀ·dy, summed
                over the queries of all ranks
    Residuals:  qh, kh, vh, yh, lse  (the own heads of all tokens of the group)
    Error:      ValueError, the same on every rank and before anything travels, where shapes do not fit; CommError where the
                ranks differ in what they should have alike
    Reference:  Jacobs et al. 2023 (DeepSpeed Ulysses), section 3; with a ring: Fang and Zhao 2024 (USP)
    """
    with refused_by_all(comm, "all_to_all_attention"):
        check_part(q, k, v, documents, comm, layout, mask, scale)
        blocks = Blocks.of(q.shape[2], block_q, block_k, layout.piece(comm.size))
        if integers("ring", [ring])[0] < 1 or comm.size % ring:
            raise ValueError(f"ring must be a divisor of the {comm.size} ranks, got {ring}")
    require_alike(f"all_to_all_attention in a ring of {ring}", q, k, documents, comm, layout, mask, scale)
    heads = Heads.of(comm, ring, q.shape[1], k.shape[1], layout.sizes(comm.size))
    group, positions = heads.comm, [layout.positions(r, comm.size) for r in range(comm.size)]
    joined = [np.concatenate(positions[start:start + group.size]) for start in range(0, comm.size, group.size)]
    ids = None if documents is None else group.all_gather(documents, axis=1, sizes=heads.tokens)
    circle = comm if ring == comm.size else comm.sub({"ring": ring, "heads": group.size}, ("ring",))
    qh, kh, vh = heads.in_exchange_for_tokens(q, heads.of_q), *(heads.kv_in(a) for a in (k, v))
    of_all = Ring(circle, joined, ids, mask, blocks, scale_of(q, scale))
    yh, lse = of_all.attend(qh, kh, vh)
    y = heads.back(yh, heads.of_q)
    n_kv = k.shape[1]

    def vjp(dy):
        dq, dk, dv = of_all.attend_vjp(qh, kh, vh, heads.in_exchange_for_tokens(dy, heads.of_q), yh, lse)
        return heads.back(dq, heads.of_q), heads.kv_back(dk, n_kv), heads.kv_back(dv, n_kv), None
    return y, vjp


@dataclass(frozen=True)
class Heads:
    """Who gets which heads: `of_q` and `of_kv` of the ranks of a group, whose tokens are `tokens`.  repeats: how often each kv
    head is sent (once, where whole groups of query heads fall to each rank)."""
    comm: Comm
    of_q: tuple[int, ...]
    of_kv: tuple[int, ...]
    repeats: int
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, comm: Comm, ring: int, H: int, G: int, sizes: tuple[int, ...]) -> "Heads":
        group = comm if ring == 1 else comm.sub({"ring": ring, "heads": comm.size // ring}, ("heads",))
        first = comm.rank - group.rank
        of_q, n = shares(H, group.size), H // G if G else 1
        whole = all(m % n == 0 for m in of_q)
        return cls(group, of_q, tuple(m // n for m in of_q) if whole else of_q, 1 if whole else n,
                   sizes[first:first + group.size])

    def in_exchange_for_tokens(self, a: Array, parts: tuple[int, ...]) -> Array:
        """(B, heads, T_r, K) -> (B, own heads, T of the group, K)"""
        return exchanged(a, self.comm, 1, 2, parts, self.tokens)

    def back(self, a: Array, parts: tuple[int, ...]) -> Array:
        """(B, own heads, T of the group, K) -> (B, heads, T_r, K)"""
        return exchanged(a, self.comm, 2, 1, self.tokens, parts)

    def kv_in(self, a: Array) -> Array:
        a = a if self.repeats == 1 else xp_of(a).repeat(a, self.repeats, axis=1)
        return self.in_exchange_for_tokens(a, self.of_kv)

    def kv_back(self, a: Array, G: int) -> Array:
        a = self.back(a, self.of_kv)
        return a if self.repeats == 1 else a.reshape(a.shape[0], G, self.repeats, *a.shape[2:]).sum(axis=2)
