"""The table of parameters: shape, placement on the mesh and initial scale of each, in one place.

It drives initialisation, the gradient rule, checkpoints and comparison.  Names are refimpl's; README.md maps them to
Megatron's and Hugging Face's.
"""
import math
from dataclasses import dataclass
from typing import Iterator

from refimpl.comm import Mesh
from refimpl.models.config import Config
from refimpl.parallel import Cut, Placement, Replicated


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
    return dict(_rows(cfg, mesh))


def _rows(cfg: Config, mesh: Mesh) -> Iterator[tuple[str, Row]]:
    if mesh.tp.size > cfg.n_heads:
        raise ValueError(f"tp={mesh.tp.size} needs at least as many heads, the model has n_heads {cfg.n_heads}")
    D, F, whole = cfg.d_model, cfg.d_ff, Replicated()
    std, residual_std = power_of_two(0.02), power_of_two(0.02 / math.sqrt(2 * cfg.n_layers))
    heads = Cut.even(0, cfg.n_heads, mesh.tp).bounds
    bounds = tuple((a * cfg.head_dim, b * cfg.head_dim) for a, b in heads)      # whole heads only
    by_heads, ff = (lambda axis: Cut(axis, bounds)), (lambda axis: Cut.even(axis, F, mesh.tp))

    def norm(name: str) -> Iterator[tuple[str, Row]]:
        yield f"{name}.g", Row((D,), whole, None)
        yield f"{name}.b", Row((D,), whole, 0)

    yield "embed.w", Row((cfg.vocab_size, D), whole, std)
    yield "positions.w", Row((cfg.max_seq_len, D), whole, std)
    for i in range(cfg.n_layers):
        yield from norm(f"layers.{i}.norm1")
        for part in "qkv":
            yield f"layers.{i}.attn.{part}.w", Row((D, D), by_heads(1), std)
            # softmax does not see a bias of k: it adds the same number to all scores of a query
            yield f"layers.{i}.attn.{part}.b", Row((D,), by_heads(0), 0, gauge=part == "k")
        yield f"layers.{i}.attn.o.w", Row((D, D), by_heads(0), residual_std)
        yield f"layers.{i}.attn.o.b", Row((D,), whole, 0)
        yield from norm(f"layers.{i}.norm2")
        yield f"layers.{i}.mlp.up.w", Row((D, F), ff(1), std)
        yield f"layers.{i}.mlp.up.b", Row((F,), ff(0), 0)
        yield f"layers.{i}.mlp.down.w", Row((F, D), ff(0), residual_std)
        yield f"layers.{i}.mlp.down.b", Row((D,), whole, 0)
    yield from norm("norm")


def placements(cfg: Config, mesh: Mesh) -> dict[str, Placement]:
    """name -> Replicated or Cut."""
    return {name: row.placement for name, row in parameters(cfg, mesh).items()}
