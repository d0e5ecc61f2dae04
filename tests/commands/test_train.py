"""Localises a train command that trains on something else than it was told, or loses what a run says: samples, curves, logs."""
import json
import os
import re
import select
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from refimpl import tensorfile
from refimpl.__main__ import main
from refimpl.comm import CommError
from refimpl.comm.launch import mpirun_command
from refimpl.commands import train
from refimpl.text import BPETokenizer, write_tokenizer
from refimpl.train.log import printable

TEXT = "the quick brown fox jumps over the lazy dog. né 🚀 " * 30
TINY = ["--d-model", "8", "--n-layers", "1", "--batch-size", "2", "--seq-len", "8", "--sample", "3"]
SEEN = ["--eval-every", "2", "--sample-every", "3"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


@pytest.fixture
def run(capsys, folder):
    """run(*flags) -> stdout and stderr of a run of 4 steps in this process."""
    def start(*flags, steps=4):
        assert main(["train", *TINY, "--steps", str(steps), *flags]) == 0
        return capsys.readouterr()
    return start


@pytest.fixture
def refused(capsys):
    """refused(*flags) -> the one line that `train` ends with."""
    def start(*flags, steps=2):
        with pytest.raises(SystemExit) as end:
            main(["train", *TINY, "--steps", str(steps), "--no-bar", *flags])
        out, err = capsys.readouterr()
        assert end.value.code == 1 and err.startswith("refimpl train: ") and err.count("\n") == 1, err
        return err
    return start


def rows(out):
    def no_constant(name):
        raise AssertionError(f"{name} is not JSON")
    lines = Path(out, "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=no_constant) for line in lines]


def of(out, key):
    """The steps that have a row with this key, with what it says."""
    return {row["step"]: row[key] for row in rows(out) if key in row}


def same(a, b):
    """Two runs ended with the same bits, and said the same."""
    one, two = (tensorfile.read(f"{out}/params.safetensors") for out in (a, b))
    assert one.keys() == two.keys() and all(one[name].tobytes() == two[name].tobytes() for name in one)
    keys = ("loss", "validation_loss", "bits_per_byte", "sample")
    assert [of(a, key) for key in keys] == [of(b, key) for key in keys]
    assert Path(a, "tokenizer.json").read_text() == Path(b, "tokenizer.json").read_text()


# -- what is learnt from ----------------------------------------------------------------------------------------------


def test_bpe_through_a_token_file_is_bpe_on_the_text_bit_by_bit(run):
    pytest.importorskip("regex")
    main(["tokenize", "--text", "text.txt", "--vocab-size", "270", "--out", "t.safetensors", "--save-tokenizer", "t.json"])
    run("--tokens", "t.safetensors", "--out", "a", *SEEN)
    run("--text", "text.txt", "--tokenizer", "bpe", "--vocab-size", "270", "--out", "b", *SEEN)
    same("a", "b")
    assert tensorfile.read("a/params.safetensors")["embed.w"].shape == (270, 8)
    run("--text", "text.txt", "--tokenizer", "t.json", "--out", "c", *SEEN)
    same("a", "c")


def test_the_token_command_and_train_in_processes_of_their_own(run):
    pytest.importorskip("regex")
    for command in (["tokenize", "--text", "text.txt", "--vocab-size", "270", "--out", "t.safetensors"],
                    ["train", "--tokens", "t.safetensors", *TINY, "--steps", "4", "--out", "a", "--no-bar"]):
        done = subprocess.run([sys.executable, "-m", "refimpl", *command], capture_output=True, timeout=60,
                              stdin=subprocess.DEVNULL)
        assert done.returncode == 0 and not done.stderr, done.stderr
    run("--text", "text.txt", "--tokenizer", "bpe", "--vocab-size", "270", "--out", "b", "--no-bar")
    same("a", "b")


def test_the_run_leaves_the_tokenizer_that_another_run_can_use(run):
    pytest.importorskip("regex")
    run("--text", "text.txt", "--tokenizer", "bpe", "--vocab-size", "260", "--out", "a")
    run("--text", "text.txt", "--tokenizer", "a/tokenizer.json", "--out", "b")
    same("a", "b")


def test_the_tokenizer_of_gpt2s_file(run, folder):
    pytest.importorskip("regex")
    (folder / "vocab.bpe").write_text("#version: 0.2\nt h\nth e\nĠ the\n", encoding="utf-8")
    printed = run("--text", "text.txt", "--tokenizer", "vocab.bpe", "--out", "a")
    assert tensorfile.read("a/params.safetensors")["embed.w"].shape == (256 + 3 + 1, 8) and "validation loss" in printed.out
    write_tokenizer("mine.json", BPETokenizer.from_gpt2("vocab.bpe"))
    run("--text", "text.txt", "--tokenizer", "mine.json", "--out", "b")
    same("a", "b")


def test_a_folder_is_its_files_in_order_with_blank_lines_between(run, folder):
    for name, text in (("b.txt", TEXT[300:]), ("a/z.txt", TEXT[:300]), (".hidden", "x" * 999)):
        (folder / "many" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "many" / name).write_text(text, encoding="utf-8")
    (folder / "one.txt").write_text(TEXT[:300] + "\n\n" + TEXT[300:], encoding="utf-8")
    run("--text", "many", "--out", "a")
    run("--text", "one.txt", "--out", "b")
    same("a", "b")


def test_without_a_text_it_is_the_standard_library(run, monkeypatch):
    monkeypatch.setattr(train, "standard_library", lambda: TEXT)
    run("--out", "a")
    run("--text", "text.txt", "--out", "b")
    same("a", "b")


@pytest.mark.parametrize("flags, words", [
    (["--tokenizer", "words"], "there is no tokenizer 'words': use byte, bpe, a file NAME.json"),
    (["--tokenizer", "missing.json"], "the tokenizer missing.json cannot be read: No such file"),
    (["--tokenizer", "missing.bpe"], "the tokenizer missing.bpe cannot be read: No such file"),
    (["--tokenizer", "bpe", "--vocab-size", "9"], "has the 256 bytes at least, got vocab_size 9"),
    (["--tokens", "missing"], "the tokens missing cannot be read: No such file"),
    (["--tokens", "text.txt"], "text.txt"),
    (["--text", "empty"], "the folder empty has no file"),
    (["--text", ""], "--text is empty: it must name a text, or a folder of them"),
    (["--text", "text.txt", "--tokens", "text.txt"], "--tokens goes without --text, --tokenizer and --vocab-size"),
])
def test_data_that_is_not_there_is_one_sentence(refused, folder, flags, words):
    (folder / "empty").mkdir()
    assert words in refused(*(flags if {"--text", "--tokens"} & set(flags) else ["--text", "text.txt", *flags]))


def test_a_prompt_that_cannot_be_is_refused_before_training(refused):
    """Not after the last step, with the run lost: the parameters were not written then."""
    for prompt in ("", "\udcff"):
        refused("--text", "text.txt", "--prompt", prompt, "--out", "a")
        assert not os.path.exists("a/log.jsonl") or of("a", "loss") == {}, prompt


# -- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, stored", [("float64", "float64"), ("float32", "float32"), ("bfloat16", "float32")])
def test_every_precision_trains_and_keeps_its_parameters(run, dtype, stored):
    run("--text", "text.txt", "--dtype", dtype, "--out", "a")
    assert {str(a.dtype) for a in tensorfile.read("a/params.safetensors").values()} == {stored}
    run("--text", "text.txt", "--out", "b")
    a, b = (np.array(list(of(out, "loss").values())) for out in "ab")
    tolerance = {"float64": 0, "float32": 1e-6, "bfloat16": 1e-3}[dtype]       # measured: 0, 1e-7, 4e-5
    np.testing.assert_allclose(a, b, rtol=tolerance)
    assert (a == b).all() == (dtype == "float64")


# -- what a run says --------------------------------------------------------------------------------------------------


def test_evaluations_and_samples_come_at_their_steps_and_at_the_end(run):
    printed = run("--text", "text.txt", "--out", "a", *SEEN, steps=5)
    assert list(of("a", "loss")) == [1, 2, 3, 4, 5]
    assert list(of("a", "validation_loss")) == list(of("a", "bits_per_byte")) == [2, 4, 5]
    assert list(of("a", "sample")) == [3, 5] and all(s.startswith("The ") for s in of("a", "sample").values())
    for step, loss in of("a", "validation_loss").items():
        said = f"validation loss {loss:.4f}, {of('a', 'bits_per_byte')[step]:.4f} bits per byte\n"
        assert (f"step {step}: {said}" in printed.err, f"\n{said}" in printed.out) == (step < 5, step == 5)
        assert of("a", "bits_per_byte")[step] == pytest.approx(loss / np.log(2))       # a byte a token
    assert "step 3: The " in printed.err and "step 5: The " not in printed.err         # the last is what the run prints
    assert printed.out.endswith(f"\n\n{printable(of('a', 'sample')[5])}\n")


def test_zero_means_at_the_end_only(run):
    run("--text", "text.txt", "--out", "a")
    assert list(of("a", "validation_loss")) == list(of("a", "sample")) == [4]


def test_the_log_is_json_of_the_run_and_of_each_step(run):
    run("--text", "text.txt", "--out", "a", "--clip", "1", "--schedule", "cosine", "--warmup", "2", "--lr", "0.01", "--windows",
        "4", "--decay", "")
    first, *others = rows("a")
    assert first["options"]["decay"] == [] and first["config"]["windows"] == [4] and first["mesh"] == "dp=1"
    steps = [row for row in others if "loss" in row]
    assert [set(row) for row in steps] == 4 * [{"step", "loss", "norm", "lr", "seconds", "tokens_per_second"}]
    assert [row["lr"] for row in steps] == pytest.approx([0.005, 0.01, 0.01, 0.0])
    for row in steps:
        assert row["tokens_per_second"] == pytest.approx(2 * 8 / row["seconds"], rel=0.01)
    summary = json.loads(Path("a/summary.json").read_text())
    assert summary["losses"] == [row["loss"] for row in steps] and summary["bits_per_byte"] == of("a", "bits_per_byte")[4]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_validation_loss_that_is_no_number_does_not_make_a_log_that_is_no_json(capsys):
    """The only step's update is too large: the training loss before it is fine, the validation loss after it is not."""
    try:
        main(["train", *TINY, "--text", "text.txt", "--steps", "1", "--lr", "1e300", "--out", "a", "--no-bar"])
    except SystemExit:
        assert "nan" in capsys.readouterr().err
    rows("a")


def test_early_stop_says_so_and_ends_with_everything_that_an_end_has(run):
    """At this learning rate every evaluation is worse than the first."""
    flags = ["--text", "text.txt", "--lr", "5", "--eval-every", "1", "--patience", "2", "--save-every", "50", "--out", "a"]
    printed = run(*flags, steps=40)
    losses = of("a", "validation_loss")
    best = min(losses, key=losses.get)
    assert max(of("a", "loss")) == max(losses) == best + 2 < 40 and list(of("a", "sample")) == [best + 2]
    assert f"the best validation loss is still {losses[best]:.4f} (patience 2)" in printed.out
    assert os.listdir("a/checkpoints") == [f"step-{best + 2:08d}"] and os.path.exists("a/params.safetensors")


def test_a_run_without_a_bar_says_that_it_stopped_early(run):
    printed = run("--text", "text.txt", "--lr", "5", "--eval-every", "1", "--patience", "2", "--out", "a", "--no-bar", steps=40)
    assert "stopped early" in printed.out + printed.err or any("stopped" in row for row in rows("a"))


def test_a_run_whose_output_is_no_terminal_has_about_twenty_lines_and_without_a_bar_none(run):
    for steps in (4, 39, 60):                           # (in between: the fraction of 20 that is cut off)
        printed = run("--text", "text.txt", "--validation", "0", "--sample", "0", steps=steps)
        assert len(printed.err.splitlines()) <= 22, steps       # what is trained, the first step, and a twentieth each
        assert re.search(rf"^step {steps}/{steps}  loss \d\.\d{{4}}  [\d,]+ tokens/s  0:00 left$", printed.err, re.M)
    assert run("--text", "text.txt", "--no-bar", *SEEN).err == ""


def test_a_terminal_has_a_bar_with_loss_speed_and_time_left(folder):
    pytest.importorskip("tqdm")
    fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))      # a new one has no width
    command = [sys.executable, "-m", "refimpl", "train", *TINY, "--text", "text.txt", "--steps", "4", *SEEN]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=slave) as child:
        os.close(slave)
        said, end = b"", time.monotonic() + 60
        while time.monotonic() < end and select.select([master], [], [], 60)[0]:
            try:
                said += os.read(master, 4096)
            except OSError:                             # all that had it open have ended
                break
        os.close(master)
        child.kill() if time.monotonic() > end else child.wait(20)
        out = child.stdout.read().decode()
    text = said.decode()
    assert re.search(r"100%\|.*\| 4/4 \[00:00<00:00, .*step/s, loss 5\.\d{4}, [\d,]+ tokens/s\]", text), text
    assert "step 2: validation loss 5." in text and "step 3: The " in text and "step 1/4" not in text
    assert "loss 5." in out and "\r" not in out and "%" not in out.splitlines()[0]


# -- pictures ---------------------------------------------------------------------------------------------------------


def test_plot_draws_both_curves_of_the_log(run, monkeypatch):
    drawn = []
    monkeypatch.setattr(train, "draw_losses", lambda *args: drawn.append(args) or "picture: there")
    printed = run("--text", "text.txt", "--out", "a", "--plot", "--eval-every", "2")
    (path, curves, unit), = drawn
    assert str(path) == "a/loss.png" and unit == "nats per token" and printed.out.endswith("picture: there\n")
    assert curves == {"training": ([1, 2, 3, 4], list(of("a", "loss").values())),
                      "validation": ([2, 4], list(of("a", "validation_loss").values()))}


def test_plot_without_validation_has_one_curve(run, monkeypatch):
    drawn = []
    monkeypatch.setattr(train, "draw_losses", lambda path, curves, unit: drawn.append(list(curves)) or "")
    run("--text", "text.txt", "--out", "a", "--plot", "--validation", "0")
    assert drawn == [["training"]] and of("a", "validation_loss") == {}


def test_plot_after_a_resume_shows_the_whole_run(run, monkeypatch):
    drawn = []
    monkeypatch.setattr(train, "draw_losses", lambda path, curves, unit: drawn.append(curves) or "")
    run("--text", "text.txt", "--out", "a", "--save-every", "2", steps=2)
    run("--out", "a", "--resume", "--plot")
    assert [steps for steps, _ in drawn[0].values()] == [[1, 2, 3, 4], [2, 4]]


def test_plot_leaves_a_picture(run, folder):
    pytest.importorskip("matplotlib")
    assert "picture: a/loss.png" in run("--text", "text.txt", "--out", "a", "--plot").out
    assert (folder / "a" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_is_a_sentence_after_the_run(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    printed = run("--text", "text.txt", "--out", "a", "--plot")
    assert printed.out.endswith("no picture: pip install '.[run]' brings matplotlib\n")
    assert not os.path.exists("a/loss.png") and os.path.exists("a/summary.json")


@pytest.mark.parametrize("flag", ["--plot", "--resume"])
def test_what_needs_the_folder_of_the_run_says_so(refused, flag):
    assert refused(flag) == f"refimpl train: {flag} needs --out, the folder of the run\n"


# -- going on ---------------------------------------------------------------------------------------------------------


def test_resume_takes_the_checkpoints_settings_and_equals_the_run_in_one_piece(run, folder):
    pytest.importorskip("regex")
    (folder / "my.toml").write_text('[training]\naccumulate = 2\nclip = 0.5\ndecay = ["vectors"]\nschedule = "cosine"\n'
                                    '[model]\ndropout = 0.1\nwindows = [4]\nbiases = []\nnorm = "rms_norm"\n'
                                    '[data]\ntext = "text.txt"\ntokenizer = "bpe"\nvocab_size = 270\n')
    pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    run("--config", "my.toml", "--out", "whole", "--save-every", "2", "--keep", "0", *SEEN)
    os.rename("my.toml", "gone.toml")
    assert main(["train", "--out", "part", "--resume", "whole/checkpoints/step-00000002", "--sample", "3", "--no-bar"]) == 0
    later = {step: loss for step, loss in of("whole", "loss").items() if step > 2}
    assert of("part", "loss") == later and of("part", "validation_loss")[4] == of("whole", "validation_loss")[4]
    one, two = (tensorfile.read(f"{out}/params.safetensors") for out in ("whole", "part"))
    assert all(one[name].tobytes() == two[name].tobytes() for name in one)
    first, = [row for row in rows("part") if "options" in row]
    assert first["options"] == rows("whole")[0]["options"] and first["config"] == rows("whole")[0]["config"]


def test_resume_keeps_how_samples_are_drawn(run, capsys):
    """--help: "go on ... with its settings"."""
    run("--text", "text.txt", "--out", "a", "--save-every", "2", "--prompt", "dog", "--temperature", "0", steps=2)
    assert main(["train", "--out", "a", "--resume", "--steps", "3", "--no-bar"]) == 0
    assert of("a", "sample")[3].startswith("dog")


def test_resume_with_other_flags_changes_what_may_change_and_refuses_the_rest(run, refused):
    run("--text", "text.txt", "--out", "a", "--save-every", "2", steps=2)
    for flags, words in ((["--d-model", "16"], "d_model of its config is 8, here it is 16"),
                         (["--seed", "1"], "seed of its options is 0, here it is 1"),
                         (["--dtype", "float32"], "dtype of its options is float64, here it is float32"),
                         (["--validation", "0.2"], "train of its data is ")):
        assert words in refused("--out", "a", "--resume", *flags, steps=4)
    assert "there is nothing to do" in refused("--out", "a", "--resume", steps=1)
    assert "a has checkpoints, the last is step-00000002: resume from there, or choose another folder" in refused(
        "--text", "text.txt", "--out", "a")
    run("--out", "a", "--resume", "--lr", "1e-5", "--clip", "1")
    assert [row["lr"] for row in rows("a") if "lr" in row] == [1e-3, 1e-3, 1e-5, 1e-5]


@pytest.mark.parametrize("flags, where", [(["--resume", "--out", "none"], "none"), (["--resume", "none"], "none")])
def test_resume_without_a_checkpoint_is_a_sentence_and_leaves_no_folder(refused, flags, where):
    assert f"there is no checkpoint in {where} to go on from" in refused(*flags)
    assert os.listdir() == ["text.txt"]


def test_checkpoints_need_a_folder_and_a_run_that_is_to_save_them_says_so(refused):
    """--help: "needs --out".  Without it nothing would be saved, which is seen too late."""
    assert "--out" in refused("--text", "text.txt", "--save-every", "1")


def test_the_timeline_of_a_resumed_run_is_of_its_first_steps_too(run):
    run("--text", "text.txt", "--out", "a", "--save-every", "4", "--trace", "first.json")
    run("--out", "a", "--resume", "--trace", "resumed.json", steps=12)
    first, resumed = (sum(event.get("name") == "adamw" for event in events(file)) for file in ("first.json", "resumed.json"))
    assert first == resumed > 0


def events(file):
    found = json.loads(Path(file).read_text())
    return found["traceEvents"] if isinstance(found, dict) else found


# -- ranks ------------------------------------------------------------------------------------------------------------


def mpirun(*flags):
    try:
        command = [*mpirun_command(2), sys.executable, "-m", "refimpl", "train", *TINY, *flags]
    except CommError as error:
        pytest.skip(str(error))
    return subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


def test_two_ranks_with_a_file_of_settings_are_one_rank(run, folder):
    pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    (folder / "my.toml").write_text('[training]\nsteps = 3\nlr = 1\neval_every = 2\naccumulate = 2\n[model]\ndropout = 0.1\n'
                                    '[data]\ntext = "text.txt"\n[sampling]\nprompt = "fox"\n')
    done = mpirun("--config", "my.toml", "--mesh", "dp=2", "--out", "two", "--lr", "0.01", "--no-bar")
    assert done.returncode == 0 and not done.stderr, done.stderr
    run("--config", "my.toml", "--out", "one", "--lr", "0.01", "--no-bar", steps=3)
    for key in ("loss", "lr", "validation_loss", "bits_per_byte"):
        a, b = of("one", key), of("two", key)
        assert a.keys() == b.keys()
        np.testing.assert_allclose([*a.values()], [*b.values()], rtol=1e-12)
    assert of("one", "sample") == of("two", "sample") and done.stdout.count("\nfox") == 1
    assert set(of("one", "lr").values()) == {0.01}      # the flag, not the file's


@pytest.mark.parametrize("text, words", [("[training]\nstep = 3\n", "[training] has no key 'step': its keys are steps, "),
                                         ("[training]\nlr = -1\n", "the learning rate must be a positive number, got -1.0")])
def test_a_mistake_in_the_file_is_one_sentence_of_two_ranks(folder, text, words):
    pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    (folder / "my.toml").write_text(text)
    done = mpirun("--config", "my.toml", "--mesh", "dp=2", "--text", "text.txt")
    assert done.returncode != 0 and done.stderr.count(words) == 1 and "Traceback" not in done.stderr, done.stderr
