"""Bytes of one layer's activations: the largest that is live at once (`peaks`), and what backward needs (`stored_factor`).

Peaks are the lecture's slides 33-36, from blockwise attention to the ring; all layers are recomputed in backward there.
Stored activations are those of tensor and sequence parallelism (slides 34 and 126), with little or no recomputation.

Letters: b samples of s positions, h model width, n (or a) heads, c positions of a block, t ranks of tensor parallelism.
"""
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a layer.  A gated feed-forward counts both branches in d_ff: both are live.  itemsize: bytes of an element."""
    b: int
    s: int
    h: int
    n: int
    d_ff: int
    itemsize: int = 2


def peaks(layer: LayerSizes, c: int) -> dict[str, tuple[int, int]]:
    """kind of layer -> (bytes of the largest activation of attention, of feed-forward); the layer's peak is the larger one.

    vanilla            itemsize · (b·n·s², b·s·d_ff)                all scores; 2bns² and 8bsh in bfloat16 with d_ff = 4h
    memory-efficient   itemsize · (b·s·h + 2·b·c·h, b·s·d_ff)       output, keys and values of a block; 2bsh + 4bch and 8bsh
    blockwise          itemsize · (b·s·h, b·s·h)                    the outputs; 2bsh: less by d_ff/h than memory-efficient
    ring               itemsize · (6·b·c·h, b·c·h)                  q, k, v, two buffers to receive k and v, output

    Misprints in the paper's table, which assumes bfloat16: the total of vanilla has an h for the n of 2bns²; the ring's 6bch
    are elements, in bytes 12bch (its feed-forward, 2bch, and the other rows are in bytes)
    Reference: Liu et al. 2023 (Ring Attention), section 3 and Table 1; Liu and Abbeel 2023 (blockwise)
    """
    scores, output, block = layer.b * layer.n * layer.s ** 2, layer.b * layer.s * layer.h, layer.b * c * layer.h
    hidden = layer.b * layer.s * layer.d_ff
    elements = {"vanilla": (scores, hidden), "memory-efficient": (output + 2 * block, hidden),
                "blockwise": (output, output), "ring": (6 * block, block)}
    return {kind: (layer.itemsize * a, layer.itemsize * f) for kind, (a, f) in elements.items()}


@dataclass(frozen=True)
class Stored:
    """What a layer keeps for backward: `linear` bytes per s·b·h, `square` bytes per a·s²·b.  `cut` by tensor parallelism?"""
    block: str
    what: str
    linear: int
    square: int
    cut: bool


STORED = (                                              # 2 bytes an element, but 1 of a dropout mask
    Stored("attention", "input of q, k and v", 2, 0, False),
    Stored("attention", "q and k", 4, 0, True),
    Stored("attention", "output of softmax", 0, 2, True),
    Stored("attention", "mask of softmax dropout", 0, 1, True),
    Stored("attention", "output of softmax dropout", 0, 2, True),
    Stored("attention", "v", 2, 0, True),
    Stored("attention", "input of the projection", 2, 0, True),
    Stored("attention", "mask of dropout", 1, 0, False),
    Stored("mlp", "input of the first product", 2, 0, False),
    Stored("mlp", "input of GeLU", 8, 0, True),
    Stored("mlp", "input of the second product", 8, 0, True),
    Stored("mlp", "mask of dropout", 1, 0, False),
    Stored("norm", "input of the first norm", 2, 0, False),
    Stored("norm", "input of the second norm", 2, 0, False),
)
FULL_RECOMPUTATION = 2                                  # the layer's input alone: 2 bytes an element, on every rank of t


def stored_factor(a: int, s: int, h: int, t: int = 1, sequence_parallel: bool = False, selective: bool = False) -> float:
    """Bytes per s·b·h that a rank stores of one layer for backward: the sum of STORED.

                   tensor parallel          with `sequence_parallel`
    all stored     10 + 24/t + 5as/(ht)     (34 + 5as/h) / t
    `selective`    10 + 24/t                34/t

    The feed-forward is 4h wide.  Selective recomputation forgets the terms in s²: from the scores to their product with v.

    Reference: Korthikanti et al. 2022, section 4.1 and Table 2
    """
    total = 0.0
    for item in STORED:
        size = item.linear + (0 if selective else item.square * a * s / h)
        total += size / t if item.cut or sequence_parallel else size
    return total


def selective_overhead(s: int, h: int) -> float:
    """FLOP that selective recomputation adds, as a share of a step's; without the logits.

    A step takes 72·b·s·h²·(1 + s/6h) a layer.  Scores, and their product with the values, are computed once more: 4·b·s²·h.
    (1 + 2s/9h) / (1 + s/6h) - 1:  0.9% for GPT-3, 0.55% for MT-NLG

    Deviation: the paper prints `printed_overhead`
    Reference: Korthikanti et al. 2022, appendix A
    """
    return (1 + 2 * s / (9 * h)) / (1 + s / (6 * h)) - 1


def printed_overhead(s: int, h: int) -> float:
    """The same from the paper's equations 7 and 8, (1 + s/3h) / (1 + s/6h) - 1:  2.7% for GPT-3, 1.6% for MT-NLG.

    Equation 8 adds 12·b·s²·h, three times the 4·b·s²·h that the text above it names.

    Reference: Korthikanti et al. 2022, section 5 and appendix A
    """
    return (1 + s / (3 * h)) / (1 + s / (6 * h)) - 1
