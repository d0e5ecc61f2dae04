"""Attention by name: where the sequence is cut over the cp ranks, the ways differ in what travels; all give the same numbers.

| name | what travels | what a rank holds at once |
|---|---|---|
| naive | all keys and values, to all ranks (all_gather) | scores of its queries with all keys |
| blockwise | the same | scores of two blocks, all keys and values |
| ring | keys and values, round the ring | scores of two blocks, two ranks' keys and values |
| all_to_all | q, k, v and y, heads for tokens | scores of two blocks, its heads' keys and values |

On one rank nothing travels, and ring and all_to_all are blockwise.
"""
from typing import Any

from refimpl import ops
from refimpl.autograd import Tensor
from refimpl.comm import Comm
from refimpl.ops import CAUSAL, Mask
from refimpl.parallel.collectives import all_gather
from refimpl.parallel.ring import ring_attention
from refimpl.parallel.sequence import SequenceLayout
from refimpl.parallel.ulysses import all_to_all_attention

ATTENTIONS = ("naive", "blockwise", "ring", "all_to_all")


def attention(q: Tensor, k: Tensor, v: Tensor, comm: Comm, layout: SequenceLayout, mask: Mask = CAUSAL, how: str = "naive"
              ) -> Tensor:
    """q[B, H, T_r, K], k, v[B, G, T_r, K] of this rank's positions -> y[B, H, T_r, K].  Error: ValueError for another name."""
    if how not in ATTENTIONS:
        raise ValueError(f"attention is one of {', '.join(ATTENTIONS)}, got {how!r}")
    if how in ("ring", "all_to_all"):
        return (ring_attention if how == "ring" else all_to_all_attention)(q, k, v, comm=comm, layout=layout, mask=mask)
    op: Any = ops.attention if how == "naive" else ops.blockwise_attention
    if comm.size == 1:
        return op(q, k, v, mask=mask)
    k, v = whole_keys(k, v, comm, layout)
    return op(q, k, v, None, None, layout.positions(comm.rank, comm.size), layout.order(comm.size), mask=mask)


def whole_keys(k: Tensor, v: Tensor, comm: Comm, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    """Keys and values of all ranks, in the order layout.order(comm.size)."""
    if comm.size == 1:
        return k, v
    sizes = layout.sizes(comm.size)
    return all_gather(k, comm=comm, axis=2, sizes=sizes), all_gather(v, comm=comm, axis=2, sizes=sizes)
