"""Localises gradients that recomputation changes by even one bit: for every op, and for blocks that chain them."""
import numpy as np
import pytest

from refimpl.autograd import REGISTRY, Params, Tensor, recompute, value_and_grad
from refimpl.cases import CASES
from refimpl.comm import Mesh
from refimpl.models import Config, Context, decoder, init
from refimpl.ops import (CAUSAL, Mask, add, attention, concat, cross_entropy, cumsum, depthwise_conv, dropout, einsum,
                         embedding, exp, fft_conv, gather, linear, logsumexp, max, mean, mul, norm, pad, repeat, reshape,
                         rms_norm, rope, scatter_add, sigmoid, softplus, split, straight_through, sum, swiglu, tanh, transpose,
                         where)
from refimpl.rng import draw

B, T, D, H, G, K, F, V = 2, 5, 8, 4, 2, 4, 12, 11
TOKENS, TARGETS = np.arange(B * T).reshape(B, T) % V, (np.arange(B * T).reshape(B, T) * 3 + 1) % V
DOCUMENTS = np.array([[0, 0, 0, 1, 1], [0, 1, 1, 1, 2]])
CASE_LIST = [pytest.param(REGISTRY[name], case, id=f"{name}-{case.name}") for name, cases in CASES.items() for case in cases
             if "parallel" not in name]                 # those want weights that are cut: the decoder's are, below


def same_bits(plain, again):
    assert set(plain) == set(again)
    for name, g in plain.items():
        assert g.array.tobytes() == again[name].array.tobytes(), name


@pytest.mark.parametrize("op, case", CASE_LIST)
def test_every_op_gives_the_same_bits(op, case):
    """Σ c·op(x), with the op inside recompute and outside."""
    params = {str(k): Tensor(a) for k, a in enumerate(case.arrays) if a is not None and a.dtype.kind == "f"}

    def whole(p):
        y = op(*(p.get(str(k), a) for k, a in enumerate(case.arrays)), **case.static)
        total = None
        for i, part in enumerate(y if isinstance(y, tuple) else (y,)):
            if part.dtype.kind == "f":
                weighted = sum(mul(part, draw(f"c {i}", part.shape)))
                total = weighted if total is None else add(total, weighted)
        return total
    with np.errstate(invalid="ignore"):                 # the logarithm of a masked row is -inf
        same_bits(value_and_grad(whole, params)[1], value_and_grad(lambda p: recompute(whole, p), params)[1])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_decoder_gives_the_same_bits_with_dropout(dtype):
    cfg = Config(vocab_size=V, n_layers=2, n_heads=2, d_model=D, max_seq_len=T, dropout=0.25)
    ctx = Context(Mesh(), np.arange(B), np.arange(T), step=3)

    def loss(run):
        def fn(p):
            x = decoder.embed(TOKENS, p, cfg, ctx)
            for i in range(cfg.n_layers):
                x = run(decoder.block, x, p / f"layers.{i}", cfg, ctx)
            return decoder.cross_entropy(decoder.head(x, p, cfg, ctx), TARGETS, cfg, ctx)
        return fn
    params = init(cfg, Mesh(), seed=1, dtype=dtype)
    same_bits(value_and_grad(loss(lambda f, *a: f(*a)), params)[1], value_and_grad(loss(recompute), params)[1])


def heads(x, n):
    """(B, T, n·K) -> (B, n, T, K)"""
    return transpose(reshape(x, shape=(B, T, n, K)), axes=(0, 2, 1, 3))


def llama(x, p):
    """rms_norm, rope, grouped attention over documents in a window, swiglu, dropout."""
    h = rms_norm(x, p["g"], gain="1+w")
    q, k, v = split(linear(h, p["qkv"]), sizes=(H * K, G * K, G * K))
    q, k = (rope(heads(a, n), np.arange(T), pairing="interleaved") for a, n in ((q, H), (k, G)))
    y = attention(q, k, heads(v, G), DOCUMENTS, DOCUMENTS, mask=Mask(causal=True, window=3))
    tiled = attention(q, repeat(k, times=H // G, axis=1), repeat(heads(v, G), times=H // G, axis=1), mask=CAUSAL)
    x = x + linear(reshape(transpose(y + tiled, axes=(0, 2, 1, 3)), shape=(B, T, H * K)), p["o"])
    gate, up = split(linear(x, p["up"]), sizes=(F, F))
    y = dropout(swiglu(gate, up), np.arange(B), np.arange(T), np.arange(F), key=5, rate=0.5, shape=(B, T, F))
    return x + einsum(y, p["down"], spec="btf,fd->btd")


def mamba(x, p):
    """Convolutions, gates, running sums, lookups, and the ops with corners."""
    y = depthwise_conv(x, p["taps"]) + fft_conv(x, p["kernel"])
    y = mul(cumsum(mul(tanh(y), sigmoid(y)), axis=1), softplus(y))
    y = where(y.array > 0, exp(tanh(y)), y)
    y = y + straight_through(Tensor(np.sign(y.array)), y)
    flat = reshape(y, shape=(B * T, D))
    mixed = scatter_add(gather(flat, np.arange(B * T) // 2), np.arange(B * T) % 3, n=3)
    ends = pad(concat(max(flat, axis=0, keepdims=True), mean(mixed, axis=0, keepdims=True), axis=0), before=1, axis=0)
    return y + mul(sum(ends, axis=0), norm(flat, axis=0)) + reshape(logsumexp(flat), shape=(B, T, 1))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_blocks_of_all_the_other_ops_give_the_same_bits(dtype):
    shapes = {"embed": (V, D), "a.g": (D,), "a.qkv": (D, (H + 2 * G) * K), "a.o": (H * K, D), "a.up": (D, 2 * F),
              "a.down": (F, D), "b.taps": (3, D), "b.kernel": (T, D)}
    params = {name: Tensor(draw(name, shape, 0.5, dtype)) for name, shape in shapes.items()}

    def loss(run):
        def fn(p: Params):
            x = run(mamba, run(llama, embedding(p["embed"], TOKENS), p / "a"), p / "b")
            return cross_entropy(linear(x, transpose(p["embed"], axes=(1, 0))), TARGETS, smoothing=0.1, z_loss=1e-3)
        return fn
    (value, _), plain = value_and_grad(loss(lambda f, *a: f(*a)), params)
    (again, _), grads = value_and_grad(loss(recompute), params)
    assert float(value) == float(again) and value.dtype == dtype
    same_bits(plain, grads)
    same_bits(plain, value_and_grad(loss(lambda f, *a: recompute(recompute, f, *a)), params)[1])
    assert all(np.isfinite(g.array).all() and g.array.any() for g in grads.values())
