"""Localises merges learned in another order than the rule says, or applied in another order than they were learned."""
import random

import numpy as np
import pytest

from refimpl.text import BPETokenizer, standard_library
from refimpl.text.bpe import gpt2_alphabet, learn_merges, recounted_merges, words_of

TEXTS = ["", "plain", "It's 3 o'clock  now", "héllo 🚀 \x00 \r\n\t  ", "".join(map(chr, range(1, 0x3000, 7))), " " * 50]
SENNRICH = {"low": 5, "lower": 2, "newest": 6, "widest": 3}        # Sennrich et al. 2016, section 3.2, words with frequencies


@pytest.fixture(scope="module")
def tokenizer():
    pytest.importorskip("regex")
    return BPETokenizer.train(standard_library()[:100_000], 512)


@pytest.mark.parametrize("learn", (learn_merges, recounted_merges))
def test_the_merges_of_the_papers_words(learn):
    """Its first four are printed there; the others by the rule for ties."""
    words = {(*map(ord, word), ord("·")): n for word, n in SENNRICH.items()}         # · ends a word
    names = {**{ord(c): c for word in SENNRICH for c in word}, ord("·"): "·"}
    for k, (a, b) in enumerate(learn(words, 10, first=1000)):
        names[1000 + k] = names[a] + names[b]
    assert list(names.values())[-10:] == ["es", "est", "est·", "lo", "low", "ne", "new", "newest·", "low·", "wi"]


def test_kept_counts_equal_recounted_ones():
    """Few letters and small frequencies: ties everywhere, and pairs that overlap themselves."""
    draw = random.Random(0)
    for _ in range(300):
        words = {tuple(draw.choices(b"abc", k=draw.randint(1, 9))): draw.randint(1, 4) for _ in range(draw.randint(1, 12))}
        assert learn_merges(words, 12) == recounted_merges(words, 12), words


def test_equally_frequent_pairs_are_merged_in_the_order_of_their_places():
    assert learn_merges({b"xy": 1, b"ab": 1}, 2) == [(ord("x"), ord("y")), (ord("a"), ord("b"))]
    assert learn_merges({b"cdab": 1, b"ab": 1, b"cd": 1}, 1) == [(ord("c"), ord("d"))]


def test_merging_ends_where_no_pair_is_left():
    assert learn_merges({b"ab": 2, b"c": 1}, 5) == [(ord("a"), ord("b"))]
    assert learn_merges({}, 5) == []


def test_merges_are_applied_in_the_order_they_were_learned():
    """From left to right, "abc" would become ab c (more than half of the words of a text come out wrong that way)."""
    tokenizer = BPETokenizer([(98, 99), (97, 98)])
    assert tokenizer.merged(b"abc") == (97, 256)
    assert tokenizer.merged(b"abab") == (257, 257)
    assert BPETokenizer([(97, 97)]).merged(b"aaaaa") == (256, 256, 97)


@pytest.mark.parametrize("text", TEXTS)
def test_decode_undoes_encode(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int64 and tokenizer.decode(tokens) == text
    assert "".join(words_of(text)) == text


def test_more_merges_never_make_more_tokens(tokenizer):
    text = standard_library()[100_000:120_000]
    sizes = [len(BPETokenizer(tokenizer.merges[:n]).encode(text)) for n in (0, 1, 8, 64, 256)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == len(text.encode()) and sizes[-1] < 0.6 * sizes[0]


def test_no_token_reaches_into_the_next_word(tokenizer):
    text = "the theory of the thesis, that's 1234 things  \n indeed"
    assert tokenizer.encode(text).tolist() == [t for word in words_of(text) for t in tokenizer.encode(word)]


def test_gpt2s_alphabet_has_each_byte_once():
    alphabet = gpt2_alphabet()
    assert sorted(alphabet.values()) == list(range(256)) and alphabet["Ġ"] == 32 and alphabet["!"] == 33
    assert list(alphabet)[:3] == ["!", '"', "#"] and list(alphabet).index("Ġ") == 220    # GPT-2's token 220 is a space


def test_a_file_of_merges_is_read_and_bad_ones_are_named(tmp_path):
    file = tmp_path / "vocab.bpe"
    file.write_text("#version: 0.2\nĠ t\nh e\nĠt he\n", encoding="utf-8")
    tokenizer = BPETokenizer.from_gpt2(file)
    assert tokenizer.vocab_size == 256 + 3 + 1 and tokenizer.decode([258, 259]) == " the<|endoftext|>"
    assert tokenizer.merged(b" the") == (258,)
    for line in ("Ġ", "Ġ t h", "Ġ the", "t\te"):
        file.write_text(f"#version: 0.2\nĠ t\n{line}\n", encoding="utf-8")
        with pytest.raises(ValueError, match="vocab.bpe, line 3: .* is not two tokens made before it"):
            BPETokenizer.from_gpt2(file)
    file.write_text("Ġ t\nĠ t\n", encoding="utf-8")
    with pytest.raises(ValueError, match="vocab.bpe: merge 1 of the tokens 220 and 83: .* no merge may come twice"):
        BPETokenizer.from_gpt2(file)


@pytest.mark.parametrize("merges", ([(0, 257)], [(256, 0)], [(-1, 0)], [(0, 1), (0, 1)]))
def test_merges_that_cannot_be_are_refused(merges):
    with pytest.raises(ValueError, match=f"merge {len(merges) - 1} of the tokens"):
        BPETokenizer(merges)


def test_wrong_use_gets_a_sentence(tokenizer):
    with pytest.raises(ValueError, match="has the 256 bytes at least, got vocab_size 100"):
        BPETokenizer.train("text", 100)
    with pytest.raises(ValueError, match=r"tokens must be in \[0, 512\), got 3 to 512"):
        tokenizer.decode([3, 512])
    with pytest.raises(ValueError, match="each byte once"):
        BPETokenizer([], alphabet=[0] * 256)


def test_without_regex_there_is_a_sentence(monkeypatch):
    import sys

    from refimpl.text import bpe
    monkeypatch.setitem(sys.modules, "regex", None)
    bpe.pattern.cache_clear()
    with pytest.raises(ValueError, match=r"needs the package regex, for GPT-2's pattern: pip install '.\[text\]'"):
        words_of("text")
    bpe.pattern.cache_clear()
