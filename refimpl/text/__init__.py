"""Text: corpus.py reads it; bytes.py and bpe.py make tokens of it; tokenizers.py and tokenfile.py keep both on disk."""
from refimpl.text.bpe import BPETokenizer
from refimpl.text.bytes import ByteTokenizer
from refimpl.text.corpus import read_text, standard_library
from refimpl.text.tokenfile import open_tokens, write_tokens
from refimpl.text.tokenizers import Tokenizer, make_tokenizer, read_tokenizer, tokenizer_from, write_tokenizer

__all__ = ["BPETokenizer", "ByteTokenizer", "Tokenizer", "make_tokenizer", "open_tokens", "read_text", "read_tokenizer",
           "standard_library", "tokenizer_from", "write_tokenizer", "write_tokens"]
