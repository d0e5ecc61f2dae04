"""Localises faults of the ring's closed forms, against the tables and the figure of Liu et al. 2023 (Ring Attention)."""
import numpy as np
import pytest

from refimpl.analysis import causal_share, flops_ratio, ring_context, smallest_block, smallest_shard
from refimpl.analysis.long_context import layer_flops
from refimpl.ops import CAUSAL

INTERCONNECTS = {                                       # Table 2: TFLOP/s, GB/s -> thousands of positions, c and s
    "A100 NVLink": (312, 300, "1.0", "6.2"), "TPU v3": (123, 112, "1.1", "6.6"), "TPU v4": (275, 268, "1.0", "6.2"),
    "TPU v5e": (196, 186, "1.1", "6.3"),
}
LONGEST = [                                             # Table 3: thousands of tokens; devices, model,
    (8, "3B", 4, 32, 64, 512, 8),                       # vanilla, memory-efficient, blockwise, ring, gain over blockwise
    (8, "7B", 2, 16, 32, 256, 8),                       # A100 NVLink
    (8, "13B", 2, 4, 16, 128, 8),
    (32, "7B", 4, 64, 128, 4096, 32),                   # A100 InfiniBand
    (32, "13B", 4, 32, 64, 2048, 32),
    (512, "7B", 1, 4, 8, 2048, 256),                    # TPU v3
    (512, "13B", 1, 2, 8, 1024, 128),
    (1024, "3B", 8, 16, 32, 16384, 512),                # TPU v4
    (1024, "7B", 4, 8, 16, 8192, 512),
    (1024, "13B", 4, 8, 16, 4096, 256),
    (1024, "30B", 2, 4, 8, 2048, 256),
    (256, "3B", 4, 8, 32, 4096, 128),                   # TPU v5e
    (256, "7B", 2, 8, 16, 2048, 128),
]
MULTIPLES = [2, 4, 8, 16, 32, 64, 256, 3072, 32768]     # Figure 5's axis: 8K, 16K, 32K, 64K, 128K, 256K, "1M", "10M", "100M"
COSTS = {                                               # its cells, by width
    36864: "1.0 1.1 1.1 1.3 1.6 2.1 5.6 56.8 596.8", 12288: "1.1 1.2 1.4 1.8 2.6 4.3 14.4 162.6 1725.6",
    8192: "1.1 1.2 1.5 2.2 3.4 5.8 20.6 237.2 2521.5", 7168: "1.1 1.3 1.6 2.3 3.7 6.5 23.2 268.0 2850.3",
    5120: "1.1 1.4 1.8 2.8 4.6 8.4 31.0 362.3 3855.9", 4096: "1.1 1.4 2.0 3.1 5.4 10.0 37.4 439.7 4682.0",
}


def cells(width, contexts):
    return [f"{flops_ratio(s, width):.1f}" for s in contexts]


@pytest.mark.parametrize("name", INTERCONNECTS)
def test_smallest_blocks_of_table_2(name):
    flops, bandwidth, c, s = INTERCONNECTS[name]
    assert f"{smallest_block(flops * 1e12, bandwidth * 1e9) / 1e3:.1f}" == c
    assert f"{smallest_shard(flops * 1e12, bandwidth * 1e9) / 1e3:.1f}" == s


def test_infiniband_is_misprinted_in_table_2():
    """24.5 and 149.5 are printed, from 312 TFLOP/s and 12.5 GB/s."""
    assert smallest_block(312e12, 12.5e9) == 24_960 and smallest_shard(312e12, 12.5e9) == 149_760


def test_a_block_of_the_smallest_size_takes_as_long_as_its_transfer():
    flops, bandwidth, h = 312e12, 300e9, 4096
    c = smallest_block(flops, bandwidth)
    assert 4 * h * c ** 2 / flops == pytest.approx(4 * c * h / bandwidth, rel=1e-14)


@pytest.mark.parametrize("devices, model, vanilla, efficient, blockwise, ring, gain", LONGEST)
def test_the_ring_of_table_3_multiplies_blockwise_contexts(devices, model, vanilla, efficient, blockwise, ring, gain):
    assert ring_context(blockwise, gain) == ring and devices % gain == 0
    assert vanilla < efficient < blockwise, model
    assert all(n & (n - 1) == 0 for n in (vanilla, efficient, blockwise, ring)), "all contexts tried are powers of two"


def test_2048_times_of_slide_41_are_over_vanilla():
    gains = [(ring / vanilla, ring / efficient) for devices, _, vanilla, efficient, _, ring, _ in LONGEST if devices == 1024]
    assert gains == [(2048, 1024), (2048, 1024), (1024, 512), (1024, 512)]
    assert max(ring / efficient for _, _, _, efficient, _, ring, _ in LONGEST) == 1024


@pytest.mark.parametrize("width", COSTS)
def test_cells_of_figure_5(width):
    assert cells(width, [4096 * n for n in MULTIPLES]) == COSTS[width].split()


def test_contexts_of_figure_5_are_multiples_of_4096():
    """With decimal contexts 29 of the 54 cells differ, with a binary 10M and 100M the last two columns do."""
    decimal = [8e3, 16e3, 32e3, 64e3, 128e3, 256e3, 1e6, 1e7, 1e8]
    differ = [a != b for width in COSTS for a, b in zip(cells(width, decimal), COSTS[width].split(), strict=True)]
    assert sum(differ) == 29
    for width in COSTS:
        binary = [4096 * n for n in MULTIPLES[:-2]] + [10 * 2 ** 20, 100 * 2 ** 20]
        assert [a == b for a, b in zip(cells(width, binary), COSTS[width].split(), strict=True)] == 7 * [True] + 2 * [False]


@pytest.mark.parametrize("printed, width, differ", [(5140, 5120, 3), (6656, 7168, 7)])
def test_widths_of_figure_5(printed, width, differ):
    """The text has 5140 for 5120; 33B is listed with 7168, where the released LLaMA has 6656."""
    wrong = cells(printed, [4096 * n for n in MULTIPLES])
    assert sum(a != b for a, b in zip(wrong, COSTS[width].split(), strict=True)) == differ


@pytest.mark.parametrize("s, h", [(4096, 4096), (8192, 5120), (2 ** 20, 36864)])
def test_the_ratio_is_that_of_the_flops_per_token(s, h):
    per_token = layer_flops(s, h, b=3) / (3 * s) / (layer_flops(4096, h) / 4096)
    assert flops_ratio(s, h) == pytest.approx(per_token, rel=1e-14)


def test_flops_of_a_layer_by_hand():
    # q, k, v, o 2·3·(4·2·2) = 96, feed-forward 2·3·(2·2·8) = 192, scores 2·3·3·2 = 36, their product with v 36
    assert layer_flops(s=3, h=2) == 96 + 192 + 36 + 36 and layer_flops(s=3, h=2, b=5) == 5 * 360


@pytest.mark.parametrize("p, share", [(1, 1), (2, 0.75), (4, 0.625), (8, 0.5625)])
def test_useful_share_of_a_contiguous_causal_ring(p, share):
    pieces = np.arange(3 * p).reshape(p, 3)
    useful = sum(CAUSAL.block(queries, keys) is not False for queries in pieces for keys in pieces)
    assert causal_share(p) == share == useful / p ** 2
    assert 1 - causal_share(p) == (p - 1) / (2 * p)
