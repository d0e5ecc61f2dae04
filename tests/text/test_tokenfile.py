"""Localises tokens that change on the way to disk, files loaded instead of mapped, and tokens of another vocabulary."""
import json
import tracemalloc

import numpy as np
import pytest

from refimpl import tensorfile
from refimpl.text import BPETokenizer, ByteTokenizer, open_tokens, write_tokens

SMALL = BPETokenizer([(98, 99), (97, 256)], [*range(1, 256), 0], ["<|end|>", "né"])
BYTE = {"tokenizer": '{"kind": "byte"}'}
TOKENS = np.array([0, 97, 255, 97], np.uint16)


# -- round trips ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text", ["", "plain", "héllo 🚀 \x00 \r\n\t  ", "".join(map(chr, range(1, 0x3000, 7)))])
def test_tokens_and_tokenizer_come_back(tmp_path, text):
    pytest.importorskip("regex")
    for tokenizer in (ByteTokenizer(), SMALL):
        write_tokens(tmp_path / "t", tokenizer.encode(text), tokenizer)
        tokens, back = open_tokens(tmp_path / "t")
        assert tokens.dtype == np.uint16 and tokens.tolist() == tokenizer.encode(text).tolist()
        assert back.to_dict() == tokenizer.to_dict() and back.decode(tokens) == text


def test_the_file_by_hand(tmp_path):
    write_tokens(tmp_path / "t", np.array([1, 256 + 2]), SMALL)
    header, metadata, start = tensorfile.read_header(tmp_path / "t")
    assert header == {"tokens": {"dtype": "U16", "shape": [2], "data_offsets": [0, 4]}}
    assert json.loads(metadata["tokenizer"]) == SMALL.to_dict() and (tmp_path / "t").read_bytes()[start:] == b"\x01\x00\x02\x01"


@pytest.mark.parametrize("vocab_size, dtype", [(65536, np.uint16), (65537, np.uint32)])
def test_a_token_has_two_bytes_as_long_as_they_suffice(tmp_path, vocab_size, dtype):
    tokenizer = BPETokenizer([], specials=["x"] * (vocab_size - 256))
    write_tokens(tmp_path / "t", np.array([vocab_size - 1, 0]), tokenizer)
    tokens, back = open_tokens(tmp_path / "t")
    assert tokens.dtype == dtype and tokens.tolist() == [vocab_size - 1, 0] and back.vocab_size == vocab_size


def test_the_tokens_are_mapped_and_never_loaded(tmp_path):
    write_tokens(tmp_path / "t", np.full(16_000_000, 255, np.uint8), ByteTokenizer())
    tracemalloc.start()
    try:
        tokens, _ = open_tokens(tmp_path / "t")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert isinstance(tokens, np.memmap) and not tokens.flags.writeable and tokens.shape == (16_000_000,)


def test_what_is_on_disk_is_replaced_by_a_whole_file_or_not_at_all(tmp_path, monkeypatch):
    write_tokens(tmp_path / "t", TOKENS, ByteTokenizer())

    def half(path, *_):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(tensorfile, "write", half)
    with pytest.raises(ValueError, match="t cannot be written: No space left on device"):
        write_tokens(tmp_path / "t", TOKENS[:1], ByteTokenizer())
    assert [p.name for p in tmp_path.iterdir()] == ["t"] and open_tokens(tmp_path / "t")[0].tolist() == TOKENS.tolist()


@pytest.mark.parametrize("tokens", [[256], [-1], [[1, 2]], [1.0], [True], 3])
def test_what_is_no_token_is_not_written(tmp_path, tokens):
    with pytest.raises(ValueError, match=r"tokens must be integers in \[0, 256\) along one axis, got .*(shape|to)"):
        write_tokens(tmp_path / "t", np.array(tokens), ByteTokenizer())
    assert not any(tmp_path.iterdir())


# -- hostile files ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("tensors, metadata, words", [
    ({}, BYTE, "must have one tensor, tokens, and has none"),
    ({"embed.w": TOKENS}, BYTE, "must have one tensor, tokens, and has embed.w"),
    ({"tokens": TOKENS, "more": TOKENS}, BYTE, "must have one tensor, tokens, and has more, tokens"),
    ({"tokens": TOKENS.astype(np.uint32)}, BYTE, r"must have tokens of U16\[n\], for a vocabulary of 256; they are U32\[4\]"),
    ({"tokens": TOKENS.astype(np.int16)}, BYTE, r".*are I16\[4\]"),
    ({"tokens": TOKENS.astype(np.float32)}, BYTE, r".*are F32\[4\]"),
    ({"tokens": TOKENS.reshape(2, 2)}, BYTE, r".*are U16\[2, 2\]"),
    ({"tokens": TOKENS[0]}, BYTE, r".*are U16\[\]"),
    ({"tokens": TOKENS + 1}, BYTE, "has the token 256; its vocabulary has 256"),
    ({"tokens": TOKENS}, None, "has no tokenizer"),
    ({"tokens": TOKENS}, {"tokenizers": ""}, "has no tokenizer"),
    ({"tokens": TOKENS}, {"tokenizer": "{"}, "has a tokenizer that is none: Expecting property name"),
    ({"tokens": TOKENS}, {"tokenizer": "[" * 100_000}, "has a tokenizer that is none: .*nested too deeply"),
    ({"tokens": TOKENS}, {"tokenizer": '{"kind": "spm"}'}, "has a tokenizer that is none: .*kind must be byte or bpe"),
])
def test_malformed_files_are_refused(tmp_path, tensors, metadata, words):
    tensorfile.write(tmp_path / "bad", tensors, metadata)
    with pytest.raises(ValueError, match=f"/bad {words}"):
        open_tokens(tmp_path / "bad")


def test_bfloat16_is_no_token(tmp_path):
    """Its bits have the dtype that tokens have."""
    tensorfile.write(tmp_path / "t", {"tokens": TOKENS}, BYTE)
    (tmp_path / "bad").write_bytes((tmp_path / "t").read_bytes().replace(b'"U16"', b'"BF16"').replace(b"[0,8]}} ", b"[0,8]}}"))
    with pytest.raises(ValueError, match=r"are BF16\[4\]"):
        open_tokens(tmp_path / "bad")


@pytest.mark.parametrize("name, words", [("missing", "cannot be read: No such file"), (".", "cannot be read: Is a directory"),
                                         ("text", "the header claims")])
def test_what_is_no_token_file_is_named(tmp_path, name, words):
    (tmp_path / "text").write_text("It was a dark and stormy night")
    with pytest.raises(ValueError, match=f"{tmp_path / name}.*{words}"):
        open_tokens(tmp_path / name)


def test_a_mutated_file_is_what_it_says_or_refused_by_name(tmp_path, mutations):
    path, loaded = tmp_path / "t", 0
    write_tokens(path, np.tile(np.arange(260), 8), SMALL)
    for data in mutations(path.read_bytes(), 400):
        path.write_bytes(data)
        try:
            tokens, tokenizer = open_tokens(path)
        except ValueError as error:
            assert str(path) in str(error), error
            continue
        loaded += 1
        _, metadata, start = tensorfile.read_header(path)
        assert tokens.tobytes() == data[start:] and tokens.max() < tokenizer.vocab_size
        assert tokenizer.to_dict() == json.loads(metadata["tokenizer"])
    assert 10 < loaded < 300
