"""Sampling by a full forward pass for every token: slow, and the truth that a cache has to reproduce."""
from typing import Mapping

import numpy as np

from refimpl.array import to_host
from refimpl.autograd import Layout, Params, Tensor
from refimpl.comm import Mesh
from refimpl.models import Config, Context, Plan, decoder
from refimpl.rng import draw24, stream


def sample(params: Mapping[str, Tensor], prompt: np.ndarray, n: int, cfg: Config, mesh: Mesh, temperature: float = 1.0,
           seed: int = 0, plan: Plan = Plan()) -> np.ndarray:
    """`prompt` int[T], T ≥ 1, and `n` tokens more.  The same on every rank and every mesh; cp ranks share the positions.

    Each token is drawn from softmax(logits / temperature) by a hash of (seed, its position); temperature 0 takes the
    largest logit.  The model sees the last max_seq_len tokens.
    """
    tokens = np.asarray(prompt)
    if tokens.ndim != 1 or not tokens.size or temperature < 0:
        raise ValueError(f"sample needs at least one token of prompt and temperature ≥ 0, got {tokens.shape} and {temperature}")
    for i in range(len(tokens), len(tokens) + n):
        seen = tokens[-cfg.max_seq_len:]
        logits = last_logits(params, seen, cfg, Context.over(mesh, np.zeros(1, np.int64), len(seen), plan))
        if temperature == 0:
            choice = int(np.argmax(logits))
        else:
            e = np.exp((logits - logits.max()) / temperature)
            u = float(draw24(stream(seed, "sample"), np.array([i]))[0]) / 2 ** 24
            choice = min(int(np.searchsorted(np.cumsum(e), u * e.sum(), side="right")), cfg.vocab_size - 1)
        tokens = np.append(tokens, choice)
    return tokens


def last_logits(params: Mapping[str, Tensor], seen: np.ndarray, cfg: Config, ctx: Context) -> np.ndarray:
    """float64[vocab_size], on every rank, though one cp rank alone has the last position."""
    tokens, cp = Tensor(ctx.own(seen[None]), Layout(frozenset({"cp"})), cut=ctx.cut), ctx.mesh.cp
    logits = to_host(decoder.forward(tokens, Params(params), cfg, ctx).array[0]).astype("float64")
    last = len(seen) - 1
    root = next(r for r in range(cp.size) if last in ctx.sequence.positions(r, cp.size))
    mine = logits[ctx.positions == last] if cp.rank == root else np.zeros((1, cfg.vocab_size))
    return cp.broadcast(mine, root)[0]
