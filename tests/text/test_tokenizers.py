"""Localises tokenizers that come back from disk as others, wrong lengths, and files that make a reader crash or allocate."""
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from refimpl.text import (BPETokenizer, ByteTokenizer, make_tokenizer, read_tokenizer, standard_library, tokenizer_from,
                          tokenizers, write_tokenizer)

TEXTS = ["", "plain", "It's 3 o'clock  now", "héllo 🚀 \x00 \r\n\t  ", "".join(map(chr, range(1, 0x3000, 7))), " " * 50]
SMALL = BPETokenizer([(98, 99), (97, 256)], [*range(1, 256), 0], ["<|end|>", "né"])
BPE = SMALL.to_dict()


@pytest.fixture(scope="module")
def trained():
    pytest.importorskip("regex")
    return BPETokenizer.train(standard_library()[:100_000], 512)


# -- lengths ----------------------------------------------------------------------------------------------------------

def test_lengths_of_a_texts_tokens_sum_to_its_bytes(trained):
    for tokenizer in (ByteTokenizer(), trained):
        assert tokenizer.lengths.dtype == np.int64 and tokenizer.lengths.shape == (tokenizer.vocab_size,)
        for text in TEXTS:
            assert tokenizer.lengths[tokenizer.encode(text)].sum() == len(text.encode())


def test_lengths_by_hand():
    assert SMALL.lengths.tolist() == [1] * 256 + [2, 3, 7, 3]          # merges of 2 and 3 bytes, <|end|>, né


# -- round trips ------------------------------------------------------------------------------------------------------

def test_a_tokenizer_comes_back_from_disk_and_gives_the_same_ids(tmp_path, trained):
    for tokenizer in (ByteTokenizer(), trained, SMALL):
        write_tokenizer(tmp_path / "t.json", tokenizer)
        back = read_tokenizer(tmp_path / "t.json")
        assert type(back) is type(tokenizer) and back.to_dict() == tokenizer.to_dict()
        assert back.vocab_size == tokenizer.vocab_size and back.lengths.tolist() == tokenizer.lengths.tolist()
        everything = np.arange(tokenizer.vocab_size)
        assert back.decode(everything) == tokenizer.decode(everything)
        for text in TEXTS:
            tokens = back.encode(text)
            assert tokens.tolist() == tokenizer.encode(text).tolist() and back.decode(tokens) == text


def test_the_description_by_hand():
    assert ByteTokenizer().to_dict() == {"kind": "byte"}
    assert BPE == {"kind": "bpe", "merges": [[98, 99], [97, 256]], "alphabet": [*range(1, 256), 0],
                   "specials": ["<|end|>", "né"]}


def test_what_a_description_is_made_of_is_not_shared():
    description = SMALL.to_dict()
    description["merges"].clear()
    assert SMALL.to_dict() == BPE


def test_gpt2s_file_comes_back_from_disk(tmp_path):
    pytest.importorskip("regex")
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\nĠ t\nh e\nĠt he\n", encoding="utf-8")
    tokenizer = make_tokenizer(str(tmp_path / "vocab.bpe"), "", 0)
    write_tokenizer(tmp_path / "t.json", tokenizer)
    back = read_tokenizer(tmp_path / "t.json")
    assert back.encode(" the\nthe").tolist() == tokenizer.encode(" the\nthe").tolist() == [258, 198, 83, 257]
    assert back.decode([259]) == "<|endoftext|>" and back.lengths[258:].tolist() == [4, 13]


def test_what_is_on_disk_is_replaced_by_a_whole_file_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "new" / "t.json"
    write_tokenizer(path, SMALL)

    def half(self, text, **_):
        with open(self, "w") as file:
            file.write(text[:9])
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(ValueError, match="t.json cannot be written: No space left on device"):
        write_tokenizer(path, ByteTokenizer())
    assert [p.name for p in path.parent.iterdir()] == ["t.json"] and read_tokenizer(path).to_dict() == BPE


@pytest.mark.parametrize("path, reason", [("/proc/t.json", "No such file"), ("/dev/null/t.json", "Not a directory|File exists"),
                                          (".", "Is a directory")])
def test_a_place_that_cannot_be_written_to_is_named(tmp_path, path, reason):
    with pytest.raises(ValueError, match=f"cannot be written: ({reason})"):
        write_tokenizer(tmp_path / path, SMALL)


# -- the choice by name -----------------------------------------------------------------------------------------------

def test_a_tokenizer_is_made_by_name(tmp_path):
    pytest.importorskip("regex")
    write_tokenizer(tmp_path / "t.json", SMALL)
    assert make_tokenizer("byte", "text", 300).to_dict() == {"kind": "byte"}
    assert make_tokenizer("bpe", "ab ab ab", 257).to_dict()["merges"] == [[ord("a"), ord("b")]]
    assert make_tokenizer(str(tmp_path / "t.json"), "text", 300).to_dict() == BPE


@pytest.mark.parametrize("kind", ["", "bytes", "BPE", "tokenizer", "json", "model.safetensors"])
def test_any_other_name_is_refused(kind):
    with pytest.raises(ValueError, match=f"tokenizer {kind!r}: use byte, bpe, .*json.*bpe"):
        make_tokenizer(kind, "text", 300)


@pytest.mark.parametrize("name", ["missing.json", "missing.bpe"])
def test_a_missing_file_is_named(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name} cannot be read: No such file"):
        make_tokenizer(str(tmp_path / name), "text", 300)


# -- hostile files ----------------------------------------------------------------------------------------------------

HOSTILE = {
    "nothing": (b"", "Expecting value"),
    "no JSON": (b"{'kind': 'byte'}", "Expecting property name"),
    "not utf-8": (b'{"kind": "\xff"}', "codec can't decode"),
    "deep nesting": (b"[" * 100_000, "nested too deeply"),
    "deep objects": (b'{"kind":' * 100_000, "nested too deeply"),
    "a number of 10000 digits": (b'{"kind": %s}' % (b"9" * 10_000), "4300"),
    "a list": ([BPE], "kind must be byte or bpe"),
    "null": (None, "kind must be byte or bpe"),
    "no kind": ({}, "kind must be byte or bpe"),
    "unknown kind": ({"kind": "unigram"}, "kind must be byte or bpe"),
    "kind that is a list": ({"kind": ["byte"]}, "kind must be byte or bpe"),
    "a key too many": ({"kind": "byte", "merges": []}, "a byte tokenizer has the keys kind, got kind, merges"),
    "a key too few": ({k: BPE[k] for k in ("kind", "merges", "alphabet")}, "a bpe tokenizer has the keys alphabet, kind"),
    "merges that are null": ({**BPE, "merges": None}, "merges must be pairs of whole numbers"),
    "merges that are an object": ({**BPE, "merges": {}}, "merges must be pairs"),
    "merge that is text": ({**BPE, "merges": ["bc"]}, "merges must be pairs"),
    "merge of one": ({**BPE, "merges": [[98]]}, "merges must be pairs"),
    "merge of three": ({**BPE, "merges": [[98, 99, 100]]}, "merges must be pairs"),
    "merge of a bool": ({**BPE, "merges": [[True, 99]]}, "merges must be pairs"),
    "merge of a fraction": ({**BPE, "merges": [[98.0, 99]]}, "merges must be pairs"),
    "merge of a huge number": ({**BPE, "merges": [[10 ** 4000, 99]]}, "merges must be pairs"),
    "merge of a negative": ({**BPE, "merges": [[-1, 99]]}, "merges must be pairs"),
    "merge of what comes later": ({**BPE, "merges": [[98, 256]]}, "merge 0 of the tokens 98 and 256"),
    "merge twice": ({**BPE, "merges": [[98, 99], [98, 99]]}, "merge 1 of the tokens 98 and 99"),
    "a token of 2**99 bytes": ({**BPE, "merges": [[t, t] for t in [97, *range(256, 355)]]}, "more than 100,000,000 bytes"),
    "short alphabet": ({**BPE, "alphabet": list(range(255))}, "each byte once"),
    "alphabet of text": ({**BPE, "alphabet": "a" * 256}, "alphabet must be whole numbers"),
    "alphabet of mixed kinds": ({**BPE, "alphabet": [False, True, *range(2, 256)]}, "alphabet must be whole numbers"),
    "alphabet of fractions": ({**BPE, "alphabet": [float(b) for b in range(256)]}, "alphabet must be whole numbers"),
    "specials that are text": ({**BPE, "specials": "<|end|>"}, "specials must be texts"),
    "special that is a number": ({**BPE, "specials": [1]}, "specials must be texts"),
    "special that is no text": ({**BPE, "specials": ["\ud800"]}, "surrogates not allowed"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_malformed_files_are_refused(tmp_path, case):
    content, words = HOSTILE[case]
    (tmp_path / "bad.json").write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f"bad.json is not a tokenizer's: .*{words}") as caught:
            read_tokenizer(tmp_path / "bad.json")
        assert tracemalloc.get_traced_memory()[1] < 300_000_000 and "\n" not in str(caught.value)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("case", [c for c, (content, _) in HOSTILE.items() if not isinstance(content, bytes)])
def test_malformed_descriptions_are_refused(case):
    with pytest.raises(ValueError, match=HOSTILE[case][1]):
        tokenizer_from(HOSTILE[case][0])


def test_a_file_that_is_too_long_is_not_read(monkeypatch):
    monkeypatch.setattr(tokenizers, "MAX_FILE", 1000)
    with pytest.raises(ValueError, match="/dev/zero is not a tokenizer's: it has more than 1,000 bytes"):
        read_tokenizer("/dev/zero")


def test_a_folder_is_no_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} cannot be read: Is a directory"):
        read_tokenizer(tmp_path)


def test_a_mutated_file_is_what_it_says_or_refused_by_name(tmp_path, mutations):
    path, loaded = tmp_path / "t.json", 0
    merges = [(t, t + 100) for t in range(300)]
    for data in mutations(json.dumps(BPETokenizer(merges, specials=["<|end|>"] * 20).to_dict()).encode(), 600):
        path.write_bytes(data)
        try:
            back = read_tokenizer(path)
        except ValueError as error:
            assert "t.json is not a tokenizer's: " in str(error), error
            continue
        loaded += 1
        assert back.to_dict() == json.loads(data)
        assert back.vocab_size == len(back.lengths) == 256 + len(back.merges) + len(back.to_dict()["specials"])
    assert 20 < loaded < 400
