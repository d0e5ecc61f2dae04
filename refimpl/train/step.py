"""The gradient of one training step: forward and backward of every micro-batch, one sum over ranks, one division."""
from dataclasses import dataclass
from typing import Iterable, Mapping

from refimpl.autograd import Layout, Params, Tensor, value_and_grad
from refimpl.comm import Mesh
from refimpl.models import Config, Context, Plan, decoder, placements
from refimpl.parallel import Reduction, divide_by_count, total_over
from refimpl.train.data import Batch

OVER_SAMPLES = Layout(frozenset({"dp", "cp"}))          # ranks that have samples, or positions, of their own


@dataclass(frozen=True)
class Gradients:
    """The mean loss per valid target over all ranks and micro-batches, how many there were, and its gradient."""
    loss: float
    count: int
    grads: dict[str, Tensor]


def gradients(params: Mapping[str, Tensor], batches: Iterable[Batch], cfg: Config, mesh: Mesh, seed: int = 0,
              step: int | None = None, reduction: type[Reduction] = Reduction, plan: Plan = Plan()) -> Gradients:
    """Loss and gradient of a whole batch, equal on every mesh.  `step` None: without dropout.

    Each cp rank is given whole sequences, and takes its own positions of them.

    `Reduction` sums gradients over ranks while the last micro-batch's backward pass goes on; `RowReduction` gives a rank its
    rows of the sums.
    """
    total = count = 0.0
    table, grads, micro_batches = placements(cfg, mesh), dict[str, Tensor](), list(batches)
    if not micro_batches:
        raise ValueError("a step needs one micro-batch at least, got none")
    for batch in micro_batches:
        ctx = Context.over(mesh, batch.rows, batch.tokens.shape[1], plan, seed=seed, step=step)
        tokens, targets = Tensor(ctx.own(batch.tokens), OVER_SAMPLES, cut=ctx.cut), ctx.own(batch.targets)

        def loss(p: Params) -> tuple[Tensor, Tensor]:
            return decoder.loss(tokens, targets, p, cfg, ctx)
        if batch is micro_batches[-1]:
            sums = reduction(mesh, table, before=grads)
            (part, valid), _ = value_and_grad(loss, params, on_leaf=sums.add)
            grads = sums.finish()
        else:
            (part, valid), new = value_and_grad(loss, params)
            grads = {name: Tensor(grads[name].array + g.array, g.layout) if grads else g for name, g in new.items()}
        total, count = total + float(part), count + float(valid)
    total, count = total_over(mesh, total, count)
    grads = divide_by_count({name: grads[name] for name in params}, int(count))
    return Gradients(total / count, int(count), grads)
