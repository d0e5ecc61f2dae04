"""Localises faults of emulated rounding: numbers that a format has not, errors of the wrong size, or draws that repeat."""
import contextlib

import numpy as np
import pytest

from refimpl.autograd import Record, Tensor, bfloat16, value_and_grad
from refimpl.autograd.op import REGISTRY, Seam, call
from refimpl.comm import Mesh
from refimpl.comm.base import SerialComm
from refimpl.golden.emulate import FORMATS, NEAREST, Reordered, Rounding, rounded
from refimpl.golden.recipe import MODELS, Recipe
from refimpl.golden.trace import trace
from refimpl.ops import CAUSAL, Mask, linear
from refimpl.ops import sum as total
from refimpl.parallel import SequenceLayout
from refimpl.rng import draw, draw24, stream

CAST = {"float32": np.float32, "float16": np.float16}
BITS = {"float32": np.uint32, "float16": np.uint16}
RECIPE = Recipe(MODELS["gpt-micro"], steps=1)
U = {name: fmt.u for name, fmt in FORMATS.items()}


def cast(x, dtype):
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return x.astype(CAST[dtype]).astype(np.float64)


def require_same_bits(a, b):
    """Nan in the same places, and elsewhere the same bits, the sign of 0 included."""
    assert np.array_equal(np.isnan(a), np.isnan(b))
    assert np.where(np.isnan(a), 0, a).tobytes() == np.where(np.isnan(b), 0, b).tobytes()


def numbers_of(dtype):
    """float64: all of float16, or 200 000 of float32 of every exponent, without nan and infinity."""
    bits = np.arange(2 ** 16) if dtype == "float16" else draw24(stream(0, "bits"), np.arange(200_000)) << 8 | 0x5A
    with np.errstate(invalid="ignore"):
        a = bits.astype(BITS[dtype]).view(CAST[dtype]).astype(np.float64)
    return a[np.isfinite(a)]


# -- to nearest -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", CAST)
def test_a_number_of_the_format_is_its_own_nearest(dtype):
    a = numbers_of(dtype)
    require_same_bits(rounded(a, FORMATS[dtype]), a)


@pytest.mark.parametrize("dtype", CAST)
def test_ties_and_their_neighbours_go_where_numpys_cast_takes_them(dtype):
    """Halfway from each number to the next: from the smallest subnormal to the largest number, whose next is infinity."""
    a = numbers_of(dtype).astype(CAST[dtype])
    with np.errstate(over="ignore"):
        up = np.nextafter(a, CAST[dtype](np.inf)).astype(np.float64)
    fmt, a = FORMATS[dtype], a.astype(np.float64)
    up = np.where(np.isinf(up), np.sign(up) * 2.0 ** fmt.largest, up)
    tie = (a + up) / 2                                  # exact: one bit more than the format has
    assert len(tie) > 60_000
    for x in (tie, np.nextafter(tie, np.inf), np.nextafter(tie, -np.inf)):
        require_same_bits(rounded(x, fmt), cast(x, dtype))


@pytest.mark.parametrize("dtype", CAST)
def test_numbers_of_every_float64_exponent_are_rounded_as_numpy_does(dtype):
    exponents = np.repeat(np.arange(-1074, 1025), 40)
    x = np.ldexp(draw("mantissas", exponents.shape), exponents)
    assert np.isfinite(x).all() and (x != 0).sum() > 80_000
    require_same_bits(rounded(x, FORMATS[dtype]), cast(x, dtype))


@pytest.mark.parametrize("dtype", FORMATS)
def test_nan_infinity_and_zeros_stay(dtype):
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0])
    require_same_bits(rounded(x, FORMATS[dtype]), x)
    for dither in (0.0, 0.9):                           # (a zero loses its sign here)
        assert np.array_equal(rounded(x, FORMATS[dtype], np.full(5, dither)), x, equal_nan=True)


def test_bfloat16_is_that_of_the_trainer():
    """Every upper half with lower halves around the tie, so subnormals, overflow and all exponents, too."""
    upper, lower = np.arange(2 ** 16, dtype=np.uint32) << 16, np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    x = (upper[:, None] | lower).view(np.float32)
    with np.errstate(invalid="ignore"):                 # signalling nans
        x = x[~np.isnan(x)]
        require_same_bits(rounded(x.astype(np.float64), FORMATS["bfloat16"]), bfloat16(x).astype(np.float64))


@pytest.mark.parametrize("dtype", FORMATS)
def test_u_is_the_largest_relative_error(dtype):
    x = 1 + np.arange(4096) / 4096 * 4 * U[dtype]
    worst = (np.abs(rounded(x, FORMATS[dtype]) - x) / x).max()
    assert 0.99 * U[dtype] < worst <= U[dtype]


# -- by chance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FORMATS)
def test_what_is_exact_stays_exact_whatever_is_drawn(dtype):
    a = numbers_of("float16") if dtype == "float16" else rounded(numbers_of("float32"), FORMATS[dtype])
    a = a[np.isfinite(a)]
    for dither in (0.0, 0.5, 1 - 2.0 ** -24):
        assert np.array_equal(rounded(a, FORMATS[dtype], np.full(a.shape, dither)), a)


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_mean_of_many_draws_is_what_was_rounded(dtype):
    """A fraction f of a unit goes up with probability f, so the mean of n is off by √(f(1 - f)/n) units."""
    n, f = 20_000, np.array([1 / 64, 0.25, 0.5, 0.8125, 63 / 64])
    for start in (1.0, -1.5, 2.0 ** (FORMATS[dtype].smallest + 1)):     # the last is subnormal
        unit = 2 * U[dtype] if abs(start) >= 1 else 2.0 ** FORMATS[dtype].smallest
        x = start + f * unit
        dither = draw24(stream(2, "d"), np.arange(5 * n)).reshape(n, 5) / 2 ** 24
        y = rounded(np.broadcast_to(x, (n, 5)), FORMATS[dtype], dither)
        assert set(np.unique(y)) <= {start, start + unit}
        off = (y.mean(axis=0) - x) / unit
        assert (np.abs(off) < 5 * np.sqrt(f * (1 - f) / n)).all(), off


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_variance_is_a_sixth_of_ulp_squared_and_a_twelfth_to_nearest(dtype):
    """Of e² itself the variance is 1/15 - 1/36 = 7/180 (by chance) and 1/80 - 1/144 = 1/180 (to nearest), in ulp⁴."""
    n, ulp = 100_000, 2 * U[dtype]
    x = 1.5 + draw("where", (n,), 0.5) + draw("its lower bits", (n,), 2.0 ** -25)
    by_chance = rounded(x, FORMATS[dtype], draw24(stream(1, "dither"), np.arange(n)) / 2 ** 24) - x
    nearest = rounded(x, FORMATS[dtype]) - x
    assert abs(np.mean(by_chance ** 2) / ulp ** 2 - 1 / 6) < 5 * np.sqrt(7 / 180 / n)
    assert abs(np.mean(nearest ** 2) / ulp ** 2 - 1 / 12) < 5 * np.sqrt(1 / 180 / n)
    assert abs(np.mean(by_chance)) < 5 * ulp * np.sqrt(1 / 6 / n)
    assert NEAREST ** 2 == pytest.approx((1 / 12) / (1 / 6))


# -- a frame --------------------------------------------------------------------------------------------------------


def representable(a, dtype):
    return np.array_equal(rounded(a, FORMATS[dtype]), a)


def floats(values):
    return [a for a in (values if isinstance(values, (tuple, list)) else [values]) if getattr(a, "dtype", None) == "float64"]


@pytest.mark.parametrize("seed", (None, 3))
@pytest.mark.parametrize("dtype", FORMATS)
def test_what_ops_give_and_hand_on_is_representable_and_losses_are_float32(dtype, seed):
    record = Record()
    trace(RECIPE, SerialComm(), Rounding(dtype, seed), [record])
    ops = [e for e in record if not isinstance(e.op, Seam)]
    for e in ops:
        loss = "cross_entropy" in e.op.name
        for a in floats(e.y):
            assert representable(a, "float32" if loss else dtype), e.name
        for a in floats(e.dx):
            assert representable(a, dtype), e.name
    losses = [a for e in ops if "cross_entropy" in e.op.name for a in floats(e.y)]
    assert len(losses) and len(ops) > 50 and sum(e.dx is not None for e in ops) > 50
    assert dtype == "float32" or not all(representable(a, dtype) for a in losses)


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_optimizer_keeps_float32_masters_and_moments(dtype):
    values = trace(RECIPE, SerialComm(), Rounding(dtype))
    for kind in ("m", "v", "params"):
        arrays = [v.array for key, v in values.items() if key.startswith(f"step1/{kind}/")]
        assert arrays and all(representable(a, "float32") for a in arrays)
        assert dtype == "float32" or not any(representable(a, dtype) for a in arrays if a.size > 100)


def test_ids_conditions_and_none_stay_as_they_are():
    frame = Rounding("bfloat16", 0)
    for a in (np.arange(999), np.array([True, False]), np.full(3, 1 / 3, "float32"), None):
        assert frame.round(a) is a
    x = np.full(3, 1 / 3)
    ids, y, nothing = frame.round((np.arange(3), x, None))
    assert ids.tolist() == [0, 1, 2] and nothing is None and representable(y, "bfloat16") and not representable(x, "bfloat16")
    values = trace(RECIPE, SerialComm(), Rounding("bfloat16", 0))
    truth = trace(RECIPE, SerialComm())
    for name in ("tokens", "targets"):
        assert np.array_equal(values[f"step1/{name}"].array, truth[f"step1/{name}"].array)


def test_the_same_seed_gives_the_same_numbers_and_another_others():
    def numbers(seed):
        return {key: v.array.tobytes() for key, v in trace(RECIPE, SerialComm(), Rounding("float16", seed)).items()}
    one, again, other, nearest = numbers(1), numbers(1), numbers(2), numbers(None)
    assert one == again
    for a in (other, nearest):
        same = {key.split("/")[1] for key in one if key.startswith("step1/") and a[key] == one[key]}
        assert same <= {"tokens", "targets", "dact", "act"}     # acts: what is copied from exact weights (positions, embed)
        assert sum(a[key] != one[key] for key in one) > 200


def test_no_draw_is_used_twice():
    frame = Rounding("bfloat16", 7)
    first, second = frame.dither((4, 5)), frame.dither((4, 5))
    assert first.shape == (4, 5) and 0 <= min(first.min(), second.min()) and max(first.max(), second.max()) < 1
    assert not (first == second).any()


# -- sums -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", (16, 256))
def test_a_product_errs_as_one_that_is_added_up_in_float32(k):
    """Against sums in float32, one after another, each product added before it is rounded (as a fused multiply-add): the order
    of magnitude, for in hardware the order is another."""
    n = 400
    a, b = draw("a", (n, k)), draw("b", (k, 1))
    sequential = np.zeros((n, 1), np.float32)
    for j in range(k):
        sequential = (sequential.astype(np.float64) + a[:, j:j + 1] * b[j]).astype(np.float32)
    y = a @ b
    actual = np.sqrt(np.mean((sequential - y) ** 2))
    emulated = NEAREST * np.sqrt(np.mean([(Rounding("bfloat16", s).summed(y, a, b) - y) ** 2 for s in range(8)]))
    assert actual / 3 < emulated < 3 * actual, (actual, emulated)
    assert Rounding("bfloat16").summed(y, a, b) is y


def test_a_product_errs_by_the_formula_without_bias():
    """NEAREST times the deviation has the variance k/6·u²·Σ x²w²: of n draws, uniform, with 5 standard errors (e⁴ is 9/5)."""
    a, b, n = draw("a", (1, 64)), draw("b", (64, 1)), 4000
    y = a @ b
    off = np.array([Rounding("bfloat16", s).summed(y, a, b).item() - y.item() for s in range(n)]) * NEAREST
    variance = 64 / 6 * U["float32"] ** 2 * ((a * a) @ (b * b)).item()
    assert abs(off.mean()) < 5 * np.sqrt(variance / n)
    assert abs(np.mean(off ** 2) / variance - 1) < 5 * np.sqrt((9 / 5 - 1) / n)


def product_of(x, w, seed):
    def loss(p):
        y = linear(p["x"], p["w"])
        return total(y * y), y
    params = {"x": Tensor(x, name="x"), "w": Tensor(w, name="w")}
    if seed is None:
        (_, y), grads = value_and_grad(loss, params)
    else:
        with Reordered(seed):
            (_, y), grads = value_and_grad(loss, params)
    return [y.array, *(g.array for g in grads.values())]


def test_another_order_changes_nothing_where_sums_are_exact():
    """Multiples of 2^-6 up to 2^3: every product and sum fits into 53 bits.  A lost or doubled term would show."""
    x, w = (np.rint(draw(name, shape, 512)) / 64 for name, shape in (("x", (5, 37)), ("w", (37, 11))))
    for seed in range(5):
        assert all(np.array_equal(a, b) for a, b in zip(product_of(x, w, None), product_of(x, w, seed), strict=True))


def test_another_order_changes_little_otherwise():
    """But something: k terms, in any order, are within (k + 1)·2^-53·Σ|x·w| of the truth, and two orders within twice that."""
    rng = np.random.default_rng(0)                      # (with the 24 bits of a draw most sums would be exact)
    x, w = rng.normal(size=(50, 300)), rng.normal(size=(300, 70))
    (y, *_), (z, *_), (other, *_) = (product_of(x, w, seed) for seed in (None, 0, 1))
    assert (np.abs(y - z) <= 2 * 301 * 2.0 ** -53 * (np.abs(x) @ np.abs(w))).all()
    assert (y != z).mean() > 0.1 and (z != other).mean() > 0.1
    truth, found = trace(RECIPE, SerialComm()), trace(RECIPE, SerialComm(), frames=[Reordered(0)])
    for key, v in truth.items():
        off = np.abs(found[key].array - v.array).max()
        assert off <= 1e-11 * max(np.abs(v.array).max(), 1e-3), key     # (gradients that are rounding alone have no scale)
    assert any((found[key].array != v.array).any() for key, v in truth.items())


# -- attention ------------------------------------------------------------------------------------------------------

SHAPE, GROUPS, SCALE = (2, 4, 12, 8), 2, 0.75           # B, H, T, K; kv heads
SCORE = 8.0                                             # the scores' standard deviation
COMM = Mesh().cp
OPS = {"attention": {}, "blockwise_attention": {"block_q": 5, "block_k": 4},
       "ring_attention": {"comm": COMM, "layout": SequenceLayout("zigzag", 12)},
       "all_to_all_attention": {"comm": COMM, "layout": SequenceLayout("zigzag", 12)}}


def attended(name, inputs, dtype="float64", frames=()):
    """dq, dk, dv of an attention op, of plain arrays: as on a tape, but for its tags."""
    q, k, v, dy = (a.astype(dtype) for a in inputs)
    with contextlib.ExitStack() as stack:
        for frame in frames:
            stack.enter_context(frame)
        y, vjp = call(REGISTRY[name], (q, k, v), {"mask": CAUSAL, "scale": SCALE, **OPS[name]})
        return [d.astype(np.float64) for d in vjp(dy)[:3]]


def inputs_of(seed):
    q, k, v, dy = (cast(draw(f"{name}{seed}", (2, GROUPS, 12, 8) if name in "kv" else SHAPE, 3 ** 0.5), "float32")
                   for name in ("q", "k", "v", "dy"))
    return cast(q * SCORE / SCALE / 8 ** 0.5, "float32"), k, v, dy


@pytest.mark.parametrize("emulated", OPS)
def test_the_emulated_errors_of_attention_are_those_of_flash_attentions_backward_pass(emulated):
    """Also where one key has all of a query's attention, so that naive attention's errors cancel."""
    found = {name: [] for name in ("attention", "blockwise_attention")}
    for seed in range(3):
        inputs = inputs_of(seed)
        truth = attended("attention", inputs)
        runs = [attended(emulated, inputs, frames=[Rounding("float32", n)]) for n in range(32)]
        for k, right in enumerate(truth):
            sigma = NEAREST * np.sqrt(np.mean([np.square(run[k] - right) for run in runs], axis=0))
            sigma = np.maximum(sigma, U["float32"] / 2 * np.abs(right))
            for name in found:
                found[name].append((np.abs(attended(name, inputs, "float32")[k] - right)[sigma > 0] / sigma[sigma > 0]))
    naive, flash = (np.concatenate(f) for f in found.values())
    assert max(naive.max(), flash.max()) < 10           # of 5,000 numbers each 5; naive attention's own errors alone: 200
    assert 0.1 < np.median(flash) < 1


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype, small", (("bfloat16", 2.0 ** -10), ("float16", 2.0 ** -13)))
def test_the_inner_product_is_that_of_the_rounded_output(name, dtype, small):
    """One query, one key: y is v = 1 + small, kept as 1, so dp - Σ y·dy is small, and 0 where y is not rounded."""
    one = np.ones((1, 1, 1, 1))
    static = {"mask": CAUSAL, "scale": 1.0, **{k: SequenceLayout("zigzag", 1) if k == "layout" else v
                                               for k, v in OPS[name].items()}}
    with Rounding(dtype):
        _, vjp = call(REGISTRY[name], (one, one, one + small), static)
        dq, dk, dv = vjp(one)[:3]
    assert dq.item() == dk.item() == small and dv.item() == 1


def spread(name, score, mask):
    """Of dv in float32, for each of two keys, in units of it: what the first query hands on, whose scores are 1 and `score`."""
    one, dy, k = (np.array(a).reshape(1, 1, 2, 1) for a in ((1.0, 1.0), (1.0, 0.0), (1.0, score)))
    static = {"mask": mask, "scale": 1.0, **{key: SequenceLayout("contiguous", 2) if key == "layout" else v
                                             for key, v in OPS[name].items()}}
    runs = []
    for seed in range(200):
        with Rounding("float32", seed):
            runs.append(call(REGISTRY[name], (one, k, one), static)[1](dy)[2].ravel())
    return np.std(runs, axis=0) / U["float32"]


@pytest.mark.parametrize("name", OPS)
def test_a_query_errs_by_the_scores_that_it_sees(name):
    """The second key's is in sight or not, and counts where it is the largest.  Of all_to_all the largest of all queries
    counts."""
    assert 60 < spread(name, 100.0, Mask())[1] < 150    # uniform in ± √2·100 units: 82; 116 where scores are made again
    assert spread(name, -1000.0, Mask())[0] < 5 and spread(name, -1000.0, CAUSAL)[0] < 5
    assert spread(name, 1000.0, CAUSAL)[0] < 5 or name == "all_to_all_attention"
