"""The blockwise parallel transformer: attention and feed-forward a block of positions at a time (the lecture's slides 33-36).

    of all positions     k, v
    of each block        queries -> attention over all k, v -> residual -> norm -> feed-forward -> residual

The feed-forward works on each position by itself, so blocks change no number; but its hidden units, d_ff/d_model times as wide
as x, are there for one block only.  Backward runs each block again (recompute): of a layer, x, k and v are kept.

Peak of a layer's activations in elements, D wide, F hidden, blocks of c positions:  B·T·F at once, B·c·F + B·T·D by blocks.
Reference: Liu and Abbeel 2023 (Blockwise Parallel Transformer), algorithm 1
"""
from dataclasses import replace

import numpy as np

from refimpl.autograd import Params, Tensor, recompute, scoped
from refimpl.models.attention import grouped, heads, output, placed
from refimpl.models.config import Config
from refimpl.models.context import Context, enter
from refimpl.models.mlp import mlp
from refimpl.models.norm import norm
from refimpl.ops import blockwise_attention, concat, split
from refimpl.parallel import whole_keys


@scoped
def blockwise(x: Tensor, p: Params, cfg: Config, ctx: Context) -> Tensor:
    """x[B, T, D] -> x[B, T, D]: what `decoder.block` gives, by blocks of plan.block positions."""
    T = x.shape[1]
    k, v, of_keys = recompute(keys, x, p, cfg, ctx)
    sizes = tuple(min(ctx.plan.block, T - start) for start in range(0, T, ctx.plan.block)) or (0,)
    done, start = [], 0
    for part in split(x, sizes=sizes, axis=1):
        here = replace(ctx, positions=ctx.positions[start:start + part.shape[1]])
        done.append(recompute(one, part, k, v, of_keys, p, cfg, here))
        start += part.shape[1]
    return concat(*done, axis=1)


def keys(x: Tensor, p: Params, cfg: Config, ctx: Context) -> tuple[Tensor, Tensor, np.ndarray]:
    """Keys and values of all positions, and these, int[S]."""
    x = norm(x, p / "norm1", cfg) if cfg.norm_place == "pre" else x
    x, p = enter(x, ctx)[0], p / "attn"
    k, v = placed(heads(x, "k", p, cfg), p / "k_norm", cfg, ctx), heads(x, "v", p, cfg)
    return whole_keys(grouped(k, cfg, ctx), grouped(v, cfg, ctx), ctx.mesh.cp, ctx.sequence)


def one(x: Tensor, k: Tensor, v: Tensor, of_keys: np.ndarray, p: Params, cfg: Config, here: Context) -> Tensor:
    """A block x[B, c, D] of the positions of `here`, which meets the keys and values of all."""
    def attention(x: Tensor) -> Tensor:
        q = placed(heads(enter(x, here)[0], "q", p / "attn", cfg), p / "attn" / "q_norm", cfg, here)
        y = blockwise_attention(q, k, v, None, None, here.positions, of_keys, mask=here.mask)
        return output(y, p / "attn", cfg, here)
    if cfg.norm_place == "post":
        x = norm(x + attention(x), p / "norm1", cfg)
        return norm(x + mlp(x, p / "mlp", cfg, here), p / "norm2", cfg)
    x = x + attention(norm(x, p / "norm1", cfg))
    return x + mlp(norm(x, p / "norm2", cfg), p / "mlp", cfg, here)
