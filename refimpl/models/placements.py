"""The table of parameters: shape, placement on the mesh and initial scale of each, in one place.

It drives initialisation, the gradient rule, checkpoints and comparison.  Names are refimpl's; README.md maps them to
Megatron's and Hugging Face's.
"""
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Iterator

from refimpl.comm import Mesh
from refimpl.models.config import Config
from refimpl.parallel import Cut, Placement, Replicated
from refimpl.parallel.cuts import even_bounds


@dataclass(frozen=True)
class Row:
    """One parameter.

    shape      of the whole, global array
    placement  Replicated or Cut
    scale      initial values are uniform in [-scale, scale); 0: zeros; None: ones
    gauge      the loss does not depend on it: its gradient is rounding alone, and its updates are not compared
    """
    shape: tuple[int, ...]
    placement: Placement
    scale: float | None
    gauge: bool = False


def power_of_two(std: float) -> float:
    """The power of two whose uniform distribution on [-s, s) has the standard deviation nearest to `std`."""
    return 2.0 ** round(math.log2(std * math.sqrt(3)))


def parameters(cfg: Config, mesh: Mesh) -> dict[str, Row]:
    """Every parameter of the decoder by name.

    Deviation from GPT-2: initial values are uniform with a power-of-two scale (exact in float32 and on any machine)
    instead of normal with std 0.02 (0.02/√(2·n_layers) for the two projections that write to the residual stream).
    Error: ValueError where there are more tp ranks than heads.
    """
    return dict(rows(cfg, mesh.tp.size))


def count(cfg: Config) -> int:
    """The number of parameters, from their shapes alone."""
    return sum(math.prod(row.shape) for _, row in rows(cfg, 1))


@lru_cache(maxsize=8)
def rows(cfg: Config, tp: int) -> tuple[tuple[str, Row], ...]:
    return tuple(_rows(cfg, tp))


def _rows(cfg: Config, tp: int) -> Iterator[tuple[str, Row]]:
    D, F, K, V, whole = cfg.d_model, cfg.d_ff, cfg.head_dim, cfg.padded_vocab, Replicated()
    std, residual_std = power_of_two(0.02), power_of_two(0.02 / math.sqrt(2 * cfg.n_layers))
    q_heads, kv_heads = heads(cfg, tp)
    unseen = cfg.positions != "rope"                    # a bias of all keys adds the same to all scores of a query
    q_width, kv_width = cfg.n_heads * K, cfg.n_kv_heads * K

    def by_heads(axis: int, bounds: Bounds) -> Cut:
        return Cut(axis, tuple((a * K, b * K) for a, b in bounds))  # whole heads only

    def even(axis: int, n: int) -> Cut:
        return Cut(axis, even_bounds(n, tp))

    def norm(name: str, width: int = D, gauge: bool = False) -> Iterator[tuple[str, Row]]:
        yield f"{name}.g", Row((width,), whole, 0 if cfg.norm == "rms_norm_1+w" else None)
        if cfg.norm == "layer_norm" and "norm" in cfg.biases:
            yield f"{name}.b", Row((width,), whole, 0, gauge)

    def dense(name: str, part: str, shape: tuple[int, int], w: Placement, b: Placement, scale: float = std,
              gauge: bool = False) -> Iterator[tuple[str, Row]]:
        yield f"{name}.w", Row(shape, w, scale)
        if part in cfg.biases:
            yield f"{name}.b", Row(shape[1:], b, 0, gauge)

    yield "embed.w", Row((V, D), even(0, V), std)
    if cfg.positions == "learned":
        yield "positions.w", Row((cfg.max_seq_len, D), whole, std)
    for i in range(cfg.n_layers):
        layer = f"layers.{i}"
        yield from norm(f"{layer}.norm1")
        yield from dense(f"{layer}.attn.q", "qkv", (D, q_width), by_heads(1, q_heads), by_heads(0, q_heads))
        for part in "kv":
            yield from dense(f"{layer}.attn.{part}", "qkv", (D, kv_width), by_heads(1, kv_heads), by_heads(0, kv_heads),
                             gauge=part == "k" and unseen and not cfg.qk_norm)
        if cfg.qk_norm:
            yield from norm(f"{layer}.attn.q_norm", K)
            yield from norm(f"{layer}.attn.k_norm", K, gauge=unseen)
        yield from dense(f"{layer}.attn.o", "o", (q_width, D), by_heads(0, q_heads), whole, residual_std)
        yield from norm(f"{layer}.norm2")
        if cfg.gated:
            yield from dense(f"{layer}.mlp.gate", "mlp", (D, F), even(1, F), even(0, F))
        yield from dense(f"{layer}.mlp.up", "mlp", (D, F), even(1, F), even(0, F))
        yield from dense(f"{layer}.mlp.down", "mlp", (F, D), even(0, F), whole, residual_std)
    if cfg.norm_place == "pre":
        yield from norm("norm")
    if not cfg.tied:
        yield "head.w", Row((D, V), even(1, V), std)
    if "head" in cfg.biases:
        yield "head.b", Row((V,), even(0, V), 0)


Bounds = tuple[tuple[int, int], ...]


@lru_cache(maxsize=8)
def heads(cfg: Config, tp: int) -> tuple[Bounds, Bounds]:
    """(start, stop) of every tp rank's query heads, and of the kv heads that these use: neighbours may share one.

    9 query and 3 kv heads on 2 ranks: queries 0-4 and 5-8, which use kv heads 0, 1 and 1, 2.
    Error: ValueError where there are more tp ranks than heads
    """
    if tp > cfg.n_heads:
        raise ValueError(f"tp={tp} needs at least as many heads, the model has n_heads {cfg.n_heads}")
    group = cfg.n_heads // cfg.n_kv_heads               # query heads that share a kv head
    q = even_bounds(cfg.n_heads, tp)
    return q, tuple((a // group, (b - 1) // group + 1) for a, b in q)


def kv_of_head(cfg: Config, mesh: Mesh) -> list[int]:
    """For each query head of this rank, the kv head it uses, counted from this rank's first."""
    q, kv = heads(cfg, mesh.tp.size)
    return [h * cfg.n_kv_heads // cfg.n_heads - kv[mesh.tp.rank][0] for h in range(*q[mesh.tp.rank])]


def placements(cfg: Config, mesh: Mesh) -> dict[str, Placement]:
    """name -> Replicated or Cut."""
    return {name: row.placement for name, row in parameters(cfg, mesh).items()}
