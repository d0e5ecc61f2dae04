"""Localises faults of the counted FlashAttention: a wrong merge of blocks, a transfer that is not counted, more held than M."""
import math

import numpy as np
import pytest

from refimpl.analysis import counted_flash, counted_standard, fitting_blocks, flash_traffic, paper_blocks, standard_traffic
from refimpl.analysis.flash_io import FastMemory, held
from refimpl.ops import CAUSAL, Mask, attention
from refimpl.rng import draw

SIZES = [(12, 12, 4, 64), (13, 13, 4, 60), (7, 19, 3, 30), (19, 7, 3, 30), (1, 5, 8, 40), (5, 1, 8, 400), (64, 64, 16, 700),
         (50, 50, 5, 24), (33, 47, 8, 2000), (0, 3, 2, 20)]        # T, S, d, M
CHOICES = [paper_blocks, fitting_blocks]
KILOBYTES_100 = 100 * 1024 // 4                         # floats in them


def inputs(T, S, d, scale=1.0):
    return scale * draw("q", (T, d)), scale * draw("k", (S, d)), draw("v", (S, d))


def naive(q, k, v, causal=False):
    return attention.array(q[None, None], k[None, None], v[None, None], mask=CAUSAL if causal else Mask())[0][0, 0]


def log_sum_exp(q, k, causal=False):
    s = q @ k.T / math.sqrt(q.shape[1])
    s[np.arange(len(k)) > np.arange(len(q))[:, None] + len(k) - len(q) if causal else np.zeros_like(s, bool)] = -np.inf
    return np.logaddexp.reduce(s, axis=1, initial=-np.inf)


def near(a, b):
    return a.shape == b.shape and np.abs(a - b).max(initial=0) <= 1e-12 * np.abs(b).max(initial=1)


def cases():
    """(T, S, d, M, causal) where every query has a key."""
    return [(*size, causal) for size in SIZES for causal in (False, True) if size[1] >= size[0] or not causal]


@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize("T, S, d, M, causal", cases())
def test_output_and_lse_equal_naive_attention(T, S, d, M, causal, choose):
    q, k, v = inputs(T, S, d)
    o, lse, _ = counted_flash(q, k, v, choose(M, d), causal)
    assert near(o, naive(q, k, v, causal)) and near(lse, log_sum_exp(q, k, causal))


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 11, 20])
@pytest.mark.parametrize("rows", [1, 2, 4, 11, 20])
def test_any_blocks_give_the_same(columns, rows):
    q, k, v = inputs(11, 11, 4, scale=30.0)             # scores of thousands: exponentials without a maximum would overflow
    for causal in (False, True):
        o, lse, _ = counted_flash(q, k, v, (columns, rows), causal)
        assert near(o, naive(q, k, v, causal)) and near(lse, log_sum_exp(q, k, causal))


def test_inputs_stay_and_float32_stays_float32():
    q, k, v = (a.astype(np.float32) for a in inputs(9, 9, 4))
    before = [a.copy() for a in (q, k, v)]
    o, lse, _ = counted_flash(q, k, v, (2, 3), causal=True)
    assert o.dtype == lse.dtype == np.float32 and all(map(np.array_equal, (q, k, v), before))


@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize("T, S, d, M, causal", cases())
def test_counts_equal_the_closed_form(T, S, d, M, causal, choose):
    blocks = choose(M, d)
    io = counted_flash(*inputs(T, S, d), blocks, causal)[2]
    assert (io.loads, io.stores) == flash_traffic(T, S, d, blocks, causal)
    assert io.held == 0, "all is freed at the end"


def test_counts_by_hand():
    # k and v once; the 5 rows pass at 2 blocks of keys: q, o, ℓ, m in, o, ℓ, m out; and out once at first
    io = counted_flash(*inputs(5, 3, 2), (2, 3))[2]
    assert (io.loads, io.stores) == (2 * 3 * 2 + 2 * 5 * (2 * 2 + 2), 5 * 4 + 2 * 5 * 4)
    assert io.peak == 2 * 2 * 2 + 3 * (2 * 2 + 3) + 2 * 3 == held(columns=2, rows=3, d=2)


def test_causal_blocks_above_the_diagonal_cost_nothing():
    # 4 keys by 4 queries in blocks of 2: of 4 passes of 2 rows, that of rows 0, 1 with keys 2, 3 is left out
    full, causal = (counted_flash(*inputs(4, 4, 1), (2, 2), causal)[2] for causal in (False, True))
    assert full.loads - causal.loads == 2 * (2 * 1 + 2) and full.stores - causal.stores == 2 * (1 + 2)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_causal_passes_are_half_and_the_diagonal(n):
    N, d, B = 48, 3, 48 // n
    fulls, causals = flash_traffic(N, N, d, (B, B)), flash_traffic(N, N, d, (B, B), causal=True)
    for full, causal, once in zip(fulls, causals, (2 * N * d, N * (d + 2)), strict=True):
        assert (causal - once) / (full - once) == (n + 1) / (2 * n)


@pytest.mark.parametrize("T, S, d, M, causal", cases())
def test_what_is_held_fits_into_fast_memory(T, S, d, M, causal):
    columns, rows = fitting_blocks(M, d)
    io = counted_flash(*inputs(T, S, d), (columns, rows), causal)[2]
    assert io.peak <= M and io.peak <= held(columns, rows, d) <= M
    assert io.peak == held(min(columns, S), min(rows, T), d) or T == 0
    assert held(columns + 1, min(columns + 1, d), d) > M, "one key more does not fit"


@pytest.mark.parametrize("d", [1, 3, 8, 64])
def test_where_the_blocks_of_algorithm_1_fit(d):
    """Not while q, k, v and o fill all of M, up to 4d²: the scores come on top.  From 8d² + 24d on, where q and o take less."""
    assert all(held(*paper_blocks(M, d), d) > M for M in range(1, 4 * d * d + 1))
    assert held(*paper_blocks(8 * d * d + 8 * d, d), d) > 8 * d * d + 8 * d
    assert all(held(*paper_blocks(M, d), d) <= M for M in range(8 * d * d + 24 * d, 8 * d * d + 24 * d + 9 * d))
    assert paper_blocks(8 * d * d, d) == (2 * d, d) and paper_blocks(8 * d * d + 1, d) == (2 * d + 1, d)


def test_100_kilobytes_of_floats_are_too_few_for_the_blocks_of_algorithm_1():
    assert paper_blocks(KILOBYTES_100, 64) == (100, 64) and fitting_blocks(KILOBYTES_100, 64) == (89, 64)
    io = counted_flash(*inputs(256, 256, 64), (100, 64))[2]
    assert io.peak == 2 * 100 * 64 + 64 * (2 * 64 + 3) + 64 * 100 == 27_584 > KILOBYTES_100


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_rows_of_a_block_do_not_change_the_count(rows):
    """But where causal: there smaller blocks leave more out."""
    assert flash_traffic(100, 100, 8, (16, rows)) == flash_traffic(100, 100, 8, (16, 100))
    assert sum(flash_traffic(100, 100, 8, (16, rows), True)) < sum(flash_traffic(100, 100, 8, (16, 100), True))


def moved(N, d, M, choose):
    """All elements counted.  The queries are one block, which is quick: rows do not change the count."""
    io = counted_flash(*inputs(N, N, d), (choose(M, d)[0], N))[2]
    return io.loads + io.stores


def once(N, d):
    """Of these, k, v and the first o, ℓ, m, which move once; the others are the term in N²d²/M."""
    return N * (3 * d + 2)


def test_twice_the_memory_halves_the_passes():
    """Exactly, where 4d divides M and the block divides N."""
    counts = [moved(512, 8, M, paper_blocks) - once(512, 8) for M in (64, 128, 256, 512, 1024, 2048)]
    assert [a / b for a, b in zip(counts, counts[1:])] == 5 * [2]


@pytest.mark.parametrize("choose", CHOICES)
def test_the_count_falls_with_the_inverse_of_the_memory(choose):
    """A fit gives an exponent of M of -1 within 3%, not exactly: both block size and number of blocks are whole numbers, and
    blocks that fit leave some of M to q and o.  The whole count falls slower, as what moves once does not depend on M.
    """
    N, d, memories = 2000, 4, np.geomspace(500, 5000, 12).astype(int).tolist()
    counts = np.array([moved(N, d, M, choose) for M in memories])
    term, whole = (np.polyfit(np.log(memories), np.log(c), 1)[0] for c in (counts - once(N, d), counts))
    assert abs(term + 1) < 0.03 and 0.03 < whole - term < 0.1


def test_the_constant_of_theorem_2():
    """12·N²d²/M for the paper's blocks where M is far below N·d; from 4·N·d on there is one pass, and M does not matter."""
    N, d, M = 2 ** 24, 1024, 2 ** 24
    assert sum(flash_traffic(N, N, d, paper_blocks(M, d))) == pytest.approx(12 * N ** 2 * d ** 2 / M, rel=2e-3)
    assert flash_traffic(64, 64, 8, paper_blocks(4 * 64 * 8, 8)) == flash_traffic(64, 64, 8, paper_blocks(9 * 64 * 8, 8))


@pytest.mark.parametrize("T, S, d, scale", [(6, 6, 2, 1), (3, 7, 4, 30), (1, 1, 1, 1)])
def test_standard_attention_counts_and_computes(T, S, d, scale):
    q, k, v = inputs(T, S, d, scale)
    o, io = counted_standard(q, k, v)
    assert near(o, naive(q, k, v))
    assert (io.loads, io.stores) == standard_traffic(T, S, d)
    assert io.loads + io.stores == 4 * T * S + 2 * T * d + 2 * S * d


@pytest.mark.parametrize("N, passes, ratio", [(1024, 11, 0.540), (2048, 21, 0.510), (4096, 41, 0.495), (16384, 164, 0.492)])
def test_ratio_to_standard_attention_with_100_kilobytes_of_floats(N, passes, ratio):
    """Blocks of 100 keys: about (3d + 4)/4B_c = 0.49, half of the traffic.  Half precision has twice the M: a quarter."""
    flash, standard = 3 * 64 + 2 + passes * (3 * 64 + 4), 4 * (N + 64)                      # elements per query
    assert sum(flash_traffic(N, N, 64, paper_blocks(KILOBYTES_100, 64))) == N * flash
    assert sum(standard_traffic(N, N, 64)) == N * standard
    assert round(flash / standard, 3) == ratio
    half_precision = sum(flash_traffic(N, N, 64, paper_blocks(2 * KILOBYTES_100, 64))) / sum(standard_traffic(N, N, 64))
    assert 0.24 < half_precision < 0.32


def test_ratio_to_standard_attention_is_that_of_the_counters():
    q, k, v = inputs(1024, 1024, 64)
    flash, standard = counted_flash(q, k, v, paper_blocks(KILOBYTES_100, 64))[2], counted_standard(q, k, v)[1]
    assert round((flash.loads + flash.stores) / (standard.loads + standard.stores), 3) == 0.540


def test_nothing_is_saved_with_100_kilobytes_of_floats_and_wide_heads():
    """Section 3.2 has "many times fewer" accesses for d of 64 to 128, as d² is below M; the ratio is 3d²/M, not d²/M."""
    flash, standard = flash_traffic(8192, 8192, 128, paper_blocks(KILOBYTES_100, 128)), standard_traffic(8192, 8192, 128)
    assert round(sum(flash) / sum(standard), 2) == 1.92 and round(3 * 128 ** 2 / KILOBYTES_100, 2) == 1.92


def test_fast_memory_counts_what_it_is_told():
    io, slow = FastMemory(), np.arange(6.0)
    fast = io.load(slow[:4])
    fast += 1
    made = io.hold(fast[:3] * 2)
    io.store(made, slow[3:])
    io.free(fast)
    assert slow.tolist() == [0, 1, 2, 2, 4, 6], "a load is a copy, a store overwrites"
    assert io == FastMemory(loads=4, stores=3, held=3, peak=7)


@pytest.mark.parametrize("shapes, options, message", [
    (((3, 2), (4, 3), (4, 3)), {}, r"q\[3, 2\], k\[4, 3\], v\[4, 3\] must be"),
    (((3, 2), (4, 2), (5, 2)), {}, "must be"),
    (((3, 0), (4, 0), (4, 0)), {}, "d > 0"),
    (((1, 3, 2), (4, 2), (4, 2)), {}, "must be"),
    (((3, 2), (4, 2), (4, 2)), {"blocks": (0, 1)}, r"got \(columns, rows\) = \(0, 1\)"),
    (((3, 2), (0, 2), (0, 2)), {}, "every query needs a key, got 3 queries, 0 keys"),
    (((3, 2), (2, 2), (2, 2)), {"causal": True}, "got 3 queries, 2 keys, causal True"),
])
def test_bad_inputs(shapes, options, message):
    with pytest.raises(ValueError, match=message):
        counted_flash(*(np.zeros(shape) for shape in shapes), **{"blocks": (2, 2), **options})


def test_a_memory_too_small_for_one_query_and_one_key():
    assert fitting_blocks(24, 5) == (1, 1)              # k, v, q, o: 4·5; two maxima, a sum, a score
    with pytest.raises(ValueError, match="take 24 elements, M is 23"):
        fitting_blocks(23, 5)
