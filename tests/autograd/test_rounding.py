"""Localises bfloat16 numbers that are not the nearest ones, and values that `Round` leaves as they were or should leave so.

The expected number comes from a table of all bfloat16 numbers, in which the nearest is looked up in float64, without a bit of
bit arithmetic.  torch and ml_dtypes are asked in tests/peers/test_bfloat16.py.
"""
import threading

import numpy as np
import pytest
from device import double

from refimpl import ops
from refimpl.array import to_host
from refimpl.autograd import REGISTRY, Record, Round, Tensor, bfloat16, call, recompute, seam, stack, value_and_grad
from refimpl.cases import CASES, ON_RANKS
from refimpl.check.tools import cast, cotangents, is_array
from refimpl.comm import Comm
from refimpl.parallel import reduce_from
from refimpl.train.adamw import adamw

LOSSES = {"cross_entropy", "vocab_parallel_cross_entropy"}
ALL = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)         # every bfloat16 number, by its bits
POSITIVE = np.append(ALL[:0x7F80].astype(np.float64), 2.0 ** 128)          # 0 ... the largest, and what inf stands for


def nearest(x):
    """In POSITIVE the index of a number is its bits, so the even one of two equally near ones has an even index."""
    size = np.minimum(np.abs(x.astype(np.float64)), POSITIVE[-1])
    low = np.minimum(np.searchsorted(POSITIVE, size, "right") - 1, len(POSITIVE) - 2)
    below, above = size - POSITIVE[low], POSITIVE[low + 1] - size
    index = low + ((above < below) | ((above == below) & (low % 2 == 1)))
    return np.copysign(np.append(ALL[:0x7F80], np.float32(np.inf))[index], x)


def same(a, b):
    """Bit for bit, but for the payload of nan."""
    return a.dtype == b.dtype and a.shape == b.shape and (
        a.tobytes() == b.tobytes() or bool(((bits(a) == bits(b)) | (np.isnan(a) & np.isnan(b))).all()))


def bits(a):
    return np.ascontiguousarray(a).view(f"u{a.dtype.itemsize}").reshape(a.shape)


def representable(a):
    return bool(((bits(a) & 0xFFFF) == 0)[~np.isnan(a)].all())


# -- the number ----------------------------------------------------------------------------------------------------


def test_every_bfloat16_number_is_its_own():
    """All 65536, -0, subnormal ones and inf among them."""
    assert same(bfloat16(ALL), ALL) and np.isnan(ALL).sum() == 2 * 127


def test_between_two_numbers_the_nearest_is_taken_and_of_a_tie_the_even_one():
    """The middle of every two neighbours, and the float32 numbers next to it and to the neighbours, of both signs.  The middle
    above the largest number is inf: its last bit is 0."""
    starts = np.arange(0x7F80, dtype=np.uint32) << 16
    for low in (1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        for sign in (0, 1 << 31):
            x = (starts | low | sign).astype(np.uint32).view(np.float32)
            got = bfloat16(x)
            assert representable(got) and same(got, nearest(x)), hex(low)
    ties = (starts | 0x8000).view(np.float32)
    assert ((bits(bfloat16(ties)) >> 16) % 2 == 0).all()


@pytest.mark.parametrize("low", (0x7F800001, 0xFF800001, 0x7F80FFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0xFFFF8000))
def test_nan_stays_nan(low):
    """Also where only its lower half says so, and where rounding would carry beyond the last number."""
    assert np.isnan(bfloat16(np.array([low], np.uint32).view(np.float32))).all()


@pytest.mark.parametrize("x, want", [
    (1 + 2 ** -8, 1.0), (1 + 3 * 2 ** -8, 1 + 2 ** -6), (1 + 2 ** -8 + 2 ** -23, 1 + 2 ** -7), (-1 - 2 ** -8, -1.0),
    (0.1, 0.10009765625), (3.1415927, 3.140625), (255.5, 256.0), (3.3895314e38, 3.3895314e38),
    (np.uint32(0x7F7F7FFF).view(np.float32), 3.3895314e38), (np.uint32(0x7F7F8000).view(np.float32), np.inf),
    (-3.4e38, -np.inf),
    (2.0 ** -134, 0.0), (2.0 ** -133, 2.0 ** -133), (1.5 * 2.0 ** -133, 2.0 ** -132), (2.0 ** -149, 0.0), (-2.0 ** -149, -0.0),
    (np.inf, np.inf)])
def test_by_hand(x, want):
    assert bits(bfloat16(np.array(x, np.float32))) == bits(np.array(want, np.float32))


def test_any_form_of_array():
    """0-d and empty ones, strides, reversed and transposed ones, read-only ones; the argument is left alone."""
    x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    want, before = nearest(x), x.tobytes()
    x.flags.writeable = False
    for cut in (np.s_[...], np.s_[::2, 1::3], np.s_[::-1, ::-1], np.s_[2, 3], np.s_[:0], np.s_[:, None, 2:2], np.s_[1:2]):
        got = bfloat16(x[cut])
        assert isinstance(got, np.ndarray) and same(got, np.asarray(want[cut])) and not np.shares_memory(got, x)
        assert same(bfloat16(x[cut].T), np.asarray(want[cut].T))
    assert same(bfloat16(np.broadcast_to(x[:, :1], (4, 5))), np.broadcast_to(want[:, :1], (4, 5)))
    assert x.tobytes() == before


@pytest.mark.parametrize("dtype", ("float64", "float16", "int32", "uint32", "complex64"))
def test_anything_but_float32_is_refused(dtype):
    with pytest.raises(TypeError, match=f"bfloat16 is the upper half of float32, got {dtype}"):
        bfloat16(np.ones(2, dtype))


def test_on_a_device():
    """The double: nothing that cupy lacks, and numpy's bits."""
    x = np.append(ALL[::7], np.random.default_rng(0).standard_normal(100).astype(np.float32))
    for a in (x, x[::2], x[:0], np.array(np.float32(1.01))):
        got = bfloat16(double.asarray(a))
        assert type(got) is double.DeviceArray and same(to_host(got), bfloat16(a))


# -- the frame -----------------------------------------------------------------------------------------------------


def as_tuple(y):
    return y if isinstance(y, tuple) else (y,)


def require_rounded(op, args, static, dy=None):
    """Under Round the outputs of `op`, but for a loss, and its cotangents are the rounded ones of those without.  Those of `dy`
    are the same with and without.  -> whether rounding changed one."""
    y, vjp = call(op, args, static)
    dy = cast(cotangents(list(map(np.asarray, as_tuple(y))), "dy"), "float32") if dy is None else dy
    dx = vjp(*dy)
    with Round():
        rounded_y, rounded_vjp = call(op, args, static)
        rounded_dx = rounded_vjp(*dy)
    assert isinstance(rounded_y, tuple) == isinstance(y, tuple) and isinstance(rounded_dx, tuple) == isinstance(dx, tuple)
    changed = False
    for kept, group, want in ((op.name in LOSSES, as_tuple(rounded_y), as_tuple(y)),
                              (False, as_tuple(rounded_dx), as_tuple(dx))):
        assert len(group) == len(want)
        for got, a in zip(group, want):
            if a is None:
                assert got is None
                continue
            a, got = np.asarray(a), np.asarray(got)
            if kept or a.dtype != np.float32:           # the loss, ids, counts
                assert got.dtype == a.dtype and got.tobytes() == a.tobytes()
            else:
                assert representable(got) and same(got, bfloat16(a))
                changed |= not representable(a)
    return changed


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_cotangents_of_every_op_are_rounded(name):
    """On all CASES in float32; and on one at least there is something to round."""
    changed = [require_rounded(REGISTRY[name], cast(case.arrays, "float32"), case.static) for case in CASES[name]]
    assert any(changed), name


@pytest.mark.parametrize("name", sorted(ON_RANKS))
def test_collectives_are_rounded_after_the_sum(ranks, name):
    """Also of numbers that are no bfloat16 ones: rounded before, the sum would be another."""
    def check(comm: Comm):
        for case in ON_RANKS[name]:
            arrays, static = case.arguments(comm, "float32")
            y, _ = REGISTRY[name].array(*arrays, comm=comm, **static)
            dy = [np.ones(a.shape, np.float32) * np.float32(0.1) if a.dtype.kind == "f" else np.zeros_like(a)
                  for a in map(np.asarray, as_tuple(y))]
            require_rounded(REGISTRY[name], arrays, {"comm": comm, **static}, dy)
    ranks.run(check)


def test_a_sum_over_ranks_by_hand(ranks):
    """1 + 2^-10 on rank 0, -1 on rank 1, nothing elsewhere: 2^-10.  Rounded before the sum: 0."""
    def check(comm: Comm):
        x = np.array([(1 + 2 ** -10, -1.0)[comm.rank] if comm.rank < 2 else 0.0], np.float32)
        with Round():
            y, vjp = call(reduce_from, (x,), {"comm": comm})
        assert y[0] == (2 ** -10 if comm.size > 1 else 1.0) and vjp(np.float32([0.3]))[0] == np.float32(0.30078125)
    ranks.run(check)


def test_float64_is_left_alone():
    with Round():
        y, vjp = call(ops.mul, (np.array([0.1]), np.array([0.3])), {})
    assert y[0] == 0.1 * 0.3 and vjp(np.array([0.7]))[0] == 0.3 * 0.7


def test_seams_are_left_alone():
    """AdamW's masters and moments, and a seam that gives several things."""
    @seam
    def pair(x):
        return x / np.float32(3), 7
    p, g = np.float32([0.1, 0.2]), np.float32([0.3, -0.4])
    want = adamw(p, g, p, p)
    with Round():
        got, (third, seven) = adamw(p, g, p, p), pair(np.float32([1]))
    assert all(same(a, b) and not representable(a) for a, b in zip(got, want))
    assert third[0] == np.float32(1) / np.float32(3) and seven == 7


def loss(p):
    """w is used twice; a hidden layer between."""
    h = ops.tanh(ops.linear(p["x"], p["w"]))
    return ops.cross_entropy(ops.linear(h, p["w"]), np.array([1, 0, 2]))[0]


def some_params():
    draw = np.random.default_rng(0)
    return {name: Tensor(bfloat16(draw.standard_normal((3, 3)).astype(np.float32)), name=name) for name in "xw"}


def test_gradients_of_a_value_that_is_used_twice_are_added_up_in_float32():
    """Each is a bfloat16 number, the sum need not be one: 1 + 2^-9."""
    params = {"w": Tensor(np.float32([1.0]), name="w")}
    factors = [Tensor(np.float32([f])) for f in (1.0, 2.0 ** -9)]
    with Round():
        _, grads = value_and_grad(lambda p: ops.sum(p["w"] * factors[0]) + ops.sum(p["w"] * factors[1]), params)
    assert grads["w"].array[0] == np.float32(1 + 2 ** -9) and not representable(grads["w"].array)


def test_the_loss_is_not_rounded_and_its_gradient_is():
    with Round():
        value, grads = value_and_grad(loss, some_params())
    plain, exact = value_and_grad(loss, some_params())
    assert not representable(value.array) and value.array != plain.array and abs(value.array / plain.array - 1) < 2 ** -6
    assert representable(grads["x"].array) and not same(grads["x"].array, exact["x"].array)


def test_activations_are_recomputed_as_they_were():
    with Round():
        _, want = value_and_grad(loss, some_params())
        _, got = value_and_grad(lambda p: recompute(loss, p), some_params())
    assert all(same(got[name].array, g.array) for name, g in want.items())


def test_a_record_outside_sees_rounded_values_and_one_inside_those_before():
    """The newest frame is outermost.  Loss and gradients are the same."""
    with Round():
        value, grads = value_and_grad(loss, some_params())
    with Round(), Record() as outside:
        results = [value_and_grad(loss, some_params())]
    with Record() as inside, Round():
        results.append(value_and_grad(loss, some_params()))
    for other, other_grads in results:
        assert other.array == value.array and all(same(g.array, other_grads[name].array) for name, g in grads.items())
    assert len(outside.entries) == len(inside.entries) == 4
    for out, inn in zip(outside, inside):
        if out.op.name != "cross_entropy":
            assert representable(out.y) and not representable(inn.y) and same(out.y, bfloat16(inn.y))
        for a, b in zip(as_tuple(out.dx), as_tuple(inn.dx)):
            assert a is None and b is None or same(a, bfloat16(b))
        assert all(representable(a) for entry in (out, inn) for a in (*entry.inputs, *entry.dy[:1])
                   if is_array(a) and a.dtype == np.float32)


def test_leaving_it_restores_what_was_and_other_threads_never_see_it():
    before, third = list(stack.frames), np.float32(1) / np.float32(3)

    def divided():
        return ops.divide(np.float32([1]), np.float32([3])).array[0]
    elsewhere = []
    with pytest.raises(KeyError), Round():
        assert divided() == np.float32(0.333984375)
        thread = threading.Thread(target=lambda: elsewhere.append(divided()))
        thread.start()
        thread.join()
        raise KeyError
    assert stack.frames == before and divided() == third and elsewhere == [third]
    with Round():
        with Round():
            pass
        assert divided() == np.float32(0.333984375)
    assert divided() == third


def test_a_vjp_rounds_though_its_frame_was_left():
    """What was recorded under Round is differentiated under it: a frame changes calls, and the vjp is of the call."""
    with Round():
        _, vjp = call(ops.mul, (np.float32([1.5]), np.float32([2.5])), {})
    assert representable(vjp(np.float32([0.1]))[0])
