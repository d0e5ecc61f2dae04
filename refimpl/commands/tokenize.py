"""python -m refimpl tokenize: turn a text into a file of tokens, once, for many training runs.

    python -m refimpl tokenize --out tokens.safetensors                              4,096 tokens of byte pair encoding
    python -m refimpl tokenize --text FOLDER --vocab-size 8192 --out FILE --save-tokenizer tokenizer.json
    python -m refimpl tokenize --text OTHER --tokenizer tokenizer.json --out FILE    the same tokens for another text
    python -m refimpl tokenize --text OTHER --tokenizer vocab.bpe --out FILE         GPT-2's
"""
import argparse
import shlex
from pathlib import Path

from refimpl.text import make_tokenizer, read_text, standard_library, write_tokenizer, write_tokens

DEFAULT = "the documentation of Python's standard library"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", metavar="PATH", help=f"a utf-8 file, or a folder of them (default: {DEFAULT})")
    parser.add_argument("--tokenizer", default="bpe", metavar="byte|bpe|FILE", help="bytes; byte pairs, learned from the text; "
                        "or a file: NAME.json of --save-tokenizer, or GPT-2's vocab.bpe (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=4096, metavar="N", help="tokens that bpe learns, if the text has as "
                        "many (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="write the tokens here, with their tokenizer")
    parser.add_argument("--save-tokenizer", type=Path, metavar="FILE", help="write the tokenizer alone here, too")


def run(args: argparse.Namespace) -> int:
    text = standard_library() if args.text is None else read_text(args.text)
    tokenizer = make_tokenizer(args.tokenizer, text, args.vocab_size)
    tokens = tokenizer.encode(text)
    if args.save_tokenizer:
        write_tokenizer(args.save_tokenizer, tokenizer)
    write_tokens(args.out, tokens, tokenizer)
    size = len(text.encode())
    saved = f", also in {args.save_tokenizer}" if args.save_tokenizer else ""
    print(f"text       {args.text or DEFAULT}: {size:,} bytes\n"
          f"tokenizer  {args.tokenizer}, a vocabulary of {tokenizer.vocab_size:,}{saved}\n"
          f"tokens     {tokens.size:,}, {size / tokens.size:.2f} bytes each\n"
          f"written    {args.out}, {args.out.stat().st_size:,} bytes\n"
          f"next       python -m refimpl train --tokens {shlex.quote(str(args.out))}")
    return 0
