"""Multi-head attention, cut by heads (the lecture's slides 123-125).

        rank 0              rank 1
    Q K V of heads 0,1 | Q K V of heads 2,3        columns of the three matrices
    attention          | attention                 heads do not talk to each other
    rows of O          | rows of O                 the products add up: g

Shape letters: B batch, T queries, D model, H query heads, G kv heads, K head dim; H/tp and G/tp are this rank's shares of the
heads.  A kv head whose queries lie on several ranks is on each of them (placements.heads).
"""
from typing import Any

import numpy as np

from refimpl import parallel
from refimpl.autograd import Params, Tensor, scoped
from refimpl.models.config import Config
from refimpl.models.context import Context, drop, enter, leave
from refimpl.models.norm import norm
from refimpl.models.placements import kv_of_head
from refimpl.ops import gather, reshape, rope, transpose
from refimpl.parallel import column_parallel_linear, row_parallel_linear


@scoped
def attention(x: Tensor, p: Params, cfg: Config, ctx: Context, state: Any = None) -> tuple[Tensor, Any, dict[str, Any]]:
    """The mixer: x[B, T, D] -> (y[B, T, D], state, aux).

    Deviation from GPT-2: no dropout on the attention probabilities.
    Reference: Vaswani et al. 2017, section 3.2.2; Shoeybi et al. 2019, figure 3b.  HF GPT2Attention, Megatron SelfAttention
    """
    x, again = enter(x, ctx)                                                        # f: identity | all_reduce
    q, k, v = (heads(x, of, p, cfg, again) for of in "qkv")
    q, k = placed(q, p / "q_norm", cfg, ctx), placed(k, p / "k_norm", cfg, ctx)     # (B, H/tp, T, K), (B, G/tp, T, K)
    k, v = grouped(k, cfg, ctx), grouped(v, cfg, ctx)
    y = parallel.attention(q, k, v, ctx.mesh.cp, ctx.sequence, ctx.mask, ctx.plan.attention, ctx.plan.ring)
    return output(y, p, cfg, ctx), state, {}


def heads(x: Tensor, of: str, p: Params, cfg: Config, again: parallel.Regathered | None = None) -> Tensor:
    """x[B, T, D] -> queries, keys or values (of: q, k, v) of this rank's heads, (B, H/tp, T, K) or (B, G/tp, T, K)."""
    return split_heads(column_parallel_linear(x, p[f"{of}.w"], p.get(f"{of}.b"), again=again), cfg)


def output(y: Tensor, p: Params, cfg: Config, ctx: Context) -> Tensor:
    """y[B, H/tp, T, K] -> (B, T, D)"""
    y = leave(row_parallel_linear(merge_heads(y), p["o.w"]), ctx)                   # g: all_reduce | identity
    y = y + p["o.b"] if "o.b" in p else y                                           # the bias once, after g
    return drop(y, p, cfg, ctx)


def split_heads(x: Tensor, cfg: Config) -> Tensor:
    """(B, T, H/tp·K) -> (B, H/tp, T, K)"""
    B, T, width = x.shape
    return transpose(reshape(x, shape=(B, T, width // cfg.head_dim, cfg.head_dim)), axes=(0, 2, 1, 3))


def merge_heads(x: Tensor) -> Tensor:
    """(B, H/tp, T, K) -> (B, T, H/tp·K)"""
    B, H, T, K = x.shape
    return reshape(transpose(x, axes=(0, 2, 1, 3)), shape=(B, T, H * K))


def placed(x: Tensor, p: Params, cfg: Config, ctx: Context) -> Tensor:
    """Queries or keys as their scores need them: normalised, and turned by their positions, where the model does that."""
    x = norm(x, p, cfg) if cfg.qk_norm else x
    if cfg.positions == "rope":
        x = rope(x, ctx.positions, theta=cfg.rope_theta, pairing=cfg.rope_pairing)
    return x


def grouped(x: Tensor, cfg: Config, ctx: Context) -> Tensor:
    """This rank's kv heads (B, G/tp, T, K): as they are where the query heads fall to them in equal groups, in order, as
    attention wants; else one for each query head, (B, H/tp, T, K)."""
    heads, G = kv_of_head(cfg, ctx.mesh), x.shape[1]
    if len(heads) % G == 0 and heads == [h * G // len(heads) for h in range(len(heads))]:
        return x
    return transpose(gather(transpose(x, axes=(1, 0, 2, 3)), np.array(heads)), axes=(1, 0, 2, 3))
