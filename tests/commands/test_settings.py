"""Localises a setting that is taken from the wrong place, as the wrong kind, or refused without its name and what is right."""
import argparse
import io
import re
import sys
from contextlib import redirect_stdout
from dataclasses import fields

import pytest

from refimpl.__main__ import main
from refimpl.comm import SerialComm
from refimpl.commands import train
from refimpl.commands.settings import add_flags, checked, defaults, read_toml
from refimpl.models import Config
from refimpl.models.config import BIASED, CHOICES
from refimpl.train import Options, Sampling
from refimpl.train.adamw import GROUPS
from refimpl.train.options import DTYPES
from refimpl.train.schedule import SCHEDULES

DEFAULT = {"yes": True, "count": 3, "rate": 0.5, "name": "a", "parts": ("x", "y"), "none": ()}
TEXT = "the quick brown fox jumps over the lazy dog. " * 20


def parsed(*flags):
    parser = argparse.ArgumentParser()
    add_flags(parser, DEFAULT, dict.fromkeys(DEFAULT, "help"))
    return vars(parser.parse_args(flags))


@pytest.fixture
def toml(tmp_path):
    """toml(text) -> the path of a TOML file."""
    pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")

    def write(text):
        path = tmp_path / "my.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path
    return write


def settings(*flags, checkpoint=None):
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return train.settings_of(SerialComm(), parser.parse_args(list(flags)), checkpoint)


def refused(capsys, *arguments):
    """The one line that `train` ends with."""
    with pytest.raises(SystemExit) as end:
        main(["train", *arguments])
    out, err = capsys.readouterr()
    assert end.value.code == 1 and not out and err.startswith("refimpl train: ") and err.count("\n") == 1, err
    return err


# -- kinds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags, values", [
    ([], {}),
    (["--yes"], {"yes": True}), (["--no-yes"], {"yes": False}),
    (["--count", "-7"], {"count": -7}), (["--rate", "2"], {"rate": 2.0}), (["--rate", "1e-3"], {"rate": 0.001}),
    (["--name", "12"], {"name": "12"}), (["--name", ""], {"name": ""}),
    (["--parts", "p,q"], {"parts": ("p", "q")}), (["--parts", "p"], {"parts": ("p",)}), (["--parts", ""], {"parts": ()}),
    (["--none", "8, 0,"], {"none": (8, 0)}), (["--parts", " p , q "], {"parts": ("p", "q")}),
])
def test_a_flag_gives_its_kind_and_what_is_not_given_is_not_there(flags, values):
    found = parsed(*flags)
    assert found == values and [type(v) for v in found.values()] == [type(v) for v in values.values()]


@pytest.mark.parametrize("given, values", [
    ({}, {}), ({"yes": False}, {"yes": False}), ({"count": 0}, {"count": 0}), ({"rate": 2}, {"rate": 2.0}),
    ({"rate": 2.5}, {"rate": 2.5}), ({"name": ""}, {"name": ""}), ({"parts": []}, {"parts": ()}),
    ({"parts": ["p"]}, {"parts": ("p",)}), ({"none": [4, 0]}, {"none": (4, 0)}),
])
def test_a_value_of_a_file_becomes_the_settings_kind(given, values):
    found = checked(given, DEFAULT, "here")
    assert found == values and [type(v) for v in found.values()] == [type(v) for v in values.values()]


@pytest.mark.parametrize("name, value, right", [
    ("yes", 1, "true or false, got 1"), ("yes", "true", 'true or false, got "true"'), ("count", 1.0, "a whole number, got 1.0"),
    ("count", True, "a whole number, got true"), ("count", "3", 'a whole number, got "3"'),
    ("rate", True, "a number, got true"), ("rate", "2", 'a number, got "2"'),
    ("name", 3, "a text, got 3"), ("name", ["a"], r'a text, got \["a"\]'),
    ("parts", "p", 'a list of texts or of numbers, got "p"'), ("none", 4, "a list of texts or of numbers, got 4"),
    ("none", {}, "a list of texts or of numbers, got {}"),
])
def test_a_value_of_another_kind_is_named_with_the_kind_that_is_right(name, value, right):
    with pytest.raises(ValueError, match=f"^here: {name} must be {right}$"):
        checked({name: value}, DEFAULT, "here")


def test_an_unknown_key_is_named_with_all_that_there_are():
    with pytest.raises(ValueError, match="^here has no key 'cuont': its keys are yes, count, rate, name, parts, none$"):
        checked({"count": 1, "cuont": 2}, DEFAULT, "here")


@pytest.mark.parametrize("values", [3, [], "x", [{"count": 1}]])
def test_what_is_no_table_is_refused(values):
    with pytest.raises(ValueError, match="^here must be a table of settings, got "):
        checked(values, DEFAULT, "here")


def test_defaults_are_those_of_the_fields_then_of_the_example():
    found = train.SECTIONS["model"]
    assert "vocab_size" not in found and found["n_layers"] == train.SMALL.n_layers and found["norm"] == "layer_norm"
    assert found["d_ff"] == 0                           # not 384: derived from the width that is chosen
    assert Options(**defaults(Options)) == Options() and Sampling(**defaults(Sampling)) == Sampling()


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_file_has_sections_and_those_that_it_lacks_are_empty(toml):
    found = read_toml(toml('[training]\nlr = 1\ndecay = []\nzero = true\n[model]\nwindows = [8, 0]\n[data]\n'), train.SECTIONS)
    assert found == {"training": {"lr": 1.0, "decay": (), "zero": True}, "model": {"windows": (8, 0)}, "data": {},
                     "sampling": {}}
    assert read_toml(toml(""), train.SECTIONS) == dict.fromkeys(train.SECTIONS, {})


@pytest.mark.parametrize("text, words", [
    ("[training]\nstep = 3", "my.toml: [training] has no key 'step': its keys are steps, batch_size, seq_len, "),
    ("[model]\nvocab_size = 3", "my.toml: [model] has no key 'vocab_size': its keys are n_layers, n_heads, "),
    ("[sampling.deep]\nx = 3", "my.toml: [sampling] has no key 'deep': its keys are prompt, sample, temperature"),
    ("[trainig]\nsteps = 3", "my.toml has no use for 'trainig': its sections are [training], [model], [data], [sampling]"),
    ("steps = 3", "my.toml has no use for 'steps': its sections are [training], [model], [data], [sampling]"),
    ("training = 3", "my.toml: [training] must be a table of settings, got 3"),
    ("[[training]]\nsteps = 3", "my.toml: [training] must be a table of settings, got [{'steps': 3}]"),
    ("[training]\nsteps = '3'", 'my.toml: [training]: steps must be a whole number, got "3"'),
    ("[training]\nlr = 2024-01-01", 'my.toml: [training]: lr must be a number, got "2024-01-01"'),
    ("[model]\ntied = 0", "my.toml: [model]: tied must be true or false, got 0"),
    ("[model]\nwindows = 8", "my.toml: [model]: windows must be a list of texts or of numbers, got 8"),
    ("[data]\ntext = ['a']", 'my.toml: [data]: text must be a text, got ["a"]'),
    ("[training]\nschedule = 'linear'", "schedule must be one of constant, cosine, got 'linear'"),
    ("[training]\nlr = inf", "the learning rate must be a positive number, got inf"),
    ("[training]\ndecay = ['norms']", "decay must list some of matrices, embeddings, vectors, got 'norms'"),
    ("[training]\ndecay = ['a', 1]", "decay must "),
    ("[training]\ndecay = [['a']]", "decay must "),
    ("[training]\nlr = 1" + 400 * "0", "lr must be "),
    ("[model]\nwindows = [1.5]", "windows must be a list of texts or of numbers, got [1.5]"),
    ("[model]\nbiases = [true]", "biases must be a list of texts or of numbers, got [true]"),
    ("[model]\nbiases = ['all']", "biases must be among norm, qkv, o, mlp, head, got 'all'"),
    ("[model]\nffn = 'silu'", "ffn must be one of gelu_tanh, gelu_erf, relu, swiglu, geglu_tanh, geglu_erf, got 'silu'"),
    ("[data]\ntokenizer = 'words'", "there is no tokenizer 'words': use byte, bpe, a file NAME.json"),
    ("[sampling]\ntemperature = -1", "sample and temperature must be at least 0, got 200 and -1.0"),
    ("[training", "my.toml are not TOML: "), (b"\xff\xfe", "my.toml are not TOML: 'utf-8' codec can't decode byte 0xff"),
    ("a = " + 100_000 * "[", "my.toml are not TOML: "), ("[training]\nsteps = 1\nsteps = 2", "my.toml are not TOML: "),
    (b"\x00", "my.toml are not TOML: "),
], ids=lambda x: None if len(x) < 99 else "long")
def test_what_is_wrong_in_a_file_is_one_sentence(toml, tmp_path, capsys, text, words):
    (tmp_path / "text").write_text(TEXT)
    file = toml(text)
    assert words in refused(capsys, "--config", str(file), "--steps", "1", "--no-bar", "--text", str(tmp_path / "text"))


@pytest.mark.parametrize("name, reason", [("missing.toml", "No such file or directory"), (".", "Is a directory")])
def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path, capsys, name, reason):
    assert f"{tmp_path / name} cannot be read: {reason}" in refused(capsys, "--config", str(tmp_path / name))


def test_a_file_needs_a_reader_and_the_sentence_says_which(tmp_path, monkeypatch):
    monkeypatch.setattr("refimpl.commands.settings.import_module", lambda name: __import__("refimpl.no_such_module"))
    with pytest.raises(ValueError, match=r"a TOML file needs Python 3.11 or the package tomli: pip install '.\[run\]'"):
        read_toml(tmp_path / "my.toml", train.SECTIONS)


# -- precedence -------------------------------------------------------------------------------------------------------


def test_flags_go_before_the_file_the_file_before_the_checkpoint_the_checkpoint_before_the_defaults(toml, monkeypatch):
    """Four settings, each set by one place more than the one before."""
    saved = {"training": {"lr": 2.0, "clip": 2.0, "warmup": 2}, "model": {"n_layers": 5, "windows": (2,), "d_ff": 7},
             "data": {"text": "saved"}, "sampling": {}}
    monkeypatch.setattr(train, "saved_settings", lambda path: saved)
    file = toml("[training]\nlr = 3\nclip = 3\n[model]\nn_layers = 6\nbiases = []\n[data]\ntext = 'file'")
    found = settings("--config", str(file), "--lr", "4", "--n-layers", "7", "--no-tied", checkpoint="here")
    training, model = found["training"], found["model"]
    assert (training["beta2"], training["warmup"], training["clip"], training["lr"]) == (0.95, 2, 3.0, 4.0)
    assert (model["d_model"], model["d_ff"], model["biases"], model["n_layers"]) == (96, 7, (), 7)
    assert (model["windows"], model["tied"], found["data"]["text"]) == ((2,), False, "file")


def test_without_a_file_and_flags_there_are_the_defaults():
    found = settings()
    assert Options(**found["training"]) == Options() and Sampling(**found["sampling"]) == Sampling()
    assert found["model"]["max_seq_len"] == 0           # seq_len, unless somebody says otherwise
    assert Config(vocab_size=256, **found["model"] | {"max_seq_len": 64}) == train.SMALL


def test_the_longest_context_is_seq_len_unless_it_is_set_anywhere(toml):
    assert settings("--seq-len", "128")["model"]["max_seq_len"] == 0
    assert settings("--max-seq-len", "256")["model"]["max_seq_len"] == 256
    assert settings("--config", str(toml("[model]\nmax_seq_len = 99")))["model"]["max_seq_len"] == 99


# -- help -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown():
    """What `train --help` prints on a terminal of 100 columns."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), pytest.raises(SystemExit) as end:
        patch.setenv("COLUMNS", "100")
        main(["train", "--help"])
    assert end.value.code == 0
    return out.getvalue()


def test_every_field_of_the_dataclasses_has_its_help_and_nothing_else_has():
    classes = {"training": Options, "model": Config, "data": train.Source, "sampling": Sampling}
    assert list(train.HELP) == list(train.SECTIONS) == list(classes)
    for section, cls in classes.items():
        names = {f.name for f in fields(cls)}
        if cls is Config:
            names.remove("vocab_size")                  # the tokenizer says it
        assert set(train.HELP[section]) == set(train.SECTIONS[section]) == names, section


def test_no_setting_is_in_two_sections():
    """A flag of a name that two sections have would go to both."""
    names = [name for section in train.SECTIONS.values() for name in section]
    assert len(names) == len(set(names))


def test_every_flag_is_in_the_help_with_its_text_and_its_default(shown):
    flat = " ".join(shown.split())
    for section, values in train.SECTIONS.items():
        for name, value in values.items():
            text = " ".join(train.HELP[section][name].split())
            default = {True: "yes", False: "no"}[value] if isinstance(value, bool) else \
                ",".join(value) if isinstance(value, tuple) else str(value).strip()
            flag = "--" + name.replace("_", "-")
            metavar = r", --no-\S+" if isinstance(value, bool) else r" \S+"
            end = rf" \(default: {re.escape(default)} ?\)" if default else ""
            assert re.search(rf"(^| ){flag}{metavar} {re.escape(text)}{end}", flat), name


def test_the_help_names_every_choice(shown):
    model = train.HELP["model"] | train.HELP["training"]
    for name, words in {**CHOICES, "biases": BIASED, "decay": GROUPS, "dtype": DTYPES, "schedule": SCHEDULES}.items():
        assert all(word in model[name] for word in words), name


def test_the_help_is_narrow_in_order_and_has_the_launch_lines(shown):
    assert max(map(len, shown.splitlines())) <= 130
    order = [shown.index(f"\n{section}:") for section in train.SECTIONS]
    assert order == sorted(order) and shown.index("--config") < order[0]
    for line in ("mpirun -n 4 python -m refimpl train --mesh dp=2,tp=2", "--config my.toml", "--resume"):
        assert line in shown


@pytest.mark.parametrize("flags, words", [
    (["--steps", "many"], "argument --steps: invalid int value: 'many'"), (["--lr", "fast"], "argument --lr: invalid float"),
    (["--nonsense", "1"], "--nonsense"), (["--steps"], "argument --steps: expected one argument"),
])
def test_a_bad_flag_names_itself(capsys, flags, words):
    with pytest.raises(SystemExit) as end:
        main(["train", *flags])
    err = capsys.readouterr().err
    assert end.value.code == 2 and words in err and "Traceback" not in err
