"""Text: the tokenizers bytes.py and bpe.py, and corpus.py."""
from refimpl.text.bpe import BPETokenizer
from refimpl.text.bytes import ByteTokenizer
from refimpl.text.corpus import read_text, standard_library

__all__ = ["BPETokenizer", "ByteTokenizer", "read_text", "standard_library"]
