"""The feed-forward layer, cut by columns, then by rows (the lecture's slides 121-122).

    Y = GELU(X A) B        A = [ A_0 | A_1 ]        B = [ B_0 ]        Y = GELU(X A_0) B_0 + GELU(X A_1) B_1
                                                        [ B_1 ]

GELU works on each rank's own columns, so one exchange, g, is enough.  Cut the other way round, GELU would meet partial
sums and the layout tag would refuse it.  Shape letters: B batch, T positions, D model, F feed-forward.
"""
from refimpl.autograd import Params, Tensor, scoped
from refimpl.models.config import Config
from refimpl.models.context import Context, drop
from refimpl.ops import gelu_tanh
from refimpl.parallel import column_parallel_linear, copy_to, reduce_from, row_parallel_linear


@scoped
def mlp(x: Tensor, p: Params, cfg: Config, ctx: Context) -> Tensor:
    """x[B, T, D] -> y[B, T, D].  Reference: Shoeybi et al. 2019, figure 3a.  HF GPT2MLP, Megatron ParallelMLP"""
    x = copy_to(x, comm=ctx.mesh.tp)                                                # f: identity | all_reduce
    h = gelu_tanh(column_parallel_linear(x, p["up.w"], p["up.b"]))                  # (B, T, F/tp)
    y = reduce_from(row_parallel_linear(h, p["down.w"]), comm=ctx.mesh.tp)          # g: all_reduce | identity
    return drop(y + p["down.b"], p, cfg, ctx)                                       # the bias once, after g
