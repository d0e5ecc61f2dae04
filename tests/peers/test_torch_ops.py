"""Localises an op whose values or gradients are not what the rest of the world computes: every op against torch, on all CASES.

TORCH holds one torch function per op, of the same arguments.  The twin is made an op of plain arrays, so expected values,
cotangents and scales all come from torch.  Equal means, per result: |refimpl - torch| <= tolerance·scale,

    scale        the largest |result|, or, where that is more, how far the result moves when every input moves by one
                 rounding, in roundings (this is what a result loses by cancellation); for a cotangent plus |dy|·|y|/|x|
    float64      1e-12
    float32      refimpl in float32 against torch in float64 on the same, rounded arguments: 8·√n·2^-24, n the size of the
                 largest array, since the roundings of a sum of n terms are independent in sign (Higham and Mary 2019, λ = 8)

Integer results are equal.  Where torch means something else, its twin here says so in a comment, and ELSEWHERE pins it.
"""
import importlib
import math
import pkgutil

import numpy as np
import pytest
import torch

import refimpl
from refimpl import ops
from refimpl.autograd import REGISTRY
from refimpl.cases import CASES, ON_RANKS, Case
from refimpl.check.tools import EXACT, JITTER, cast, compare, cotangents, evaluate, floats, is_array, is_float, largest, pull
from refimpl.rng import GOLDEN_GAMMA, MASK, draw, mix64

F = torch.nn.functional

# -- the twins ----------------------------------------------------------------------------------------------------------


def total(x, axis=None, keepdims=False):
    """torch sums over all axes for dim=(), numpy over none."""
    return x * 1 if axis == () else torch.sum(x, dim=axis, keepdim=keepdims)


def padded(x, before=0, after=0, axis=-1):
    """torch lists the pads from the last axis to the first."""
    pads = [0, 0] * (x.ndim - 1 - axis % x.ndim) + [before, after]
    return F.pad(x, pads)


def softmax(x):
    """torch gives nan in a row that is -inf everywhere: there we take 0."""
    hidden = (x == -math.inf).all(-1, keepdim=True)
    return torch.where(hidden, 0.0, F.softmax(torch.where(hidden, 0.0, x), dim=-1))


def attention(q, k, v, q_documents=None, k_documents=None, q_positions=None, k_positions=None, mask=ops.Mask(), scale=None):
    """torch's is_causal aligns top left, ours bottom right: an explicit mask, asked key by key.  A row of it without a key
    gives 0 in torch, too."""
    T, (G, S) = q.shape[2], k.shape[1:3]
    if q.numel() == 0 or S == 0:                        # torch has no heads to repeat and no keys to sum
        return q * 0
    of_queries, of_keys = (range(S - T, S), range(S)) if q_positions is None else (q_positions.tolist(), k_positions.tolist())
    seen = torch.tensor([[sees(mask, i, j) for j in of_keys] for i in of_queries]).reshape(T, S)
    if q_documents is not None:
        seen = seen & (q_documents[:, None, :, None] == k_documents[:, None, None, :])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=q.shape[1] != G)


def sees(mask, i, j):
    """Query position i, key position j: the docstring of Mask, in words of Python."""
    near = mask.window is None or abs(i - j) < mask.window
    return (near and (j <= i or not mask.causal)) or j < mask.prefix


def cross_entropy(logits, targets, ignore_index=-100, smoothing=0.0, smoothing_over="all", z_loss=0.0):
    """reduction="sum"; torch has the form "all" of smoothing, for "others" it takes the probabilities; it has no z-loss."""
    flat, ids = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    valid = ids != ignore_index
    if smoothing_over == "all":
        y = F.cross_entropy(flat, ids, ignore_index=ignore_index, label_smoothing=smoothing, reduction="sum")
    else:
        hot = F.one_hot(ids[valid], flat.shape[1]).to(flat.dtype)
        others = (1 - hot) * smoothing / max(flat.shape[1] - 1, 1)
        probabilities = hot * (1 - smoothing) + others if flat.shape[1] > 1 else hot
        y = F.cross_entropy(flat[valid], probabilities, reduction="sum")
    return y + z_loss * (torch.logsumexp(flat[valid], -1) ** 2).sum(), valid.sum()


def rope(x, positions, theta=10000.0, pairing="half", rotated=None):
    """Su et al. 2021, section 3.2.2: a pair is one complex number, z -> z·e^(iφ); angles in float64."""
    R = x.shape[-1] if rotated is None else rotated
    turning, rest = x[..., :R], x[..., R:]
    pairs = turning.unflatten(-1, (R // 2, 2) if pairing == "interleaved" else (2, R // 2)) if R else turning[..., None]
    last = -1 if pairing == "interleaved" or not R else -2
    angles = positions.double()[:, None] * torch.tensor([theta ** (-2 * i / R) for i in range(R // 2)], dtype=torch.double)
    turned = torch.complex(pairs.select(last, 0), pairs.select(last, -1)) * torch.polar(torch.ones_like(angles), angles)
    if R == 0:
        return x * 1
    return torch.cat([torch.stack([turned.real, turned.imag], last).flatten(-2).to(x.dtype), rest], -1)


def causal_conv(x, w):
    """Conv1d with groups = D wants [B, D, T], T > 0; the tail of its output is cut off."""
    W, D = w.shape
    if x.shape[1] == 0:
        return x * 1
    return F.conv1d(x.mT, w.T[:, None], padding=W - 1, groups=D)[..., :x.shape[1]].mT


def long_conv(x, k):
    """The direct sum in place of the FFT: Conv1d correlates, so the kernel is turned round."""
    return causal_conv(x, k.flip(0))


def dropout(x, *at, key=0, rate=0.0, shape=()):
    """torch draws another mask; here the documented one, element by element in Python's integers."""
    keep = torch.zeros(x.shape, dtype=torch.bool)
    for where in np.ndindex(*x.shape):
        index = 0
        for k, size in enumerate(shape):
            index = index * size + int(at[k][where[k]])
        keep[where] = mix64((key + (index + 1) * GOLDEN_GAMMA) & MASK) >> 40 >= rate * 2 ** 24
    return x * keep / (1 - rate)


TORCH = {
    "add": torch.add, "subtract": torch.sub, "mul": torch.mul, "divide": torch.div, "where": torch.where,
    "scale": lambda x, by: x * by,
    "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "erf": torch.erf,
    "softplus": lambda x: F.softplus(x, threshold=700),         # by default torch returns x above 20
    "power": lambda x, exponent=2.0: torch.pow(x, exponent),
    "relu": F.relu, "silu": F.silu, "gelu_erf": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x), "swiglu": lambda gate, up: F.silu(gate) * up,
    "sum": total, "mean": lambda x, axis=None, keepdims=False: torch.mean(x, dim=axis, keepdim=keepdims),
    "max": lambda x, axis=None, keepdims=False: torch.amax(x, dim=() if axis is None else axis, keepdim=keepdims),
    "cumsum": lambda x, axis=-1: torch.cumsum(x, dim=axis),
    "norm": lambda x, axis=-1, keepdims=False: torch.linalg.vector_norm(x, dim=axis, keepdim=keepdims),
    "linear": lambda x, w, b=None: F.linear(x, w.mT, b),
    "column_parallel_linear": lambda x, w, b=None, pieces=1: F.linear(x, w.mT, b),
    "row_parallel_linear": lambda x, w, pieces=1: F.linear(x, w.mT), "matmul": torch.matmul,
    "einsum": lambda a, b, spec: torch.einsum(spec, a, b),
    "softmax": softmax, "log_softmax": lambda x: F.log_softmax(x, dim=-1),
    "logsumexp": lambda x, keepdims=False: torch.logsumexp(x, dim=-1, keepdim=keepdims),
    "layer_norm": lambda x, g, b=None, eps=1e-5: F.layer_norm(x, g.shape, g, b, eps),
    "rms_norm": lambda x, w, eps=1e-6, gain="w": F.rms_norm(x, w.shape, w if gain == "w" else 1 + w, eps),
    "attention": attention, "blockwise_attention": lambda *arrays, block_q=0, block_k=0, **static: attention(*arrays, **static),
    "cross_entropy": cross_entropy, "rope": rope, "depthwise_conv": causal_conv, "fft_conv": long_conv,
    "embedding": lambda w, ids: F.embedding(ids, w), "gather": lambda x, ids: torch.index_select(x, 0, ids),
    "scatter_add": lambda x, ids, n: x.new_zeros(n, *x.shape[1:]).index_add(0, ids, x),
    "reshape": lambda x, shape: torch.reshape(x, shape), "transpose": lambda x, axes: torch.permute(x, axes),
    "concat": lambda *parts, axis=-1: torch.cat(parts, dim=axis),
    "split": lambda x, sizes, axis=-1: torch.split(x, sizes, dim=axis), "pad": padded,
    "slice_axis": lambda x, axis=-1, start=0, stop=None: torch.narrow(
        x, axis, start, (x.shape[axis] if stop is None else stop) - start),
    "repeat": lambda x, times=1, axis=-1: torch.repeat_interleave(x, times, dim=axis),
    "stop_gradient": torch.Tensor.detach, "straight_through": lambda hard, soft: hard.detach() + (soft - soft.detach()),
    "dropout": dropout,
}
WITHOUT = {name: "a collective: what it computes needs several ranks; tests/ops and tests/parallel check it on all of them"
           for name in ON_RANKS}
MORE = {                                                # corners on which torch is worth asking
    "max": [Case("ties", (np.array([[3.0, 1, 3, 3], [2, 2, 2, 2]]),), {"axis": 1}), Case("ties of all", (np.ones((2, 3)),))],
    "relu": [Case("at zero", (np.array([0.0, -0.0, 1.0]),))],
    "norm": [Case("the zero vector", (np.array([[0.0, 0.0], [3.0, 4.0]]),))],
    **{name: [Case(f"alone, {x:.0f}", (np.array([x]),)) for x in (-20.0, -38.0)] for name in ("sigmoid", "silu", "quick_gelu")},
    "softplus": [Case("alone, -38", (np.array([-38.0]),)), Case("large", (np.array([-1e4, -30.0, 20.5, 30.0, 1e4]),))],
    "gelu_erf": [Case("every range of erf", (np.linspace(-9, 9, 181),))],
    "erf": [Case("every range", (np.linspace(-7, 7, 281),))],
}
ALL_CASES = [pytest.param(name, case, id=f"{name}-{case.name}") for name in TORCH
             for case in [*CASES.get(name, []), *MORE.get(name, [])]]

# -- the comparison -----------------------------------------------------------------------------------------------------


def as_op(twin):
    """A torch function as an op of plain arrays: (y, vjp)."""
    def run(*arrays, **static):
        args = [None if a is None else torch.tensor(a.astype("int64") if a.dtype.kind in "iu" else a, requires_grad=is_float(a))
                for a in arrays]
        ys = twin(*args, **static)
        ys = ys if isinstance(ys, tuple) else (ys,)

        def vjp(*dys):
            wanted = [a for a in args if a is not None and a.requires_grad]
            ends = [(y, torch.tensor(dy)) for y, dy in zip(ys, dys) if y.requires_grad]
            grads = torch.autograd.grad([y for y, _ in ends], wanted, [dy for _, dy in ends], allow_unused=True) if ends else ()
            found = {id(a): g for a, g in zip(wanted, grads) if g is not None}
            return tuple(found[id(a)].numpy() if id(a) in found else None for a in args)
        return tuple(y.detach().numpy() for y in ys), vjp
    return run


def results(op, args, dy, static):
    ys, vjp = evaluate(op, args, static)
    return [*ys, *pull(op, vjp, dy, args)]


def scales_of(twin, args, dy, static):
    """What the tolerance of each result is counted in: see the top."""
    def moved(arrays, trial):
        return [np.asarray(a * (1 + JITTER * np.sign(draw(f"{trial} {k}", a.shape)))) if is_float(a) else a
                for k, a in enumerate(arrays)]
    args, dy = cast(args, "float64"), cast(dy, "float64")
    out = results(twin, args, dy, static)
    scales = [0.0 if a is None else largest([a]) for a in out]
    for trial in range(3):
        near = results(twin, moved(args, f"args {trial}"), moved(dy, f"dy {trial}"), static)
        scales = [s if a is None else max(s, largest([b - a]) / JITTER) for s, a, b in zip(scales, out, near)]
    for k in floats(args):
        size = largest([args[k]])
        scales[len(dy) + k] += largest(dy) * largest(out[:len(dy)]) / size if size else 0
    return scales


def require_equal(op, case, dtype, tolerance, change=lambda a: a):
    """Outputs and cotangents of `op` at `dtype` against torch's in float64 on the same arguments; scales by torch, too."""
    twin, args = as_op(TORCH[op.name]), cast(case.arrays, dtype)
    dy = cast(cotangents(evaluate(twin, cast(args, "float64"), case.static)[0], f"dy {case.name}"), dtype)
    expected = results(twin, cast(args, "float64"), cast(dy, "float64"), case.static)
    got = results(op, args, dy, case.static)
    for i, (a, b) in enumerate(zip(got, expected)):
        if b is not None:
            assert a.shape == b.shape and (a.dtype == dtype if is_float(b) else (a == b).all()), (
                f"{op.name}: result {i} is {a.dtype}{list(a.shape)}, torch gives {b.dtype}{list(b.shape)}")
    scales = scales_of(twin, args, dy, case.static)
    compare(op, f"in {dtype} against torch", [a if a is None else change(a) for a in got], expected, tolerance, scales)


@pytest.mark.parametrize("name, case", ALL_CASES)
def test_values_and_gradients_equal_torch_in_float64(name, case):
    require_equal(REGISTRY[name], case, "float64", EXACT)


@pytest.mark.parametrize("name, case", ALL_CASES)
def test_values_and_gradients_equal_torch_in_float32(name, case):
    """Blockwise attention makes p = e^(s - lse) again in its vjp: p is as far off as lse, which is as large as the scores."""
    n = max([1, *(a.size for a in filter(is_array, case.arrays))])
    scores = 1.0
    if name == "blockwise_attention" and n > 1:
        q, k = case.arrays[:2]
        scores = max(1.0, float(np.abs(np.einsum("bhtk,bgsk->bhgts", q, k)).max(initial=0)) / math.sqrt(q.shape[3]))
    require_equal(REGISTRY[name], case, "float32", 8 * math.sqrt(n) * scores * 2.0 ** -24)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", ["log_softmax", "cross_entropy"])
def test_what_all_logits_share_costs_no_digits(name, dtype):
    """Logits 10000, 10001, 10002 are exact in both dtypes, and so are their differences: x - lse must not be a difference of
    large numbers.  Scale: the result alone; the rule above would excuse a loss of four digits."""
    arrays = [np.array([[1e4, 1e4 + 1, 1e4 + 2]])] + ([np.array([2])] if name == "cross_entropy" else [])
    args = cast(arrays, dtype)
    got, expected = (evaluate(f, a, {})[0][0] for f, a in ((REGISTRY[name], args), (as_op(TORCH[name]), arrays)))
    assert np.abs(got - expected).max() <= 8 * np.finfo(dtype).eps * np.abs(expected).max()


@pytest.mark.parametrize("name", TORCH)
def test_an_error_of_one_in_a_billion_is_found(name):
    with pytest.raises(AssertionError, match="in float64 against torch is off by"):
        for case in CASES[name]:
            require_equal(REGISTRY[name], case, "float64", EXACT, lambda a: a * (1 + 1e-9) if is_float(a) else a)


def test_every_op_has_a_twin_or_a_reason():
    for module in pkgutil.walk_packages(refimpl.__path__, "refimpl."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    registered = {name for name, op in REGISTRY.items() if op.__module__.partition(".")[0] == "refimpl"}
    assert registered == set(TORCH) | set(WITHOUT) and not set(TORCH) & set(WITHOUT)
    assert [name for name in TORCH if not CASES.get(name)] == []


# -- where torch means something else ----------------------------------------------------------------------------------

ELSEWHERE = [
    pytest.param("softmax", lambda x: F.softmax(x, -1), [-math.inf, -math.inf], [1.0, 1.0], [math.nan] * 2, [0.0] * 2,
                 id="softmax of a row without a finite logit"),
    pytest.param("log_softmax", lambda x: F.log_softmax(x, -1), [-math.inf, -math.inf], [0.0, 0.0], [math.nan] * 2,
                 [-math.inf] * 2, id="log_softmax of such a row"),
    pytest.param("softplus", F.softplus, [21.0], [1.0], [21.0], [21.0 + math.log1p(math.exp(-21))],
                 id="softplus above torch's threshold"),
]
CORNERS = [
    pytest.param("log", torch.log, 0.0, id="log"), pytest.param("sqrt", torch.sqrt, 0.0, id="sqrt"),
    pytest.param("power", torch.sqrt, 0.0, id="power"),
]


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize("name, function, x, dy, in_torch, here", ELSEWHERE)
def test_a_stated_difference(name, function, x, dy, in_torch, here):
    np.testing.assert_array_equal(function(torch.tensor(x, dtype=torch.double)).numpy(), in_torch)
    np.testing.assert_array_equal(REGISTRY[name].array(np.array(x))[0], here)


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize("name, function, x", CORNERS)
def test_a_zero_cotangent_meets_an_infinite_slope(name, function, x):
    """torch: 0·∞ = nan.  Here 0, so that the branch that `where` did not take passes nothing on."""
    t = torch.tensor([x], dtype=torch.double, requires_grad=True)
    assert torch.autograd.grad(function(t), t, torch.zeros(1, dtype=torch.double))[0].isnan().all()
    static = {"exponent": 0.5} if name == "power" else {}
    assert REGISTRY[name].array(np.array([x]), **static)[1](np.zeros(1)) == 0
