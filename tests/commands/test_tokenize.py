"""Localises a tokenize command whose file is not the text's tokens, or whose report is not of what it wrote."""
import os
import subprocess
import sys

import pytest

from refimpl.__main__ import main
from refimpl.text import open_tokens, read_tokenizer, standard_library

TEXT = "the quick brown fox jumps over the lazy dog. " * 20 + "né 🚀"


@pytest.fixture(autouse=True)
def text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")


def tokenize(*arguments):
    assert main(["tokenize", *arguments]) == 0
    return open_tokens("t.safetensors")


def test_bytes_are_written_and_reported(capsys):
    tokens, tokenizer = tokenize("--text", "text.txt", "--tokenizer", "byte", "--out", "t.safetensors")
    assert tokens.tolist() == list(TEXT.encode()) and tokenizer.to_dict() == {"kind": "byte"}
    assert capsys.readouterr().out == f"""\
text       text.txt: 908 bytes
tokenizer  byte, a vocabulary of 256
tokens     908, 1.00 bytes each
written    t.safetensors, {os.path.getsize("t.safetensors"):,} bytes
next       python -m refimpl train --tokens t.safetensors
"""


def test_bpe_is_trained_on_the_text_and_saved(capsys):
    pytest.importorskip("regex")
    tokens, tokenizer = tokenize("--text", "text.txt", "--vocab-size", "270", "--out", "t.safetensors",
                                 "--save-tokenizer", "new/t.json")
    assert tokenizer.vocab_size == 270 and tokenizer.decode(tokens) == TEXT and len(tokens) < 700
    assert read_tokenizer("new/t.json").to_dict() == tokenizer.to_dict()
    out = capsys.readouterr().out
    assert "tokenizer  bpe, a vocabulary of 270, also in new/t.json\n" in out
    assert f"tokens     {len(tokens)}, {908 / len(tokens):.2f} bytes each\n" in out


def test_a_tokenizer_from_a_file_is_used_on_another_text():
    pytest.importorskip("regex")
    _, first = tokenize("--text", "text.txt", "--vocab-size", "270", "--out", "t.safetensors", "--save-tokenizer", "t.json")
    os.mkdir("folder")
    for name in "ab":
        with open(f"folder/{name}", "w") as file:
            file.write(f"{name}: another fox")
    tokens, second = tokenize("--text", "folder", "--tokenizer", "t.json", "--out", "t.safetensors")
    assert second.to_dict() == first.to_dict() and second.decode(tokens) == "a: another fox\n\nb: another fox"


def test_the_default_text_is_the_standard_library(capsys):
    tokens, tokenizer = tokenize("--tokenizer", "byte", "--out", "t.safetensors")
    assert tokenizer.decode(tokens) == standard_library()
    assert capsys.readouterr().out.startswith("text       the documentation of Python's standard library: ")


def test_the_next_command_can_be_pasted(capsys):
    main(["tokenize", "--text", "text.txt", "--tokenizer", "byte", "--out", "my file"])
    assert capsys.readouterr().out.endswith("train --tokens 'my file'\n")


@pytest.mark.parametrize("arguments, sentence", [
    (["--text", "missing"], "the text missing cannot be read: No such file or directory"),
    (["--text", ""], "the text  cannot be read: No such file or directory"),
    (["--tokenizer", "words"], "there is no tokenizer 'words': use byte, bpe"),
    (["--tokenizer", "text.json"], "the tokenizer text.json cannot be read: No such file"),
    (["--vocab-size", "100"], "has the 256 bytes at least, got vocab_size 100"),
    (["--out", "/proc/t"], "/proc/t cannot be written: No such file or directory"),
])
def test_what_the_user_got_wrong_is_one_sentence(arguments, sentence):
    command = [sys.executable, "-m", "refimpl", "tokenize", "--text", "text.txt", "--out", "t", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode != 0 and sentence in done.stderr
    assert done.stderr.startswith("refimpl tokenize: ") and done.stderr.count("\n") == 1
    assert sorted(os.listdir()) == ["text.txt"]
