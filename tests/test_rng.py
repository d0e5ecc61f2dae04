"""Localises initial weights and dropout masks that depend on the layout or differ between languages.

The vectors are for ports: copy them.  Each is also worked out here by a second, scalar implementation.
"""
import hashlib

import numpy as np
import pytest

from refimpl.rng import draw24, flat_index, fnv1a64, integers, mix64, stream, uniform_weights

EMBED = stream(0, "embed.w")


# -- the second implementation: whole Python integers, modulo 2^64, one number at a time ------------------------------

def scalar_mix64(z):
    z = (z ^ z // 2 ** 30) * 0xBF58476D1CE4E5B9 % 2 ** 64
    z = (z ^ z // 2 ** 27) * 0x94D049BB133111EB % 2 ** 64
    return z ^ z // 2 ** 31


def scalar_fnv1a64(text):
    h = 14695981039346656037
    for byte in text.encode():
        h = (h ^ byte) * 1099511628211 % 2 ** 64
    return h


def scalar_draw24(key, i):
    return scalar_mix64((key + (i + 1) * 0x9E3779B97F4A7C15) % 2 ** 64) // 2 ** 40


MIX64 = {0: 0, 1: 0x5692161D100B05E5, 0x9E3779B97F4A7C15: 0xE220A8397B1DCDAF, 2 ** 64 - 1: 0xB4D055FCF2CBBD7B}
FNV1A64 = {"": 0xCBF29CE484222325, "a": 0xAF63DC4C8601EC8C, "foobar": 0x85944171F73967E8}      # Fowler, Noll, Vo's own
STREAMS = {
    (0, "embed.w", None): 0x92E5AF5A6E0BF980,
    (1, "embed.w", None): 0xF8BCFAEA96F724FD,
    (0, "layers.0.attn.q.w", None): 0x192A00B24599B7BB,
    (-1, "b", None): 0x054F1D4E64AEEF6B,
    (7, "größe", None): 0x2239F3C99767F9EB,
    (0, "embed.w", 0): 0x69E9023450D6123B,
    (0, "embed.w", 3): 0xCBD381BA1DDB1388,
}
# of stream(0, "embed.w"): draws by index, and the first five integers below 50257
DRAWS = {0: 1778283, 1: 12571456, 2: 14323275, 3: 14820127, 2 ** 32: 1585317, 2 ** 40: 1933765}
INTEGERS = [6483, 37194, 25724, 113, 25662]


@pytest.mark.parametrize("z", MIX64)
def test_mix64_vectors(z):
    assert mix64(z) == scalar_mix64(z) == MIX64[z]


def test_mix64_makes_the_published_splitmix64_sequence():
    """Seed 1234567: the outputs that Rosetta Code and the reference C program print."""
    state, out = 1234567, []
    for _ in range(5):
        state = (state + 0x9E3779B97F4A7C15) % 2 ** 64
        out.append(mix64(state))
    assert out == [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]


@pytest.mark.parametrize("text", FNV1A64)
def test_fnv1a64_vectors(text):
    assert fnv1a64(text) == scalar_fnv1a64(text) == FNV1A64[text]


@pytest.mark.parametrize("seed, name, step", STREAMS)
def test_stream_vectors(seed, name, step):
    key = scalar_mix64(scalar_fnv1a64(name) ^ scalar_mix64(seed % 2 ** 64))
    key = key if step is None else scalar_mix64(key ^ scalar_mix64(step))
    assert stream(seed, name, step) == key == STREAMS[seed, name, step]


def test_draw24_vectors():
    index = np.array(list(DRAWS))
    assert draw24(EMBED, index).tolist() == [scalar_draw24(EMBED, int(i)) for i in index] == list(DRAWS.values())
    assert draw24(EMBED, index).dtype == np.uint64


def test_uniform_weights_vectors():
    """(n - 2^23)·2^-23·scale, from the draws above."""
    expected = [(n - 2 ** 23) / 2 ** 23 * 0.03125 for n in DRAWS.values()]
    assert uniform_weights(EMBED, np.array(list(DRAWS)), 0.03125).tolist() == expected
    assert [value.hex() for value in expected[:3]] == ["-0x1.9376540000000p-6", "0x1.fe9a000000000p-7", "0x1.6a392c0000000p-6"]


def test_integers_vectors():
    expected = [(scalar_draw24(EMBED, 2 * i) * 2 ** 24 + scalar_draw24(EMBED, 2 * i + 1)) % 50257 for i in range(5)]
    assert integers(EMBED, np.arange(5), 50257).tolist() == expected == INTEGERS


def test_a_thousand_draws_have_this_hash():
    """One line to compare a port with: SHA-256 of 1000 draws as little-endian 32-bit integers."""
    draws = draw24(EMBED, np.arange(1000)).astype("<u4").tobytes()
    assert draws == b"".join(scalar_draw24(EMBED, i).to_bytes(4, "little") for i in range(1000))
    assert hashlib.sha256(draws).hexdigest() == "741c8983f578e5b88c4962cbea2bcecedb2a70664f78e28f650b4b4f039634b5"


# -- layouts ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape, where", [
    ((7,), (slice(2, 5),)), ((6, 10), (slice(0, 6), slice(5, 10))), ((6, 10), (slice(4, 6), slice(0, 10))),
    ((3, 5, 7), (slice(1, 3), slice(4, 5), slice(0, 7))), ((4, 6), (slice(2, 2), slice(0, 6)))])
def test_a_shard_is_the_slice_of_the_whole(shape, where):
    whole = uniform_weights(EMBED, np.arange(np.prod(shape)).reshape(shape), 1.0)
    part = uniform_weights(EMBED, flat_index([np.arange(s.start, s.stop) for s in where], shape), 1.0)
    assert part.tobytes() == whole[where].tobytes()


def test_flat_index_counts_in_c_order_and_takes_any_rows():
    assert flat_index([np.arange(2), np.arange(3)], (2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert flat_index([np.array([5, 0]), np.array([2])], (1, 3)).tolist() == [[17], [2]]
    assert flat_index([np.array([1], "int32"), np.array([2 ** 31 - 1], "int32")], (2, 2 ** 31)).tolist() == [[2 ** 32 - 1]]


@pytest.mark.parametrize("index", [np.array(3), np.arange(3)[:0], np.array([[3]], "int32"), np.array([3], "uint8")])
def test_any_integer_array_is_an_index(index):
    assert draw24(EMBED, index).ravel().tolist() == [DRAWS[3]] * index.size
    assert draw24(EMBED, index).shape == index.shape


def test_a_scalar_parameter_has_one_draw():
    assert uniform_weights(EMBED, flat_index([], ()), 1.0).shape == ()
    assert draw24(EMBED, flat_index([], ())) == DRAWS[0]


# -- the distribution -------------------------------------------------------------------------------------------------

def test_moments_are_those_of_the_uniform_distribution():
    n = 200_000
    x = uniform_weights(stream(4, "moments"), np.arange(n), 1.0)
    for power, mean in ((1, 0), (2, 1 / 3), (3, 0), (4, 1 / 5)):
        sigma = np.sqrt((1 / (2 * power + 1) - mean ** 2) / n)      # E[x^2k] = 1 / (2k + 1)
        assert abs(np.mean(x ** power) - mean) < 5 * sigma
    for lag in (1, 2, 1000):
        assert abs(np.mean(x[lag:] * x[:-lag])) < 5 / 3 / np.sqrt(n - lag)
    assert -1 <= x.min() < -0.9999 and 0.9999 < x.max() < 1


@pytest.mark.parametrize("other", [stream(5, "a"), stream(4, "b"), stream(4, "a", 0), stream(4, "a", 1)])
def test_streams_are_uncorrelated(other):
    n = 50_000
    x, y = (uniform_weights(key, np.arange(n), 1.0) for key in (stream(4, "a"), other))
    assert abs(np.mean(x * y)) < 5 / 3 / np.sqrt(n)


def test_every_bit_is_fair():
    n = 100_000
    draws = draw24(stream(4, "bits"), np.arange(n))
    for bit in range(24):
        ones = float(np.mean(draws >> np.uint64(bit) & np.uint64(1)))
        assert abs(ones - 0.5) < 5 * 0.5 / np.sqrt(n), f"bit {bit}"
    assert int(draws.max()) < 2 ** 24


def test_integers_are_uniform_and_below_the_limit():
    n, below = 70_000, 7
    counts = np.bincount(integers(stream(4, "integers"), np.arange(n), below), minlength=below)
    assert len(counts) == below
    assert np.abs(counts - n / below).max() < 5 * np.sqrt(n / below * (1 - 1 / below))


@pytest.mark.parametrize("scale", [2.0 ** -9, 1.0, 0.03125])
def test_float32_weights_are_exactly_the_float64_ones(scale):
    index = np.arange(100_000)
    wide, narrow = (uniform_weights(EMBED, index, scale, dtype) for dtype in ("float64", "float32"))
    assert narrow.dtype == np.float32
    assert np.array_equal(narrow.astype(np.float64), wide)
