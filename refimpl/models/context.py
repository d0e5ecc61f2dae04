"""What a model is told about one call besides its parameters: the mesh, which samples and positions, and the dropout stream."""
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from refimpl.autograd import Params, Tensor
from refimpl.comm import Mesh
from refimpl.models.config import Config
from refimpl.ops import CAUSAL, Mask, dropout
from refimpl.parallel import (ATTENTIONS, LAYOUTS, Regathered, SequenceLayout, all_gather, copy_to, even_sizes, reduce_from,
                              reduce_scatter, share)
from refimpl.rng import stream


@dataclass(frozen=True)
class Plan:
    """How a run treats long sequences; no way changes a number, but for rounding.  Error: ValueError for an unknown name.

    attention          how queries meet keys, of ATTENTIONS (parallel/attention.py)
    layout             how a sequence is cut over the cp ranks, of LAYOUTS (parallel/sequence.py)
    sequence_parallel  tp ranks share the positions between the layers' matrices, too: see `enter` and `leave`
    regather           of what they join for the matrices they keep their share, and join it once more in the backward pass
    ring               with "all_to_all": how many groups of ranks form a ring, each of which exchanges heads for tokens
    block              positions of a block in which attention and feed-forward are computed (blockwise.py); 0: all at once
    """
    attention: str = "naive"
    layout: str = "contiguous"
    sequence_parallel: bool = False
    regather: bool = False
    ring: int = 1
    block: int = 0

    def __post_init__(self) -> None:
        for name in ("ring", "block"):
            if not hasattr(getattr(self, name), "__index__"):
                raise ValueError(f"{name} must be an integer, got {getattr(self, name)!r}")
        if self.ring < 1 or self.ring > 1 and self.attention != "all_to_all":
            raise ValueError(f"ring must be at least 1, and needs attention 'all_to_all', got ring {self.ring}, attention "
                             f"{self.attention!r}")
        if self.block < 0 or self.block and (self.attention != "blockwise" or self.sequence_parallel):
            raise ValueError(f"block must be at least 0, and needs attention 'blockwise' without sequence_parallel, got block "
                             f"{self.block}, attention {self.attention!r}, sequence_parallel {self.sequence_parallel}")
        if self.regather and not self.sequence_parallel:
            raise ValueError("regather needs sequence_parallel: without it there is nothing to join")
        for name, allowed in (("attention", ATTENTIONS), ("layout", LAYOUTS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Context:
    """rows int[B]: global sample numbers; positions int[T]: this rank's global positions; step None: no dropout.

    sequence  how the whole sequence is cut over cp; None where each rank has all of it.  `Context.over` sets both
    """
    mesh: Mesh
    rows: np.ndarray
    positions: np.ndarray
    mask: Mask = CAUSAL
    seed: int = 0
    step: int | None = None
    sequence: SequenceLayout = field(default=None)      # type: ignore[assignment]
    plan: Plan = Plan()

    def __post_init__(self) -> None:
        if self.sequence is None:
            if self.mesh.wide(("cp",)):
                raise ValueError(f"the mesh {self.mesh} cuts sequences: Context.over says how")
            object.__setattr__(self, "sequence", SequenceLayout("contiguous", len(self.positions)))

    @classmethod
    def over(cls, mesh: Mesh, rows: np.ndarray, length: int, plan: Plan = Plan(), **others: Any) -> "Context":
        """Of sequences of `length` positions, of which this rank has those that the plan's layout gives it."""
        sequence = SequenceLayout(plan.layout, length)
        return cls(mesh, rows, sequence.own_positions(mesh.cp), sequence=sequence, plan=plan, **others)

    @property
    def between(self) -> np.ndarray:
        """The positions that this rank has between the layers' matrices: its share of those of its tp ranks, or all of them."""
        return self.positions[share(len(self.positions), self.mesh.tp)] if self.plan.sequence_parallel else self.positions

    @property
    def cut(self) -> dict[str, int]:
        """How this rank's tokens[B, T] are cut, as a Tensor says it; nothing where blocks are taken of them."""
        return {} if self.plan.block else {"cp": 1}

    def own(self, a: np.ndarray) -> np.ndarray:
        """This rank's positions of a[B, T]: tokens, or targets that have been shifted already."""
        return self.sequence.own(a, self.mesh.cp)

    def within(self, window: int | None) -> "Context":
        """The same, for a layer whose queries see `window` keys (None: all that the mask shows)."""
        windows = [w for w in (window, self.mask.window) if w is not None]
        return replace(self, mask=replace(self.mask, window=min(windows))) if windows else self


def enter(x: Tensor, ctx: Context) -> tuple[Tensor, Regathered | None]:
    """f: from where tp ranks do the same to where each has columns of its own; x[B, T, D].  And what gives x again (regather).

                  tensor parallel            and sequence parallel
    enter (f)     identity | all_reduce      all_gather | reduce_scatter, along T
    leave (g)     all_reduce | identity      reduce_scatter | all_gather, along T

    In between, with sequence parallelism, each tp rank has its share of the positions: norms, dropout and residual sums are
    computed once, not tp times, and kept once.  An all_reduce is a reduce_scatter and an all_gather: as much travels.
    Reference: Korthikanti et al. 2022, section 4.2.2 and figure 5
    """
    if not ctx.plan.sequence_parallel:
        return copy_to(x, comm=ctx.mesh.tp), None
    how: dict[str, Any] = {"comm": ctx.mesh.tp, "axis": 1, "sizes": even_sizes(len(ctx.positions), ctx.mesh.tp)}
    return all_gather(x, **how), Regathered(x.array, **how) if ctx.plan.regather else None


def leave(x: Tensor, ctx: Context) -> Tensor:
    """g: back again, adding the ranks' parts up."""
    return reduce_scatter(x, comm=ctx.mesh.tp, axis=1) if ctx.plan.sequence_parallel else reduce_from(x, comm=ctx.mesh.tp)


def drop(x: Tensor, p: Params, cfg: Config, ctx: Context) -> Tensor:
    """Dropout of x[B, T, D] by the hash of (seed, step, name, sample, position, channel): the same on every mesh."""
    if ctx.step is None or not cfg.dropout:
        return x
    return dropout(x, ctx.rows, ctx.between, np.arange(cfg.d_model), key=stream(ctx.seed, p.full("dropout"), ctx.step),
                   rate=cfg.dropout, shape=(1, cfg.max_seq_len, cfg.d_model))
