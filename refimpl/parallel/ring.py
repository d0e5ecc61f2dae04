"""Ring attention: each rank keeps its queries, and keys and values travel round the ring (the lecture's slides 37-41).

           step 0     step 1     step 2     step 3            4 ranks; which block of keys and values each has
    rank 0   0          3          2          1
    rank 1   1          0          3          2               at step t rank r has block r - t, works on it with its queries,
    rank 2   2          1          0          3               and at the same time sends it on to rank r + 1
    rank 3   3          2          1          0

Receives are posted before the work begins, and between blocks MPI gets to move what is under way (comm.progress).
Backward, keys and values travel again, and with them go dk and dv.  They are born at the first rank that is not their own,
each adds what its queries give, and the last sends them home; dq stays.  So of a sequence of S positions a rank sends

    forward  2(p - 1)·B·(S/p)·G·K elements         backward  4(p - 1)·B·(S/p)·G·K         and none where it is alone

Softmaxes are merged as in ops/blockwise.py, so a rank holds two blocks of keys and values however long the sequence is (and
of all ranks the positions, 8 bytes each).  Where they are large, heads take turns: then it is two blocks of some heads (and
ids of documents go round with each).
"""
from dataclasses import dataclass
from typing import Any, Iterator, Sequence

import numpy as np

from refimpl.array import Array, xp_of
from refimpl.autograd import Layout, LayoutError, Tensor, op
from refimpl.autograd.layout import describe, join, names
from refimpl.comm import Comm
from refimpl.comm.arguments import form, refused_by_all
from refimpl.comm.transfer import Transfer
from refimpl.ops.attention import check
from refimpl.ops.blockwise import Blocks, Partial, Upstream, attend, attend_vjp, by_group, scale_of, shared
from refimpl.ops.mask import CAUSAL, Mask
from refimpl.ops.sight import EVERYTHING, Sight
from refimpl.parallel.sequence import SequenceLayout

TURN = 1 << 21                                          # bytes of the keys and values of a block that travel together


def cut_by_position(args: Any, static: dict[str, Any]) -> Layout:
    """Queries, keys and values are each rank's own positions, of all samples and heads that it has."""
    axes, last = frozenset(static["comm"].axes), 3
    for t in (a for a in args if type(a) is Tensor):
        if not axes <= t.layout.varies:
            raise LayoutError(f"attention over {names(axes)} takes each rank's own positions, but {describe(t)} is replicated "
                              f"over {names(axes - t.layout.varies)}: scatter_to cuts it")
        wrong = [axis for axis, k in t.cut.items() if k == last or (k == 2) != (axis in axes)]
        if t.array.ndim == 4 and wrong:
            raise LayoutError(f"attention over {names(axes)}: {describe(t)} must be cut along axis 2 there and nowhere else, "
                              f"over {wrong[0]} it is cut along axis {t.cut[wrong[0]]}")
    return join(ring_attention, [a for a in args if type(a) is Tensor])


@op(values=slice(3), collective=True, layout=cut_by_position)
def ring_attention(q, k, v, documents=None, comm=None, layout=None, mask=CAUSAL, scale=None, block_q=None, block_k=None):
    """`attention` of a sequence that is cut over ranks; what a query sees goes by the layout's positions.

    Equation:   s = scale·q·kᵀ, -inf where masked;  p = softmax(s) over the keys of all ranks;  y = p·v
    Shapes:     q[B, H, T_r, K], k[B, G, T_r, K], v[B, G, T_r, K] -> y[B, H, T_r, K], all Shard(2), G divides H; T_r are this
                rank's positions;  documents int[B, T_r];  block_q, block_k: queries and keys of a block.  Keys of all ranks
                come by, so a window may be of any size
    VJP:        p = e^(s - lse);  D = Σ y·dy;  ds = p·(dy·vᵀ - D);  dq = scale·ds·k;  dk = scale·dsᵀ·q and dv = pᵀ·dy, summed
                over the queries of all ranks
    Residuals:  q, k, v, y, lse
    Error:      ValueError, the same on every rank and before any key travels, where shapes do not fit the layout; CommError
                where the ranks differ in what they should have alike
    Reference:  Liu et al. 2023 (Ring Attention), algorithm 1.  Megatron's context parallelism
    """
    with refused_by_all(comm, "ring_attention"):
        check_part(q, k, v, documents, comm, layout, mask, scale)
        blocks = Blocks.of(q.shape[2], block_q, block_k, layout.piece(comm.size))
    require_alike("ring_attention", q, k, documents, comm, layout, mask, scale)
    positions = [layout.positions(r, comm.size) for r in range(comm.size)]
    ring = Ring(comm, positions, documents, mask, blocks, scale_of(q, scale))
    y, lse = ring.attend(q, k, v)

    def vjp(dy):
        return *ring.attend_vjp(q, k, v, dy, y, lse), None
    return y, vjp


def check_part(q: Array, k: Array, v: Array, documents: Array | None, comm: Comm, layout: Any, mask: Any, scale: Any = None
               ) -> None:
    """Error: ValueError or TypeError unless these are this rank's part of a sequence that is cut by the layout."""
    if type(layout) is not SequenceLayout:
        raise ValueError(f"layout must be a SequenceLayout, got {layout!r}")
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a Mask, got {mask!r}")
    check("attention", q, k, v, documents, documents, None, None)
    if not q.dtype == k.dtype == v.dtype or q.dtype not in ("float32", "float64"):
        raise TypeError(f"q, k and v must be float32 or float64, all the same, got {q.dtype}, {k.dtype}, {v.dtype}")
    scale_of(q, scale)
    n = layout.sizes(comm.size)[comm.rank]
    if (q.shape[2], k.shape[2]) != (n, n):
        raise ValueError(f"{layout.length} positions cut {layout.kind} over {comm.size} ranks are {n} on rank {comm.rank}, got "
                         f"q{list(q.shape)}, k{list(k.shape)}")


def require_alike(name: str, q: Array, k: Array, documents: Array | None, comm: Comm, layout: Any, mask: Any, scale: Any = None
                  ) -> None:
    """Error: CommError on every rank where they differ in what the messages alone would not tell, such as the mask."""
    ids = None if documents is None else form(documents, 1)
    comm.agree(f"{name} over {comm.name}: q {form(q, 2)}, k {form(k, 2)}, documents {ids}, {layout}, {mask}, scale "
               f"{scale_of(q, scale)}")


@dataclass(frozen=True)
class Ring:
    """The ranks of a ring, the positions of each, this rank's documents int[B, T_r] (or None), which keys a query sees, and the
    factor of scores."""
    comm: Comm
    positions: Sequence[np.ndarray]
    documents: Array | None
    mask: Mask
    blocks: Blocks
    factor: float

    def attend(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """(y[B, H, T_r, K], lse) of this rank's queries and the keys of all ranks."""
        part, queries = Partial.nothing(q, k), by_group(q, k)
        for heads in self.turns(k):
            some = part.of((EVERYTHING, heads, EVERYTHING))
            for _, keys, values, seen in self.blocks_of_all(k[:, heads], v[:, heads]):
                attend(some, queries[:, heads], shared(keys), shared(values), seen, self.blocks, self.factor,
                       self.comm.progress)
                del keys, values                                    # their place is that of the next ones
        y, lse = part.finished()
        return y.reshape(q.shape), lse

    def attend_vjp(self, q: Array, k: Array, v: Array, dy: Array, y: Array, lse: Array) -> tuple[Array, Array, Array]:
        """dq, dk, dv.  In each turn but the last, dk and dv come home while the next one's own block is worked on."""
        xp, up, queries = xp_of(q), Upstream.by_group(dy, y, lse, k), by_group(q, k)
        dq, dk_dv = xp.zeros_like(q), xp.zeros((2, *k.shape), k.dtype)
        coming_home: list[tuple[Array, Transfer]] = []
        for heads in self.turns(k):
            own, some, moving = dk_dv[:, :, heads], up.of((EVERYTHING, heads, EVERYTHING)), None
            for step, keys, values, seen in self.blocks_of_all(k[:, heads], v[:, heads]):
                here = own if step == 0 else xp.zeros((2, *keys.shape), k.dtype)
                attend_vjp(by_group(dq, k)[:, heads], shared(here[0]), shared(here[1]), queries[:, heads], shared(keys),
                           shared(values), some, seen, self.blocks, self.factor, self.comm.progress)
                del keys, values                                    # the last ones' place is that of dk and dv that come home
                if step == 0:
                    add_up(coming_home)
                    continue
                if moving:
                    here += moving.wait().reshape(here.shape)       # what the ranks before have added
                    moving = None                                   # and its place is free before more is sent
                moving = self.send_on(here, step, values_of(k[:, heads]))
            if moving:
                coming_home.append((own, moving))
        add_up(coming_home)
        dq *= self.factor
        return dq, dk_dv[0], dk_dv[1]

    def turns(self, k: Array) -> Iterator[slice]:
        """Some kv heads after the others: so many that their keys and values in a block take TURN bytes, on all ranks alike."""
        B, G, _, K = k.shape
        each = 2 * B * K * k.dtype.itemsize * max(map(len, self.positions))
        size = max(1, TURN // max(1, each))
        return (slice(g, g + size) for g in range(0, max(1, G), size))

    def blocks_of_all(self, k: Array, v: Array) -> Iterator[tuple[int, Array, Array, Sight]]:
        """Step, keys, values, and what this rank's queries see of them, of every rank's block in turn, the own first.

        While one is worked on, it is sent on, and the next one comes; nothing here holds on to it.
        """
        xp, (B, G, _, K), n = xp_of(k), k.shape, self.comm.size
        held, ids = xp.concatenate([k.reshape(-1), v.reshape(-1)], axis=0), self.documents
        for step in range(n):
            at = self.positions[(self.comm.rank - step) % n]
            coming = [] if step == n - 1 else [self.send_on(held, step, values_of(k))]
            if coming and ids is not None:
                coming.append(self.send_on(ids, step, B))
            ids = None if ids is None else ids.reshape(B, len(at))
            of_keys = held.reshape(2, B, G, len(at), K)
            parts = [of_keys[1], of_keys[0]]
            del held, of_keys
            yield step, parts.pop(), parts.pop(), Sight(self.mask, self.positions[self.comm.rank], at, self.documents, ids)
            if coming:
                held, *others = [transfer.wait() for transfer in coming]
                ids = others[0] if others else None
                del coming, others

    def send_on(self, a: Array, step: int, each: int) -> Transfer:
        """Send what belongs to the block of `step`, `each` elements a position, to the next rank."""
        n = self.comm.size
        return self.comm.start_ring(a.reshape(-1), sizes=[each * len(self.positions[(r - step) % n]) for r in range(n)])


def add_up(coming: list[tuple[Array, Transfer]]) -> None:
    """Add each to where it belongs."""
    while coming:
        own, transfer = coming.pop()
        own += transfer.wait().reshape(own.shape)


def values_of(k: Array) -> int:
    """Elements of a position's keys and values."""
    B, G, _, K = k.shape
    return 2 * B * G * K
