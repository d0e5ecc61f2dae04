"""Localises faults of the text: bytes lost in encoding, and files that cannot be trained on."""
import numpy as np
import pytest

from refimpl.text import ByteTokenizer, read_text, standard_library


@pytest.mark.parametrize("text", ["", "plain", "héllo 🚀 \x00 \r\n", "".join(map(chr, range(1, 0x3000, 7)))])
def test_decode_undoes_encode(text):
    tokens = ByteTokenizer().encode(text)
    assert tokens.dtype == np.int64 and ByteTokenizer().decode(tokens) == text
    assert len(tokens) == len(text.encode())


def test_every_byte_is_a_token():
    tokens = np.arange(256)
    assert ByteTokenizer().decode(tokens[:128]) == "".join(map(chr, range(128)))
    assert "\N{REPLACEMENT CHARACTER}" in ByteTokenizer().decode(tokens[128:])


def test_a_cut_off_character_becomes_the_replacement_character():
    assert ByteTokenizer().decode(ByteTokenizer().encode("aé")[:-1]) == "a\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("bad", [-1, 256])
def test_tokens_outside_the_bytes_are_refused(bad):
    with pytest.raises(ValueError, match=r"byte tokens must be in \[0, 256\), got"):
        ByteTokenizer().decode(np.array([65, bad]))


def test_the_default_corpus_is_english_and_the_same_every_time():
    text = standard_library()
    assert len(text) > 500_000 and "assert" in text
    assert text.split().count("the") > 5_000
    assert text == standard_library()


def test_files_that_cannot_be_trained_on_are_named(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "latin1").write_bytes(b"caf\xe9")
    for name, reason in (("empty", "is empty"), ("latin1", "is not utf-8: byte 3 is 0xe9"), ("missing", "No such file")):
        with pytest.raises(ValueError, match=f"{name}.*{reason}"):
            read_text(str(tmp_path / name))
