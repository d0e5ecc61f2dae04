"""Make a bundle: run the recipe on a mesh, prove that it is the serial run, measure what rounding does, and write."""
import hashlib
import json
import math
import shutil
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Iterator, Mapping

import numpy as np

from refimpl.comm import Comm, Mesh
from refimpl.comm.base import SerialComm
from refimpl.golden.bundle import write as write_bundle
from refimpl.golden.conventions import conventions
from refimpl.golden.emulate import FORMATS
from refimpl.golden.manifest import Entry
from refimpl.golden.noise import RUNS, encoded, measured, rms, uncertainty
from refimpl.golden.place import SHARED, Placement, located, per_rank
from refimpl.golden.recipe import Recipe, spread
from refimpl.golden.trace import Value, trace
from refimpl.models.placements import heads, parameters
from refimpl.tensorfile import CODES


def make(recipe: Recipe, comm: Comm, out: Path, runs: int = RUNS) -> None:
    """All ranks make the bundle OUT, which rank 0 writes.  The same recipe gives the same bytes on every backend.

    runs    emulated runs in each format, from which the noise is measured
    Errors: ValueError, the same on every rank, where OUT is there already or cannot be written; AssertionError where the
            sharded run is not the serial one
    """
    comm.on_first(lambda: require_new(out))
    truth = trace(recipe, comm)
    sure = uncertainty(recipe, comm, truth)
    sigmas = {dtype: measured(recipe, comm, truth, dtype, runs) for dtype in FORMATS}
    values = everybodys(comm, {key: v.array for key, v in truth.items()})
    noises = {dtype: everybodys(comm, sigma) for dtype, sigma in sigmas.items()}
    sures = [json.loads(text) for text in comm.gather_texts(json.dumps(sure))]
    comm.on_first(lambda: write(recipe, out, runs, truth, values, noises, sures))


def require_new(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there already: give another --out, or remove it")


def everybodys(comm: Comm, arrays: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Every rank's arrays, on every rank."""
    forms = json.dumps({key: (a.dtype.str, a.shape) for key, a in arrays.items()})
    shapes = [json.loads(text) for text in comm.gather_texts(forms)]
    raw = np.frombuffer(b"".join(a.tobytes() for a in arrays.values()), np.uint8)
    sizes = [sum(np.dtype(d).itemsize * math.prod(shape) for d, shape in table.values()) for table in shapes]
    out: list[dict[str, np.ndarray]] = []
    joined, end = comm.all_gather(raw, 0, sizes), 0
    for table in shapes:
        out.append({})
        for key, (dtype, shape) in table.items():
            start, end = end, end + np.dtype(dtype).itemsize * math.prod(shape)
            out[-1][key] = joined[start:end].view(dtype).reshape(shape)
    return out


def write(recipe: Recipe, out: Path, runs: int, truth: dict[str, Value], values: list[dict[str, np.ndarray]],
          noises: dict[str, list[dict[str, np.ndarray]]], sures: list[dict[str, float]]) -> None:
    """Rank 0 writes what all have."""
    alone = replace(recipe, mesh=Mesh().dims, attention="naive", layout="contiguous")
    serial = trace(alone, SerialComm()) if len(values) > 1 else truth
    gauge = gauges(recipe)
    kv_bounds = heads(recipe.config, recipe.mesh["tp"])[1]
    entries, parts = {}, {}
    for key, value in truth.items():
        held = [ranks[key] for ranks in values]
        place = per_rank(held, recipe.mesh) if key not in serial else \
            located(key, held, serial[key].array, recipe.mesh, kv_bounds, key not in gauge, recipe.layout)
        noise: dict[str, float | None] = {}
        parts[key] = {r: held[r] for r in place.holders()}
        for dtype in FORMATS if value.role != "input" else ():
            sigma = {r: noises[dtype][r][key] for r in place.holders()}
            largest = max(float(s.max(initial=0.0)) for s in sigma.values())
            noise[dtype] = largest if math.isfinite(largest) else None
            if math.isfinite(largest):
                parts[f"{dtype}/{key}"] = {r: encoded(s, largest) for r, s in sigma.items()}
        kind = "gauge" if key in gauge else "partial" if is_partial(place) or is_summand(key) else "canonical"
        entries[key] = Entry(value.role, value.phase, value.step, CODES[held[0].dtype], place, kind, digest(parts[key]),
                             rms(np.array([sures[r].get(key, 0.0) for r in place.holders()])), noise, value.terms)
    about = {"generator": f"refimpl {release()}", "recipe": recipe.to_dict(), "runs": runs, "conventions": conventions(recipe),
             "weights": weights_of(recipe)}
    with finished(out) as folder:
        write_bundle(folder, about, entries, parts)


@contextmanager
def finished(out: Path) -> Iterator[Path]:
    """A folder to write to that becomes OUT at the end, or is gone."""
    require_new(out)
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        yield part
        if out.exists():
            out.rmdir()                                 # it is empty
        part.rename(out)
    except OSError as error:
        raise ValueError(f"{out} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def is_summand(key: str) -> bool:
    """Whether it is what a rank adds to a sum over ranks."""
    return key.endswith((".all_reduce.in", ".reduce_scatter.in"))


def is_partial(place: Placement) -> bool:
    return any(how == "partial" or SHARED in how for how in place.along.values())


def gauges(recipe: Recipe) -> set[str]:
    """Keys of values that are rounding alone, or, after an update, made of such."""
    names = [name for name, row in parameters(recipe.config, Mesh()).items() if row.gauge]
    return {f"step{step}/{kind}/{name}" for name in names for step in range(1, recipe.steps + 1)
            for kind in ("grad", "m", "v", "params")}


def weights_of(recipe: Recipe) -> dict[str, dict]:
    """Of every parameter: its shape, offset and scale, from which the hash makes it."""
    rows = parameters(recipe.config, Mesh())
    return {name: {"shape": list(row.shape), **dict(zip(("offset", "scale"), spread(name, row)))} for name, row in rows.items()}


def digest(parts: Mapping[int, np.ndarray]) -> str:
    return hashlib.sha256(b"".join(parts[r].tobytes() for r in sorted(parts))).hexdigest()


def release() -> str:
    try:
        return version("refimpl")
    except PackageNotFoundError:
        return "unknown"
