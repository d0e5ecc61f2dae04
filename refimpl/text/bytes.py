"""The byte tokenizer: a text's utf-8 bytes are its tokens."""
from typing import Any

import numpy as np


class ByteTokenizer:
    """256 tokens, one per byte.  decode(encode(text)) == text for every text.

    lengths   int64[256], the bytes of each token: 1
    >>> ByteTokenizer().encode("né").tolist()
    [110, 195, 169]
    """
    vocab_size = 256
    lengths = np.ones(256, np.int64)

    def encode(self, text: str) -> np.ndarray:
        """text -> int64[n].  A lone surrogate, which utf-8 cannot hold, is an error (UnicodeEncodeError)."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int64)

    def decode(self, tokens: np.ndarray) -> str:
        """int[n] -> text.  Bytes that are not utf-8 (a cut-off character) become U+FFFD.  Error: ValueError outside 0..255."""
        tokens = np.asarray(tokens)
        if tokens.size and not (0 <= tokens.min() and tokens.max() < 256):
            raise ValueError(f"byte tokens must be in [0, 256), got {tokens.min()} to {tokens.max()}")
        return tokens.astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def to_dict(self) -> dict[str, Any]:
        """What `tokenizer_from` makes it from."""
        return {"kind": "byte"}
