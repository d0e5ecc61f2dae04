"""Localises an emulation of bfloat16 that is not what torch and ml_dtypes mean by it: the numbers, and ops that compute in it.

u = 2^-8 is bfloat16's unit roundoff: a number of 8 bits is the nearest one within half of its last place.
"""
from contextlib import nullcontext

import ml_dtypes
import numpy as np
import pytest
import torch

from refimpl import ops
from refimpl.autograd import Round, Tensor, bfloat16, call, value_and_grad

F = torch.nn.functional
U = 2.0 ** -8

# -- the numbers -------------------------------------------------------------------------------------------------------


def floats(bits):
    return bits.astype(np.uint32).view(np.float32)


def by_torch(x):
    return torch.tensor(x).to(torch.bfloat16).float().numpy()


def by_ml_dtypes(x):
    with np.errstate(invalid="ignore"):                 # it warns of nan
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)


NUMBERS = np.arange(1 << 16, dtype=np.uint32) << 16


@pytest.mark.parametrize("peer", (by_torch, by_ml_dtypes))
@pytest.mark.parametrize("low", (0, 1, 2, 0x4000, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFF))
def test_each_number_and_what_lies_between_it_and_the_next(peer, low):
    """All 65536 upper halves: 0 are the numbers themselves, 0x8000 the middles; -0, subnormal, inf and nan among them."""
    x = floats(NUMBERS | np.uint32(low))
    require_same(bfloat16(x), peer(x))


@pytest.mark.parametrize("peer", (by_torch, by_ml_dtypes))
def test_a_million_float32_numbers(peer):
    x = floats(np.random.default_rng(0).integers(0, 1 << 32, 1_000_000, dtype=np.uint32))
    require_same(bfloat16(x), peer(x))


def require_same(got, want):
    """Bit for bit, but for the payload of nan."""
    wrong = (got.view(np.uint32) != want.view(np.uint32)) & ~(np.isnan(got) & np.isnan(want))
    assert got.dtype == want.dtype and not wrong.any(), (got[wrong][:3], want[wrong][:3])


# -- ops ---------------------------------------------------------------------------------------------------------------

draw = np.random.default_rng(1).standard_normal
B, H, T, D = 2, 4, 16, 32


def numbers(*shape, by=1.0):
    return bfloat16((draw(shape) * by).astype(np.float32))


OPS = {
    "linear": (ops.linear, lambda x, w, b: F.linear(x, w.mT, b),
               [numbers(T, D), numbers(D, 24, by=D ** -0.5), numbers(24)], {}),
    "matmul": (ops.matmul, torch.matmul, [numbers(3, T, D), numbers(3, D, 8, by=D ** -0.5)], {}),
    "gelu_tanh": (ops.gelu_tanh, lambda x: F.gelu(x, approximate="tanh"), [numbers(T, D, by=2)], {}),
    "gelu_erf": (ops.gelu_erf, F.gelu, [numbers(T, D, by=2)], {}),
    "silu": (ops.silu, F.silu, [numbers(T, D, by=2)], {}),
    "layer_norm": (ops.layer_norm, lambda x, g, b: F.layer_norm(x, g.shape, g, b),
                   [numbers(T, D), numbers(D), numbers(D)], {}),
    "softmax": (ops.softmax, lambda x: F.softmax(x, -1), [numbers(T, D, by=2)], {}),
    "attention": (ops.attention, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
                  [numbers(B, H, T, 8), numbers(B, H, T, 8), numbers(B, H, T, 8)], {"mask": ops.Mask(causal=True)}),
}


def in_torch(f, arrays, dy, dtype):
    args = [torch.tensor(a, dtype=dtype, requires_grad=True) for a in arrays]
    y = f(*args)
    return [t.detach().double().numpy() for t in (y, *torch.autograd.grad(y, args, torch.tensor(dy, dtype=dtype)))]


def in_refimpl(op, arrays, dy, static, rounding):
    with Round() if rounding else nullcontext():
        y, vjp = call(op, arrays, static)
        return [y, *(dx for dx in as_tuple(vjp(dy)) if dx is not None)]


def as_tuple(y):
    return y if isinstance(y, tuple) else (y,)


def errors(got, want):
    """Of each result, in parts of its largest number."""
    return [np.abs(a - b).max() / np.abs(b).max() for a, b in zip(got, want, strict=True)]


@pytest.mark.parametrize("name", OPS)
def test_an_op_errs_by_one_rounding_and_is_near_torch(name):
    """Of bfloat16 arguments, against torch in float64.  Ours: the result in float32, rounded once, so within u of each number,
    and float32's own error, 2^-18 at most here, of the scale.  torch may round inside as well (the probabilities of attention,
    and what its backward makes of them): within 4u of the scale, so the two lie within 5u of one another."""
    op, f, arrays, static = OPS[name]
    dy = numbers(*f(*map(torch.tensor, arrays)).shape)
    truth = in_torch(f, arrays, dy, torch.double)
    ours, plain = (in_refimpl(op, arrays, dy, static, rounding) for rounding in (True, False))
    torchs = in_torch(f, arrays, dy, torch.bfloat16)
    for a, b in zip(ours, truth):
        assert (np.abs(a - b) <= U * np.abs(b) + 2 ** -18 * np.abs(b).max()).all()
    assert max(errors(torchs, truth)) <= 4 * U and max(errors(ours, torchs)) <= 5 * U
    assert max(errors(plain, truth)) < 2 ** -18 and min(errors(ours, truth)) > 2 ** -12     # it is bfloat16's, not float32's


# -- a chain of them ---------------------------------------------------------------------------------------------------

CHAIN = {"x": numbers(B, T, D), "g": 1 + numbers(D, by=0.25), "b": numbers(D, by=0.25), "qkv": numbers(D, 3 * D, by=D ** -0.5),
         "up": numbers(D, 2 * D, by=D ** -0.5), "up.b": numbers(2 * D, by=0.25), "down": numbers(2 * D, D, by=D ** -0.5)}
CHAIN = {name: bfloat16(a.astype(np.float32)) for name, a in CHAIN.items()}
WEIGHT = numbers(B, T, D)                               # of the outputs, in the sum that is differentiated


def ours(p):
    h = ops.layer_norm(p["x"], p["g"], p["b"])
    heads = [ops.transpose(ops.reshape(t, shape=(B, T, H, D // H)), axes=(0, 2, 1, 3))
             for t in ops.split(ops.linear(h, p["qkv"]), sizes=(D,) * 3)]
    a = ops.reshape(ops.transpose(ops.attention(*heads, mask=ops.Mask(causal=True)), axes=(0, 2, 1, 3)), shape=(B, T, D))
    up = ops.gelu_tanh(ops.linear(a, p["up"], p["up.b"]))
    y = ops.softmax(ops.linear(up, p["down"]))
    return ops.sum(y * Tensor(WEIGHT.astype(p["x"].dtype))), y


def torchs(p):
    h = F.layer_norm(p["x"], (D,), p["g"], p["b"])
    heads = [t.reshape(B, T, H, D // H).transpose(1, 2) for t in F.linear(h, p["qkv"].mT).split(D, -1)]
    a = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(B, T, D)
    up = F.gelu(F.linear(a, p["up"].mT, p["up.b"]), approximate="tanh")
    y = F.softmax(F.linear(up, p["down"].mT), -1)
    return (y * torch.tensor(WEIGHT, dtype=y.dtype)).sum(), y


def chain_in_torch(dtype):
    p = {name: torch.tensor(a, dtype=dtype, requires_grad=True) for name, a in CHAIN.items()}
    total, y = torchs(p)
    total.backward()
    return [y.detach().double().numpy(), *(t.grad.double().numpy() for t in p.values())]


def chain_in_refimpl(dtype="float32"):
    (_, y), grads = value_and_grad(ours, {name: Tensor(a.astype(dtype), name=name) for name, a in CHAIN.items()})
    return [y.array, *(grads[name].array for name in CHAIN)]


def test_a_chain_errs_as_much_as_torchs():
    """The norm of the error in parts of the result's, of the output and of every gradient.

    Up to eight roundings forward and as many back meet in a gradient; each has a size of u/√3 at most (it is uniform), they
    are independent, and no op here multiplies them by more than 2: √16·2·u/√3 = 4.6u.  None less than one rounding of most
    sizes, u/8: it is bfloat16's error and not float32's.  torch's and ours are of one kind: within a factor of 3.
    """
    truth = chain_in_torch(torch.double)
    exact, plain = chain_in_refimpl("float64"), chain_in_refimpl()
    with Round():
        rounded = chain_in_refimpl()
    others = chain_in_torch(torch.bfloat16)

    def apart(got, want):
        return np.array([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(got, want, strict=True)])
    assert apart(exact, truth).max() < 1e-12 and apart(plain, truth).max() < 2 ** -18
    mine, theirs, between = apart(rounded, truth), apart(others, truth), apart(rounded, others)
    for error in (mine, theirs):
        assert (error > U / 8).all() and (error < 4.6 * U).all(), error
    assert (between < mine + theirs + 1e-12).all() and (mine < 3 * theirs).all() and (theirs < 3 * mine).all(), (mine, theirs)
    assert 2 ** -12 < between.min() and between.max() < 2 ** -6
