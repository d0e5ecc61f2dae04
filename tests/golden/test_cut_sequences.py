"""Localises faults of golden values where sequences are cut over cp: parts in the wrong places, and mistakes that pass."""
import math
import sys

import numpy as np
import pytest
from comm.programs import execute

from refimpl import ops, tensorfile
from refimpl.autograd import Replace
from refimpl.comm import CommError, run_threads
from refimpl.comm.launch import mpirun_command
from refimpl.comm.mesh import AXES
from refimpl.golden import bundle
from refimpl.golden.actual import read
from refimpl.golden.make import make
from refimpl.golden.place import layout_of, located
from refimpl.golden.recipe import MODELS, Recipe
from refimpl.golden.session import How, compared
from refimpl.golden.trace import trace
from refimpl.ops import Mask
from refimpl.parallel import LAYOUTS, SequenceLayout, ring_attention
from refimpl.rng import draw

WAYS = {"ring zigzag": ("llama-micro", (1, 2, 2), "ring", "zigzag"),
        "all to all striped": ("gpt-micro", (2, 2, 1), "all_to_all", "striped"),
        "gathered": ("gpt-micro", (1, 3, 1), "blockwise", "contiguous")}
ACT = "step1/act/layers.0.attn.attention"


def recipe_of(way, steps=2):
    model, dims, attention, layout = WAYS[way]
    return Recipe(MODELS[model], dict(zip(AXES, dims)), steps=steps, attention=attention, layout=layout)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    kept = {}

    def get(way):
        if way not in kept:
            recipe, out = recipe_of(way), tmp_path_factory.mktemp("cut") / "bundle"
            run_threads(math.prod(recipe.mesh.values()), lambda comm: make(recipe, comm, out, 8))
            kept[way] = bundle.read(out)
        return kept[way]
    return get


def ran(found, folder, frame=None):
    """What a stack dumps that computes in float32 on these ranks, in which `frame` is in force: one file per rank."""
    def run(comm):
        values = trace(found.recipe, comm, frames=[frame()] if frame else [], dtype="float32")
        tensorfile.write(folder / f"rank{comm.rank}.safetensors", {
            key: v.array.astype("float32") if v.array.dtype.kind == "f" else v.array for key, v in values.items()})
    folder.mkdir()
    run_threads(found.ranks, run)
    return read(folder)


@pytest.mark.parametrize("way", WAYS)
def test_the_values_are_those_of_one_rank_whatever_the_way(bundles, way):
    found, serial = bundles(way), Recipe(MODELS[WAYS[way][0]], steps=2)
    truth = run_threads(1, lambda comm: trace(serial, comm))[0]
    assert set(truth) <= set(found.entries)
    for key, value in truth.items():
        if found.entries[key].kind != "gauge":
            whole = found.value(key)
            np.testing.assert_allclose(whole, value.array, rtol=0, atol=1e-12 * np.abs(value.array).max(initial=1e-300))
    cut = {key for key, e in found.entries.items() if e.place.along.get("cp", "").startswith("axis")}
    assert ACT in cut and f"step1/dact/{ACT[10:]}" in cut and not any("/grad/" in key for key in cut)
    assert layout_of(found.entries[ACT].place.along["cp"])[0] == WAYS[way][3]


@pytest.mark.parametrize("local", (False, True))
@pytest.mark.parametrize("way", WAYS)
def test_a_right_stack_passes_on_its_own_ranks(bundles, tmp_path, way, local):
    found = bundles(way)
    report = compared(ran(found, tmp_path / "dump"), found, How("float32", locally=local))
    assert report.status == 0 and not report.missing and not report.lacking, report.text()


def no_mask(q, k, v, documents=None, mask=None, **static):
    return ring_attention.array(q, k, v, documents, mask=Mask(), **static)


def own_keys_only(q, k, v, documents=None, comm=None, layout=None, mask=None, **static):
    at = layout.positions(comm.rank, comm.size)
    y, vjp = ops.attention.array(q, k, v, None, None, at, at, mask=mask)
    return y, lambda dy: (*vjp(dy)[:3], None)


def local_positions(x, positions, **static):
    y, vjp = ops.rope.array(x, np.arange(len(positions)), **static)
    return y, vjp


@pytest.mark.parametrize("op, fn, first", [("ring_attention", no_mask, "layers.0.attn.attention"),
                                           ("ring_attention", own_keys_only, "layers.0.attn.attention"),
                                           ("rope", local_positions, "layers.0.attn.rope")])
def test_the_usual_mistakes_are_found_where_they_are_made(bundles, tmp_path, op, fn, first):
    """A missing mask, keys of other ranks that are forgotten, positions counted from 0 on each rank."""
    found = bundles("ring zigzag")
    report = compared(ran(found, tmp_path / "dump", lambda: Replace(op, "*", fn)), found, How("float32", locally=True))
    assert report.status == 1
    assert next(line.key for line in report.lines if line.failed) == f"step1/act/{first}"
    assert next(line.key for line in report.locally if line.failed) == f"step1/act/{first}"
    assert fn is not no_mask or "there is no causal mask" in report.cause.what


def test_a_dump_in_another_layout_fails(bundles, tmp_path):
    found = bundles("ring zigzag")
    sets = ran(found, tmp_path / "dump")
    arrays = [np.array(part[ACT].read()) for part in sets]
    layout, whole = SequenceLayout("zigzag", 8), found.value(ACT)
    right = [whole[:, 2 * (r % 2):][:, :2][:, :, layout.positions(r // 2, 2)] for r in range(4)]
    assert all(np.abs(a - b).max() < 1e-5 for a, b in zip(arrays, right, strict=True))
    (tmp_path / "other").mkdir()
    for r in range(4):
        moved = np.ascontiguousarray(whole[:, 2 * (r % 2):][:, :2][:, :, 4 * (r // 2):][:, :, :4]).astype("float32")
        tensorfile.write(tmp_path / "other" / f"rank{r}.safetensors", {ACT: moved})
    assert compared(read(tmp_path / "other"), found, How("float32")).status == 1


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("n", (2, 3, 5))
def test_parts_are_placed_by_their_positions(kind, n):
    whole, layout = draw("whole", (3, 7, 2)), SequenceLayout(kind, 7)
    parts = [whole[:, layout.positions(r, n)] for r in range(n)]
    dims = dict(zip(AXES, (1, n, 1)))
    place = located("x", parts, whole, dims, [(0, 1)], layout=kind)
    assert place.along == {"cp": "axis 1" + (f" {kind}" if kind != "contiguous" else "")}
    assert np.array_equal(place.whole(parts), whole)
    assert all(np.array_equal(whole[place.where(r)], part) for r, part in enumerate(parts))
    with pytest.raises(AssertionError, match="is not the serial value, however its parts are put together"):
        located("x", [parts[-1], *parts[:-1]] if n > 2 else [p[::-1] for p in parts], whole, dims, [(0, 1)], layout=kind)


def test_sums_over_tp_of_cut_positions_are_sums():
    """Parts are shorter because cp cuts them: over tp they are summands all the same."""
    whole, layout = draw("whole", (2, 8, 3)), SequenceLayout("zigzag", 8)
    first = draw("summand", whole.shape)
    parts = [a[:, layout.positions(r, 2)] for r in range(2) for a in (first, whole - first)]
    place = located("x", parts, whole, dict(zip(AXES, (1, 2, 2))), [(0, 1), (1, 2)], layout="zigzag")
    assert place.along == {"cp": "axis 1 zigzag", "tp": "partial"}


def test_mpirun_makes_the_bytes_of_the_threads(tmp_path):
    try:
        start = mpirun_command(2)
    except CommError as error:
        pytest.skip(str(error))
    recipe = Recipe(MODELS["gpt-micro"], dict(zip(AXES, (1, 2, 1))), steps=1, attention="ring", layout="zigzag")
    run_threads(2, lambda comm: make(recipe, comm, tmp_path / "threads", 8))
    how = ["--mesh", "cp=2", "--attention", "ring", "--layout", "zigzag", "--steps", "1", "--runs", "8"]
    program = [sys.executable, "-m", "refimpl", "golden", "make", *how, "--out", str(tmp_path / "mpi")]
    status, _, err, _ = execute([*start, *program])
    assert status == 0, err
    made, threads = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("mpi", "threads"))
    assert made == threads
