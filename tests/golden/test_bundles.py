"""Localises faults of making bundles: other values than the serial run's, wrong words on them, other bytes, half a folder.

Bundles are made with two runs of each format instead of 32: `test_the_size_does_not_depend_on_the_runs` says why that shows
their size, too.
"""
import json
import math
import re
import sys

import numpy as np
import pytest
from comm.programs import execute

from refimpl.autograd import Replace
from refimpl.comm import CommError, run_threads
from refimpl.comm.base import SerialComm
from refimpl.comm.launch import mpirun_command
from refimpl.comm.mesh import AXES
from refimpl.golden import bundle
from refimpl.golden.emulate import FORMATS
from refimpl.golden.make import gauges, make
from refimpl.golden.recipe import MODELS, Recipe
from refimpl.golden.trace import trace
from refimpl.ops import gelu_tanh

MICRO = 2_000_000                                       # bytes that a bundle of a micro model may have
MESHES = ((1, 1), (1, 2), (2, 2))
GRAD, ACT = "step1/grad/layers.0.attn.q.w", "step1/act/layers.0.attn.q"


def recipe_of(model, dp=1, tp=1, **settings):
    return Recipe(MODELS[model], dict(zip(AXES, (dp, 1, tp))), **settings)


def made(recipe, out, runs=2, frames=None):
    """The bundle, made on threads; frames: rank -> a frame that is in force there."""
    def run(comm):
        if frames and comm.rank in frames:
            with frames[comm.rank]:
                make(recipe, comm, out, runs)
        else:
            make(recipe, comm, out, runs)
    run_threads(math.prod(recipe.mesh.values()), run, timeout=60)
    return bundle.read(out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("golden")


@pytest.fixture(scope="module")
def bundles(folder):
    """(model, dp, tp) -> a bundle of three steps, made at first use."""
    kept = {}

    def get(model, dp=1, tp=1):
        if (model, dp, tp) not in kept:
            kept[model, dp, tp] = made(recipe_of(model, dp, tp), folder / f"{model}-{dp}-{tp}")
        return kept[model, dp, tp]
    return get


def bytes_of(path):
    return {p.name: p.read_bytes() for p in path.iterdir()}


def size(path):
    return sum(p.stat().st_size for p in path.iterdir())


def require_serial(found, serial, recipe):
    """Every value that the serial run has, too, to rounding; what is rounding alone only in its shape and size."""
    assert set(serial) <= set(found.entries)
    for key, v in serial.items():
        whole = found.value(key)
        assert whole.shape == v.array.shape and whole.dtype == v.array.dtype, key
        off = np.abs(whole - v.array).max(initial=0)
        assert off <= (1e-15 if key in gauges(recipe) and "params" not in key else 1e-12 * np.abs(v.array).max()) or (
            key in gauges(recipe) and off < 2 * recipe.lr * recipe.steps), key


# -- what is in it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dp, tp", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_values_are_the_serial_runs_and_a_bundle_is_small(bundles, model, dp, tp):
    found, recipe = bundles(model, dp, tp), recipe_of(model, dp, tp)
    require_serial(found, trace(recipe_of(model), SerialComm()), recipe)
    assert found.recipe == recipe and found.ranks == dp * tp
    assert {p.name for p in found.folder.iterdir()} == {"manifest.json", *found.files}
    # the manifest's texts of three noises of a value could each be 24 characters at most
    assert size(found.folder) < MICRO and size(found.folder) + len(found.entries) * 3 * 24 < MICRO


@pytest.mark.parametrize("model, dp, tp", [("gpt-micro", 1, 3), ("llama-micro", 1, 3), ("llama-micro", 5, 1)])
def test_uneven_shares_overlapping_kv_heads_and_ranks_without_samples(tmp_path, model, dp, tp):
    """Four heads on three ranks: llama's two kv heads are on two of them each; four samples on five ranks."""
    recipe = recipe_of(model, dp, tp, steps=1)
    found = made(recipe, tmp_path / "a")
    require_serial(found, trace(recipe_of(model, steps=1), SerialComm()), recipe)
    if (model, tp) == ("llama-micro", 3):
        boxes = found.entries["params/layers.0.attn.k.w"].place.boxes
        assert boxes == (((0, 16), (0, 6)), ((0, 16), (6, 12)), ((0, 16), (6, 12)))
        assert found.entries["step1/dact/layers.0.attn.k"].place.along == {"tp": "axis 2, shared parts add up"}
        assert found.entries["step1/dact/layers.0.attn.k"].kind == "partial"


@pytest.mark.parametrize("model, dp, tp", [("gpt-micro", 2, 2), ("llama-micro", 1, 2)])
def test_every_ranks_part_is_what_that_rank_had(bundles, model, dp, tp):
    """And its sigma has its shape, so that parts can be judged alone."""
    found, recipe = bundles(model, dp, tp), recipe_of(model, dp, tp)
    for rank, values in enumerate(run_threads(dp * tp, lambda comm: trace(recipe, comm))):
        for key, v in values.items():
            assert found.value(key, rank).tobytes() == v.array.tobytes(), key
            assert found.shape(key, rank) == v.array.shape
            if v.role != "input":
                assert found.sigma(key, "bfloat16", rank).shape == v.array.shape, key


def test_later_steps_hold_the_batch_the_loss_the_norm_and_the_parameters(bundles):
    for dp, tp in MESHES:
        found = bundles("gpt-micro", dp, tp)
        params = {key for key in found.entries if key.startswith("params/")}
        for step in (2, 3):
            held = {key.partition("/")[2] for key in found.entries if key.startswith(f"step{step}/")}
            assert held == {"tokens", "targets", "loss", "grad_norm", *params}
        assert {e.step for e in found.entries.values()} == {0, 1, 2, 3} and len(params) > 30
        assert {key.split("/")[1] for key in found.entries if key.startswith("step1/")} >= {"act", "dact", "grad", "m", "v"}
        assert any(key.startswith("step1/comm/") for key in found.entries) == (dp * tp > 1)


ABOUT = {                                               # key -> (role, phase, step, terms, kind), of gpt-micro on one rank
    "params/layers.0.attn.q.w": ("param", "forward", 0, 1, "canonical"),
    "step1/tokens": ("input", "forward", 1, 1, "canonical"),
    ACT: ("act", "forward", 1, 16, "canonical"),                            # a linear over d_model
    "step1/act/layers.0.mlp.down": ("act", "forward", 1, 32, "canonical"),  # over d_ff
    "step1/act/layers.0.mlp.gelu_tanh": ("act", "forward", 1, 1, "canonical"),
    "step1/act/layers.1.attn.attention": ("act", "forward", 1, 8, "canonical"),         # over the positions (head_dim is 6)
    "step1/act/head": ("act", "forward", 1, 16, "canonical"),
    "step1/loss": ("act", "forward", 1, 32, "canonical"),                   # over the tokens
    "step1/dact/head": ("grad", "backward", 1, 40, "canonical"),
    GRAD: ("grad", "backward", 1, 32, "canonical"),
    "step1/grad/layers.0.attn.k.b": ("grad", "backward", 1, 32, "gauge"),
    "step1/grad/layers.0.attn.q.b": ("grad", "backward", 1, 32, "canonical"),
    "step1/grad_norm": ("act", "backward", 1, 6320, "canonical"),           # over all parameters
    "step1/m/layers.0.attn.q.w": ("opt", "update", 1, 32, "canonical"),
    "step1/params/layers.1.attn.k.b": ("param", "update", 1, 32, "gauge"),
    "step3/params/layers.1.attn.k.b": ("param", "update", 3, 32, "gauge"),
    "step3/params/norm.g": ("param", "update", 3, 32, "canonical"),
}


@pytest.mark.parametrize("key", ABOUT)
def test_the_manifest_says_what_a_value_is(bundles, key):
    entry = bundles("gpt-micro").entries[key]
    assert (entry.role, entry.phase, entry.step, entry.terms, entry.kind) == ABOUT[key]
    assert entry.dtype == ("I64" if key == "step1/tokens" else "F64") and entry.place.along == {}
    assert entry.noise.keys() == (set() if key == "step1/tokens" else FORMATS.keys())


WHERE = {                                               # on dp=2,tp=2: along dp, along tp, kind
    "params/layers.0.attn.q.w": ("replicated", "axis 1", "canonical"),
    "params/layers.0.attn.o.w": ("replicated", "axis 0", "canonical"),
    "params/layers.0.attn.q.b": ("replicated", "axis 0", "canonical"),
    "params/embed.w": ("replicated", "axis 0", "canonical"),
    "params/norm.g": ("replicated", "replicated", "canonical"),
    GRAD: ("replicated", "axis 1", "canonical"),
    "step1/grad/layers.0.attn.k.b": ("replicated", "axis 0", "gauge"),
    "step1/m/layers.0.mlp.down.w": ("replicated", "axis 0", "canonical"),
    "step1/tokens": ("axis 0", "replicated", "canonical"),
    ACT: ("axis 0", "axis 2", "canonical"),
    "step1/act/layers.0.attn.attention": ("axis 0", "axis 1", "canonical"),
    "step1/act/layers.0.attn.o": ("axis 0", "partial", "partial"),
    "step1/act/layers.0.attn.reduce_from": ("axis 0", "replicated", "canonical"),
    "step1/loss": ("replicated", "replicated", "canonical"),
    "step1/comm/layers.0.attn.reduce_from.all_reduce.in": ("per rank", "per rank", "partial"),
    "step1/comm/layers.0.attn.reduce_from.all_reduce.out": ("per rank", "replicated", "canonical"),
}


@pytest.mark.parametrize("key", WHERE)
def test_the_manifest_says_how_a_value_lies(bundles, key):
    entry = bundles("gpt-micro", 2, 2).entries[key]
    assert (entry.place.along["dp"], entry.place.along["tp"], entry.kind) == WHERE[key]


def test_gauges_are_those_of_key_biases_and_llama_has_none(bundles):
    for model, wanted in (("gpt-micro", {f"layers.{i}.attn.k.b" for i in (0, 1)}), ("llama-micro", set())):
        for dp, tp in MESHES:
            entries = bundles(model, dp, tp).entries
            assert {key.split("/")[-1] for key, e in entries.items() if e.kind == "gauge"} == wanted
            assert not any(e.kind == "gauge" for key, e in entries.items() if key.startswith("params/"))


def test_noise_and_uncertainty_are_as_large_as_they_should_be(bundles):
    for dp, tp in MESHES:
        for key, e in bundles("llama-micro", dp, tp).entries.items():
            if e.role == "input" or key.startswith("params/"):
                assert not any(e.noise.values()) and e.uncertainty == 0
            elif key.startswith(("step1/act/layers", "step1/grad/")):
                size_of = np.abs(bundles("llama-micro", dp, tp).value(key)).max()
                assert 2.0 ** -8 / 50 < e.noise["bfloat16"] / size_of < 1 and e.noise["float32"] < e.noise["float16"] / 50, key
                assert e.noise["float16"] < e.noise["bfloat16"] and e.uncertainty < 1e-14 * size_of, key


# -- bytes ----------------------------------------------------------------------------------------------------------


def test_the_size_does_not_depend_on_the_runs(bundles, folder):
    """Arrays are as large, and the manifest but for the digits of three numbers a value and of the hashes that follow."""
    few, many = bundles("llama-micro").folder, folder / "more"
    made(recipe_of("llama-micro"), many, runs=7)
    assert [p.name for p in sorted(few.iterdir())] == [p.name for p in sorted(many.iterdir())]
    for path in few.iterdir():
        if path.suffix == ".safetensors":
            assert path.stat().st_size == (many / path.name).stat().st_size
    noise, other = re.compile(r'"noise": {[^{}]*}'), re.compile(r'"runs": \d+|safetensors": "\w{64}"')
    texts = [(path / "manifest.json").read_text() for path in (few, many)]
    numbers = [str(x) for text in texts for e in json.loads(text)["values"].values() for x in e["noise"].values()]
    assert max(map(len, numbers)) <= 24 and texts[0] != texts[1]
    bare = {other.sub("", noise.sub("", text)) for text in texts}
    assert len(bare) == 1


def test_the_same_recipe_makes_the_same_bytes(bundles, folder):
    made(recipe_of("llama-micro", 1, 2), folder / "again")
    assert bytes_of(folder / "again") == bytes_of(bundles("llama-micro", 1, 2).folder)


def test_another_seed_makes_other_values(folder):
    one, other = (made(recipe_of("llama-micro", steps=1, seed=seed), folder / f"seed {seed}") for seed in (0, 1))
    assert one.entries.keys() == other.entries.keys()
    same = {key for key, e in one.entries.items() if other.entries[key].sha256 == e.sha256}
    assert same <= {"step1/dact/cross_entropy:0"}       # 1 over the number of valid targets


@pytest.mark.parametrize("model, dp, tp", [("gpt-micro", 1, 2), ("llama-micro", 2, 1)])
def test_mpirun_makes_the_bytes_of_the_threads(tmp_path, model, dp, tp):
    try:
        start = mpirun_command(2)
    except CommError as error:
        pytest.skip(str(error))
    made(recipe_of(model, dp, tp, steps=1), tmp_path / "threads", runs=8)
    status, out, err, _ = execute([*start, sys.executable, "-m", "refimpl", "golden", "make", "--mesh", f"dp={dp},tp={tp}",
                                   "--model", model, "--steps", "1", "--runs", "8", "--out", str(tmp_path / "mpi")])
    assert status == 0, err
    assert bytes_of(tmp_path / "mpi") == bytes_of(tmp_path / "threads")


# -- no bundle ------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_there_is_refused_with_one_sentence_on_every_rank(ranks, tmp_path_factory):
    def check(comm):
        out = tmp_path_factory.getbasetemp() / f"taken on {comm.size}"
        comm.on_first(lambda: out.mkdir(exist_ok=True))
        comm.on_first(lambda: (out / "mine").write_text("mine"))
        with pytest.raises(ValueError) as caught:
            make(recipe_of("gpt-micro", comm.size), comm, out, 2)
        [sentence] = set(comm.gather_texts(str(caught.value)))
        assert re.fullmatch(r".*/taken on \d is there already: give another --out, or remove it", sentence)
        comm.on_first(lambda: require_untouched(out))

    def require_untouched(out):
        assert bytes_of(out) == {"mine": b"mine"} and not out.with_name(out.name + ".part").exists()
    ranks.run(check)


def test_a_file_that_is_there_is_refused_and_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    recipe = recipe_of("llama-micro", steps=1)
    with pytest.raises(ValueError, match="file is there already: give another --out, or remove it$"):
        make(recipe, SerialComm(), tmp_path / "file", 2)
    assert len(made(recipe, tmp_path / "empty").entries) > 150 and (tmp_path / "file").read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {"file", "empty"}


def test_what_cannot_be_written_is_a_sentence_and_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="cannot be written: Not a directory"):
        make(recipe_of("llama-micro", steps=1), SerialComm(), tmp_path / "file" / "a", 2)
    assert {p.name for p in tmp_path.iterdir()} == {"file"}


def a_part_in_a_million_too_large(x):
    y, vjp = gelu_tanh.array(x)
    return y * (1 + 1e-6), vjp


def a_gradient_too_large(x):
    y, vjp = gelu_tanh.array(x)
    return y, lambda dy: vjp(dy) * (1 + 1e-6)


def a_sum_that_is_not_taken(x, comm):
    comm.all_reduce(x)
    return x, lambda dy: dy


MISTAKES = {
    "of one ranks activations": (1, 2, Replace("gelu_tanh", "layers.0*", a_part_in_a_million_too_large),
                                 "step1/act/layers.0.mlp.gelu_tanh"),
    "of one ranks gradients": (1, 2, Replace("gelu_tanh", "layers.1*", a_gradient_too_large), "step1/dact/layers.1.mlp.up"),
    "of one dp ranks gradients": (2, 1, Replace("gelu_tanh", "layers.1*", a_gradient_too_large), "step1/dact/layers.1.mlp.up"),
    "of a sum that one rank has not": (1, 2, Replace("reduce_from", "layers.1.mlp*", a_sum_that_is_not_taken),
                                       "step1/act/layers.1.mlp.reduce_from"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_no_bundle_is_made_of_a_sharded_run_that_is_wrong(tmp_path, what):
    """The mistake is the last rank's alone; the first value that it touches is named, and no folder is left."""
    dp, tp, mistake, key = MISTAKES[what]
    with pytest.raises(AssertionError, match=f"^{key}.* is not the serial value, however its parts are put together"):
        made(recipe_of("gpt-micro", dp, tp, steps=1), tmp_path / "a", frames={1: mistake})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["step1/loss", "step1/params/norm.g", "step1/v/layers.0.mlp.up.w"])
def test_a_wrong_number_of_one_rank_is_found_whatever_it_is(tmp_path, monkeypatch, key):
    def wrong(recipe, comm, *args, **kwargs):
        values = trace(recipe, comm, *args, **kwargs)
        if comm.rank == 1:
            values[key].array = values[key].array * (1 + 1e-9)
        return values
    monkeypatch.setattr("refimpl.golden.make.trace", wrong)
    with pytest.raises(AssertionError, match=f"^{key} on the mesh"):
        made(recipe_of("gpt-micro", 1, 2, steps=1), tmp_path / "a")
    assert not list(tmp_path.iterdir())
