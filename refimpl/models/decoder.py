"""The decoder: embed, a loop over blocks, head.  One file for serial and sharded runs: it never asks for a rank or a size.

`embed`, `block` and `head` stay callable on their own.  f and g are in attention.py and mlp.py.
Shape letters: B batch, T positions, D model, V vocabulary.  Reference: Radford et al. 2019 (GPT-2).  HF GPT2LMHeadModel
"""
import numpy as np

from refimpl.autograd import Params, Tensor, scoped
from refimpl.models.attention import attention
from refimpl.models.config import Config
from refimpl.models.context import Context, drop
from refimpl.models.mlp import mlp
from refimpl.ops import cross_entropy, embedding, layer_norm, linear, transpose


@scoped
def embed(tokens: Tensor, p: Params, cfg: Config, ctx: Context) -> Tensor:
    """tokens int[B, T] -> x[B, T, D]"""
    x = embedding(p["embed.w"], tokens) + embedding(p["positions.w"], ctx.positions)
    return drop(x, p, cfg, ctx)


@scoped
def block(x: Tensor, p: Params, cfg: Config, ctx: Context) -> Tensor:
    """x[B, T, D] -> x[B, T, D]: x plus what attention adds, plus what the MLP adds to that."""
    mixed, _, _ = attention(norm(x, p / "norm1", cfg), p / "attn", cfg, ctx)
    x = x + mixed
    return x + mlp(norm(x, p / "norm2", cfg), p / "mlp", cfg, ctx)


@scoped
def norm(x: Tensor, p: Params, cfg: Config) -> Tensor:
    return layer_norm(x, p["g"], p["b"], eps=cfg.eps)


@scoped
def head(x: Tensor, p: Params, cfg: Config) -> Tensor:
    """x[B, T, D] -> logits[B, T, V]: the embedding matrix serves twice, so its gradient has two contributions."""
    x = norm(x, p / "norm", cfg)
    return linear(x, transpose(p["embed.w"], axes=(1, 0)))


def forward(tokens: Tensor, p: Params, cfg: Config, ctx: Context) -> Tensor:
    """tokens int[B, T] -> logits[B, T, V].  Error: ValueError where T exceeds max_seq_len."""
    if tokens.shape[1] > cfg.max_seq_len:
        raise ValueError(f"{tokens.shape[1]} positions, the model has max_seq_len {cfg.max_seq_len}")
    x = embed(tokens, p, cfg, ctx)
    for i in range(cfg.n_layers):
        x = block(x, p / f"layers.{i}", cfg, ctx)
    return head(x, p, cfg)


def loss(tokens: Tensor, targets: np.ndarray, p: Params, cfg: Config, ctx: Context) -> tuple[Tensor, Tensor]:
    """Cross entropy as (sum, count of valid targets) over this rank's samples.  targets int[B, T] are shifted already."""
    return cross_entropy(forward(tokens, p, cfg, ctx), targets)
