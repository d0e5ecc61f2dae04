"""The decoder: embed, a loop over blocks, head.  One file for serial and sharded runs: it never asks for a rank or a size.

`embed`, `block` and `head` stay callable on their own.  f and g of the layers are in attention.py and mlp.py, those of the
vocabulary here: each rank has V/tp words of the embedding and of the head.
Shape letters: B batch, T positions, D model, V vocabulary (padded, where the configuration says so).
Reference: Radford et al. 2019 (GPT-2), Touvron et al. 2023 (LLaMA).  HF GPT2LMHeadModel, LlamaForCausalLM
"""
import numpy as np

from refimpl.autograd import Params, Tensor, scoped
from refimpl.models.attention import attention
from refimpl.models.blockwise import blockwise
from refimpl.models.config import Config
from refimpl.models.context import Context, drop, enter, leave
from refimpl.models.mlp import mlp
from refimpl.models.norm import norm
from refimpl.ops import embedding, scale, tanh, transpose
from refimpl.parallel import column_parallel_linear, gather_vocab, vocab_parallel_cross_entropy, vocab_parallel_embedding


@scoped
def embed(tokens: Tensor, p: Params, cfg: Config, ctx: Context) -> Tensor:
    """tokens int[B, T] -> x[B, T, D]"""
    x = vocab_parallel_embedding(p["embed.w"], tokens, comm=ctx.mesh.tp, **words(cfg))    # a rank's own words
    x = leave(x, ctx)                                                               # g: all_reduce | identity
    x = scale(x, by=cfg.embed_scale) if cfg.embed_scale != 1 else x
    if cfg.positions == "learned":
        x = x + embedding(p["positions.w"], ctx.between)
    return drop(x, p, cfg, ctx)


@scoped
def block(x: Tensor, p: Params, cfg: Config, ctx: Context) -> Tensor:
    """x[B, T, D] -> x[B, T, D]: x plus what attention adds, plus what the MLP adds to that; a norm before each, or after."""
    if cfg.norm_place == "post":
        x = norm(x + attention(x, p / "attn", cfg, ctx)[0], p / "norm1", cfg)
        return norm(x + mlp(x, p / "mlp", cfg, ctx), p / "norm2", cfg)
    x = x + attention(norm(x, p / "norm1", cfg), p / "attn", cfg, ctx)[0]
    return x + mlp(norm(x, p / "norm2", cfg), p / "mlp", cfg, ctx)


@scoped
def head(x: Tensor, p: Params, cfg: Config, ctx: Context) -> Tensor:
    """x[B, T, D] -> logits[B, T, V/tp], each rank's own words.  A tied matrix serves twice: its gradient has two parts."""
    x = norm(x, p / "norm", cfg) if cfg.norm_place == "pre" else x
    x, again = enter(x, ctx)                                                        # f: identity | all_reduce
    w = transpose(p["embed.w"], axes=(1, 0)) if cfg.tied else p["head.w"]
    y = column_parallel_linear(x, w, p.get("head.b"), again=again)
    return scale(tanh(scale(y, by=1 / cfg.soft_cap)), by=cfg.soft_cap) if cfg.soft_cap else y


def logits(tokens: Tensor, p: Params, cfg: Config, ctx: Context) -> Tensor:
    """tokens int[B, T] -> logits[B, T, V/tp], each rank's own words.  Error: ValueError where T exceeds max_seq_len."""
    if ctx.sequence.length > cfg.max_seq_len:
        raise ValueError(f"{ctx.sequence.length} positions, the model has max_seq_len {cfg.max_seq_len}")
    x = embed(tokens, p, cfg, ctx)
    layer = blockwise if ctx.plan.block else block
    for i in range(cfg.n_layers):
        x = layer(x, p / f"layers.{i}", cfg, ctx.within(cfg.window(i)))
    return head(x, p, cfg, ctx)


def forward(tokens: Tensor, p: Params, cfg: Config, ctx: Context) -> Tensor:
    """tokens int[B, T] -> logits[B, T, vocab_size] on every rank: gathered, and without the words of the padding."""
    return gather_vocab(logits(tokens, p, cfg, ctx), comm=ctx.mesh.tp, **words(cfg))


def loss(tokens: Tensor, targets: np.ndarray, p: Params, cfg: Config, ctx: Context) -> tuple[Tensor, Tensor]:
    """Cross entropy as (sum, count of valid targets) over this rank's samples.  targets int[B, T] are shifted already."""
    return cross_entropy(logits(tokens, p, cfg, ctx), targets, cfg, ctx)


def cross_entropy(y: Tensor, targets: np.ndarray, cfg: Config, ctx: Context) -> tuple[Tensor, Tensor]:
    """Of this rank's logits y[B, T, V/tp]: (sum, count), the same on all tp ranks."""
    return vocab_parallel_cross_entropy(y, targets, comm=ctx.mesh.tp, **words(cfg))


def words(cfg: Config) -> dict[str, int]:
    return {"n_words": cfg.vocab_size, "n_rows": cfg.padded_vocab}
