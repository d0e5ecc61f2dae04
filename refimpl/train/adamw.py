"""AdamW: Adam with decoupled weight decay.  Loshchilov and Hutter 2019, algorithm 2; Kingma and Ba 2015."""
import math
from typing import Mapping, Sequence

from refimpl.array import Array, in_cache, xp_of
from refimpl.autograd import Tensor, seam
from refimpl.parallel.cuts import require_reduced


@seam
def adamw(p: Array, g: Array, m: Array, v: Array, t: int = 1, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95),
          eps: float = 1e-8, weight_decay: float = 0.0) -> tuple[Array, Array, Array]:
    """One update of one parameter, step t = 1, 2, ...  -> new (p, m, v).

    m = β₁·m + (1 - β₁)·g;  v = β₂·v + (1 - β₂)·g²;  m̂ = m/(1 - β₁ᵗ);  v̂ = v/(1 - β₂ᵗ)
    p = p - lr·(m̂/(√v̂ + eps) + weight_decay·p)
    """
    b1, b2 = betas
    root = math.sqrt(1 - b2 ** t)                       # m̂/(√v̂ + eps) = (m/(√v + eps·root))·root/(1 - β₁ᵗ): fewer passes

    def update(p: Array, g: Array, m: Array, v: Array) -> tuple[Array, Array, Array]:
        m = b1 * m
        m += (1 - b1) * g
        v = b2 * v
        square = g * g
        square *= 1 - b2
        v += square
        size = xp_of(v).sqrt(v)
        size += eps * root
        step = m / size
        step *= -lr * root / (1 - b1 ** t)
        step += p * (1 - lr * weight_decay)
        return step, m, v
    return in_cache(update, p, g, m, v)


GROUPS = ("matrices", "embeddings", "vectors")


def group_of(name: str, ndim: int) -> str:
    """The group that a parameter belongs to.  A matrix that is embedding and head in one is an embedding.

    >>> [group_of(*p) for p in (("layers.0.attn.q.w", 2), ("positions.w", 2), ("norm.g", 1))]
    ['matrices', 'embeddings', 'vectors']
    """
    if ndim < 2:
        return "vectors"
    return "embeddings" if name in ("embed.w", "positions.w") else "matrices"


class AdamW:
    """AdamW for named parameters; owns the moments m and v.  Weight decay applies to the groups of parameters in `decay`; gains
    and biases are vectors."""

    def __init__(self, lr: float, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.1,
                 decay: Sequence[str] = ("matrices", "embeddings")) -> None:
        if not 0 <= lr < math.inf:
            raise ValueError(f"the learning rate must be finite and at least 0, got {lr}")
        if not 0 <= weight_decay < math.inf:
            raise ValueError(f"weight_decay must be finite and at least 0, got {weight_decay}")
        self.lr, self.betas, self.eps, self.weight_decay, self.decay = lr, betas, eps, weight_decay, decay
        self.t = 0
        self.m: dict[str, Array] = {}
        self.v: dict[str, Array] = {}

    def start(self, params: Mapping[str, Tensor]) -> None:
        """Moments of 0 for the parameters that have none yet."""
        for moment in (self.m, self.v):
            moment.update({name: xp_of(p.array).zeros(p.shape, p.dtype) for name, p in params.items() if name not in moment})

    def step(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The new parameters.  Error: LayoutError for a gradient that still has to be reduced."""
        for name in params:
            require_reduced(name, grads[name])
        self.start(params)
        self.t += 1
        out = {}
        for name, p in params.items():
            decay = self.weight_decay if group_of(name, len(p.shape)) in self.decay else 0.0
            new, self.m[name], self.v[name] = adamw(
                p.array, grads[name].array, self.m[name], self.v[name], t=self.t, lr=self.lr, betas=self.betas, eps=self.eps,
                weight_decay=decay)
            out[name] = p.like(new)
        return out
