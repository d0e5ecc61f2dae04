"""How large rho gets for stacks that are right, and what is still found behind limits as large:
python benchmarks/false_alarms.py [--seeds 8] [--jobs 2] [--minutes N] [--out docs/false_alarms.json].

Right stacks are runs of the recipe itself that round otherwise than the runs by which a bundle's sigma was measured (WAYS).
Each is compared with its bundle as `golden check` does it: rho of every value, |z| along every suspect, z of every factor.  All
that is large is a false alarm.  golden/limits.py makes the limits of what comes out, and tests/golden/test_limits.py repeats a
part of it.

    values       quantiles 0.5 and 0.99 and the largest of rho over values, by format, way and size of the value
    comparisons  the largest rho of each comparison: mean, standard deviation and largest, by format and way
    power        what becomes of every suspect, run in a format: named, detected or missed, behind the limits
"""
import argparse
import json
import math
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Callable, Iterator
from unittest.mock import patch

import numpy as np

from refimpl.autograd import Frame, Round
from refimpl.autograd.op import Seam, stack
from refimpl.autograd.rounding import rounded as to_bfloat16
from refimpl.comm import Comm, Mesh, run_threads
from refimpl.comm.base import SerialComm
from refimpl.comm.launch import set_blas_threads
from refimpl.golden import bundle as bundles
from refimpl.golden import check, diagnose, factor
from refimpl.golden.bundle import Bundle
from refimpl.golden.emulate import FORMATS, Reordered, Rounding, rounded
from refimpl.golden.judge import FLOAT64, rho
from refimpl.golden.limits import Limits, limits_of
from refimpl.golden.make import make
from refimpl.golden.match import Found
from refimpl.golden.noise import RUNS
from refimpl.golden.recipe import MODELS, Recipe
from refimpl.golden.replay import local, valid_targets
from refimpl.golden.session import RUNS as LOCAL_RUNS
from refimpl.golden.suspects import SUSPECTS
from refimpl.golden.trace import trace
from refimpl.models import Config
from refimpl.rng import draw24, stream

Values = dict[str, np.ndarray]
SMALL = {"vocab_size": 40, "n_layers": 2, "n_heads": 4, "d_model": 16, "max_seq_len": 8}
CONFIGS = {
    **MODELS,
    "post-norm": Config(**SMALL, norm_place="post", ffn="gelu_erf", tied=False, biases=("norm", "qkv", "o", "mlp", "head")),
    "windows": Config(**SMALL, n_kv_heads=2, windows=(3, 0), qk_norm=True, norm="rms_norm_1+w", positions="rope",
                      rope_pairing="interleaved", ffn="geglu_tanh", biases=(), soft_cap=8.0),
    "wide": Config(**{**SMALL, "d_model": 32, "n_layers": 1}, n_kv_heads=1, norm="rms_norm", positions="rope", ffn="relu",
                   biases=("qkv",), d_ff=48, embed_scale=2.0),
}
POWER_OF, POWER_IN = ("gpt-micro", "llama-micro", "windows"), ("float32", "bfloat16")
MOVES = ("vocab_parallel_embedding", "embedding", "copy_to", "reduce_from", "gather_from", "reshape", "transpose", "scale",
         "relu", "add")
MESH = {**Mesh().dims, "tp": 2, "dp": 2}


class Fused(Rounding):
    """Rounds what products give, and the gradients by their inputs: norms, activations and sums are parts of larger kernels."""

    def call(self, op: Any, run: Callable, *arrays: Any, **static: Any) -> tuple[Any, Any]:
        if isinstance(op, Seam) or "linear" in op.name or op.name in ("attention", "vocab_parallel_embedding"):
            return super().call(op, run, *arrays, **static)
        return run(*arrays, **static)


class More(Rounding):
    """Rounds, too, what attention multiplies and gets: scores, probabilities and their gradients; and sums over tokens or
    outputs in the backward pass are made of four parts, each added up in the format, as of micro-batches or a split product."""

    def call(self, op: Any, run: Callable, *arrays: Any, **static: Any) -> tuple[Any, Any]:
        if op.name != "product":
            return super().call(op, run, *arrays, **static)
        a, b = arrays
        if ".attention." in f".{stack.name}.":
            return self.round(run(self.round(a), self.round(b))[0]), None
        if stack.phase != "backward":
            return run(a, b)
        total = np.zeros(())
        for p in np.array_split(np.arange(a.shape[-1]), 4):
            total = self.round(total + self.round(run(a[..., p], b[..., p, :])[0]))
        return total, None


class Narrow(Round):
    """As Round does it, with float32 inside of ops, in any format; weights are rounded, too."""

    def __init__(self, dtype: str) -> None:
        self.fmt = FORMATS[dtype]

    def round(self, values: Any) -> Any:
        if type(values) is tuple:
            return tuple(map(self.round, values))
        if getattr(values, "dtype", None) != "float32":
            return values
        return to_bfloat16(values) if self.fmt.digits == 8 else rounded(values.astype(float), self.fmt).astype("float32")

    def call(self, op: Any, run: Callable, *arrays: Any, **static: Any) -> tuple[Any, Any]:
        y, vjp = run(*arrays, **static)
        if isinstance(op, Seam):
            return y, vjp
        return y if "cross_entropy" in op.name else self.round(y), lambda *dy: self.round(vjp(*dy))

    def total(self, y: float, n: int) -> float:
        return float(np.float32(y))


class LastDigit(Frame):
    """Every result of float64 is moved by up to one unit of its last digit, as another library's may be, but of MOVES."""

    def __init__(self, seed: int) -> None:
        self.seed, self.drawn = seed, 0

    def call(self, op: Any, run: Callable, *arrays: Any, **static: Any) -> tuple[Any, Any]:
        y, vjp = run(*arrays, **static)
        return (y, vjp) if isinstance(op, Seam) or op.name in MOVES else (self.moved(y), lambda *dy: self.moved(vjp(*dy)))

    def moved(self, values: Any) -> Any:
        if type(values) is tuple:
            return tuple(map(self.moved, values))
        if getattr(values, "dtype", None) != "float64":
            return values
        self.drawn += 1
        n = draw24(stream(self.seed, f"moved {self.drawn}"), np.arange(values.size)).reshape(values.shape)
        return values * (1 + (n * 2.0 ** -23 - 1) * 2.0 ** -53)


@dataclass(frozen=True)
class Way:
    """A way to be right in `dtype`: run(recipe, comm) -> the trace."""
    name: str
    dtype: str
    run: Callable


def ways() -> Iterator[Way]:
    yield Way("reordered", "float64", lambda r, comm: trace(r, comm, frames=[Reordered(7)]))
    yield Way("last digits", "float64", lambda r, comm: trace(r, comm, frames=[Reordered(8), LastDigit(9)]))
    yield Way("numpy", "float32", partial(trace, dtype="float32"))
    yield Way("reordered", "float32", partial(trace, dtype="float32", frames=[Reordered(7)]))
    yield Way("blockwise", "float32", lambda r, comm: trace(replace(r, attention="blockwise"), comm, dtype="float32"))
    for dtype in FORMATS:
        for name, frame in (("nearest", Rounding), ("fused", Fused), ("more", More)):
            yield Way(name, dtype, lambda r, comm, f=frame, d=dtype: trace(r, comm, f(d)))
        if dtype != "float32":
            yield Way("blockwise", dtype, lambda r, comm, d=dtype: trace(replace(r, attention="blockwise"), comm, Narrow(d),
                                                                         dtype="float32"))
            yield Way("numpy", dtype, lambda r, comm, d=dtype: trace(r, comm, Narrow(d), dtype="float32"))
            yield Way("reordered", dtype, lambda r, comm, d=dtype: trace(r, comm, Narrow(d), [Reordered(7)], dtype="float32"))


WAYS = tuple(ways())


def recipes(seeds: int) -> Iterator[tuple[str, Recipe]]:
    for seed in range(seeds):
        for name, config in CONFIGS.items():
            yield name, Recipe(config, seed=seed, steps=3 if name in MODELS and seed % 4 == 0 else 1)
        if seed == 0:
            for name, config in MODELS.items():
                yield f"{name} sharded", Recipe(config, MESH, seed, steps=1)


def every_rank(recipe: Recipe, fn: Callable[[Comm], Any]) -> list[Any]:
    n = math.prod(recipe.mesh.values())
    return run_threads(n, fn) if n > 1 else [fn(SerialComm())]


def made(recipe: Recipe, folder: Path, runs: int = RUNS) -> Bundle:
    every_rank(recipe, lambda comm: make(recipe, comm, folder, runs))
    bundle = bundles.read(folder)
    bundle.value, bundle.sigma = cache(bundle.value), cache(bundle.sigma)
    return bundle


def run_of(way: Way, recipe: Recipe) -> list[Values]:
    """Every rank's values."""
    return every_rank(recipe, lambda comm: {key: v.array.astype(float) for key, v in way.run(recipe, comm).items()})


def size_of(a: np.ndarray) -> str:
    return "scalar" if a.size < 2 else "small" if a.size < 64 else "large"


def rhos(values: list[Values], bundle: Bundle, dtype: str) -> Iterator[tuple[str, float, float, str]]:
    """(size, normwise, elementwise rho, key) of every value that `golden check` would hold against a stack."""
    for rank, mine in enumerate(values):
        for key, actual in mine.items():
            entry, r = bundle.entries[key], rank if len(values) > 1 else None
            if check.rung_of(key, entry) == "inputs" or entry.kind == "gauge" or r is not None and entry.kind == "partial":
                continue
            sigma = check.sigma_in(bundle, key, r, dtype)
            if sigma is not None:
                found = rho(actual, bundle.value(key, r), sigma, entry.uncertainty, dtype)
                yield size_of(actual), found.norm, found.element, key


def local_rhos(values: list[Values], bundle: Bundle, dtype: str) -> Iterator[tuple[str, float, float, str]]:
    """The same of local replay."""
    given, count = values[0], valid_targets(bundle.recipe)
    right, noise = local(bundle.recipe, SerialComm(), given, count, dtype if dtype in FORMATS else "float32", LOCAL_RUNS)
    for key, sigma in noise.items():
        entry = bundle.entries[key]
        if check.rung_of(key, entry) not in ("inputs", "comm") and entry.kind != "gauge" and entry.step <= 1 \
                and np.isfinite(sigma).all():
            scale = 1.0 if dtype in FORMATS else FLOAT64
            found = rho(given[key], right[key], sigma * scale, 2.0 ** -53 * float(np.abs(right[key]).max(initial=0.0)),
                        dtype)
            yield size_of(sigma), found.norm, found.element, key


def projections(values: list[Values], bundle: Bundle, dtype: str, suspects: list) -> Iterator[float]:
    """|z| along every suspect of which there seems to be about as much as if it was made."""
    rank = 0 if len(values) > 1 else None
    held = {(key, rank): values[0][key] for key in bundle.entries}
    for _, run in suspects if dtype in diagnose.NARROW else ():
        found = diagnose.projected(held, run, bundle, dtype)
        if found and 0.5 < found[1] < 1.5:
            yield abs(found[2])


def factor_of(values: list[Values], runs: list, bundle: Bundle, dtype: str) -> float:
    """The largest z of a factor."""
    held = {(key, rank if len(values) > 1 else None): mine[key] for key in bundle.entries for rank, mine in enumerate(values)}
    return max((f.z for f in factor.factors(held, runs, bundle, dtype)), default=0.0)


def studied(name: str, recipe: Recipe, number: int) -> dict[str, Any]:
    """cell ("float32 nearest") -> {"size": rhos of values, ..., "comparison": the largest of each kind}."""
    out: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        bundle = made(recipe, Path(folder) / "bundle")
        suspects = diagnose.runs(bundle)
        rounded_runs = {dtype: factor.rounded_runs(bundle, dtype) for dtype in diagnose.NARROW}
        for k, way in enumerate(WAYS):
            if "sharded" in name and way.name not in ("nearest", "numpy"):
                continue
            values = run_of(way, recipe)
            cell = f"{way.dtype} {'sharded ' if 'sharded' in name else ''}{way.name}"
            out[cell] = summed(list(rhos(values, bundle, way.dtype)), name, recipe)
            if way.dtype in diagnose.NARROW:
                out[cell]["comparison"]["along"] = max(projections(values, bundle, way.dtype, suspects), default=0.0)
                out[cell]["comparison"]["factor"] = factor_of(values, rounded_runs[way.dtype], bundle, way.dtype)
            if bundle.ranks == 1 and k % 5 == number % 5:                   # some ways in turn
                out[f"{way.dtype} local {way.name}"] = summed(list(local_rhos(values, bundle, way.dtype)), name, recipe)
    return out


def summed(found: list[tuple[str, float, float, str]], name: str, recipe: Recipe) -> dict[str, Any]:
    sizes: dict[str, list] = {}
    for size, norm, element, _ in found:
        sizes.setdefault(size, []).append((norm, element))
    largest = {of: max((f[k], f[3]) for f in found) for k, of in ((1, "norm"), (2, "element"))}
    return {"sizes": sizes, "comparison": {of: rho for of, (rho, _) in largest.items()},
            "of": {of: f"{name}, seed {recipe.seed}: {key}" for of, (_, key) in largest.items()}}


def table(results: list[dict[str, Any]]) -> dict[str, Any]:
    """What is written of the study."""
    values: dict[str, Any] = {}
    comparisons: dict[str, Any] = {}
    for cell in sorted({cell for result in results for cell in result}):
        found = [result[cell] for result in results if cell in result]
        for size in ("scalar", "small", "large"):
            a = np.array([pair for f in found for pair in f["sizes"].get(size, [])]).reshape(-1, 2)
            if len(a):
                values[f"{cell}, {size}"] = {"n": len(a), "norm": quantiles(a[:, 0]), "element": quantiles(a[:, 1])}
        comparisons[cell] = {"n": len(found)}
        for of in ("norm", "element", "along", "factor"):
            maxima = np.array([f["comparison"][of] for f in found if of in f["comparison"]])
            if len(maxima):
                comparisons[cell][of] = {"mean": digits(maxima.mean()), "deviation": digits(maxima.std()),
                                         "max": digits(maxima.max()), "of": found[int(maxima.argmax())]["of"].get(of, "")}
    return {"values": values, "comparisons": comparisons}


def quantiles(a: np.ndarray) -> list[float]:
    return [digits(q) for q in (*np.quantile(a, [0.5, 0.99]), a.max())]


def digits(x: float) -> float:
    return float(f"{x:.4g}")


def power(recipe: Recipe, dtypes: tuple[str, ...], limits: Limits, only: tuple[str, ...] = ()) -> dict[str, Any]:
    """suspect -> dtype -> what becomes of it; `only`: of these suspects alone."""
    out: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, patch.object(check, "LIMITS", limits), \
            patch.object(diagnose, "LIMITS", limits):
        bundle = made(recipe, Path(folder) / "bundle")
        with patch.object(diagnose, "runs", lambda _, found=diagnose.runs(bundle): found):
            for suspect in SUSPECTS:
                change = suspect.changed(recipe)
                if change and (not only or suspect.what in only):
                    out[suspect.what] = {dtype: fate(suspect.what, *change, bundle, dtype) for dtype in dtypes}
    return out


def fate(what: str, changed: Recipe, frames: list[Frame], bundle: Bundle, dtype: str) -> dict[str, Any]:
    run = {key: v.array for key, v in trace(changed, SerialComm(), None, [*frames, Rounding(dtype)]).items()}
    values = {(key, None): run[key] for key in bundle.entries if key in run and run[key].shape == bundle.shape(key)}
    lines = check.check([Found(key, None, key, dtype, lambda a=a: a.astype(float)) for (key, _), a in values.items()],
                        bundle, dtype)
    failed = [line for line in lines if line.failed]
    largest = {of: digits(max((getattr(line.rho, of) for line in lines if line.rho and line.rung != "inputs"
                               and line.entry.kind != "gauge"), default=0.0)) for of in ("norm", "element")}
    if failed:
        found = diagnose.cause(values, lines, bundle, dtype)
        named = found is not None and found.what == what
        return {"verdict": "named" if named else "detected", "first": failed[0].key, **largest}
    hidden = [h.what for h in diagnose.hidden(values, bundle, dtype)]
    return {"verdict": "named by projection" if what in hidden else "missed", **largest}


def show(study: dict[str, Any]) -> None:
    kinds = ("norm", "element", "along", "factor")
    print(f"{'largest of a comparison':28}{'n':>4}" + "".join(f"{of:>10} mean    sd   max" for of in kinds))
    for cell, row in study["comparisons"].items():
        print(f"{cell:28}{row['n']:4}" + "".join(
            f"{row[of]['mean']:15.2f}{row[of]['deviation']:6.2f}{row[of]['max']:6.2f}" for of in kinds if of in row))
    print(f"\n{'values':36}{'n':>7}{'norm: 0.5   0.99    max':>26}{'element: 0.5   0.99    max':>30}")
    for cell, row in study["values"].items():
        print(f"{cell:36}{row['n']:7}" + "".join(f"{'':5}" + "".join(f"{q:7.2f}" for q in row[of]) for of in kinds[:2]))
    print(f"\nlimits {vars(limits_of(study))}")
    for name, suspects in study.get("power", {}).items():
        for what, fates in suspects.items():
            print(f"{name:12} {what[:80]:80} " + "  ".join(f"{d}: {f['verdict']}" for d, f in fates.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, help="start no more recipes after so long")
    parser.add_argument("--out", type=Path, default=Path("docs/false_alarms.json"))
    args = parser.parse_args()
    start, results = time.monotonic(), []
    with ProcessPoolExecutor(args.jobs, initializer=set_blas_threads, initargs=(1,)) as pool:
        waiting = [pool.submit(studied, *r, k) for k, r in enumerate(recipes(args.seeds))]
        for done in as_completed(waiting):
            if done.cancelled():
                continue
            results.append(done.result())
            print(f"{len(results)} recipes", end="\r", flush=True)
            if args.minutes and time.monotonic() - start > 60 * args.minutes:
                for job in waiting:
                    job.cancel()
        study = {"recipes": len(results), "runs": RUNS, **table(results)}
        limits = limits_of(study)
        jobs = {name: pool.submit(power, Recipe(CONFIGS[name], steps=1), POWER_IN, limits) for name in POWER_OF}
        study |= {"limits": vars(limits), "power": {name: job.result() for name, job in jobs.items()}}
    lines = (f" {json.dumps(name)}: {{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in part.items()) + "\n }"
             if isinstance(part, dict) else f" {json.dumps(name)}: {json.dumps(part)}" for name, part in study.items())
    args.out.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    show(study)


if __name__ == "__main__":
    main()
