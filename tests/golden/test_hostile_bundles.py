"""Localises faults of reading bundles: one that is damaged or hostile and is believed, crashes, or makes it allocate."""
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl import tensorfile
from refimpl.__main__ import main
from refimpl.comm.base import SerialComm
from refimpl.golden.bundle import SHARED, read
from refimpl.golden.make import make
from refimpl.golden.manifest import BundleError
from refimpl.golden.recipe import MODELS, Recipe

KEY = "step1/act/layers.0.attn.q"                       # [4, 8, 24]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    out = tmp_path_factory.mktemp("original") / "bundle"
    make(Recipe(MODELS["gpt-micro"], steps=1), SerialComm(), out, runs=2)
    tensorfile.write(out.parent / "dump.safetensors", {"step1/loss": read(out).value("step1/loss")})
    return out


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "bundle")


def rewritten(folder, change):
    """The manifest, after `change` has been made to what it says."""
    path = folder / "manifest.json"
    said = json.loads(path.read_text())
    said = change(said) or said
    path.write_text(json.dumps(said))


def signed(folder, file=SHARED):
    """The manifest has the sha256 of the file as it is now."""
    def change(said):
        said["files"][file] = hashlib.sha256((folder / file).read_bytes()).hexdigest()
    rewritten(folder, change)


def header_changed(folder, change, data=None):
    """The file of values with another header, of which the manifest has the sha256."""
    path = folder / SHARED
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + n])
    header = change(header) or header
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + (raw[8 + n:] if data is None else data))
    signed(folder)


def tensors_changed(folder, change):
    """The file of values written anew, and the manifest has its sha256."""
    header = tensorfile.read_header(folder / SHARED)[0]
    tensors = {name: np.array(a) for name, a in tensorfile.views(folder / SHARED).items() if name in header}
    change(tensors)
    (folder / SHARED).unlink()
    tensorfile.write(folder / SHARED, tensors)
    signed(folder)


def require_damaged(original, folder, capsys, *words, quick=5.0):
    """`golden check` ends with 4 and one sentence that has the words."""
    start = time.monotonic()
    status = main(["golden", "check", str(original.parent / "dump.safetensors"), "--against", str(folder)])
    took, done = time.monotonic() - start, capsys.readouterr()
    assert status == 4 and not done.out
    assert done.err.startswith("refimpl golden: ") and done.err.count("\n") == 1 and "Traceback" not in done.err
    assert len(done.err) < 1000 and all(word in done.err for word in words), done.err
    assert took < quick


def test_the_bundle_is_read_before_it_is_damaged(original, folder, capsys):
    """And the tools of these tests leave it whole."""
    rewritten(folder, lambda said: None)
    header_changed(folder, lambda header: None)
    tensors_changed(folder, lambda tensors: None)
    assert main(["golden", "check", str(original.parent / "dump.safetensors"), "--against", str(folder)]) == 0
    assert not capsys.readouterr().err
    assert {key: e.to_dict() for key, e in read(folder).entries.items()} == \
        {key: e.to_dict() for key, e in read(original).entries.items()}


# -- the manifest as a file --------------------------------------------------------------------------------------------

def many_digits(text):
    return text.replace(b'"version": 2', b'"version": 2' + b"0" * 5000)


AS_A_FILE = {
    "empty": (lambda text: b"", "is not JSON"),
    "half": (lambda text: text[:len(text) // 2], "is not JSON"),
    "a pickle": (lambda text: b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00]\x94.", "is not JSON"),
    "not utf-8": (lambda text: text.replace(b"step1", b"step\xff", 1), "is not JSON"),
    "utf-16": (lambda text: text.decode().encode("utf-16"), "is not JSON"),
    "NaN": (lambda text: text.replace(b'"uncertainty": ', b'"uncertainty": NaN, "x": ', 1), "it has no NaN"),
    "Infinity": (lambda text: text.replace(b'"lr": ', b'"lr": Infinity, "x": ', 1), "it has no Infinity"),
    "-Infinity": (lambda text: text.replace(b'"lr": ', b'"lr": -Infinity, "x": ', 1), "it has no -Infinity"),
    "a setting twice": (lambda text: text.replace(b'"seed": 0', b'"seed": 1, "seed": 0'), "it has a name twice"),
    "a value twice": (lambda text: text.replace(b"step1/act/add", b"step1/act/embed", 1), "it has a name twice"),
    "10 MB of lists": (lambda text: b"[" * 10_000_000, "is not JSON"),
    "10 MB of tables": (lambda text: b'{"a":' * 2_000_000, "is not JSON"),
    "a number of 5000 digits": (many_digits, "is not JSON"),
    "a list": (lambda text: b"[]", "its format is not"),
    "null": (lambda text: b"null", "its format is not"),
    "another format": (lambda text: text.replace(b"refimpl golden values", b"refimpl checkpoint"), "its format is not"),
    "version 1": (lambda text: text.replace(b'"version": 2', b'"version": 1'), "its version is 1, and 2 is read here"),
    "version of text": (lambda text: text.replace(b'"version": 2', b'"version": "1.0"'), "its version is 1.0"),
    "a version of a megabyte": (lambda text: text.replace(b'"version": 2', b'"version": "%s"' % (b"9" * 10 ** 6)),
                                "its version"),
}


@pytest.mark.parametrize("what", AS_A_FILE)
def test_a_manifest_that_cannot_be_read_is_one_sentence(original, folder, capsys, what):
    act, words = AS_A_FILE[what]
    before = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").write_bytes(act(before))
    assert (folder / "manifest.json").read_bytes() != before
    require_damaged(original, folder, capsys, "manifest.json", words)


def test_a_manifest_of_100_megabytes_is_not_read(original, folder, capsys):
    with open(folder / "manifest.json", "ab") as file:
        file.truncate(100_000_000)
    require_damaged(original, folder, capsys, "has 100000000 bytes; a manifest has at most 64000000", quick=0.5)


def test_a_folder_without_manifest_is_no_bundle(original, folder, capsys):
    (folder / "manifest.json").unlink()
    require_damaged(original, folder, capsys, f"{folder} is no bundle: it has no manifest.json")
    (folder / "manifest.json").mkdir()
    require_damaged(original, folder, capsys, "is no bundle")
    (folder / "manifest.json").rmdir()
    os.mkfifo(folder / "manifest.json")                 # which nobody writes to
    require_damaged(original, folder, capsys, "is no bundle")


# -- what the manifest says --------------------------------------------------------------------------------------------

def top(**changes):
    return lambda said: said | changes


def recipe(**changes):
    return lambda said: said["recipe"].update(changes)


def config(**changes):
    return lambda said: said["recipe"]["config"].update(changes)


def mesh(**changes):
    return lambda said: said["recipe"]["mesh"].update(changes)


def line(**changes):
    return lambda said: said["values"][KEY].update(changes)


def without(*path):
    def change(said):
        for name in path[:-1]:
            said = said[name]
        del said[path[-1]]
    return change


def noise(value):
    return lambda said: said["values"][KEY]["noise"].update(float32=value)


def both(*changes):
    return lambda said: [change(said) for change in changes] and None


WHOLE, HUGE = [[0, 4], [0, 8], [0, 24]], [[0, 4], [0, 5 * 10 ** 17], [0, 24]]
SAYS = {
    "no files": (without("files"), "it must have recipe, conventions, files, values"),
    "no recipe": (without("recipe"), "it must have recipe, conventions, files, values"),
    "no values": (without("values"), "it must have recipe, conventions, files, values"),
    "values empty": (top(values={}), "values must be a table with at least one value"),
    "values a list": (top(values=[1]), "values must be a table"),
    "values null": (top(values=None), "values must be a table"),
    "files a list": (top(files=[SHARED]), "files must be a table of texts"),
    "a sha256 that is a number": (top(files={SHARED: 1}), "files must be a table of texts"),
    "conventions a text": (top(conventions="ours"), "conventions must be at most 100, in a table"),
    "conventions a list": (top(conventions=[["pre", "before"]]), "conventions must be at most 100, in a table"),
    "101 conventions": (top(conventions={f"c{k}": [k, "k"] for k in range(101)}), "conventions must be at most 100"),
    "a convention that is empty": (top(conventions={"loss": []}), "convention 'loss' must be [value, sentence]"),
    "a convention that is a text": (top(conventions={"loss": "mean"}), "convention 'loss' must be [value, sentence]"),
    "a convention of three": (top(conventions={"loss": [1, "a", "b"]}), "convention 'loss' must be [value, sentence]"),
    "a convention without sentence": (top(conventions={"loss": [1, 2]}), "convention 'loss' must be [value, sentence]"),
    "a convention that is null": (top(conventions={"loss": [None, "x"]}), "convention 'loss' must be [value, sentence]"),
    "a convention that is a table": (top(conventions={"loss": [{}, "x"]}), "convention 'loss' must be [value, sentence]"),
    "a convention of lists of lists": (top(conventions={"loss": [[[1]], "x"]}), "convention 'loss' must be [value, sentence]"),
    "a convention of a megabyte": (top(conventions={"loss": ["x" * 10 ** 6, "x"]}), "convention 'loss' must be"),
    "a convention of a thousand digits": (top(conventions={"lr": [10 ** 1000, "x"]}), "convention 'lr' must be"),
    "a convention that moves the cursor": (top(conventions={"loss": ["\x1b[2J", "x"]}), "convention 'loss' must be"),
    "a convention whose name does": (top(conventions={"\x1b[2J": [1, "x"]}), "must be [value, sentence]"),
    "a recipe that is a text": (top(recipe="gpt-micro"), "recipe must have attention, "),
    "a recipe without seed": (without("recipe", "seed"), "recipe must have attention, "),
    "a recipe with more": (recipe(dropout=0), "recipe must have attention, "),
    "no steps": (recipe(steps=0), "steps must be at least 1, got 0"),
    "half a step": (recipe(steps=1.5), "steps must be a count, not 1.5"),
    "true steps": (recipe(steps=True), "steps must be a count, not True"),
    "a seed below 0": (recipe(seed=-1), "seed must be a count, not -1"),
    "a seed of a thousand digits": (recipe(seed=10 ** 1000), "seed must be a count, not 1000"),
    "lr a text": (recipe(lr="small"), "lr must be a number, not small"),
    "lr true": (recipe(lr=True), "lr must be a number, not True"),
    "lr of a thousand digits": (recipe(lr=10 ** 1000), "lr must be a number, not 1000"),
    "a long sequence": (recipe(seq_len=9), "seq_len is 9, the model has max_seq_len 8"),
    "a mesh of 10^9 ranks": (mesh(dp=10 ** 9), "mesh must have dp, cp, tp, at most 256 ranks"),
    "a mesh of 1000 ranks": (mesh(dp=1000), "mesh must have dp, cp, tp, at most 256 ranks"),
    "a mesh of 10^54 ranks": (mesh(dp=10 ** 18, tp=10 ** 18, cp=10 ** 18), "mesh must have dp, cp, tp, at most 256 ranks"),
    "a batch of 10^12": (recipe(batch_size=10 ** 12), "step1/tokens is not of batch_size x seq_len numbers"),
    "a vocabulary of 10^12": (config(vocab_size=10 ** 12), "its parameters are not those of its config"),
    "10^9 steps": (recipe(steps=10 ** 9), "there are fewer values than layers or steps"),
    "10^9 layers": (config(n_layers=10 ** 9), "there are fewer values than layers or steps"),
    "another width": (config(head_dim=8), "its parameters are not those of its config"),
    "two steps of one": (recipe(steps=2), "step2/tokens is not of batch_size x seq_len numbers"),
    "a mesh of no rank": (mesh(dp=0), "mesh must have dp, cp, tp"),
    "a mesh below 0": (mesh(dp=-1, tp=-1), "mesh must have dp, cp, tp"),
    "a mesh of true": (mesh(dp=True), "mesh must have dp, cp, tp"),
    "a mesh with more": (mesh(ep=1), "mesh must have dp, cp, tp"),
    "a mesh in another order": (recipe(mesh={"tp": 1, "cp": 1, "dp": 1}), "mesh must have dp, cp, tp"),
    "a mesh that is a list": (recipe(mesh=[1, 1, 1]), "mesh must have dp, cp, tp"),
    "an attention that is none": (recipe(attention="flash"), "attention must be one of naive, "),
    "an attention that is a list": (recipe(attention=["naive"]), "attention is no name: ['naive']"),
    "a layout of a thousand letters": (recipe(layout="z" * 1000), "layout is no name: zzz"),
    "a config that is a number": (recipe(config=3), "config does not have the settings of a model"),
    "a config without width": (without("recipe", "config", "d_model"), "config does not have the settings of a model"),
    "a config with more": (config(d_modle=8), "config does not have the settings of a model"),
    "heads that do not group": (config(n_kv_heads=3), "n_kv_heads"),
    "a norm that is none": (config(norm="batch_norm"), "norm"),
    "a width that is a text": (config(d_model="16"), "d_model"),
    "a width of none": (config(d_model=None), "d_model"),
    "a width below 0": (config(d_model=-16), "d_model"),
    "a width that is half": (config(d_model=16.5), "d_model"),
    "layers that are true": (config(n_layers=True), "n_layers"),
    "an eps that is a text": (config(eps="small"), "eps"),
    "biases that are a number": (config(biases=3), "biases"),
    "biases of numbers": (config(biases=[3]), "biases"),
    "windows of text": (config(windows=["8", "8"]), "windows"),
    "dropout": (config(dropout=0.5), "without dropout"),
    "a value that is a list": (lambda said: said["values"].update({KEY: []}), f"value {KEY!r}: it must have along, dtype, "),
    "a value without shape": (without("values", KEY, "shape"), f"value {KEY!r}: it must have along, dtype, "),
    "a value with more": (line(pickled="x"), f"value {KEY!r}: it must have along, dtype, "),
    "an unknown role": (line(role="weight"), f"value {KEY!r}: role must be one of input, param, "),
    "a role that is a list": (line(role=["act"]), f"value {KEY!r}: role must be one of"),
    "an unknown phase": (line(phase="after"), f"value {KEY!r}: phase must be one of"),
    "an unknown kind": (line(kind="maybe"), f"value {KEY!r}: kind must be one of"),
    "an unknown dtype": (line(dtype="F8"), f"value {KEY!r}: dtype must be one of"),
    "an object dtype": (line(dtype="|O"), f"value {KEY!r}: dtype must be one of"),
    "another dtype": (line(dtype="F32"), f"lacks {KEY!r}"),
    "a sha256 that is short": (line(sha256="ab"), f"value {KEY!r}: sha256 has 64 digits"),
    "a sha256 of other letters": (line(sha256="x" * 64), f"value {KEY!r}: sha256 has 64 digits"),
    "another sha256": (line(sha256="0" * 64), f"{KEY!r} is damaged: its sha256 is not that in the manifest"),
    "a step below 0": (line(step=-1), f"value {KEY!r}: step and terms are counts"),
    "terms of true": (line(terms=True), f"value {KEY!r}: step and terms are counts"),
    "uncertainty below 0": (line(uncertainty=-1e-9), f"value {KEY!r}: uncertainty and noise must be numbers of at least 0"),
    "uncertainty of text": (line(uncertainty="0"), f"value {KEY!r}: uncertainty and noise must be"),
    "uncertainty of a thousand digits": (line(uncertainty=10 ** 1000), f"value {KEY!r}: uncertainty and noise must be"),
    "noise a list": (line(noise=[]), f"value {KEY!r}: uncertainty and noise must be"),
    "noise below 0": (noise(-1.0), f"value {KEY!r}: uncertainty and noise must be"),
    "noise of a thousand digits": (noise(10 ** 1000), f"value {KEY!r}: uncertainty and noise must be"),
    "noise of an unknown format": (line(noise={"float8": 1.0}), f"value {KEY!r}: uncertainty and noise must be"),
    "noise of two formats": (without("values", KEY, "noise", "float16"), f"value {KEY!r}: uncertainty and noise must be"),
    "no noise": (line(noise={}), f"value {KEY!r}: uncertainty and noise must be"),
    "noise of tokens": (lambda said: said["values"]["step1/tokens"].update(noise={"float32": 0.0}),
                        "'step1/tokens': uncertainty"),
    "a shape below 0": (line(shape=[4, 8, -24]), f"value {KEY!r}: shape must be a list of counts"),
    "a shape of fractions": (line(shape=[4.0, 8.0, 24.0]), f"value {KEY!r}: shape must be a list of counts"),
    "a shape of true": (line(shape=[4, 8, 24, True]), f"value {KEY!r}: shape must be a list of counts"),
    "a shape that is a number": (line(shape=768), f"value {KEY!r}: shape must be a list of counts"),
    "a shape of 33 axes": (line(shape=[4, 8, 24] + [1] * 30), f"value {KEY!r}: shape must be a list of counts"),
    "a shape beyond 64 bits": (line(shape=[2 ** 64]), f"value {KEY!r}: shape must be a list of counts"),
    "another shape": (line(shape=[8, 4, 24]), f"lacks {KEY!r}, <f8 of shape [8, 4, 24]"),
    "lies on an axis that is not wide": (line(along={"tp": "axis 1"}), f"value {KEY!r}: along says how it lies"),
    "lies on an axis that is none": (line(along={"ep": "replicated"}), f"value {KEY!r}: along says how it lies"),
    "positions cut over tp": (both(mesh(tp=2), line(along={"tp": "axis 1 zigzag"})), f"value {KEY!r}: what is cut zigzag or"),
    "positions of an axis that is none": (both(mesh(cp=2), line(along={"cp": "axis 3 zigzag"})), f"value {KEY!r}: what is cut"),
    "positions of whole boxes": (both(mesh(cp=2), line(along={"cp": "axis 1 zigzag"})), f"value {KEY!r}: what is cut zigzag"),
    "positions of 10^18": (both(mesh(cp=2), line(shape=[4, 10 ** 18, 24], along={"cp": "axis 1 striped"}, boxes=[HUGE] * 2)),
                           f"{KEY!r}, <f8 of shape"),
    "along a list": (line(along=[]), f"value {KEY!r}: along says how it lies"),
    "a box outside": (line(boxes=[[[0, 4], [0, 8], [0, 25]]]), f"value {KEY!r}: boxes are (start, stop)"),
    "a box below 0": (line(boxes=[[[-1, 4], [0, 8], [0, 24]]]), f"value {KEY!r}: boxes are (start, stop)"),
    "a box backwards": (line(boxes=[[[4, 0], [0, 8], [0, 24]]]), f"value {KEY!r}: boxes are (start, stop)"),
    "a box of halves": (line(boxes=[[[0, 3.5], [0, 8], [0, 24]]]), f"value {KEY!r}: boxes are (start, stop)"),
    "a box of two axes": (line(boxes=[WHOLE[:2]]), f"value {KEY!r}: boxes are (start, stop)"),
    "boxes of more ranks": (line(boxes=[WHOLE, WHOLE]), f"value {KEY!r}: boxes are (start, stop)"),
    "no boxes": (line(boxes=[]), f"value {KEY!r}: boxes are (start, stop)"),
    "boxes null": (line(boxes=None), f"value {KEY!r}: boxes are (start, stop)"),
    "half a box": (line(boxes=[[[0, 2], [0, 8], [0, 24]]]), f"lacks {KEY!r}, <f8 of shape [2, 8, 24]"),
    "a value left out": (without("values", KEY), f"has a tensor 'bfloat16/{KEY}' of which the manifest says nothing"),
    "a value that is not there": (lambda said: said["values"].update(more=said["values"][KEY]), "lacks 'more'"),
}


@pytest.mark.parametrize("what", SAYS)
def test_a_manifest_that_says_what_cannot_be_is_one_sentence(original, folder, capsys, what):
    change, words = SAYS[what]
    rewritten(folder, change)
    require_damaged(original, folder, capsys, str(folder), words)


@pytest.mark.parametrize("file", ["../original/bundle/shared.safetensors", "/etc/passwd", "..", "", ".", "manifest.json",
                                  "./shared.safetensors", "rank-00000.safetensors/../shared.safetensors",
                                  "shared.safetensors\n",
                                  "rank-00001.safetensors", "rank-٠٠٠٠٠.safetensors", "a" * 10_000, "\ud800", "\0"])
def test_files_of_other_names_are_not_opened(original, folder, capsys, file):
    (folder / "rank-٠٠٠٠٠.safetensors").write_bytes((folder / SHARED).read_bytes())
    sha = hashlib.sha256((folder / SHARED).read_bytes()).hexdigest()
    rewritten(folder, lambda said: said["files"].update({file: sha}))
    require_damaged(original, folder, capsys, repr(file[:100]), "is missing, or no file of a bundle")


# -- the files ---------------------------------------------------------------------------------------------------------

def flip(folder):
    raw = bytearray((folder / SHARED).read_bytes())
    raw[-100] ^= 1
    (folder / SHARED).write_bytes(raw)


def cut(n):
    return lambda folder: (folder / SHARED).write_bytes((folder / SHARED).read_bytes()[:n])


def linked(folder):
    (folder / SHARED).rename(folder / "elsewhere")
    (folder / SHARED).symlink_to(folder / "elsewhere")


def a_folder(folder):
    (folder / SHARED).unlink()
    (folder / SHARED).mkdir()


def a_pipe(folder):
    (folder / SHARED).unlink()
    os.mkfifo(folder / SHARED)


FILES = {
    "a bit": (flip, "is damaged: its sha256 is not that in the manifest"),
    "truncated": (cut(-100), "is damaged: its sha256 is not that in the manifest"),
    "empty": (cut(0), "is damaged: its sha256 is not that in the manifest"),
    "missing": (lambda folder: (folder / SHARED).unlink(), "is missing, or no file of a bundle"),
    "a link": (linked, "is missing, or no file of a bundle"),
    "a folder": (a_folder, "is missing, or no file of a bundle"),
    "a pipe": (a_pipe, "is missing, or no file of a bundle"),
    "not named": (lambda folder: rewritten(folder, lambda said: said.update(files={})), "shared.safetensors lacks"),
}


@pytest.mark.parametrize("what", FILES)
def test_a_file_that_is_not_the_one_of_the_manifest_is_one_sentence(original, folder, capsys, what):
    act, words = FILES[what]
    act(folder)
    require_damaged(original, folder, capsys, str(folder), SHARED, words)


def entry(**changes):
    return lambda folder: header_changed(folder, lambda header: header[KEY].update(changes))


def length(n):
    def act(folder):
        (folder / SHARED).write_bytes(n.to_bytes(8, "little") + (folder / SHARED).read_bytes()[8:])
        signed(folder)
    return act


def resigned(act):
    return lambda folder: (act(folder), signed(folder))


def tensor(change):
    return lambda folder: tensors_changed(folder, change)


def twice(header):
    text = json.dumps(header)
    return (text[:-1] + f', "{KEY}": {json.dumps(header[KEY])}' + "}").encode()


def one_more(tensors):
    tensors["more"] = np.zeros(3)


def one_number(tensors):
    tensors[KEY][3, 7, 23] += 1e-9


def exchanged(tensors):
    tensors["step1/act/layers.0.attn.k"], tensors[KEY] = tensors[KEY], tensors["step1/act/layers.0.attn.k"]


HUGE = {
    "10^18 elements": entry(shape=[10 ** 18], data_offsets=[0, 8 * 10 ** 18]),
    "10^18 elements that lie": entry(shape=[10 ** 18]),
    "2^58 bytes": entry(dtype="U8", shape=[2 ** 58], data_offsets=[0, 2 ** 58]),
    "a product beyond 64 bits": entry(shape=[2 ** 62, 2 ** 62]),
    "zeros times 2^124": entry(shape=[0, 2 ** 62, 2 ** 62], data_offsets=[0, 0]),
    "33 axes": entry(shape=[4, 8, 24] + [1] * 30),
    "a header of 2^63 bytes": length(2 ** 63),
    "a header of 2^64 - 1 bytes": length(2 ** 64 - 1),
    "a shape of 10^18 in the manifest": lambda folder: rewritten(folder, line(shape=[10 ** 18])),
    "a box of 10^18 in the manifest": lambda folder: rewritten(folder, line(shape=[10 ** 18], boxes=[[[0, 10 ** 18]]])),
}
SIGNED = {
    "truncated": (resigned(cut(-100)), "its shape"),
    "nothing but a length": (resigned(cut(8)), "the header claims"),
    "empty": (resigned(cut(0)), "the header claims"),
    "a header that is too short": (length(100), "the header is not JSON"),
    "a header that is too long": (length(10 ** 6 * 2), "the header claims 2000000 bytes"),
    "a header that is a list": (lambda folder: header_changed(folder, lambda header: b"[]"), "not a JSON object"),
    "a header of lists": (lambda folder: header_changed(folder, lambda header: b"[" * 10 ** 6), "the header is not JSON"),
    "a name twice": (lambda folder: header_changed(folder, twice), f"the header names {KEY!r} twice"),
    "offsets that overlap": (entry(data_offsets=[0, 6144]), "two tensors share bytes"),
    "offsets below 0": (entry(data_offsets=[-6144, 0]), f"the entry of {KEY!r} is malformed"),
    "offsets backwards": (entry(data_offsets=[6144, 0]), f"{KEY!r} claims bytes 6144..0"),
    "offsets of halves": (entry(data_offsets=[0.0, 6144.0]), f"the entry of {KEY!r} is malformed"),
    "a shape below 0": (entry(shape=[-4, -8, 24]), f"the entry of {KEY!r} is malformed"),
    "a shape of true": (entry(shape=[True, 768]), f"the entry of {KEY!r} is malformed"),
    "a dtype that is none": (entry(dtype="O"), f"the entry of {KEY!r} is malformed"),
    "bytes that belong to nothing": (lambda folder: header_changed(folder, lambda header: None, bytes(2 * 10 ** 6)),
                                     "belong to no tensor"),
    "another dtype": (tensor(lambda tensors: tensors.update({KEY: tensors[KEY].view("int64")})), f"lacks {KEY!r}, <f8"),
    "another shape": (tensor(lambda tensors: tensors.update({KEY: tensors[KEY].reshape(8, 4, 24)})), f"lacks {KEY!r}, <f8"),
    "a tensor left out": (tensor(lambda tensors: tensors.pop(KEY)), f"lacks {KEY!r}, <f8 of shape [4, 8, 24]"),
    "sigma left out": (tensor(lambda tensors: tensors.pop("float16/" + KEY)), f"lacks 'float16/{KEY}', |u1"),
    "a tensor more": (tensor(one_more), "has a tensor 'more' of which the manifest says nothing"),
    "one number": (tensor(one_number), f"{KEY!r} is damaged: its sha256 is not that in the manifest"),
    "two tensors exchanged": (tensor(exchanged), "is damaged: its sha256 is not that in the manifest"),
    **{what: (act, "") for what, act in HUGE.items()},
}


@pytest.mark.parametrize("what", SIGNED)
def test_a_file_whose_sha256_is_right_is_still_checked(original, folder, capsys, what):
    act, words = SIGNED[what]
    act(folder)
    require_damaged(original, folder, capsys, str(folder), words)


def test_a_file_more_in_the_folder_is_not_looked_at(original, folder, capsys):
    (folder / "rank-00007.safetensors").write_bytes(b"anything")
    (folder / "README").symlink_to("/nowhere")
    assert read(folder).entries.keys() == read(original).entries.keys()


# -- memory and time ---------------------------------------------------------------------------------------------------

LIMITED = """
import resource, sys
from refimpl.__main__ import main
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for folder in sys.argv[2:]:
    print(main(["golden", "check", sys.argv[1], "--against", folder]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_what_is_claimed_is_not_allocated(original, tmp_path):
    """In a process of its own that could not have it; all claims together cost less than 60 MB."""
    folders = []
    for k, act in enumerate([*HUGE.values(), lambda folder: rewritten(folder, mesh(dp=10 ** 9))]):
        folders.append(shutil.copytree(original, tmp_path / str(k)))
        act(folders[-1])
    done = subprocess.run([sys.executable, "-c", LIMITED, original.parent / "dump.safetensors", *folders], capture_output=True,
                          text=True, timeout=60)
    *statuses, megabytes = done.stdout.split()
    assert statuses == ["4"] * len(folders) and done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == len(folders) and "MemoryError" not in done.stderr
    assert int(megabytes) < 60


@pytest.mark.parametrize("act", [cut(-100), lambda folder: (folder / "manifest.json").write_bytes(b"[" * 10 ** 7),
                                 HUGE["10^18 elements"]])
def test_the_command_itself_ends_with_4_and_one_sentence(original, folder, act):
    act(folder)
    for action in (["check", original.parent / "dump.safetensors", "--against", folder], ["show", folder]):
        done = subprocess.run([sys.executable, "-m", "refimpl", "golden", *action], capture_output=True, text=True, timeout=60)
        assert done.returncode == 4 and not done.stdout
        assert done.stderr.startswith("refimpl golden: ") and done.stderr.count("\n") == 1


# -- anything at all ---------------------------------------------------------------------------------------------------

EXAMPLES = 150


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tenth of the other bundle: of one layer and one sample."""
    out = tmp_path_factory.mktemp("tiny") / "bundle"
    make(Recipe(replace(MODELS["gpt-micro"], n_layers=1), steps=1, batch_size=1, seq_len=2), SerialComm(), out, runs=2)
    return out


ODD = st.one_of(st.none(), st.booleans(), st.integers(-2, 10), st.sampled_from([2 ** 31, 2 ** 62, 2 ** 63, 10 ** 400, -1]),
                st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=5), st.just([]), st.just({}),
                st.sampled_from(["axis 0", "axis 9", "partial", "per rank", "replicated", "F64", "I32", "BF16", "rms_norm"]),
                st.lists(st.integers(-1, 30), max_size=4))


@st.composite
def spoilt(draw, raw):
    """Bytes with some of them changed, cut out, put in again or repeated elsewhere, near the front (a header) or anywhere."""
    raw = bytearray(raw)
    for _ in range(draw(st.integers(1, 4))):
        place = st.integers(0, draw(st.sampled_from([8, 200, 20_000, len(raw)])))
        a, b = draw(place), draw(st.integers(0, 50))
        act = draw(st.sampled_from(["bytes", "bit", "truncate", "cut", "splice"]))
        if act == "bytes":
            raw[a:a + b] = draw(st.binary(max_size=20))
        elif act == "bit" and a < len(raw):
            raw[a] ^= 1 << draw(st.integers(0, 7))
        elif act == "truncate":
            del raw[a:]
        elif act == "cut":
            del raw[a:a + b]
        else:
            c = draw(place)
            raw[a:a] = raw[c:c + b]
    return bytes(raw)


@st.composite
def misleading(draw, text):
    """What a manifest says, with something else in one or two of its places."""
    said = json.loads(text)
    for _ in range(draw(st.integers(1, 2))):
        at, name = said, draw(st.sampled_from(sorted(said)))
        while isinstance(at[name], (dict, list)) and at[name] and draw(st.integers(0, 9)):
            at = at[name]
            name = draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        at[name] = draw(ODD)
    return said


def require_read_or_refused(folder):
    """The bundle (None: refused with one sentence), without delay."""
    start = time.monotonic()
    try:
        return read(folder)
    except BundleError as error:
        assert str(error) and "\n" not in str(error).replace("\\n", "") and len(str(error)) < 2000
    finally:
        assert time.monotonic() - start < 5


@pytest.mark.parametrize("file, sign", [("manifest.json", False), (SHARED, False), (SHARED, True), ("what it says", False)])
def test_a_bundle_with_anything_in_it_is_read_or_refused(tiny, tmp_path_factory, file, sign):
    """Where the file of values is changed and the bundle is read nevertheless, its values are the right ones, bit for bit."""
    folder, right = shutil.copytree(tiny, tmp_path_factory.mktemp("fuzz") / "bundle"), read(tiny)
    manifest, shared = ((tiny / name).read_bytes() for name in ("manifest.json", SHARED))
    said, counts = json.loads(manifest), {"read": 0, "refused": 0}
    changed = misleading(manifest) if file == "what it says" else spoilt(manifest if file == "manifest.json" else shared)

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
    @given(changed)
    def tried(new):
        (folder / "manifest.json").write_bytes(manifest)
        if file == SHARED:
            (folder / SHARED).unlink()                  # it may be looked at still
            (folder / SHARED).write_bytes(new)
            if sign:
                signs = said | {"files": {SHARED: hashlib.sha256(new).hexdigest()}}
                (folder / "manifest.json").write_text(json.dumps(signs))
        else:
            (folder / "manifest.json").write_bytes(new if type(new) is bytes else json.dumps(new).encode())
        bundle = require_read_or_refused(folder)
        counts["read" if bundle else "refused"] += 1
        if bundle and file == SHARED:
            assert all(bundle.value(key).tobytes() == right.value(key).tobytes() for key in right.entries)
    tried()
    print(file, "signed" if sign else "", counts)
    assert sum(counts.values()) >= EXAMPLES and counts["refused"] > EXAMPLES // 3
