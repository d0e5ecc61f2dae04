"""Each op's bandwidth and FLOP/s on a GPU, beside what the card itself reaches: python benchmarks/gpu.py [op ...]

    python benchmarks/gpu.py                              GPT-2's block on the GPU, float32 and float64
    python benchmarks/gpu.py --device numpy --size tiny   the same program on a CPU, to try it

The ceilings are measured on this card in the same dtype: a large copy (bytes read and written) and a large square matrix
product.  An op's bytes are the least it can move (forward: read the inputs, write y; vjp: read dy and the inputs, write the
gradients), its FLOPs are those of the products it makes.  So "of copy" below 1 shows traffic of temporaries, of which a numpy
expression has many, and waiting for launches; "view" stands where nothing is moved at all.  Times lie between two events on
the stream, after warm-up: median and quartiles over the rounds.
"""
import argparse
import math
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Callable, Sequence

import numpy as np

from refimpl import ops
from refimpl.array import device_module, is_array, owner
from refimpl.autograd import Count
from refimpl.rng import integers, stream, uniform_weights


@dataclass(frozen=True)
class Size:
    """B samples of T tokens, width D, H heads, F feed-forward, V words; `copy` elements and `square` rows for the ceilings."""
    B: int
    T: int
    D: int
    H: int
    F: int
    V: int
    copy: int
    square: int


SIZES = {"gpt2": Size(B=4, T=1024, D=768, H=12, F=3072, V=50257, copy=1 << 28, square=8192),
         "tiny": Size(B=2, T=8, D=12, H=3, F=24, V=31, copy=1 << 12, square=32)}
WARM_UP = 3
Row = tuple[Any, tuple[Any, ...], dict[str, Any]]       # op, arrays, static arguments


def rows(xp: ModuleType, s: Size, dtype: str) -> dict[str, Callable[[], Row]]:
    """name -> what makes the op's arguments: arrays are made when their turn comes, as not all fit side by side."""
    def values(*shape: int, mean: float = 0.0) -> Any:
        return uniform_weights(stream(0, "values"), xp.arange(math.prod(shape)), 2.0, dtype).reshape(shape) + mean

    def ids(below: int) -> Any:
        return integers(stream(0, "ids"), xp.arange(s.B * s.T), below).reshape(s.B, s.T)

    def at(*sizes: int) -> tuple[Any, ...]:
        return tuple(xp.asarray(np.arange(n)) for n in sizes)

    def x(width: int = s.D) -> Any:
        return values(s.B, s.T, width)

    heads = (s.B, s.H, s.T, s.D // s.H)
    vector = values(s.D, mean=1.0)
    return {
        "linear": lambda: (ops.linear, (x(), values(s.D, s.D), vector), {}),
        "linear up": lambda: (ops.linear, (x(), values(s.D, s.F), values(s.F)), {}),
        "linear head": lambda: (ops.linear, (x(), values(s.D, s.V)), {}),
        "attention": lambda: (ops.attention, (values(*heads), values(*heads), values(*heads)), {"mask": ops.CAUSAL}),
        "layer_norm": lambda: (ops.layer_norm, (x(), vector, vector), {}),
        "rms_norm": lambda: (ops.rms_norm, (x(), vector), {}),
        "gelu_tanh": lambda: (ops.gelu_tanh, (x(s.F),), {}),
        "gelu_erf": lambda: (ops.gelu_erf, (x(s.F),), {}),
        "swiglu": lambda: (ops.swiglu, (x(s.F), x(s.F)), {}),
        "softmax": lambda: (ops.softmax, (values(s.B, s.H, s.T, s.T),), {}),
        "cross_entropy": lambda: (ops.cross_entropy, (values(s.B, s.T, s.V), ids(s.V)), {}),
        "embedding": lambda: (ops.embedding, (values(s.V, s.D), ids(s.V)), {}),
        "rope": lambda: (ops.rope, (values(*heads), *at(s.T)), {}),
        "dropout": lambda: (ops.dropout, (x(), *at(s.B, s.T, s.D)), {"key": 1, "rate": 0.1, "shape": (s.B, s.T, s.D)}),
        "add": lambda: (ops.add, (x(), x()), {}),
        "mul": lambda: (ops.mul, (x(), x()), {}),
        "sum": lambda: (ops.sum, (x(),), {"axis": -1}),
        "transpose": lambda: (ops.transpose, (values(s.B, s.T, s.H, s.D // s.H),), {"axes": (0, 2, 1, 3)}),
    }


def clock(xp: ModuleType, run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of run() on the device, and its result."""
    if xp is np:
        start = time.perf_counter()
        result = run()
        return time.perf_counter() - start, result
    begin, end = xp.cuda.Event(), xp.cuda.Event()
    begin.record()
    result = run()
    end.record()
    end.synchronize()
    return xp.cuda.get_elapsed_time(begin, end) / 1e3, result


def quartiles(seconds: Sequence[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return [float(q) for q in np.percentile(seconds, (25, 50, 75))]


def ceilings(xp: ModuleType, s: Size, dtype: str, rounds: int) -> tuple[float, float]:
    """Bytes/s of a large copy and FLOP/s of a large matrix product: medians, after warm-up."""
    a = xp.asarray(np.ones(s.copy, dtype))
    m = uniform_weights(stream(0, "square"), xp.arange(s.square ** 2), 1.0, dtype).reshape(s.square, s.square)
    copy, product = ([clock(xp, run)[0] for _ in range(WARM_UP + rounds)][WARM_UP:] for run in (a.copy, lambda: m @ m))
    return 2 * a.nbytes / quartiles(copy)[1], 2 * s.square ** 3 / quartiles(product)[1]


def nbytes(inputs: Sequence[Any], results: Sequence[Any]) -> int:
    """What has to be read and written; 0 where all results are views of inputs."""
    inputs, results = ([a for a in group if is_array(a)] for group in (inputs, results))
    if results and {id(owner(a)) for a in results} <= {id(owner(a)) for a in inputs}:
        return 0
    return sum(a.nbytes for a in [*inputs, *results])


@dataclass(frozen=True)
class Measured:
    """Seconds (quartiles), the least bytes, and the FLOPs of the products, of a forward or a vjp."""
    seconds: list[float]
    nbytes: int
    flops: int


def measure(xp: ModuleType, row: Row, rounds: int) -> tuple[Measured, Measured]:
    """Forward and vjp."""
    op, arrays, static = row
    with Count() as forward:
        y, vjp = op.array(*arrays, **static)
    first = y[0] if isinstance(y, tuple) else y
    dy = xp.full_like(first, 1.0)
    with Count() as backward:
        dx = vjp(dy)
    looked_up = op is ops.embedding                     # reads rows, as many bytes as dy has, and not the whole table
    read, read_again = ([dy, arrays[1]], arrays[1:]) if looked_up else (arrays, arrays)
    sizes = nbytes(read, [first]), nbytes([*read_again, dy], dx if isinstance(dx, tuple) else (dx,))
    del y, vjp, dx
    seconds: tuple[list[float], list[float]] = [], []
    for _ in range(WARM_UP + rounds):
        t, (_, vjp) = clock(xp, lambda: op.array(*arrays, **static))
        seconds[0].append(t)
        seconds[1].append(clock(xp, lambda: vjp(dy))[0])
    flops = sum(forward.flops.values()), sum(backward.flops.values())
    return tuple(Measured(quartiles(t[WARM_UP:]), b, f)                                  # type: ignore[return-value]
                 for t, b, f in zip(seconds, sizes, flops))


def line(name: str, m: Measured, bandwidth: float, speed: float) -> str:
    low, median, high = m.seconds
    moved = f"{m.nbytes / median / 1e9:10.3g}{m.nbytes / median / bandwidth:9.2f}" if m.nbytes else f"{'view':>10}{'':9}"
    products = f"{m.flops / median / 1e12:10.3g}{m.flops / median / speed:11.2f}" if m.flops else ""
    return f"{name:22}{median * 1e3:10.3f}{low * 1e3:10.3f} -{high * 1e3:9.3f}{moved}{products}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", help="names of the table's rows (default: all)")
    parser.add_argument("--device", default="cupy", help="cupy or numpy (default: %(default)s)")
    parser.add_argument("--size", default="gpt2", choices=SIZES, help="default: %(default)s")
    parser.add_argument("--dtype", default="float32,float64", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=20, help="default: %(default)s")
    args = parser.parse_args(argv)
    try:
        xp = device_module(args.device)
    except ValueError as error:
        parser.error(str(error))
    size = SIZES[args.size]
    known = rows(np, SIZES["tiny"], "float64")
    if unknown := [name for name in args.ops if name not in known]:
        parser.error(f"no op is called {', '.join(unknown)}; there are {', '.join(known)}")
    card = "this CPU" if xp is np else xp.cuda.runtime.getDeviceProperties(xp.cuda.Device().id)["name"].decode()
    for dtype in args.dtype.split(","):
        bandwidth, speed = ceilings(xp, size, dtype, args.rounds)
        print(f"{card}, {args.device} {xp.__version__}, {dtype}, {size}\n"
              f"measured ceilings: copy {bandwidth / 1e9:.1f} GB/s, matrix product {speed / 1e12:.3f} TFLOP/s\n"
              f"{'':22}{'ms':>10}{'quartiles':>21}{'GB/s':>10}{'of copy':>9}{'TFLOP/s':>10}{'of product':>11}")
        for name, make in rows(xp, size, dtype).items():
            if not args.ops or name in args.ops:
                for what, m in zip(("", " vjp"), measure(xp, make(), args.rounds)):
                    print(line(name + what, m, bandwidth, speed), flush=True)
        print()


if __name__ == "__main__":
    main()
