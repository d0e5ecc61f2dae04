"""Text: bytes.py (the tokenizer) and corpus.py."""
from refimpl.text.bytes import ByteTokenizer
from refimpl.text.corpus import read_text, standard_library

__all__ = ["ByteTokenizer", "read_text", "standard_library"]
