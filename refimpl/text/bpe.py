"""Byte pair encoding: a tokenizer whose tokens are bytes and what often stands side by side.

    train    count the pairs of neighbours in all words; make a token of the most frequent; put it in place of the pair, from
             left to right; again, until there are enough
    encode   in each word, merge the pair that was learned first among those that are there, wherever it stands; again

Token t < 256 is byte t (or the one that `alphabet` says), token 256 + k what merge k makes, and then come the specials, which
no text is encoded to.  Ties are settled by a rule: of pairs that are equally frequent, the one that stands first, counting
words in the order of their first appearance in the text.

Words are found by GPT-2's pattern, so that no token reaches from one into the next; it needs the package regex.
Sennrich, Haddow, Birch 2016, algorithm 1; Radford et al. 2019, section 2.2 (bytes, and the pattern).
"""
import heapq
from collections import Counter, defaultdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

import numpy as np

from refimpl.text.corpus import read_file

Pair = tuple[int, int]
PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
MAX_BYTES = 100_000_000                                 # of all tokens; GPT-2's have 320,000


class BPETokenizer:
    """The tokenizer with these merges, the first learned first.  decode(encode(text)) == text for every text.

    alphabet  the bytes that the first 256 tokens are
    specials  texts of the tokens behind the merges, such as an end of text
    lengths   int64[vocab_size], the bytes of each token
    Error:    ValueError for a merge of a token that is not made before it, for one that is there twice, and for merges that
              double their tokens until no memory could hold them
    """

    def __init__(self, merges: Sequence[Pair], alphabet: Sequence[int] = range(256), specials: Sequence[str] = ()) -> None:
        if sorted(alphabet) != list(range(256)):
            raise ValueError("the alphabet must have each byte once")
        self.merges = [(int(a), int(b)) for a, b in merges]
        self.ranks: dict[Pair, int] = {}
        self.bytes = [bytes([b]) for b in alphabet]
        size = 256
        self.token_of = {b: t for t, b in enumerate(alphabet)}
        for rank, (a, b) in enumerate(self.merges):
            if not (0 <= a < 256 + rank and 0 <= b < 256 + rank) or (a, b) in self.ranks:
                raise ValueError(f"merge {rank} of the tokens {a} and {b}: both must be among the {256 + rank} before it, and "
                                 f"no merge may come twice")
            size += len(self.bytes[a]) + len(self.bytes[b])
            if size > MAX_BYTES:
                raise ValueError(f"the tokens up to merge {rank} have more than {MAX_BYTES:,} bytes")
            self.ranks[a, b] = rank
            self.bytes.append(self.bytes[a] + self.bytes[b])
        self.bytes += [text.encode() for text in specials]
        self.vocab_size = len(self.bytes)
        self.lengths = np.array([len(b) for b in self.bytes], np.int64)
        self.encode_word = lru_cache(maxsize=1 << 16)(self.merged)

    @classmethod
    def train(cls, text: str, vocab_size: int) -> "BPETokenizer":
        """Learn merges from a text until there are `vocab_size` tokens, or no pair is left.  Error: ValueError below 256."""
        if vocab_size < 256:
            raise ValueError(f"a byte pair encoding has the 256 bytes at least, got vocab_size {vocab_size}")
        return cls(learn_merges(Counter(word.encode() for word in words_of(text)), vocab_size - 256))

    @classmethod
    def from_gpt2(cls, path: str | Path) -> "BPETokenizer":
        """GPT-2's own tokenizer, from its file vocab.bpe: a line for each merge, whose two texts are written in characters that
        stand for bytes.  Error: ValueError that names the file, and the line or merge which is not one
        """
        alphabet = gpt2_alphabet()
        tokens, merges = {character: t for t, character in enumerate(alphabet)}, []
        for number, line in enumerate(read_file(path, "tokenizer").splitlines(), 1):
            if line.startswith("#version") or not line:
                continue
            pair = line.split(" ")
            if len(pair) != 2 or not set(pair) <= tokens.keys():
                raise ValueError(f"{path}, line {number}: {line[:50]!r} is not two tokens made before it, with a space between")
            merges.append((tokens[pair[0]], tokens[pair[1]]))
            tokens.setdefault("".join(pair), 255 + len(merges))
        try:
            return cls(merges, list(alphabet.values()), ["<|endoftext|>"])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def encode(self, text: str) -> np.ndarray:
        """text -> int64[n].  A lone surrogate, which utf-8 cannot hold, is an error (UnicodeEncodeError)."""
        return np.fromiter((t for word in words_of(text) for t in self.encode_word(word.encode())), np.int64)

    def decode(self, tokens: np.ndarray | Sequence[int]) -> str:
        """int[n] -> text.  Bytes that are not utf-8 (a cut-off character) become U+FFFD.  Error: ValueError for no token."""
        tokens = np.asarray(tokens)
        if tokens.size and not (0 <= tokens.min() and tokens.max() < self.vocab_size):
            raise ValueError(f"tokens must be in [0, {self.vocab_size}), got {tokens.min()} to {tokens.max()}")
        return b"".join(self.bytes[t] for t in tokens).decode("utf-8", errors="replace")

    def to_dict(self) -> dict[str, Any]:
        """What `tokenizer_from` makes it from."""
        return {"kind": "bpe", "merges": [[a, b] for a, b in self.merges], "alphabet": [b[0] for b in self.bytes[:256]],
                "specials": [b.decode() for b in self.bytes[256 + len(self.merges):]]}

    def merged(self, word: bytes) -> tuple[int, ...]:
        """The tokens of one word.

        >>> tokenizer = BPETokenizer([(98, 99), (97, 98)])      # bc, then ab: "abc" is a bc, not ab c
        >>> tokenizer.merged(b"abc")
        (97, 256)
        """
        tokens = tuple(self.token_of[b] for b in word)
        while len(tokens) > 1:
            pair = min(zip(tokens, tokens[1:]), key=lambda p: self.ranks.get(p, len(self.ranks)))
            if pair not in self.ranks:
                break
            tokens = replaced(tokens, pair, 256 + self.ranks[pair])
        return tokens


def gpt2_alphabet() -> dict[str, int]:
    """character -> byte, in the order of GPT-2's tokens: the bytes that are printable characters of Latin-1 stand for
    themselves, the others for the characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + k): b for k, b in enumerate(others)}


def words_of(text: str) -> list[str]:
    """The text cut by GPT-2's pattern: contractions, letters, digits and other characters, with the space before; white space.

    >>> words_of("It's 3 o'clock  now")
    ['It', "'s", ' 3', ' o', "'", 'clock', ' ', ' now']
    """
    return pattern().findall(text)


@lru_cache(maxsize=1)
def pattern() -> Any:
    try:
        import regex
    except ImportError:
        raise ValueError("byte pair encoding needs the package regex, for GPT-2's pattern: pip install '.[text]'") from None
    return regex.compile(PATTERN)


def replaced(tokens: tuple[int, ...], pair: Pair, by: int) -> tuple[int, ...]:
    """The tokens, with `by` wherever the pair stands, from left to right.

    >>> replaced((1, 1, 1, 2), (1, 1), 7)
    (7, 1, 2)
    """
    out, i = [], 0
    while i < len(tokens):
        if tokens[i:i + 2] == pair:
            out.append(by)
            i += 2
        else:
            out.append(tokens[i])
            i += 1
    return tuple(out)


def learn_merges(words: Mapping[Sequence[int], int], n: int, first: int = 256) -> list[Pair]:
    """The n most frequent pairs, one after the other, of words with their frequencies; merge k makes token first + k.

    Counts are kept, not made anew: a merge changes those of the words that the pair is in.  `recounted_merges` does the same
    in ten lines.
    """
    texts, frequencies = [tuple(word) for word in words], list(words.values())
    counts: Counter[Pair] = Counter()
    places: dict[Pair, set[int]] = defaultdict(set)     # words that the pair is, or was, in
    for w, tokens in enumerate(texts):
        for pair in zip(tokens, tokens[1:]):
            counts[pair] += frequencies[w]
            places[pair].add(w)
    heap = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)
    merges: list[Pair] = []
    while len(merges) < n:
        candidates = most_frequent(heap, counts)
        if not candidates:
            break
        best = min(candidates, key=lambda pair: first_place(pair, places[pair], texts))
        for pair in candidates:
            if pair != best:
                heapq.heappush(heap, (-counts[pair], pair))
        changed = set()
        for w in places.pop(best):
            before = texts[w]
            texts[w] = after = replaced(before, best, first + len(merges))
            for tokens, sign in ((before, -1), (after, 1)):
                for pair in zip(tokens, tokens[1:]):
                    counts[pair] += sign * frequencies[w]
                    changed.add(pair)
            for pair in zip(after, after[1:]):
                places[pair].add(w)
        del counts[best]
        for pair in changed - {best}:
            heapq.heappush(heap, (-counts[pair], pair))
        merges.append(best)
    return merges


def most_frequent(heap: list[tuple[int, Pair]], counts: Mapping[Pair, int]) -> list[Pair]:
    """The pairs with the highest count, taken from the heap, in which counts that have changed since are still there."""
    found: dict[Pair, None] = {}                        # in order, and each once: the heap may have a pair twice
    highest = 0
    while heap and (not found or -heap[0][0] == highest):
        count, pair = heapq.heappop(heap)
        if counts.get(pair, 0) == -count > 0:
            found[pair], highest = None, -count
    return list(found)


def first_place(pair: Pair, words: Iterable[int], texts: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    """Of the words that a pair may be in: the first that it is in, and where."""
    for w in sorted(words):
        tokens = texts[w]
        for i in range(len(tokens) - 1):
            if tokens[i:i + 2] == pair:
                return w, i
    raise AssertionError(f"{pair} has a count, and is in no word")


def recounted_merges(words: Mapping[Sequence[int], int], n: int, first: int = 256) -> list[Pair]:
    """`learn_merges`, by counting all pairs anew for every merge: slow, and what it is checked against."""
    texts, merges = {tuple(word): frequency for word, frequency in words.items()}, []
    items = list(texts.items())
    for k in range(n):
        counts: Counter[Pair] = Counter()               # in the order of first places: max takes the first of equals
        for tokens, frequency in items:
            for pair in zip(tokens, tokens[1:]):
                counts[pair] += frequency
        if not counts:
            break
        best = max(counts, key=counts.__getitem__)
        items = [(replaced(tokens, best, first + k), frequency) for tokens, frequency in items]
        merges.append(best)
    return merges
