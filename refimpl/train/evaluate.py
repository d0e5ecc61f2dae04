"""How well a model predicts text that it has not seen: nats per token, and bits per byte, which compare across tokenizers."""
import math
from dataclasses import dataclass
from typing import Mapping

from refimpl.autograd import Params, Tensor
from refimpl.comm import Mesh
from refimpl.models import Config, Context, decoder
from refimpl.parallel import total_over
from refimpl.train.data import Data, Sampler
from refimpl.train.options import Options
from refimpl.train.step import OVER_SAMPLES


@dataclass(frozen=True)
class Evaluation:
    """loss: nats per token;  bits_per_byte: None where it is not known what the tokens are."""
    loss: float
    bits_per_byte: float | None

    def __str__(self) -> str:
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        return f"validation loss {self.loss:.4f}{bits}"


def evaluate(params: Mapping[str, Tensor], data: Data, cfg: Config, mesh: Mesh, options: Options) -> Evaluation:
    """The loss on `eval_batches` batches of the validation part, without dropout: the same samples each time, on every mesh.

    bits per byte = Σ nats of the tokens / (ln 2 · Σ bytes of the tokens): the mean over all text that the samples predict.
    Reference: Gao et al. 2020 (The Pile), section 3.1
    """
    sampler = Sampler(data.validation, options.seq_len, options.seed, "validation")
    nats = tokens = size = 0.0
    for k in range(options.eval_batches):
        for batch in sampler.step(k, options.batch_size, 1, mesh):
            ctx = Context.over(mesh, batch.rows, options.seq_len, options.plan)
            targets = ctx.own(batch.targets)
            given = Tensor(ctx.own(batch.tokens), OVER_SAMPLES, cut=ctx.cut)
            total, count = decoder.loss(given, targets, Params(params), cfg, ctx)
            nats, tokens = nats + float(total), tokens + float(count)
            size += float(data.tokenizer.lengths[targets].sum()) if data.tokenizer else 0.0
    nats, tokens, size = total_over(mesh, nats, tokens, size)
    return Evaluation(nats / tokens, nats / (math.log(2) * size) if size else None)
