"""Localises faults of `golden`: an exit status that lies, a file that is not read, output that is not what the bundle says."""
import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from refimpl import tensorfile
from refimpl.__main__ import main
from refimpl.comm.base import SerialComm
from refimpl.golden import opcases
from refimpl.golden.bundle import read
from refimpl.golden.make import make
from refimpl.golden.names import NAMES, to_theirs
from refimpl.golden.recipe import MODELS, Recipe

Q = "step1/act/layers.0.attn.q"
KB = "step1/grad/layers.0.attn.k.b"
OPS = ("linear", "gelu_tanh", "attention", "mul", "all_gather", "sum")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a bundle, `gpt`, and the cases of some ops, `ops`."""
    out = tmp_path_factory.mktemp("golden")
    make(Recipe(replace(MODELS["gpt-micro"], n_layers=1), steps=1), SerialComm(), out / "gpt", 4)
    some = [case for case in opcases.op_cases() if case.op in OPS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opcases, "op_cases", lambda: some)
        opcases.make(out / "ops", runs=2)
    return out


def values_of(bundle):
    return {key: np.array(bundle.value(key)) for key in bundle.entries}


def checked(capsys, tmp_path, bundle, values, *flags):
    """(status, what it printed) of `golden check` on a file with the values."""
    tensorfile.write(tmp_path / "dump.safetensors", values)
    status = main(["golden", "check", str(tmp_path / "dump.safetensors"), "--against", str(bundle), *map(str, flags)])
    done = capsys.readouterr()
    said = [line for line in done.out.splitlines() if not line.startswith("    python -m refimpl")]       # to be copied whole
    assert not (done.out and done.err) and max(map(len, said), default=0) <= 80
    return status, done.out or done.err


# -- check: exit statuses ----------------------------------------------------------------------------------------------

def test_0_is_right(capsys, tmp_path, folder):
    values = values_of(read(folder / "gpt"))
    status, said = checked(capsys, tmp_path, folder / "gpt", values, "--dtype", "float32", "--all")
    assert status == 0 and said.startswith("refimpl golden check: PASS\n")
    assert checked(capsys, tmp_path, folder / "gpt", {Q: values[Q]})[0] == 0


def test_1_is_wrong(capsys, tmp_path, folder):
    values = values_of(read(folder / "gpt"))
    values[Q][1, 2, 3] += 1                             # (at the first place there is one key, whatever the query)
    status, said = checked(capsys, tmp_path, folder / "gpt", values, "--dtype", "float32")
    assert status == 1 and said.startswith("refimpl golden check: MISMATCH\n") and f"first wrong   {Q}\n" in said
    assert " ".join(said.split()).endswith("--dtype float32 --local")


def test_the_next_command_can_be_pasted(capsys, tmp_path, folder):
    """And says what was said, in a folder with a space."""
    place = tmp_path / "my dumps"
    place.mkdir()
    flags = ("--dtype", "float32", "--as", "step1/act", *stating(place, '{"tied": true}'))
    status, said = checked(capsys, place, folder / "gpt", {"layers.0.attn.q": np.ones((4, 8, 24))}, *flags)
    words = shlex.split(next(line for line in said.splitlines() if line.startswith("    python")))
    assert status == 1 and words[:3] == ["python", "-m", "refimpl"] and words[-1] == "--local"
    assert main(words[3:]) == 1 and "op that errs" in capsys.readouterr().out


@pytest.mark.parametrize("name, words", [("step1/act/layer.0.attn.q", f"is {Q} meant?"),
                                         ("layers.0.attn.q", "--as says so once")])
def test_2_is_usage(capsys, tmp_path, folder, name, words):
    status, said = checked(capsys, tmp_path, folder / "gpt", {name: np.zeros(3)})
    assert status == 2 and said.startswith("refimpl golden: ") and words in said and said.count("\n") == 1


def test_2_is_a_file_that_is_not_there(capsys, tmp_path, folder):
    assert main(["golden", "check", str(tmp_path / "none.npz"), "--against", str(folder / "gpt")]) == 2
    assert "none.npz is not there" in capsys.readouterr().err
    tensorfile.write(tmp_path / "a.safetensors", {"step1/loss": np.zeros(())})
    for command in (["check", str(tmp_path / "a.safetensors"), "--against"], ["show"]):
        assert main(["golden", *command, str(tmp_path / "gone")]) == 2
        assert f"{tmp_path / 'gone'} is not there: a bundle is a folder" in capsys.readouterr().err


def test_3_is_incomplete(capsys, tmp_path, folder):
    values = values_of(read(folder / "gpt"))
    status, said = checked(capsys, tmp_path, folder / "gpt", {k: a for k, a in values.items() if k.startswith("params/")})
    assert status == 3 and said.startswith("refimpl golden check: INCOMPLETE\n") and "`refimpl golden show` lists" in said
    assert checked(capsys, tmp_path, folder / "gpt", {Q: values[Q]}, "--all")[0] == 3


def test_4_is_a_damaged_bundle(capsys, tmp_path, folder):
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle/manifest.json").write_text("{}")
    status, said = checked(capsys, tmp_path, tmp_path / "bundle", {Q: np.zeros(3)})
    assert status == 4 and "manifest.json is damaged: its format is not 'refimpl golden values'" in said


def test_5_is_no_power(capsys, tmp_path, folder):
    values = values_of(read(folder / "gpt"))
    status, said = checked(capsys, tmp_path, folder / "gpt", {KB: values[KB]}, "--dtype", "float32")
    assert status == 5 and said.startswith("refimpl golden check: NO POWER\n") and f"no power      {KB}\n" in said


# -- check: conventions -------------------------------------------------------------------------------------------------

def stating(tmp_path, text):
    (tmp_path / "said.json").write_text(text)
    return "--conventions", tmp_path / "said.json"


def test_conventions_that_agree_are_counted(capsys, tmp_path, folder):
    value = {Q: read(folder / "gpt").value(Q)}
    same = '{"eps": 0.00001, "tied": true, "clip": 1, "betas": [0.875, 0.9375], "windows": [], "norm": "layer_norm"}'
    said = stating(tmp_path, same)
    status, text = checked(capsys, tmp_path, folder / "gpt", value, *said, "--json", tmp_path / "found.json")
    known = len(read(folder / "gpt").conventions)
    assert status == 0 and f"\n  conventions   6 of {known} stated, 6 agree\n" in text
    found = json.loads((tmp_path / "found.json").read_text())["conventions"]
    assert [f["name"] for f in found] == ["eps", "tied", "clip", "betas", "windows", "norm"] and all(f["agrees"] for f in found)
    text = checked(capsys, tmp_path, folder / "gpt", value)[1]
    assert f"conventions   none of {known} stated" in text and "conventions.json" in text


@pytest.mark.parametrize("said, words", [
    ('{"norm_place": "post"}', "norm_place: the stack says post, the bundle has pre: before each sublayer"),
    ('{"eps": 1e-6}', "eps: the stack says 1e-06, the bundle has 1e-05: of norms"),
    ('{"tied": false}', "tied: the stack says false, the bundle has true: whether the head"),
    ('{"windows": [3, 0]}', "windows: the stack says [3, 0], the bundle has none: keys that a query sees")])
def test_a_convention_that_differs_is_wrong_and_comes_first(capsys, tmp_path, folder, said, words):
    values = values_of(read(folder / "gpt"))
    values[Q] += 1
    status, text = checked(capsys, tmp_path, folder / "gpt", values, *stating(tmp_path, said))
    assert status == 1 and "MISMATCH" in text and " ".join(text.split()).find(f"MISMATCH conventions {words}") > 0
    assert text.index("the stack says") < text.index("first wrong") and "1 of" in text and "0 agree" in text
    status, text = checked(capsys, tmp_path, folder / "gpt", {Q: values[Q] - 1}, *stating(tmp_path, said))
    assert status == 1 and "do as the bundle does" in text          # though every number is right


@pytest.mark.parametrize("said, words", [
    ('{"nrom": "pre"}', "the bundle has no convention 'nrom', it has weight_layout, norm, norm_place"),
    ('{"rope_pairing": "half"}', "the bundle has no convention 'rope_pairing', it has"),            # its positions are learned
    ('{"eps": "small"}', "eps must be a number, as 1e-05, not 'small' (known are weight_layout, "),
    ('{"eps": true}', "eps must be a number"), ('{"tied": 1}', "tied must be true or false, as true, not '1'"),
    ('{"norm": 3}', "norm must be a text, as layer_norm, not '3'"), ('{"windows": 3}', "windows must be a list, as none"),
    ('{"norm": null}', "norm must be a text"), ('{"windows": [[1]]}', "windows must be a list"),
    ('{"norm": "\\u001b[2J"}', "norm must be a text"), ('{"lr": 1e999}', "lr must be a number"),
    ('{"lr": 1%s}' % ("0" * 400), "lr must be a number"), ('{"lr": NaN}', "is not JSON: it has no NaN"),
    ('{"lr": 1, "lr": 1}', "is not JSON: it has a name twice"), ("[" * 50_000, "is not JSON"), ("[]", "must be a table"),
    ("", "is not JSON"), (" " * 200_000, "has 200000 bytes; conventions have at most 100000")])
def test_conventions_that_cannot_be_read_are_usage(capsys, tmp_path, folder, said, words):
    status, text = checked(capsys, tmp_path, folder / "gpt", {Q: np.zeros((4, 8, 24))}, *stating(tmp_path, said))
    assert status == 2 and text.count("\n") == 1 and len(text) < 1500
    assert text.startswith(f"refimpl golden: {tmp_path / 'said.json'}") and words in text


def test_a_file_of_conventions_that_is_not_there_is_usage(capsys, tmp_path, folder):
    status, text = checked(capsys, tmp_path, folder / "gpt", {Q: np.zeros((4, 8, 24))}, "--conventions", tmp_path / "none")
    assert status == 2 and text == f"refimpl golden: {tmp_path / 'none'} is not there, or no file\n"


def test_conventions_in_the_folder_of_a_dump_are_read_and_alone_prove_nothing(capsys, tmp_path, folder):
    dump = tmp_path / "dump"
    dump.mkdir()
    command = ["golden", "check", str(dump), "--against", str(folder / "gpt")]
    (dump / "conventions.json").write_text('{"tied": true}')
    assert main(command) == 3 and "INCOMPLETE" in capsys.readouterr().out
    tensorfile.write(dump / "rank0.safetensors", {Q: np.array(read(folder / "gpt").value(Q))})
    assert main(command) == 0 and "stated, 1 agree" in capsys.readouterr().out
    (dump / "conventions.json").write_text('{"tied": false}')
    assert main(command) == 1
    assert main([*command, "--conventions", str(stating(tmp_path, "{}")[1])]) == 0              # the flag counts


def test_op_cases_have_conventions_too(capsys, tmp_path, folder):
    status, text = checked(capsys, tmp_path, folder / "ops", values_of(read(folder / "ops")), "--dtype", "float32")
    assert status == 0 and "conventions   none of 1 stated" in text


# -- check: flags ------------------------------------------------------------------------------------------------------

def test_the_format_is_that_of_the_arrays_unless_it_is_said(capsys, tmp_path, folder):
    values = {Q: read(folder / "gpt").value(Q).astype("float32")}
    assert "in float32; right is" in checked(capsys, tmp_path, folder / "gpt", values)[1]
    assert "in bfloat16; right is" in checked(capsys, tmp_path, folder / "gpt", values, "--dtype", "bfloat16")[1]


def test_json_has_what_was_found(capsys, tmp_path, folder):
    values = values_of(read(folder / "gpt"))
    values[Q][1, 2, 3] = np.inf
    assert checked(capsys, tmp_path, folder / "gpt", values, "--json", tmp_path / "found.json")[0] == 1
    said = json.loads((tmp_path / "found.json").read_text(), parse_constant=pytest.fail)
    assert said["verdict"] == "MISMATCH" and said["counts"]["fail"] == 1 and len(said["lines"]) == len(values)
    wrong, = (line for line in said["lines"] if line["verdict"] == "fail")
    assert (wrong["key"], wrong["worst"], wrong["actual"], wrong["what"]) == (Q, [1, 2, 3], "inf", "inf where a number belongs")


def test_names_and_as_of_another_stack(capsys, tmp_path, folder):
    """A state dict of gradients as of transformers: no kind before the names, weights as Conv1D keeps them."""
    values, theirs = values_of(read(folder / "gpt")), {}
    for rule in NAMES["hf-gpt2"].params[:-1]:           # (of the last, a head of its own, this model has none)
        ours = [values[f"step1/grad/{name.format(i=0)}"] for name in rule.ours]
        theirs["transformer." + rule.theirs.format(i=0)] = np.ascontiguousarray(to_theirs(rule, ours))
    flags = ("--names", "hf-gpt2", "--as", "step1/grad", "--dtype", "float32")
    assert checked(capsys, tmp_path, folder / "gpt", theirs, *flags)[0] == 0
    theirs["transformer.h.0.attn.c_attn.weight"][:, :24] *= 1.01                # q's third
    status, said = checked(capsys, tmp_path, folder / "gpt", theirs, *flags)
    assert status == 1 and "first wrong   step1/grad/layers.0.attn.q.w\n" in said and "the right value times 1.01" in said
    theirs["transformer.h.0.attn.c_attn.weight"] = theirs["transformer.h.0.attn.c_attn.weight"].T.copy()
    status, said = checked(capsys, tmp_path, folder / "gpt", theirs, *flags)
    assert status == 1 and "has shape [72, 16], which cannot be" in said


def test_a_tied_heads_gradient_is_compared_and_what_is_left_aside_is_counted(capsys, tmp_path, folder):
    """lm_head.weight is wte.weight."""
    values = values_of(read(folder / "gpt"))
    embed, head = values["step1/grad/embed.w"], "step1/grad/lm_head.weight"
    given = {"step1/grad/transformer.wte.weight": embed, head: embed, "step1/act/transformer.h.0.mlp": np.zeros(3)}
    flags = ("--names", "hf-gpt2", "--dtype", "float32", "--json", tmp_path / "found.json")
    status, said = checked(capsys, tmp_path, folder / "gpt", given, *flags)
    assert status == 0 and "left aside    step1/act/transformer.h.0.mlp\n" in said
    assert json.loads((tmp_path / "found.json").read_text())["left_aside"] == ["step1/act/transformer.h.0.mlp"]
    status, said = checked(capsys, tmp_path, folder / "gpt", given | {head: 5 * embed}, *flags)
    assert status == 1 and "first wrong   step1/grad/embed.w\n" in said
    said = " ".join(said.split())
    assert "differs from" in said and "both are one matrix" in said


def test_local_names_the_wrong_op(capsys, tmp_path, folder):
    values = values_of(read(folder / "gpt"))
    status, said = checked(capsys, tmp_path, folder / "gpt", values | {Q: values[Q] * 1.01}, "--dtype", "float32", "--local")
    assert status == 1 and f"op that errs  {Q}\n" in said


# -- ops ---------------------------------------------------------------------------------------------------------------

def test_a_right_dump_of_op_cases_passes(capsys, tmp_path, folder):
    values = values_of(read(folder / "ops"))
    assert {key.split("/")[0] for key in values} == {"ops", "edges", "exact", "collectives"}
    status, said = checked(capsys, tmp_path, folder / "ops", values, "--dtype", "float32", "--all")
    assert status == 0 and "\n  exact " in said and "\n  ops " in said


def test_one_wrong_case_is_named(capsys, tmp_path, folder):
    values = values_of(read(folder / "ops"))
    key = next(key for key in values if key.startswith("ops/linear/") and key.endswith("/dx1"))
    values[key].flat[0] += 0.5
    status, said = checked(capsys, tmp_path, folder / "ops", values, "--dtype", "float32")
    assert status == 1 and f"first wrong   {key}\n" in said and "--local" not in said
    assert f"run {key.removesuffix('/dx1')} alone: the bundle has its arguments" in " ".join(said.split())


def test_an_exact_case_is_exact(capsys, tmp_path, folder):
    values = values_of(read(folder / "ops"))
    key = next(key for key, a in values.items() if key.startswith("exact/mul/") and key.endswith("/y") and a.any())
    at = np.flatnonzero(values[key])[0]
    values[key].flat[at] = np.nextafter(values[key].flat[at], np.inf)
    for dtype in ("float64", "float32"):
        status, said = checked(capsys, tmp_path, folder / "ops", values, "--dtype", dtype)
        assert status == 1 and f"first wrong   {key}\n" in said and "rho           inf of the whole" in said


def test_local_is_for_traces(capsys, tmp_path, folder):
    values = values_of(read(folder / "ops"))
    status, said = checked(capsys, tmp_path, folder / "ops", values, "--local")
    assert status == 2 and "--local is for traces" in said


# -- show --------------------------------------------------------------------------------------------------------------

def test_show_lists_conventions_and_every_value(capsys, folder):
    assert main(["golden", "show", str(folder / "gpt")]) == 0
    said, bundle = capsys.readouterr().out, read(folder / "gpt")
    assert said.startswith(f"{len(bundle.entries)} values, ")
    block = said.partition("\nconventions\n")[2].partition("\n\nvalues")[0]
    assert max(map(len, block.splitlines())) <= 80 and "  eps                      1e-05: of norms, inside the root\n" in block
    assert "1 step of 1 layer on dp=1,cp=1,tp=1" in said.splitlines()[0]
    assert all(f"  {key} " in said for key in bundle.entries) and all(f"  {name} " in said for name in bundle.conventions)
    assert f"  {Q:<48} [4, 8, 24]     canonical" in said


def test_show_prints_the_numbers_of_values(capsys, folder):
    assert main(["golden", "show", str(folder / "gpt"), "--values", "step1/loss"]) == 0
    name, number = capsys.readouterr().out.split()
    assert name == "step1/loss" and float(number) == pytest.approx(float(read(folder / "gpt").value("step1/loss")), rel=1e-8)
    assert main(["golden", "show", str(folder / "gpt"), "--values", "params/*norm1*"]) == 0
    names = [line for line in capsys.readouterr().out.splitlines() if "/" in line]
    assert names == ["params/layers.0.norm1.g", "params/layers.0.norm1.b"]


def test_show_of_values_that_are_not_there_is_one_sentence(capsys, folder):
    assert main(["golden", "show", str(folder / "gpt"), "--values", "nothing"]) == 2
    assert "no value is called 'nothing'" in capsys.readouterr().err


def test_show_of_op_cases(capsys, folder):
    assert main(["golden", "show", str(folder / "ops")]) == 0
    assert "cases of ops" in capsys.readouterr().out.splitlines()[0]


def test_show_to_a_reader_that_has_gone_ends_quietly(folder):
    show = subprocess.Popen([sys.executable, "-m", "refimpl", "golden", "show", str(folder / "gpt"), "--values", "*"],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    show.stdout.readline()
    show.stdout.close()
    assert show.stderr.read() == b"" and show.wait() == 141
    show.stderr.close()


# -- make --------------------------------------------------------------------------------------------------------------

def test_make_writes_a_bundle_once(capsys, tmp_path):
    model = tmp_path / "model.toml"
    model.write_text("[model]\nvocab_size = 11\nn_layers = 1\nn_heads = 2\nd_model = 8\nmax_seq_len = 4\n")
    flags = ["golden", "make", "--model", str(model), "--steps", "1", "--batch-size", "2", "--seq-len", "4", "--runs", "8",
             "--out"]
    assert main([*flags, str(tmp_path / "a")]) == 0 and main([*flags, str(tmp_path / "b"), "--mesh", "tp=2"]) == 0
    assert f"{tmp_path / 'a'}: " in capsys.readouterr().out
    one, two = read(tmp_path / "a"), read(tmp_path / "b")
    assert one.ranks == 1 and two.ranks == 2 and one.recipe.config.vocab_size == 11
    assert np.allclose(two.value("step1/grad/embed.w"), one.value("step1/grad/embed.w"), rtol=0, atol=1e-12)
    before = {path.name: path.read_bytes() for path in Path(tmp_path / "a").iterdir()}
    with pytest.raises(SystemExit):
        main([*flags, str(tmp_path / "a")])
    assert "is there already" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in Path(tmp_path / "a").iterdir()} == before


# -- what was once misunderstood ---------------------------------------------------------------------------------------

def test_a_large_gradient_of_a_gauge_is_wrong(capsys, tmp_path, folder):
    """The loss does not depend on a bias of k: its gradient is 0, but for rounding."""
    values = values_of(read(folder / "gpt"))
    values[KB] = values[KB] + 1.0
    status, said = checked(capsys, tmp_path, folder / "gpt", values, "--dtype", "float32")
    assert status == 1 and f"first wrong   {KB}\n" in said


def test_a_misspelt_flag_is_answered_by_its_own_action(capsys, tmp_path):
    for flag, words in (("--sead", "refimpl golden make: error: there is no --sead: did you mean --seed"),
                        ("--xyzzy", "there is no --xyzzy: refimpl golden make --help lists what there is")):
        with pytest.raises(SystemExit):
            main(["golden", "make", "--out", str(tmp_path / "a"), flag, "1"])
        assert words in capsys.readouterr().err


def test_a_short_model_says_to_give_seq_len(capsys, tmp_path):
    model = tmp_path / "model.toml"
    model.write_text("[model]\nvocab_size = 11\nn_layers = 1\nn_heads = 2\nd_model = 8\nmax_seq_len = 4\n")
    with pytest.raises(SystemExit):
        main(["golden", "make", "--model", str(model), "--out", str(tmp_path / "a")])
    assert "has max_seq_len 4, below the default --seq-len 8: give --seq-len 4" in capsys.readouterr().err


@pytest.mark.parametrize("flags, words", [
    (["--seed", "-1"], "seed must be at least 0"), (["--eps", "-1"], "eps must be a positive number"),
    (["--beta1", "1.0"], "beta1 must be at least 0 and below 1"), (["--clip", "0"], "clip must be a positive number")])
def test_a_recipe_that_cannot_be_is_usage_and_leaves_nothing(capsys, tmp_path, flags, words):
    with pytest.raises(SystemExit) as caught:
        main(["golden", "make", *flags, "--out", str(tmp_path / "a")])
    assert int(caught.value.code) == 2 and words in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_json_that_cannot_be_written_is_usage_before_anything_is_compared(capsys, tmp_path, folder):
    value = {Q: read(folder / "gpt").value(Q)}
    status, said = checked(capsys, tmp_path, folder / "gpt", value, "--json", tmp_path / "no/a.json")
    assert status == 2 and "MISMATCH" not in said and "PASS" not in said


def test_a_bundle_a_lone_file_and_a_stray_one_are_told_apart(capsys, tmp_path, folder):
    value = {Q: read(folder / "gpt").value(Q)}
    lone, stray = tmp_path / "lone", tmp_path / "stray"
    lone.mkdir()
    stray.mkdir()
    for path in (lone / "dump.safetensors", stray / "rank0.safetensors", stray / "more.safetensors"):
        tensorfile.write(path, value)
    for actual, words in ((folder / "gpt", "is a bundle of golden values"),
                          (lone, "name that file, or call it rank0.safetensors"),
                          (stray, "holds more.safetensors beside the ranks' files")):
        assert main(["golden", "check", str(actual), "--against", str(folder / "gpt")]) == 2
        assert words in capsys.readouterr().err


def test_a_slash_behind_the_prefix_is_no_matter(capsys, tmp_path, folder):
    values = {key.rpartition("/")[2]: a for key, a in values_of(read(folder / "gpt")).items() if key.startswith("step1/grad/")}
    assert checked(capsys, tmp_path, folder / "gpt", values, "--as", "step1/grad/")[0] == 0
