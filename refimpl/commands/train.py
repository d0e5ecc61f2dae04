"""python -m refimpl train: train a small decoder on a text, on any mesh.

    python -m refimpl train --steps 100                                     one rank
    mpirun -n 4 python -m refimpl train --mesh dp=2,tp=2 --out runs/first   four
    mpirun -n 4 python -m refimpl train --mesh tp=4 --device cupy           four, each with a GPU if there are four
    mpirun -n 4 python -m refimpl train --mesh tp=4 --trace trace.json      four, and a timeline of the first steps
"""
import argparse
import json
from contextlib import nullcontext
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Callable

import numpy as np

from refimpl.comm import Comm, Mesh, world
from refimpl.comm.trace import Trace
from refimpl.generate import sample
from refimpl.models import Config
from refimpl.models.config import BIASED, CHOICES
from refimpl.ops.rope import PAIRINGS
from refimpl.text import ByteTokenizer, read_text, standard_library
from refimpl.train import Options, train

SMALL = Config(vocab_size=ByteTokenizer.vocab_size, n_layers=2, n_heads=4, d_model=96, max_seq_len=64)
TRACED_STEPS = 3                                        # the first of which warms up
HELP = {"steps": "training steps", "batch_size": "samples of a step, over all ranks and micro-batches",
        "seq_len": "tokens of a sample", "accumulate": "micro-batches of a step", "lr": "learning rate",
        "schedule": "constant or cosine", "warmup": "steps in which the learning rate grows to lr",
        "floor": "where the cosine ends, as a share of lr", "seed": "seed",
        "weight_decay": "weight decay of the matrices", "dtype": "float64 or float32",
        "device": "numpy, or cupy: one GPU per local rank", "n_layers": "layers", "n_heads": "attention heads",
        "d_model": "width", "d_ff": "width of the MLP, 0: four times d_model", "dropout": "dropout rate",
        "max_seq_len": "longest context", "eps": "the norms' epsilon",
        "clip": "largest norm of the gradient, 0: any", "check_replicas": "steps between two comparisons of what ranks hold in "
        "common, 0: never", "n_kv_heads": "key and value heads, 0: n_heads",
        "head_dim": "width of a head, 0: d_model / n_heads",
        "norm": " or ".join(CHOICES["norm"]), "norm_place": "pre (before each sublayer) or post (after its residual sum)",
        "positions": ", ".join(CHOICES["positions"]), "rope_theta": "RoPE's base", "rope_pairing": " or ".join(PAIRINGS),
        "ffn": ", ".join(CHOICES["ffn"]), "biases": f"parts that have a bias, of {', '.join(BIASED)}",
        "qk_norm": "normalise each head's queries and keys",
        "windows": "keys that a query sees, by layer, 0: all before it",
        "embed_scale": "factor of the embedding", "tied": "the head's matrix is the embedding's",
        "soft_cap": "logits become cap·tanh(logits / cap), 0: as they are",
        "vocab_multiple": "the vocabulary is padded to a multiple of it"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", metavar="FILE", help="train on this utf-8 text (default: the documentation of the standard "
                        "library)")
    parser.add_argument("--mesh", default="dp=1", metavar="AXIS=SIZE,...", help="how the ranks are used (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write log.jsonl, summary.json, gradients and parameters here")
    parser.add_argument("--sample", type=int, default=200, metavar="N", help="tokens to sample (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the sample (default: %(default)s)")
    parser.add_argument("--prompt", default="The ", help="what the sample starts with (default: %(default)r)")
    parser.add_argument("--trace", metavar="FILE", help=f"write a timeline of all ranks in the first {TRACED_STEPS} steps, to "
                        "open at ui.perfetto.dev; it is there when training has ended")
    parser.add_argument("--bar", action=argparse.BooleanOptionalAction, default=True, help="show a progress bar")
    add_fields(parser.add_argument_group("training"), Options())
    add_fields(parser.add_argument_group("model"), SMALL, leave_out=("vocab_size",))


def add_fields(group: Any, default: Any, leave_out: tuple[str, ...] = ()) -> None:
    """A flag for each field of a dataclass."""
    for f in fields(default):
        if f.name not in leave_out:
            value = getattr(default, f.name) if f.default is MISSING else f.default
            flag, text = "--" + f.name.replace("_", "-"), HELP[f.name] + " (default: %(default)s)"
            if isinstance(value, bool):
                group.add_argument(flag, action=argparse.BooleanOptionalAction, default=value, help=HELP[f.name])
            elif isinstance(value, tuple):
                group.add_argument(flag, type=listed(int if f.name == "windows" else str), default=",".join(map(str, value)),
                                   metavar="A,B,...", help=text)
            else:
                group.add_argument(flag, type=type(value), default=value, metavar=type(value).__name__, help=text)


def listed(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def values(text: str) -> tuple[Any, ...]:
        return tuple(kind(part.strip()) for part in text.split(",") if part.strip())
    values.__name__ = f"list of {kind.__name__}"        # argparse says so of a bad value
    return values


def from_arguments(cls: type, args: argparse.Namespace, **given: Any) -> Any:
    return cls(**given, **{f.name: getattr(args, f.name) for f in fields(cls) if f.name not in given})


def run(args: argparse.Namespace) -> int:
    comm = world()
    options = from_arguments(Options, args)
    cfg = from_arguments(Config, args, vocab_size=ByteTokenizer.vocab_size)
    if args.sample < 0 or not 0 <= args.temperature < float("inf"):
        raise ValueError(f"--sample and --temperature must be at least 0, got {args.sample} and {args.temperature}")
    if options.seq_len > cfg.max_seq_len:
        raise ValueError(f"seq_len {options.seq_len} is longer than the model's max_seq_len {cfg.max_seq_len}")
    tokenizer = ByteTokenizer()
    mesh = Mesh.parse(args.mesh, comm)
    trace = nullcontext() if args.trace is None else FirstSteps(comm, args.trace)
    corpus = shared_corpus(comm, args.text)
    with trace:
        result = train(corpus, cfg, options, mesh, args.out, bar=args.bar)
    text = tokenizer.decode(sample(result.params, tokenizer.encode(args.prompt), args.sample, cfg, mesh, args.temperature,
                                   options.seed))
    if comm.rank == 0:
        print(f"loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}, {result.tokens_per_second:,.0f} tokens/s\n\n{text}",
              flush=True)
        if args.out:
            summary = {"losses": result.losses, "payload": result.payload, "sample": text,
                       "tokens_per_second": result.tokens_per_second}
            (args.out / "summary.json").write_text(json.dumps(summary) + "\n", encoding="utf-8")
    return 0


class FirstSteps(Trace):
    """The timeline of the first TRACED_STEPS training steps.  A step ends with the last of its calls of `adamw`."""
    steps = 0

    def call(self, op: Any, run: Callable, *arrays: Any, **static: Any) -> tuple[Any, Any]:
        if op.name == "adamw":
            self.steps = static["t"]
        elif self.steps == TRACED_STEPS:
            self.stop()
            return run(*arrays, **static)
        return super().call(op, run, *arrays, **static)


def shared_corpus(comm: Comm, path: str | None) -> np.ndarray:
    """The text's tokens on every rank: rank 0 reads, the others are told (one rank's disk may not be another's)."""
    tokens = comm.on_first(lambda: ByteTokenizer().encode(read_text(path) if path else standard_library()))
    size = int(comm.broadcast(np.array([0 if tokens is None else tokens.size]))[0])
    return comm.broadcast(np.zeros(size, np.int64) if tokens is None else tokens)
