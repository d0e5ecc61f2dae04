"""The lecture's slides 37-41 in numbers: when a ring hides its traffic, how far it reaches, what a long context costs.

All of it is from Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (Ring
Attention below).  What a layer holds in memory is in activations.py.

Letters: c positions of a block, h model width (the paper's d as well), p ranks of a ring, b samples of s positions.
"""


def smallest_block(flops: float, bandwidth: float) -> float:
    """Positions c of the smallest block whose attention takes as long as the transfer of the next one:  c = F/B.

    Attention of a block takes 4·h·c² / F seconds, 2·h·c² FLOP for the scores and as many for their product with the values.
    Keys and values, 2·c·h bytes each in bfloat16, take 4·c·h / B.  Projections and feed-forward would only hide more.

    flops in FLOP/s of a device, bandwidth in bytes/s to the next device of the ring
    Misprint: Table 2 has c = 24.5 and s = 149.5 thousand for InfiniBand; 312 TFLOP/s and 12.5 GB/s give 24.96 and 149.76
    Reference: Ring Attention, section 3 and Table 2

    >>> round(smallest_block(312e12, 300e9))
    1040
    """
    return flops / bandwidth


def smallest_shard(flops: float, bandwidth: float) -> float:
    """Positions that each device of the ring should hold: s = 6c, as many as there are blocks in its memory.

    Reference: Ring Attention, section 3 and Table 2; the six blocks are the row "ring" of `activations.peaks`
    """
    return 6 * smallest_block(flops, bandwidth)


def ring_context(blockwise: int, p: int) -> int:
    """The longest context of a ring of p, where blockwise attention and feed-forward reach `blockwise` without it.

    p divides the number of devices: the rest of them shard the model (FSDP).  The gain over attention that is merely
    memory-efficient is larger, and larger still over a vanilla transformer: the "2048x longer" of slide 41 is over vanilla;
    over memory-efficient (Flash) attention the same rows of Table 3 gain 1024x.

    Reference: Ring Attention, Table 3
    """
    return blockwise * p


def causal_share(p: int) -> float:
    """Share of a ring's p·p block products of which a causal mask leaves something, rank r holding the r-th piece: (p + 1)/2p.

    A rank waits for the others, so (p - 1)/2p of the ring's time is wasted.  The diagonal's products, half masked, count whole.

    Reference: Brandon et al. 2023, "Striped Attention", whose layout balances the ranks
    """
    return (p + 1) / (2 * p)


def layer_flops(s: int, h: int, b: int = 1) -> int:
    """FLOP of one layer's matrix products forward, all s·s scores counted: 24·b·s·h² + 4·b·s²·h.  Backward takes twice as many.

    Reference: Ring Attention, appendix D; Korthikanti et al. 2022, appendix A
    """
    return 24 * b * s * h ** 2 + 4 * b * s ** 2 * h


def flops_ratio(s: int, h: int, base: int = 4096) -> float:
    """FLOP to train on a data set cut into contexts of s, over those with contexts of `base`: (6h + s) / (6h + base).

    The number of tokens stays, so this is the ratio of `layer_flops(s, h) / s`.

    Figure 5 counts positions in 1024s, and by its axis of multiples of 4096: "1M" is 256 of them, 2^20, but "10M" is 3072 of
    them, 12·2^20, and "100M" is 32768 of them, 2^27 = 128·2^20.  With these all its 54 cells come out, to the digit.
    Misprint: the text has width 5140 for LLaMA-13B; its cells need 5120
    Deviation: LLaMA-33B is listed with width 7168, and its cells need that; the released model has 6656
    Reference: Ring Attention, appendix D and Figure 5
    """
    return (6 * h + s) / (6 * h + base)
