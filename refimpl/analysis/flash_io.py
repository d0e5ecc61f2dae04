"""FlashAttention-1, counting every element that moves between slow and fast memory: a readable twin of ops/attention.py.

One head, in numpy.  Read `FastMemory`, then `counted_flash`, which is the paper's algorithm 1 line by line, then the closed
forms of its count.  `counted_standard` is the paper's algorithm 0.  Backward is left out.

Letters: T queries, S keys, d head dim, M elements of fast memory; blocks of `columns` keys (B_c) and `rows` queries (B_r).

Reference: Dao, Fu, Ermon, Rudra, Ré 2022, "FlashAttention", algorithms 0 and 1, theorem 2
"""
import math
from dataclasses import dataclass

import numpy as np

from refimpl.ops.mask import CAUSAL


@dataclass
class FastMemory:
    """Counts elements: those loaded from slow memory, those stored to it, and those held in between.

    What is computed there is counted by `hold`, where it gets a name; numpy's temporaries are not.
    """
    loads: int = 0
    stores: int = 0
    held: int = 0
    peak: int = 0                                       # the largest `held` so far

    def load(self, slow: np.ndarray) -> np.ndarray:
        """A copy in fast memory."""
        self.loads += slow.size
        return self.hold(slow.copy())

    def store(self, fast: np.ndarray | float, slow: np.ndarray) -> None:
        """Overwrites all of `slow`."""
        slow[...] = fast
        self.stores += slow.size

    def hold(self, made: np.ndarray) -> np.ndarray:
        """For what was computed in fast memory, not loaded."""
        self.held += made.size
        self.peak = max(self.peak, self.held)
        return made

    def free(self, *arrays: np.ndarray) -> None:
        self.held -= sum(a.size for a in arrays)


def paper_blocks(M: int, d: int) -> tuple[int, int]:
    """(columns, rows) = (⌈M/4d⌉, min(⌈M/4d⌉, d)), line 1 of algorithm 1.

    Deviation of the algorithm from its text: these blocks do not always fit into M.  While M ≤ 4d² the blocks of q, k, v and o
    fill it, and the scores come on top, up to M/4 of them.  From M = 8d² + 24d on they fit: see `held`.
    """
    columns = math.ceil(M / (4 * d))
    return columns, min(columns, d)


def fitting_blocks(M: int, d: int) -> tuple[int, int]:
    """(columns, rows) with the most columns, and rows = min(columns, d) as in the paper, of which all that is held fits into M.

    Error: ValueError where not even one query and one key fit
    """
    fitting = [n for n in range(1, M // (2 * d) + 1) if held(n, min(n, d), d) <= M]
    if not fitting:
        raise ValueError(f"fitting_blocks: one query and one key of dimension {d} take {held(1, 1, d)} elements, M is {M}")
    return fitting[-1], min(fitting[-1], d)


def held(columns: int, rows: int, d: int) -> int:
    """Elements in fast memory at the peak: k and v; q, o, the old and new maxima, the sums; a tile of scores."""
    return 2 * columns * d + rows * (2 * d + 3) + rows * columns


def counted_flash(q: np.ndarray, k: np.ndarray, v: np.ndarray, blocks: tuple[int, int],
                  causal: bool = False) -> tuple[np.ndarray, np.ndarray, FastMemory]:
    """softmax(q·kᵀ/√d)·v with keys in the outer loop, queries in the inner one, and an output that is normalised at every step.

    Shapes:     q[T, d], k[S, d], v[S, d], blocks = (columns, rows) -> (o[T, d], lse[T], counts);  lse = ln Σ exp(q·kᵀ/√d),
                made at the end of the maxima m and sums ℓ in slow memory, uncounted: the paper keeps these two
    causal:     query i sees the keys up to i + S - T; a block that no query of it sees is skipped and costs nothing
    Deviations: scores are scaled and masked as in the paper's algorithm 2; exponents are taken relative to the new maximum at
                once, not to the tile's (line 10) and then to the new one: a row without a key in the tile is no special case;
                exponentials overwrite the scores and products accumulate into o, so a temporary of numpy's is not counted
    Error:      ValueError for shapes that do not fit, blocks below 1, no key at all, and causal with fewer keys than queries
    """
    check(q, k, v, blocks, causal)
    columns, rows = blocks
    (T, d), S = q.shape, len(k)
    io = FastMemory()
    o, sums, tops = np.empty_like(q), np.empty_like(q, shape=T), np.empty_like(q, shape=T)          # in slow memory: O, ℓ, m
    for start, slow in ((0.0, o), (0.0, sums), (-np.inf, tops)):                                    # line 2
        io.store(start, slow)
    for j in range(0, S, columns):                                                                  # line 5
        kj, vj = io.load(k[j:j + columns]), io.load(v[j:j + columns])                               # line 6
        for i in range(0, T, rows):                                                                 # line 7
            block = slice(i, i + rows)
            seen = CAUSAL.block(np.arange(T)[block] + S - T, np.arange(j, j + len(kj))) if causal else True
            if seen is False:
                continue
            qi, oi, li, mi = (io.load(slow[block]) for slow in (q, o, sums, tops))                  # line 8
            s = io.hold(qi @ kj.T / math.sqrt(d))                                                   # line 9
            np.copyto(s, -np.inf, where=np.logical_not(seen))
            m = io.hold(np.maximum(mi, s.max(axis=1)))                                              # lines 10, 11
            p = np.exp(s - m[:, None], out=s)
            li *= np.exp(mi - m)                                                                    # the sums of earlier blocks
            oi *= li[:, None]                                                                       # line 12
            li += p.sum(axis=1)
            oi += p @ vj
            oi /= li[:, None]
            for fast, slow in ((oi, o), (li, sums), (m, tops)):                                     # lines 12, 13
                io.store(fast, slow[block])
            io.free(qi, oi, li, mi, s, m)
        io.free(kj, vj)
    return o, tops + np.log(sums), io


def check(q: np.ndarray, k: np.ndarray, v: np.ndarray, blocks: tuple[int, int], causal: bool) -> None:
    if q.ndim != 2 or k.ndim != 2 or k.shape != v.shape or q.shape[1] != k.shape[1] or not q.shape[1]:
        raise ValueError(f"counted_flash: q{list(q.shape)}, k{list(k.shape)}, v{list(v.shape)} must be [T, d], [S, d], [S, d]"
                         f", d > 0")
    if min(blocks) < 1:
        raise ValueError(f"counted_flash: blocks have at least one key and one query, got (columns, rows) = {blocks}")
    if len(k) < max(1, len(q) if causal else 1):
        raise ValueError(f"counted_flash: every query needs a key, got {len(q)} queries, {len(k)} keys, causal {causal}")


def flash_traffic(T: int, S: int, d: int, blocks: tuple[int, int], causal: bool = False) -> tuple[int, int]:
    """(loads, stores) of `counted_flash` with blocks = (columns, rows).

    loads    2·S·d + P·(2d + 2)          k and v once, q, o, ℓ, m at every pass;  P = T·⌈S/columns⌉ query rows pass
    stores   T·(d + 2) + P·(d + 2)       o, ℓ, m once at first, then at every pass

    causal: at the block of keys that starts at j, the rows pass from the block that holds row j - (S - T) on
    With the paper's blocks the sum is about 12·T·S·d²/M for large M and d: Θ(N²d²/M), theorem 2.
    """
    columns, rows = blocks
    skipped = (max(j - (S - T), 0) // rows * rows if causal else 0 for j in range(0, S, columns))
    passing = sum(T - n for n in skipped)
    return 2 * S * d + passing * (2 * d + 2), T * (d + 2) + passing * (d + 2)


def counted_standard(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, FastMemory]:
    """The same through slow memory, for scores S and their softmax P: the paper's algorithm 0.

    Shapes: q[T, d], k[S, d], v[S, d] -> (o[T, d], counts).  Whole arrays are loaded, so `peak` means nothing.
    """
    io = FastMemory()
    s, p, o = np.empty((len(q), len(k)), q.dtype), np.empty((len(q), len(k)), q.dtype), np.empty_like(q)
    io.store(io.load(q) @ io.load(k).T / math.sqrt(q.shape[1]), s)
    scores = io.load(s)
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    io.store(exponentials / exponentials.sum(axis=1, keepdims=True), p)
    io.store(io.load(p) @ io.load(v), o)
    return o, io


def standard_traffic(T: int, S: int, d: int) -> tuple[int, int]:
    """(loads, stores) of `counted_standard`: T·d + 2·S·d + 2·T·S and T·d + 2·T·S; together 4·N² + 4·N·d with N = T = S.

    The paper's Θ(Nd + N²): a product that reads its tiles more than once, which small fast memories force, is not in it.
    """
    return T * d + 2 * S * d + 2 * T * S, T * d + 2 * T * S
