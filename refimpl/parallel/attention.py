"""Attention by name: where the sequence is cut over the cp ranks, the ways differ in what travels; all give the same numbers.

| name | what travels | what a rank holds at once |
|---|---|---|
| naive | all keys and values, to all ranks (all_gather) | scores of its queries with all keys |
| blockwise | the same | scores of two blocks, all keys and values |
| ring | keys and values, round the ring | scores of two blocks, two ranks' keys and values |
| all_to_all | q, k, v and y, heads for tokens | scores of two blocks, its heads' keys and values |

On one rank nothing travels, and ring and all_to_all are blockwise.
"""
from copy import copy
from typing import Any

import numpy as np

from refimpl import ops
from refimpl.autograd import Tensor
from refimpl.comm import Comm
from refimpl.comm.arguments import refused_by_all
from refimpl.ops import CAUSAL, Mask
from refimpl.parallel.collectives import all_gather
from refimpl.parallel.ring import check_part, require_alike, ring_attention
from refimpl.parallel.sequence import SequenceLayout
from refimpl.parallel.ulysses import all_to_all_attention

ATTENTIONS = ("naive", "blockwise", "ring", "all_to_all")


def attention(q: Tensor, k: Tensor, v: Tensor, comm: Comm, layout: SequenceLayout, mask: Mask = CAUSAL, how: str = "naive",
              ring: int = 1) -> Tensor:
    """q[B, H, T_r, K], k, v[B, G, T_r, K] of this rank's positions -> y[B, H, T_r, K].

    Errors: ValueError for another name, and as in ring_attention
    """
    if how not in ATTENTIONS:
        raise ValueError(f"attention is one of {', '.join(ATTENTIONS)}, got {how!r}")
    if how == "ring":
        return ring_attention(q, k, v, comm=comm, layout=layout, mask=mask)
    if how == "all_to_all":
        return all_to_all_attention(q, k, v, comm=comm, layout=layout, mask=mask, ring=ring)
    op: Any = ops.attention if how == "naive" else ops.blockwise_attention
    with refused_by_all(comm, how):
        check_part(q.array, k.array, v.array, None, comm, layout, mask)
    if comm.size > 1:
        require_alike(how, q.array, k.array, None, comm, layout, mask)
    k, v, of_keys = whole_keys(k, v, comm, layout)
    if comm.size == 1:
        return op(q, k, v, mask=mask)
    return op(q, k, v, None, None, layout.own_positions(comm), of_keys, mask=mask)


def whole_keys(k: Tensor, v: Tensor, comm: Comm, layout: SequenceLayout) -> tuple[Tensor, Tensor, np.ndarray]:
    """Keys and values of all ranks, and the positions int[S] in whose order they lie."""
    def whole(a: Tensor) -> Tensor:
        if comm.size > 1:
            return all_gather(a, comm=comm, axis=2, sizes=layout.sizes(comm.size))
        same = copy(a)                                  # all there is lies on one rank: the cut's tag goes, and nothing else
        same.cut = {axis: k for axis, k in a.cut.items() if axis not in comm.axes}
        return same
    return whole(k), whole(v), layout.order(comm.size)
