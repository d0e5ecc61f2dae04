"""A text's tokens on disk, with the tokenizer that made them: written once, then read piece by piece without loading them.

    tensors    {"tokens": uint16[n], or uint32[n] for a vocabulary of more than 65,536}
    metadata   {"tokenizer": the JSON of its to_dict()}

in a safetensors file, so that any stack can read it.  A file is hostile until checked.
"""
from pathlib import Path

import numpy as np

from refimpl import tensorfile
from refimpl.files import replacing
from refimpl.text.tokenizers import Tokenizer, to_json, tokenizer_from_json


def write_tokens(path: str | Path, tokens: np.ndarray, tokenizer: Tokenizer) -> None:
    """int[n], and the tokenizer that they are of -> a file.

    Error: ValueError for what is no token of the tokenizer, or where the file cannot be written; then `path` is as it was.
    """
    right = f"tokens must be integers in [0, {tokenizer.vocab_size}) along one axis"
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"{right}, got {tokens.dtype} of shape {tokens.shape}")
    if tokens.size and not (0 <= tokens.min() and tokens.max() < tokenizer.vocab_size):
        raise ValueError(f"{right}, got {tokens.min()} to {tokens.max()}")
    with replacing(path) as part:
        tensorfile.write(part, {"tokens": tokens.astype(token_dtype(tokenizer))}, {"tokenizer": to_json(tokenizer)})


def open_tokens(path: str | Path) -> tuple[np.ndarray, Tokenizer]:
    """A file -> uint16[n] or uint32[n], read-only, of which nothing stays in memory but what is looked at; and the tokenizer.

    Error: ValueError that names the file, and what is wrong with it.
    """
    try:
        header, metadata, _ = tensorfile.read_header(path)
        tensors = tensorfile.views(path)
    except OSError as error:
        raise ValueError(f"the tokens {path} cannot be read: {error.strerror}") from None
    if list(header) != ["tokens"]:
        raise ValueError(f"{path} must have one tensor, tokens, and has {', '.join(sorted(header))[:100] or 'none'}")
    if "tokenizer" not in metadata:
        raise ValueError(f"{path} has no tokenizer in its metadata")
    try:
        tokenizer = tokenizer_from_json(metadata["tokenizer"])
    except ValueError as error:
        raise ValueError(f"{path} has a tokenizer that is none: {error}") from None
    tokens, entry = tensors["tokens"], header["tokens"]         # (bfloat16 is seen as uint16: the header tells them apart)
    code = tensorfile.CODES[token_dtype(tokenizer)]
    if entry["dtype"] != code or tokens.ndim != 1:
        raise ValueError(f"{path} must have tokens of {code}[n], for a vocabulary of {tokenizer.vocab_size}; they are "
                         f"{entry['dtype']}{entry['shape']}")
    largest = int(tokens.max(initial=0))                # numpy goes over the file, and copies nothing
    if largest >= tokenizer.vocab_size:
        raise ValueError(f"{path} has the token {largest}; its vocabulary has {tokenizer.vocab_size}")
    return tokens, tokenizer


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
