"""Tokenizers by name, and on disk: what every tokenizer offers, how one is made, written and read.

On disk a tokenizer is JSON: {"kind": "byte"}, or

    {"kind": "bpe", "merges": [[98, 99], ...], "alphabet": [0, 1, ..., 255], "specials": ["<|endoftext|>"]}

A file is hostile until checked: its size is bounded, and each part must be of its kind (True is no number).
"""
import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from refimpl.files import replacing
from refimpl.text.bpe import BPETokenizer
from refimpl.text.bytes import ByteTokenizer

MAX_FILE = 20_000_000                                   # bytes: more than a million merges


class Tokenizer(Protocol):
    """What ByteTokenizer and BPETokenizer have in common.

    lengths   int64[vocab_size], the utf-8 bytes of each token: lengths[encode(text)].sum() == len(text.encode())
    """
    vocab_size: int
    lengths: np.ndarray

    def encode(self, text: str) -> np.ndarray:
        """text -> int64[n]."""

    def decode(self, tokens: np.ndarray) -> str:
        """int[n] -> text."""

    def to_dict(self) -> dict[str, Any]:
        """What `tokenizer_from` makes the same tokenizer from, of JSON's kinds."""


def make_tokenizer(kind: str, text: str, vocab_size: int) -> Tokenizer:
    """byte; bpe, trained on `text` for `vocab_size` tokens; or that of a file: one of ours, .json, or GPT-2's vocab.bpe.

    Error: ValueError for another name, and for a file that is missing or malformed.
    """
    if kind == "byte":
        return ByteTokenizer()
    if kind == "bpe":
        return BPETokenizer.train(text, vocab_size)
    if kind.endswith(".json"):
        return read_tokenizer(kind)
    if kind.endswith(".bpe"):
        return BPETokenizer.from_gpt2(kind)
    raise ValueError(f"there is no tokenizer {kind!r}: use byte, bpe, a file NAME.json that `tokenize --save-tokenizer` wrote, "
                     f"or GPT-2's vocab.bpe")


def write_tokenizer(path: str | Path, tokenizer: Tokenizer) -> None:
    """Write a tokenizer for `read_tokenizer`.  Error: ValueError where the file cannot be written."""
    with replacing(path) as part:
        part.write_text(to_json(tokenizer) + "\n", encoding="utf-8")


def read_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a file.  Error: ValueError that names the file, and what is wrong with it."""
    try:
        with open(path, "rb") as file:
            return tokenizer_from_json(file.read(MAX_FILE + 1))
    except OSError as error:
        raise ValueError(f"the tokenizer {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not a tokenizer's: {error}") from None


def to_json(tokenizer: Tokenizer) -> str:
    return json.dumps(tokenizer.to_dict())


def tokenizer_from_json(text: str | bytes) -> Tokenizer:
    """The tokenizer of a JSON text.  Error: ValueError that says what is wrong with it."""
    if len(text) > MAX_FILE:
        raise ValueError(f"it has more than {MAX_FILE:,} bytes")
    try:
        description = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return tokenizer_from(description)


def tokenizer_from(description: Any) -> Tokenizer:
    """The tokenizer that `to_dict` described.  Error: ValueError that says what is wrong with the description.

    >>> tokenizer_from({"kind": "bpe", "merges": [[98, 99]], "alphabet": list(range(256)), "specials": []}).decode([97, 256])
    'abc'
    """
    kind = description.get("kind") if isinstance(description, dict) else None
    if kind not in ("byte", "bpe"):
        raise ValueError("its kind must be byte or bpe")
    keys = {"kind"} if kind == "byte" else {"kind", "merges", "alphabet", "specials"}
    if description.keys() != keys:
        got = ", ".join(sorted(map(str, description)))[:100]
        raise ValueError(f"a {kind} tokenizer has the keys {', '.join(sorted(keys))}, got {got}")
    if kind == "byte":
        return ByteTokenizer()
    merges, alphabet, specials = description["merges"], description["alphabet"], description["specials"]
    if not isinstance(merges, list) or not all(whole_numbers(pair) and len(pair) == 2 for pair in merges):
        raise ValueError("its merges must be pairs of whole numbers")
    if not whole_numbers(alphabet):
        raise ValueError("its alphabet must be whole numbers")
    if not isinstance(specials, list) or not all(isinstance(text, str) for text in specials):
        raise ValueError("its specials must be texts")
    return BPETokenizer(merges, alphabet, specials)


def whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2 ** 32 for v in values)
