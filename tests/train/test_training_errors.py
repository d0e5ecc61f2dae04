"""Localises bad input and accidents that end training in something else than one sentence, or that cost a good checkpoint."""
import errno
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import resume_programs
from resume_programs import TINY, Stopping, execute, loaded, require_sentence, shared, stop, trained, write_corpus

import refimpl
from refimpl import tensorfile
from refimpl.comm import Mesh
from refimpl.models import Config
from refimpl.train import AdamW, Data, Options, latest
from refimpl.train.checkpoint import complete_ones, read_manifest
from refimpl.train.log import read_log
from refimpl.train.loop import gradients

CFG = Config(vocab_size=17, n_layers=1, n_heads=4, d_model=8, max_seq_len=6)
DATA = Data(np.arange(300) * 31 % 97 % 17)
OPTIONS = Options(steps=6, batch_size=4, seq_len=6, save_every=1)


def same_sentence(comm, kind, act):
    """`act` raises the same sentence on every rank -> it."""
    with pytest.raises(kind) as caught:
        act()
    sentence = str(caught.value)
    assert set(comm.gather_texts(sentence)) == {sentence} and "\n" not in sentence
    return sentence


def require_finite(path):
    assert all(np.isfinite(a).all() for a in loaded(path).values())


# -- numbers that are lost ---------------------------------------------------------------------------------------------

def planted(monkeypatch, at, value, name="norm.g"):
    """In step `at` = 0, 1, ... the reduced gradient of a parameter has one element of this value."""
    def poisoned(params, batches, cfg, mesh, seed, step, *how):
        found = gradients(params, batches, cfg, mesh, seed, step, *how)
        if step == at and found.grads[name].array.size:
            found.grads[name].array.flat[0] = value
        return found
    monkeypatch.setattr("refimpl.train.loop.gradients", poisoned)


@pytest.mark.parametrize("options", ({}, {"zero": True}, {"merged": True}), ids=str)
@pytest.mark.parametrize("value", (np.nan, np.inf))
def test_a_lost_loss_names_its_step_and_the_last_checkpoint_which_is_good(ranks, tmp_path, monkeypatch, value, options):
    """A gradient is lost in step 3, which nothing looks at; the loss of step 4 tells."""
    planted(monkeypatch, 2, value)

    def check(comm):
        mesh, folder = Mesh(dp=comm.size, comm=comm), shared(comm, tmp_path) / "a"
        trainer = Stopping(DATA, CFG, replace(OPTIONS, save_every=2, **options), mesh, folder)
        with np.errstate(all="ignore"):
            said = same_sentence(comm, ArithmeticError, trainer.run)
        last = folder / "checkpoints/step-00000002"
        assert said == f"the loss is nan at step 4: try a smaller learning rate than 0.001; the last good checkpoint is {last}"
        assert complete_ones(folder / "checkpoints") == [last]
        require_finite(last)
        assert comm.rank or [row["step"] for row in read_log(folder / "log.jsonl")[1:]] == [1, 2, 3]
        resumed = Stopping(DATA, CFG, replace(OPTIONS, save_every=2, lr=1e-4, **options), mesh, folder)
        resumed.resume(last)
        assert np.isfinite(resumed.step(3)[1]["loss"])  # (step 3 would have its accident again)
    if ranks.size <= 4:
        ranks.run(check)


@pytest.mark.parametrize("options", ({}, {"zero": True}, {"merged": True}, {"clip": 1.0}), ids=str)
def test_a_parameter_that_is_lost_just_before_a_save_is_not_saved(ranks, tmp_path, monkeypatch, options):
    planted(monkeypatch, 2, np.nan)

    def check(comm):
        mesh, folder = Mesh(dp=comm.size, comm=comm), shared(comm, tmp_path) / "a"
        with np.errstate(all="ignore"):
            said = same_sentence(comm, ArithmeticError, Stopping(DATA, CFG, replace(OPTIONS, **options), mesh, folder).run)
        words = "the gradient's norm is nan at step 3" if options.get("clip") else "norm.g is no longer finite after step 3"
        assert words in said
        assert [p.name for p in sorted((folder / "checkpoints").iterdir())] == ["step-00000001", "step-00000002"]
        for path in complete_ones(folder / "checkpoints"):
            require_finite(path)
    if ranks.size <= 4:
        ranks.run(check)


def test_a_parameter_that_one_rank_alone_has_lost_is_the_sentence_of_all(ranks, tmp_path):
    """Infinity stands in the part of the last tp rank."""
    def check(comm):
        mesh, folder = Mesh(tp=comm.size, comm=comm), shared(comm, tmp_path) / "a"
        trainer = stop(Stopping(DATA, CFG, OPTIONS, mesh, folder), 2)
        if comm.rank == comm.size - 1:
            trainer.state.params["layers.0.mlp.up.w"].array.flat[0] = -np.inf
        trainer.state.optimizer.t = 3
        said = same_sentence(comm, ArithmeticError, lambda: trainer.state.save(folder / "checkpoints", {}))
        assert said == "params/layers.0.mlp.up.w is no longer finite after step 3: it is not saved"
        assert latest(folder / "checkpoints").name == "step-00000002"
    if ranks.size <= 4:
        ranks.run(check)


def test_moments_that_are_lost_are_not_saved(tmp_path, monkeypatch):
    """In float32 the square of 1e25 is infinite: v is lost, and with it that element's training, though p is finite."""
    planted(monkeypatch, 2, 1e25)
    with np.errstate(all="ignore"), pytest.raises(ArithmeticError, match="norm.g .*no longer finite after step 3"):
        Stopping(DATA, CFG, replace(OPTIONS, dtype="float32"), Mesh(), tmp_path).run()
    require_finite(latest(tmp_path / "checkpoints"))


def test_a_learning_rate_that_is_far_too_large_ends_in_one_sentence(tmp_path):
    """Nothing but the sentence: no warnings of numpy."""
    done = execute("train", "--text", write_corpus(tmp_path / "text"), *TINY, "--lr", "1e300", "--out", tmp_path / "a",
                   "--save-every", "1")
    said = require_sentence(done, "the loss is ", "at step 2: try a smaller learning rate than 1e+300")
    assert done.stderr == said + "\n" and "checkpoint" not in said     # that of step 1 has the parameters that give nan
    require_finite(latest(tmp_path / "a/checkpoints"))


# -- full disks --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n, which, size, mesh", [(0, 0, 60_000, []), (2, 1, 20_000, ["--mesh", "tp=2"]),
                                                  (2, 0, 30_000, ["--mesh", "tp=2"]),
                                                  (2, 1, 10_000, ["--mesh", "dp=2", "--zero"])])
def test_a_disk_that_is_full_is_one_sentence_and_the_last_checkpoint_stays(tmp_path, n, which, size, mesh):
    """A checkpoint's file has 80 kB, those of two ranks half of it; other results have 26 kB."""
    text, out = write_corpus(tmp_path / "text"), tmp_path / "a"
    given = ["--text", text, *TINY, *mesh, "--save-every", "1", "--keep", "1", "--out", out]
    trained(*given, "--steps", "2", ranks=n)
    last = tmp_path / "a/checkpoints/step-00000002"
    before = {path.name: path.read_bytes() for path in last.iterdir()}
    done = execute("limited", size, which, "train", *given, "--steps", "4", "--resume", ranks=n,
                   program=(resume_programs.__file__,), limit=40)
    file = tmp_path / f"a/checkpoints/step-00000003.part/rank-{which:05d}.safetensors"
    require_sentence(done, f"saving step-00000003: rank {which} failed at {file}: File too large; the latest complete "
                     f"checkpoint is {last}")
    assert {path.name: path.read_bytes() for path in last.iterdir()} == before
    assert list((tmp_path / "a/checkpoints").iterdir()) == [last]
    trained(*given, "--steps", "4", "--resume", ranks=n)                    # there is space again


@pytest.mark.parametrize("n, mesh", [(0, []), (2, ["--mesh", "dp=2"])])
@pytest.mark.parametrize("file, size", [("grads_last", 10_000), ("log.jsonl", 40_100)])
def test_results_for_which_there_is_no_space_are_named(tmp_path, n, mesh, file, size):
    given = ["--text", write_corpus(tmp_path / "text"), *TINY, *mesh, "--out", tmp_path / "a"]
    trained(*given, "--steps", "1", "--save-every", "1", ranks=n)
    log = tmp_path / "a/log.jsonl"
    if file == "log.jsonl":                             # almost full from the start
        rest = 38_000 - log.stat().st_size
        log.write_text(log.read_text() + json.dumps({"step": 1, "sample": "x" * rest}) + "\n")
    done = execute("limited", size, 0, "train", *given, "--steps", "30", "--save-every", "0", "--resume", ranks=n,
                   program=(resume_programs.__file__,), limit=40)
    require_sentence(done, "File too large", file)
    require_finite(latest(tmp_path / "a/checkpoints"))


def test_a_disk_that_fills_up_in_training_is_the_same_sentence_on_every_rank(ranks, tmp_path, monkeypatch):
    write, last = tensorfile.write, f"rank-{ranks.size - 1:05d}.safetensors"

    def failing(path, *args):
        if path.name == last and path.parent.name == "step-00000003.part":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, *args)
    monkeypatch.setattr(tensorfile, "write", failing)

    def check(comm):
        mesh, folder = Mesh(tp=comm.size, comm=comm), shared(comm, tmp_path) / "a"
        said = same_sentence(comm, ValueError, Stopping(DATA, CFG, OPTIONS, mesh, folder).run)
        assert "No space left on device; the latest complete checkpoint is" in said and said.endswith("step-00000002")
        require_finite(latest(folder / "checkpoints"))
    if ranks.size <= 4:
        ranks.run(check)


# -- damaged and foreign checkpoints -----------------------------------------------------------------------------------

def change(name, act):
    return lambda path: (path / name).write_bytes(act((path / name).read_bytes()))


def about(**changes):
    def rewrite(text):
        manifest = json.loads(text)
        return json.dumps(manifest | {"about": manifest["about"] | changes}).encode()
    return change("manifest.json", rewrite)


def flip(data):
    return data[:-9] + bytes([data[-9] ^ 16]) + data[-8:]


DAMAGED = {
    "truncated": (change("rank-00000.safetensors", lambda data: data[:-100]), "it is damaged, or another file"),
    "empty": (change("rank-00000.safetensors", lambda data: b""), "it is damaged, or another file"),
    "a bit": (change("rank-00000.safetensors", flip), "it is damaged, or another file"),
    "missing": (lambda path: (path / "rank-00000.safetensors").unlink(), "is missing: the checkpoint is not complete"),
    "half a manifest": (change("manifest.json", lambda text: text[:len(text) // 2]), "manifest.json is not JSON"),
    "an empty manifest": (change("manifest.json", lambda text: b""), "manifest.json is not JSON"),
    "a foreign format": (change("manifest.json", lambda text: text.replace(b'"format": 1', b'"format": 2')), "not of format 1"),
    "a pickle": (change("manifest.json", lambda text: b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00]\x94."), "is not JSON"),
    "not of training": (change("manifest.json", lambda t: json.dumps(json.loads(t) | {"about": {}}).encode()), "not saved in"),
    "a config that is a number": (about(config=3), ""),
    "a config that is a list": (about(config=["d_model"]), ""),
    "options that are none": (about(options=None), ""),
    "a source that is a list": (about(source=["text"]), ""),
    "data that are a text": (about(data="mine"), ""),
    "a best loss that is a text": (about(best="low"), ""),
    "a best loss that is a list": (about(best=[1.0]), ""),
    "a count that is a text": (about(waited="long"), ""),
    "a count that is none": (about(waited=None), ""),
    "a width that is a text": (about(config=CFG.to_dict() | {"d_model": "8"}), "d_model"),
}


@pytest.fixture(scope="module")
def command_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trained("--text", write_corpus(folder / "text"), *TINY, "--steps", "2", "--save-every", "1", "--out", folder / "a")
    return folder


def copied(command_run, tmp_path):
    shutil.copytree(command_run / "a", tmp_path / "a")
    return tmp_path / "a"


def go_on(out, *arguments, ranks=0):
    return execute("train", "--out", out, "--resume", "--steps", "5", "--no-bar", "--sample", "0", *arguments, ranks=ranks,
                   limit=40)


def contents(folder):
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_or_foreign_checkpoint_is_one_sentence(command_run, tmp_path, what):
    damage, words = DAMAGED[what]
    out = copied(command_run, tmp_path)
    damage(latest(out / "checkpoints"))
    before = contents(out)
    require_sentence(go_on(out), "step-00000002", words)
    assert contents(out) == before


@pytest.mark.parametrize("what", ("truncated", "missing", "half a manifest", "a config that is a number",
                                  "a best loss that is a text"))
def test_a_damaged_checkpoint_is_one_sentence_of_two_ranks(command_run, tmp_path, what):
    damage, words = DAMAGED[what]
    out = copied(command_run, tmp_path)
    damage(latest(out / "checkpoints"))
    before = contents(out)
    require_sentence(go_on(out, "--mesh", "dp=2", ranks=2), "step-00000002", words)
    assert contents(out) == before


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_checkpoint_is_the_same_sentence_on_every_rank(ranks, tmp_path, what):
    damage, words = DAMAGED[what]
    if ranks.size > 3 or "source" in what:              # (which the command reads)
        return

    def check(comm):
        mesh, folder = Mesh(dp=comm.size, comm=comm), shared(comm, tmp_path) / "a"
        stop(Stopping(DATA, CFG, OPTIONS, mesh, folder), 2)
        comm.barrier()
        path = latest(folder / "checkpoints")
        if comm.rank == 0:
            damage(path)
        comm.barrier()
        resumed = Stopping(DATA, CFG, OPTIONS, mesh, folder)
        said = same_sentence(comm, ValueError, lambda: resumed.resume(path))
        assert words in said and path.name in said
        assert resumed.state.optimizer.t == 0 and not any(a.any() for a in resumed.state.optimizer.m.values())
    ranks.run(check)


def test_the_way_out_of_a_damaged_checkpoint_is_the_one_before_it_in_another_folder(command_run, tmp_path):
    out = copied(command_run, tmp_path)
    DAMAGED["truncated"][0](latest(out / "checkpoints"))
    first = out / "checkpoints/step-00000001"
    require_sentence(execute("train", "--out", out, "--resume", first), "go on from there, or choose another folder")
    trained("--out", tmp_path / "b", "--resume", first, "--no-bar", "--sample", "0")
    assert (tmp_path / "b/params.safetensors").read_bytes() == (out / "params.safetensors").read_bytes()


def test_a_checkpoint_of_another_model_or_text_is_a_sentence_with_both_values(command_run, tmp_path):
    out = copied(command_run, tmp_path)
    before = contents(out)
    require_sentence(go_on(out, "--d-model", "12"), "is of another run: d_model of its config is 8, here it is 12")
    require_sentence(go_on(out, "--batch-size", "4"), "is of another run: batch_size of its options is 3, here it is 4")
    require_sentence(go_on(out, "--dtype", "float32", "--mesh", "tp=2", ranks=2), "dtype of its options is float64, here it is")
    (tmp_path / "text").write_text("another text " * 80)
    require_sentence(go_on(out, "--text", tmp_path / "text"), "train of its data is 900, here it is 1040")
    assert contents(out) == before


def test_nothing_to_go_on_from_is_a_sentence(tmp_path):
    (tmp_path / "a/checkpoints/step-00000003.part").mkdir(parents=True)
    require_sentence(go_on(tmp_path / "a"), f"there is no checkpoint in {tmp_path / 'a'} to go on from")
    require_sentence(go_on(tmp_path / "b"), f"there is no checkpoint in {tmp_path / 'b'} to go on from")
    require_sentence(execute("train", "--resume", "--no-bar"), "--resume needs --out, the folder of the run")


# -- folders that have checkpoints -------------------------------------------------------------------------------------

def test_a_fresh_run_into_a_folder_with_checkpoints_is_refused(ranks, tmp_path):
    def check(comm):
        mesh, folder = Mesh(dp=comm.size, comm=comm), shared(comm, tmp_path) / "a"
        stop(Stopping(DATA, CFG, OPTIONS, mesh, folder), 2)
        comm.barrier()
        before = contents(folder)
        said = same_sentence(comm, ValueError, Stopping(DATA, CFG, OPTIONS, mesh, folder).run)
        assert said == (f"{folder} has checkpoints, the last is step-00000002: resume from there, or choose another folder")
        assert contents(folder) == before
    if ranks.size <= 3:
        ranks.run(check)


def test_the_command_refuses_a_folder_with_checkpoints(command_run, tmp_path):
    out = copied(command_run, tmp_path)
    before = contents(out)
    for arguments, ranks in (([], 0), (["--mesh", "dp=2"], 2)):
        done = execute("train", "--text", command_run / "text", *TINY, "--out", out, *arguments, ranks=ranks)
        require_sentence(done, "has checkpoints, the last is step-00000002: resume from there, or choose another folder")
    assert contents(out) == before


@pytest.mark.parametrize("way", ("absolute", "relative", "link"))
def test_an_older_checkpoint_than_the_last_is_refused_however_it_is_written(command_run, tmp_path, way):
    """The log must not lose the steps after it, nor may two histories share a folder."""
    out = copied(command_run, tmp_path)
    before = contents(out)
    first = out / "checkpoints/step-00000001"
    if way == "relative":
        first = Path(os.path.relpath(first, resume_programs.HERE))
    if way == "link":
        (tmp_path / "link").symlink_to(out)
        first = tmp_path / "link/checkpoints/step-00000001"
    done = execute("train", "--out", out, "--resume", first, "--steps", "5", "--no-bar", "--sample", "0")
    require_sentence(done, "has checkpoints of its own, the last is step-00000002: go on from there, or choose another folder")
    assert contents(out) == before


def test_a_run_is_not_resumed_into_a_folder_that_has_checkpoints_of_another(command_run, tmp_path):
    out = copied(command_run, tmp_path)
    trained("--text", command_run / "text", *TINY, "--lr", "0.01", "--steps", "1", "--save-every", "1", "--out", tmp_path / "b")
    before = contents(out)
    done = execute("train", "--out", out, "--resume", tmp_path / "b/checkpoints", "--steps", "5", "--no-bar", "--sample", "0")
    require_sentence(done, out, "step-00000002")
    assert contents(out) == before


# -- bad input ---------------------------------------------------------------------------------------------------------

def empty_folder(path):
    path.mkdir()


def folder_of_nothing(path):
    path.mkdir()
    (path / "empty").write_text("")


BAD_TEXTS = {
    "an empty file": (lambda path: path.write_text(""), "text is empty"),
    "an empty folder": (empty_folder, "text has no file"),
    "a folder with an empty file": (folder_of_nothing, "text is empty"),
    "short": (lambda path: path.write_text("12345678"), "the text has 8 tokens: a sample needs seq_len + 1 = 9"),
    "not utf-8": (lambda path: path.write_bytes(b"abc\xff" * 50), "text is not utf-8: byte 3 is 0xff"),
    "missing": (lambda path: None, "text cannot be read: No such file or directory"),
}


@pytest.mark.parametrize("n", (0, 2))
@pytest.mark.parametrize("what", BAD_TEXTS)
def test_a_text_that_cannot_be_learnt_from_is_one_sentence(tmp_path, what, n):
    make, words = BAD_TEXTS[what]
    make(tmp_path / "text")
    if n and what not in ("short", "not utf-8"):
        return
    done = execute("train", "--text", tmp_path / "text", *TINY, "--out", tmp_path / "a", *(["--mesh", "dp=2"] if n else []),
                   ranks=n, limit=40)
    said = require_sentence(done, words)
    assert not (tmp_path / "a").exists() and (n or done.stderr == said + "\n")


def test_the_shortest_text_trains(tmp_path):
    (tmp_path / "text").write_text("123456789")
    trained("--text", tmp_path / "text", *TINY, "--steps", "2")


@pytest.mark.parametrize("mesh, n", [("dp=2", 0), ("dp=3", 2), ("dp=1", 2), ("dp=2,tp=2", 2)])
def test_a_mesh_of_other_ranks_is_one_sentence(tmp_path, mesh, n):
    done = execute("train", "--text", write_corpus(tmp_path / "text"), *TINY, "--mesh", mesh, ranks=n, limit=40)
    require_sentence(done, f"the mesh {mesh} needs ", f"there are {n}" if n else "there is 1")


BAD_RATES = ("0", "-1", "nan", "inf", "-inf")


@pytest.mark.parametrize("rate", BAD_RATES)
def test_a_learning_rate_that_is_none_is_refused(rate):
    with pytest.raises(ValueError, match=f"the learning rate must be a positive number, got {float(rate)}"):
        Options(lr=float(rate))
    if float(rate):                                     # an optimizer's may be 0: a cosine ends there
        with pytest.raises(ValueError, match=f"the learning rate must be finite and at least 0, got {float(rate)}"):
            AdamW(float(rate))


@pytest.mark.parametrize("rate", BAD_RATES)
def test_the_command_refuses_such_a_learning_rate_before_it_writes_anything(tmp_path, rate):
    done = execute("train", "--text", write_corpus(tmp_path / "text"), *TINY, f"--lr={rate}", "--out", tmp_path / "a")
    said = require_sentence(done, f"the learning rate must be a positive number, got {float(rate)}")
    assert done.stderr == said + "\n" and not (tmp_path / "a").exists()


def test_a_learning_rate_of_a_file_or_of_two_ranks_is_refused_too(tmp_path):
    (tmp_path / "my.toml").write_text("[training]\nlr = nan\n")
    given = ["--text", write_corpus(tmp_path / "text"), *TINY]
    require_sentence(execute("train", *given, "--config", tmp_path / "my.toml"), "must be a positive number, got nan")
    require_sentence(execute("train", *given, "--lr", "0", "--mesh", "dp=2", ranks=2), "must be a positive number, got 0.0")


def test_nothing_is_pickled():
    for path in Path(refimpl.__file__).parent.rglob("*.py"):
        assert not re.search(r"\b(pickle|marshal|shelve)\b|\bnp\.load\(", path.read_text()), path


def test_a_checkpoint_has_safetensors_and_a_manifest_alone(command_run):
    path = latest(command_run / "a/checkpoints")
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "rank-00000.safetensors"]
    assert read_manifest(path)["step"] == 2 and len(tensorfile.read(path / "rank-00000.safetensors")) % 3 == 0
