"""Multi-head attention, cut by heads (the lecture's slides 123-125).

        rank 0              rank 1
    Q K V of heads 0,1 | Q K V of heads 2,3        columns of the three matrices
    attention          | attention                 heads do not talk to each other
    rows of O          | rows of O                 the products add up: g

Shape letters: B batch, T queries, D model, H heads, K head dim; H/tp is this rank's share of the heads.
"""
from typing import Any

from refimpl import ops
from refimpl.autograd import Params, Tensor, scoped
from refimpl.models.config import Config
from refimpl.models.context import Context, drop
from refimpl.ops import reshape, transpose
from refimpl.parallel import column_parallel_linear, copy_to, reduce_from, row_parallel_linear


@scoped
def attention(x: Tensor, p: Params, cfg: Config, ctx: Context, state: Any = None) -> tuple[Tensor, Any, dict[str, Any]]:
    """The mixer: x[B, T, D] -> (y[B, T, D], state, aux).

    Deviation from GPT-2: no dropout on the attention probabilities.
    Reference: Vaswani et al. 2017, section 3.2.2; Shoeybi et al. 2019, figure 3b.  HF GPT2Attention, Megatron SelfAttention
    """
    x = copy_to(x, comm=ctx.mesh.tp)                                                # f: identity | all_reduce
    q, k, v = (split_heads(column_parallel_linear(x, p[f"{n}.w"], p[f"{n}.b"]), cfg) for n in "qkv")  # (B, H/tp, T, K)
    y = merge_heads(ops.attention(q, k, v, mask=ctx.mask))                          # (B, T, D/tp)
    y = reduce_from(row_parallel_linear(y, p["o.w"]), comm=ctx.mesh.tp)             # g: all_reduce | identity
    return drop(y + p["o.b"], p, cfg, ctx), state, {}                               # the bias once, after g


def split_heads(x: Tensor, cfg: Config) -> Tensor:
    """(B, T, H/tp·K) -> (B, H/tp, T, K)"""
    B, T, width = x.shape
    return transpose(reshape(x, shape=(B, T, width // cfg.head_dim, cfg.head_dim)), axes=(0, 2, 1, 3))


def merge_heads(x: Tensor) -> Tensor:
    """(B, H/tp, T, K) -> (B, T, H/tp·K)"""
    B, H, T, K = x.shape
    return reshape(transpose(x, axes=(0, 2, 1, 3)), shape=(B, T, H * K))
