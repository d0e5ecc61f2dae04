"""The feed-forward layer, cut by columns, then by rows (the lecture's slides 121-122).

    Y = GELU(X A) B        A = [ A_0 | A_1 ]        B = [ B_0 ]        Y = GELU(X A_0) B_0 + GELU(X A_1) B_1
                                                        [ B_1 ]

GELU works on each rank's own columns, so one exchange, g, is enough; ReLU and gated units likewise.  Cut the other way
round, GELU would meet partial sums and the layout tag would refuse it.
Shape letters: B batch, T positions, D model, F feed-forward.
"""
from refimpl import ops
from refimpl.autograd import Params, Tensor, scoped
from refimpl.models.config import Config
from refimpl.models.context import Context, drop, enter, leave
from refimpl.ops import mul, swiglu
from refimpl.parallel import column_parallel_linear, row_parallel_linear


@scoped
def mlp(x: Tensor, p: Params, cfg: Config, ctx: Context) -> Tensor:
    """x[B, T, D] -> y[B, T, D].  Reference: Shoeybi et al. 2019, figure 3a; gated: Shazeer 2020, eq. 6.

    HF GPT2MLP, LlamaMLP; Megatron ParallelMLP
    """
    x, again = enter(x, ctx)                                                        # f: identity | all_reduce
    h = column_parallel_linear(x, p["up.w"], p.get("up.b"), again=again)            # (B, T, F/tp)
    if cfg.gated:
        h = gated(column_parallel_linear(x, p["gate.w"], p.get("gate.b"), again=again), h, cfg.ffn)
    else:
        h = activated(h, cfg.ffn)
    y = leave(row_parallel_linear(h, p["down.w"]), ctx)                             # g: all_reduce | identity
    y = y + p["down.b"] if "down.b" in p else y                                     # the bias once, after g
    return drop(y, p, cfg, ctx)


def activated(x: Tensor, ffn: str) -> Tensor:
    return getattr(ops, ffn)(x)


def gated(gate: Tensor, up: Tensor, ffn: str) -> Tensor:
    """Gate and up are cut alike, so each rank has both halves of its units."""
    return swiglu(gate, up) if ffn == "swiglu" else mul(activated(gate, ffn.replace("geglu", "gelu")), up)
