"""Each op's forward and vjp beside torch's, float32, one core, interleaved: make bench-ops, or
python benchmarks/ops.py [op ...] where torch is installed.

Sizes are those of a GPT block: N = 2048 tokens, D 384, F 1536, 6 heads of 64, T 256, V 4096.  In every round both sides run
once, so that a slow moment of the machine hits both; the table shows the median of the rounds' ratios (torch's time / ours:
1 is equal, above 1 we are faster), its quartiles, and which share of the measured copy bandwidth the op's inputs and outputs
amount to (forward: read the inputs, write y; vjp: read dy and the inputs, write their gradients), or, for products, which
share of the measured matrix-product speed their FLOPs do.  Shares above 100% are data that was still in the cache, and vjps
that only hand on a view.  Left out: reshape, transpose, split, slice_axis, stop_gradient, straight_through, which are views.
"""
import argparse
import os
import platform
import time
from typing import Any, Callable

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np  # noqa: E402  the thread counts must be set before BLAS is loaded
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from refimpl import ops  # noqa: E402
from refimpl.autograd import Count  # noqa: E402
from refimpl.rng import draw, integers, stream  # noqa: E402

N, D, FF, H, K, T, V = 2048, 384, 1536, 6, 64, 256, 4096
B = N // T
MATMUL_LIKE = ("linear", "linear up", "matmul", "einsum", "attention")


def values(name: str, *shape: int, mean: float = 0.0) -> np.ndarray:
    return draw(name, shape, 2.0, "float32") + np.float32(mean)


def ids(name: str, n: int, below: int) -> np.ndarray:
    return integers(stream(0, name), np.arange(n), below)


def rows() -> dict[str, tuple[Callable, tuple[np.ndarray, ...], dict[str, Any], Callable]]:
    """name -> (our op, its arrays, its static arguments, torch's function of the same tensors)."""
    x, wide = values("x", B, T, D), values("wide", B, T, FF)
    q, k, v = (values(n, B, H, T, K) for n in "qkv")
    w, up, bias = values("w", D, D), values("up", D, FF), values("bias", FF)
    g, b = values("g", D), values("b", D)
    logits, targets = values("logits", N, V), ids("targets", N, V)
    table, tokens = values("table", V, D), ids("tokens", N, V).reshape(B, T)
    p = np.arange(T)
    unary = {name: (getattr(ops, name), (wide,), {}, fn) for name, fn in (
        ("gelu_tanh", lambda t: F.gelu(t, approximate="tanh")), ("gelu_erf", F.gelu), ("relu", F.relu), ("silu", F.silu),
        ("quick_gelu", lambda t: t * torch.sigmoid(1.702 * t)), ("exp", torch.exp), ("tanh", torch.tanh),
        ("sigmoid", torch.sigmoid), ("softplus", lambda t: F.softplus(t, threshold=1e9)), ("erf", torch.erf))}
    return {
        "linear": (ops.linear, (x, w, b), {}, lambda x, w, b: x @ w + b),
        "linear up": (ops.linear, (x, up, bias), {}, lambda x, w, b: x @ w + b),
        "matmul": (ops.matmul, (q, k.swapaxes(2, 3)), {}, torch.matmul),
        "einsum": (ops.einsum, (q, k), {"spec": "bhtk,bhsk->bhts"}, lambda a, b: torch.einsum("bhtk,bhsk->bhts", a, b)),
        "attention": (ops.attention, (q, k, v), {"mask": ops.CAUSAL},
                      lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
        "layer_norm": (ops.layer_norm, (x, g, b), {}, lambda x, g, b: F.layer_norm(x, (D,), g, b)),
        "rms_norm": (ops.rms_norm, (x, g), {}, lambda x, g: F.rms_norm(x, (D,), g, 1e-6)),
        "softmax": (ops.softmax, (values("s", B, H, T, T),), {}, lambda t: torch.softmax(t, -1)),
        "log_softmax": (ops.log_softmax, (logits,), {}, lambda t: torch.log_softmax(t, -1)),
        "logsumexp": (ops.logsumexp, (logits,), {}, lambda t: torch.logsumexp(t, -1)),
        "cross_entropy": (ops.cross_entropy, (logits, targets), {}, lambda t, y: F.cross_entropy(t, y, reduction="sum")),
        **unary,
        "swiglu": (ops.swiglu, (wide, values("up2", B, T, FF)), {}, lambda a, b: F.silu(a) * b),
        "log": (ops.log, (np.abs(wide) + 1,), {}, torch.log), "sqrt": (ops.sqrt, (np.abs(wide) + 1,), {}, torch.sqrt),
        "power": (ops.power, (wide,), {"exponent": 2.0}, lambda t: t ** 2.0),
        "add": (ops.add, (x, values("y", B, T, D)), {}, torch.add), "mul": (ops.mul, (x, values("y", B, T, D)), {}, torch.mul),
        "add bias": (ops.add, (wide, bias), {}, torch.add),
        "divide": (ops.divide, (x, values("y", B, T, D, mean=5)), {}, torch.divide),
        "subtract": (ops.subtract, (x, values("y", B, T, D)), {}, torch.subtract),
        "scale": (ops.scale, (x,), {"by": 0.5}, lambda t: t * 0.5),
        "where": (ops.where, (values("c", B, T, D) > 0, x, values("y", B, T, D)), {}, torch.where),
        "sum": (ops.sum, (wide,), {"axis": -1}, lambda t: t.sum(-1)),
        "mean": (ops.mean, (wide,), {"axis": -1}, lambda t: t.mean(-1)),
        "max": (ops.max, (wide,), {"axis": -1}, lambda t: t.amax(-1)),
        "norm": (ops.norm, (wide,), {}, lambda t: t.norm(dim=-1)),
        "cumsum": (ops.cumsum, (x,), {"axis": 1}, lambda t: t.cumsum(1)),
        "embedding": (ops.embedding, (table, tokens), {}, lambda w, i: F.embedding(i, w)),
        "gather": (ops.gather, (table, tokens.reshape(-1)), {}, lambda w, i: w[i]),
        "scatter_add": (ops.scatter_add, (values("u", N, D), tokens.reshape(-1)), {"n": V},
                        lambda u, i: torch.zeros(V, D).index_add(0, i, u)),
        "rope": (ops.rope, (q, p), {}, torch_rope),
        "dropout": (ops.dropout, (x, np.arange(B), p, np.arange(D)), {"key": 1, "rate": 0.1, "shape": (B, T, D)},
                    lambda t, *at: F.dropout(t, 0.1)),
        "concat": (ops.concat, (x, values("y", B, T, D)), {}, lambda a, b: torch.cat((a, b), -1)),
        "pad": (ops.pad, (x,), {"before": 4, "axis": 1}, lambda t: F.pad(t, (0, 0, 4, 0))),
        "repeat": (ops.repeat, (q,), {"times": 2, "axis": 1}, lambda t: t.repeat_interleave(2, 1)),
        "depthwise_conv": (ops.depthwise_conv, (x, values("taps", 4, D)), {}, torch_depthwise),
        "fft_conv": (ops.fft_conv, (x, values("long", T, D)), {}, torch_fft_conv),
    }


def torch_rope(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    angle = positions[:, None] * 10000.0 ** (-torch.arange(0, K, 2, dtype=torch.float64) / K)
    cos, sin = torch.cat([angle, angle], -1).cos().float(), torch.cat([angle, angle], -1).sin().float()
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def torch_depthwise(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), w.t()[:, None].contiguous(), groups=D).transpose(1, 2)


def torch_fft_conv(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.fft.irfft(torch.fft.rfft(x, n=2 * T, dim=1) * torch.fft.rfft(k, n=2 * T, dim=0), n=2 * T, dim=1)[:, :T]


def clock(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def one_round(row: Any, tensors: list[torch.Tensor]) -> list[float]:
    """Seconds of our forward, our vjp, torch's forward, torch's backward."""
    op, arrays, static, theirs = row
    ours, (y, vjp) = clock(lambda: op.array(*arrays, **static))          # type: ignore[attr-defined]
    first = y[0] if isinstance(y, tuple) else y
    dy = np.ones(np.shape(first), np.float32)
    ours_back, _ = clock(lambda: vjp(dy))
    for t in tensors:
        t.grad = None
    other, ty = clock(lambda: theirs(*tensors))
    tdy = torch.ones_like(ty)
    other_back, _ = clock(lambda: ty.backward(tdy))
    return [ours, ours_back, other, other_back]


def ceilings() -> tuple[float, float]:
    """Measured copy bandwidth (bytes/s, read and write both counted) and float32 matrix-product speed (FLOP/s), one core."""
    a, b = np.ones(1 << 25, np.float32), np.empty(1 << 25, np.float32)
    m = np.ones((1024, 1024), np.float32)
    copy = min(clock(lambda: np.copyto(b, a))[0] for _ in range(9))
    product = min(clock(lambda: m @ m)[0] for _ in range(9))
    return 2 * a.nbytes / copy, 2 * 1024 ** 3 / product


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", help="names of the table's rows (default: all)")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    bandwidth, flops = ceilings()
    print(f"{platform.processor() or platform.machine()}, numpy {np.__version__}, torch {torch.__version__}, one core: "
          f"copy {bandwidth / 1e9:.1f} GB/s, sgemm {flops / 1e9:.0f} GFLOP/s\n")
    print(f"{'':16}{'forward':^34}{'vjp':^34}")
    print(f"{'op':16}" + 2 * f"{'ms':>7}{'ratio':>8}{'quartiles':>12}{'share':>7}")
    for name, row in rows().items():
        if args.ops and name not in args.ops:
            continue
        tensors = [torch.from_numpy(np.ascontiguousarray(a)).requires_grad_(a.dtype == np.float32) for a in row[1]]
        times = np.array([one_round(row, tensors) for _ in range(args.rounds + 2)])[2:]
        work = needed(row, name in MATMUL_LIKE)
        ceiling = flops if name in MATMUL_LIKE else bandwidth
        print(f"{name:16}" + side(times[:, 0], times[:, 2], work[0] / ceiling)
              + side(times[:, 1], times[:, 3], work[1] / ceiling))


def needed(row: Any, flops: bool) -> tuple[float, float]:
    """What forward and vjp have to do: FLOPs of their matrix products, or bytes read and written."""
    op, arrays, static, _ = row
    with Count() as count:
        y, vjp = op.array(*arrays, **static)
        forward = sum(count.flops.values())
        first = np.asarray(y[0] if isinstance(y, tuple) else y)
        vjp(np.ones(first.shape, np.float32))
    if flops:
        return forward, sum(count.flops.values()) - forward
    inputs = sum(a.nbytes for a in arrays)
    return inputs + first.nbytes, 2 * inputs + first.nbytes


def side(ours: np.ndarray, theirs: np.ndarray, ideal: float) -> str:
    """Milliseconds, the ratio with its quartiles, and the share of the ceiling; `ideal` is the time at the ceiling."""
    low, ratio, high = np.percentile(theirs / ours, [25, 50, 75])
    seconds = float(np.median(ours))
    return f"{seconds * 1e3:7.2f}{ratio:8.2f}{f'{low:.2f}-{high:.2f}':>12}{ideal / seconds:7.0%}"


if __name__ == "__main__":
    main()
