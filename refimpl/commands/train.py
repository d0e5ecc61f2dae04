"""python -m refimpl train: train a decoder on a text, on any mesh.

    python -m refimpl train --steps 100                                     one rank
    mpirun -n 4 python -m refimpl train --mesh dp=2,tp=2 --out runs/first   four
    mpirun -n 4 python -m refimpl train --mesh tp=4 --device cupy           four, each with a GPU if there are four
    mpirun -n 4 python -m refimpl train --mesh tp=4 --trace trace.json      four, and a timeline of the first steps

    python -m refimpl train --text my.txt --tokenizer bpe --config my.toml --out runs/mine --save-every 100 --plot
    python -m refimpl train --out runs/mine --resume                        go on from the last checkpoint, on any mesh

A setting is a flag, or a key in the sections [training], [model], [data] and [sampling] of the TOML file; flags count more.
"""
import argparse
import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import numpy as np

from refimpl.comm import Comm, Mesh, world
from refimpl.comm.trace import Trace
from refimpl.commands.pictures import draw_losses
from refimpl.commands.settings import add_flags, checked, defaults, read_toml
from refimpl.files import replacing
from refimpl.memory import keep_memory
from refimpl.models import Config
from refimpl.models.config import BIASED, CHOICES
from refimpl.models.placements import count
from refimpl.ops.rope import PAIRINGS
from refimpl.parallel import ATTENTIONS, LAYOUTS
from refimpl.text import ByteTokenizer, Tokenizer, make_tokenizer, open_tokens, read_text, standard_library, tokenizer_from
from refimpl.train import Data, Options, Result, Sampling, Trainer, latest
from refimpl.train.adamw import GROUPS
from refimpl.train.log import printable, read_log, short
from refimpl.train.options import DTYPES
from refimpl.train.origin import read_origin

SMALL = Config(vocab_size=ByteTokenizer.vocab_size, n_layers=2, n_heads=4, d_model=96, max_seq_len=64)
TRACED_STEPS = 3                                        # the first of which warms up


@dataclass(frozen=True)
class Source:
    """What is learnt from: a text and how it becomes tokens, or a file of tokens."""
    text: str = ""
    tokenizer: str = "byte"
    vocab_size: int = 4096
    tokens: str = ""


MODEL = defaults(Config, SMALL, leave_out="vocab_size") | {"max_seq_len": 0}
SECTIONS = {"training": defaults(Options), "model": MODEL, "data": defaults(Source), "sampling": defaults(Sampling)}
HELP = {
    "training": {
        "steps": "training steps", "batch_size": "samples of a step, over all ranks and micro-batches",
        "seq_len": "tokens of a sample", "accumulate": "micro-batches of a step", "lr": "learning rate",
        "schedule": "constant or cosine", "warmup": "steps in which the learning rate grows to lr",
        "floor": "where the cosine ends, as a share of lr", "beta1": "AdamW's decay of the first moment",
        "beta2": "AdamW's decay of the second moment", "weight_decay": "weight decay",
        "decay": f"what weight decay applies to, of {', '.join(GROUPS)}",
        "clip": "largest norm of the gradient: a larger one is scaled down to it, 0: none is",
        "seed": "of the initial weights, the samples and dropout", "dtype": f"{', '.join(DTYPES)} (emulated)",
        "device": "numpy, or cupy: one GPU per local rank",
        "attention": f"how queries meet keys: {', '.join(ATTENTIONS)}",
        "layout": f"how a sequence is cut over the cp ranks: {', '.join(LAYOUTS)}",
        "block": "positions of a block in which attention and feed-forward are computed, 0: all at once",
        "sequence_parallel": "tp ranks share the positions between the layers' matrices, too",
        "regather": "what they join for the matrices is joined once more in the backward pass, and not kept",
        "ring": "with attention all_to_all: groups of cp ranks that form a ring",
        "zero": "ZeRO-1: each dp rank keeps its share of the optimizer's state only",
        "validation": "share of the text, from its end, that is not learnt from but judged by (one sample at least)",
        "eval_every": "steps between two evaluations, 0: at the end", "eval_batches": "batches of an evaluation",
        "patience": "stop after so many evaluations no better than the best, 0: never",
        "sample_every": "steps between two samples, 0: at the end",
        "save_every": "steps between two checkpoints (needs --out), 0: none", "keep": "checkpoints that stay, 0: all",
        "merged": "rank 0 writes whole checkpoints, instead of each rank its part",
        "check_replicas": "steps between two comparisons of what ranks hold in common, 0: never"},
    "model": {
        "n_layers": "layers", "n_heads": "attention heads", "d_model": "width",
        "d_ff": "width of the MLP, 0: four times d_model",
        "dropout": "dropout rate", "max_seq_len": "longest context, 0: seq_len", "eps": "the norms' epsilon",
        "n_kv_heads": "key and value heads, 0: n_heads", "head_dim": "width of a head, 0: d_model / n_heads",
        "norm": " or ".join(CHOICES["norm"]), "norm_place": "pre (before each sublayer) or post (after its residual sum)",
        "positions": ", ".join(CHOICES["positions"]), "rope_theta": "RoPE's base", "rope_pairing": " or ".join(PAIRINGS),
        "ffn": ", ".join(CHOICES["ffn"]), "biases": f"parts that have a bias, of {', '.join(BIASED)}",
        "qk_norm": "normalise each head's queries and keys",
        "windows": "keys that a query sees, by layer, 0: all before it", "embed_scale": "factor of the embedding",
        "tied": "the head's matrix is the embedding's", "soft_cap": "logits become cap·tanh(logits / cap), 0: as they are",
        "vocab_multiple": "the vocabulary is padded to a multiple of it"},
    "data": {
        "text": "a utf-8 text, or a folder of them; if not given, the documentation of the standard library",
        "tokenizer": "byte; bpe, trained on the text; or the file of one (.json of ours, GPT-2's vocab.bpe)",
        "vocab_size": "tokens of a bpe", "tokens": "a file of tokens (python -m refimpl tokenize), instead of a text"},
    "sampling": {
        "prompt": "what the sample starts with", "sample": "tokens to sample", "temperature": "0: always the likeliest token"}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings, as TOML")
    parser.add_argument("--mesh", default="dp=1", metavar="AXIS=SIZE,...", help="how the ranks are used (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write log.jsonl, summary.json, gradients, parameters and "
                        "checkpoints here")
    parser.add_argument("--resume", nargs="?", const="", metavar="CHECKPOINT", help="go on from the last checkpoint in --out, "
                        "or from this one, with its settings")
    parser.add_argument("--plot", action="store_true", help="draw the losses as loss.png in --out")
    parser.add_argument("--trace", metavar="FILE", help=f"write a timeline of all ranks in the first {TRACED_STEPS} steps, to "
                        "open at ui.perfetto.dev; it is there when training has ended")
    parser.add_argument("--bar", action=argparse.BooleanOptionalAction, default=True, help="show how far training is (default: "
                        "yes)")
    for section, settings in SECTIONS.items():
        add_flags(parser.add_argument_group(section), settings, HELP[section])


def run(args: argparse.Namespace) -> int:
    keep_memory()
    comm = world()
    if args.out is None and (args.plot or args.resume == ""):
        raise ValueError(f"{'--plot' if args.plot else '--resume'} needs --out, the folder of the run")
    if getattr(args, "text", None) == "":
        raise ValueError("--text is empty: it must name a text, or a folder of them")
    checkpoint = None if args.resume is None else Path(told(comm, lambda: str(found(args.resume, args.out))))
    settings = settings_of(comm, args, checkpoint)
    mesh = Mesh.parse(args.mesh, comm)
    options, source, sampling = Options(**settings["training"]), Source(**settings["data"]), Sampling(**settings["sampling"])
    if options.save_every and not args.out:
        raise ValueError(f"--save-every (here {options.save_every}) needs --out, the folder of the run")
    data, tokenizer = read_data(comm, source, options)
    model = settings["model"]
    cfg = Config(vocab_size=tokenizer.vocab_size, **model | {"max_seq_len": model["max_seq_len"] or options.seq_len})
    if options.seq_len > cfg.max_seq_len:
        raise ValueError(f"seq_len {options.seq_len} is longer than the model's max_seq_len {cfg.max_seq_len}")
    trainer = Trainer(data, cfg, options, mesh, args.out, sampling)
    if checkpoint:
        trainer.resume(checkpoint)
    with nullcontext() if args.trace is None else FirstSteps(comm, args.trace):
        if comm.rank == 0 and args.bar:
            print(f"{len(data.train):,} tokens of {cfg.vocab_size:,} to learn from, {len(data.validation):,} to judge by; "
                  f"{count(cfg):,} parameters, {options.dtype}; mesh {mesh}", file=sys.stderr, flush=True)
        result = trainer.run(args.bar)
    if comm.rank == 0:
        report(result, args)
    return 0


def found(resume: str, out: Path | None) -> Path:
    """The checkpoint to go on from: the one named, or the last of a run's folder."""
    folder = Path(resume) if resume else out or Path()
    if (folder / "manifest.json").exists():
        return folder
    last = latest(folder / "checkpoints") or latest(folder)
    if last is None:
        raise ValueError(f"there is no checkpoint in {folder} to go on from")
    return last


def told(comm: Comm, act: Callable[[], str]) -> str:
    """The text that `act` gives on rank 0, on every rank."""
    return comm.gather_texts(comm.on_first(act) or "")[0]


def settings_of(comm: Comm, args: argparse.Namespace, checkpoint: Path | None) -> dict[str, dict[str, Any]]:
    """The settings of each section: defaults, over them those of a checkpoint's run, then the TOML file's, then the flags."""
    def from_files() -> dict[str, dict[str, Any]]:
        values = saved_settings(checkpoint) if checkpoint else {section: {} for section in SECTIONS}
        file = read_toml(args.config, SECTIONS) if args.config else {}
        new = file.get("data", {}) | given["data"]
        if "tokens" in new:                             # another source, as far as names go
            values["data"] = {}
        elif "text" in new:
            values["data"].pop("tokens", None)
        return {section: values[section] | file.get(section, {}) for section in SECTIONS}
    given = {section: {name: value for name, value in vars(args).items() if name in SECTIONS[section]} for section in SECTIONS}
    files = json.loads(told(comm, lambda: json.dumps(from_files())))
    return {s: SECTIONS[s] | checked(files[s], SECTIONS[s], s) | given[s] for s in SECTIONS}    # JSON had made lists of tuples


def saved_settings(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Those of the run that a checkpoint is of."""
    about = read_origin(checkpoint)
    kept = {"training": about["options"], "data": about["source"], "sampling": about["sampling"],
            "model": {name: value for name, value in about["config"].items() if name != "vocab_size"}}
    return {section: checked(kept[section], SECTIONS[section], f"{checkpoint}: {section}") for section in SECTIONS}


def read_data(comm: Comm, source: Source, options: Options) -> tuple[Data, Tokenizer]:
    """The tokens on every rank: a token file is mapped by all; of a text, rank 0 tells the others (one rank's disk may not be
    another's)."""
    if source.tokens:
        if source != Source(tokens=source.tokens):
            raise ValueError("a file of tokens has a tokenizer of its own: --tokens goes without --text, --tokenizer and "
                             "--vocab-size")
        tokens, tokenizer = open_tokens(source.tokens)
        return Data.split(tokens, options, tokenizer, vars(source)), tokenizer
    made = comm.on_first(lambda: tokenized(source))     # None on the others
    tokenizer = tokenizer_from(json.loads(comm.gather_texts(json.dumps(made[1].to_dict()) if made else "")[0]))
    size = int(comm.broadcast(np.array([made[0].size if made else 0]))[0])
    tokens = comm.broadcast(made[0] if made else np.zeros(size, np.int64))
    return Data.split(tokens, options, tokenizer, vars(source)), tokenizer


def tokenized(source: Source) -> tuple[np.ndarray, Tokenizer]:
    text = read_text(source.text) if source.text else standard_library()
    tokenizer = make_tokenizer(source.tokenizer, text, source.vocab_size)
    return tokenizer.encode(text), tokenizer


def report(result: Result, args: argparse.Namespace) -> None:
    """What rank 0 prints and writes at the end."""
    e, last = result.evaluation, result.first + len(result.losses) - 1
    log = read_log(args.out / "log.jsonl") if args.out and (args.out / "log.jsonl").exists() else []
    losses = [row["loss"] for row in log if "loss" in row] or result.losses
    if result.losses:
        print(f"loss {short(result.losses[0])} -> {short(result.losses[-1])} in steps {result.first} to {last}, "
              f"{result.tokens_per_second:,.0f} tokens/s")
    else:
        print(f"step {last} was the last: nothing was left to train")
    for line in (e, result.stopped):
        if line:
            print(line)
    print(f"\n{printable(result.sample or '')}", flush=True)
    if args.out:
        summary = {"losses": losses, "payload": result.payload, "sample": result.sample,
                   "tokens_per_second": result.tokens_per_second, "validation_loss": e and e.loss,
                   "bits_per_byte": e and e.bits_per_byte, "stopped": result.stopped}
        with replacing(args.out / "summary.json") as part:
            part.write_text(json.dumps(summary) + "\n", encoding="utf-8")
    if args.plot:
        print(draw_losses(args.out / "loss.png", curves(log), "nats per token"))


def curves(rows: list[dict[str, Any]]) -> dict[str, tuple[list[int], list[float]]]:
    """The curves in a log by their label: (steps, losses)."""
    names = {"loss": "training", "validation_loss": "validation"}
    found = {label: [(row["step"], row[key]) for row in rows if key in row] for key, label in names.items()}
    return {label: ([s for s, _ in points], [y for _, y in points]) for label, points in found.items() if points}


class FirstSteps(Trace):
    """The timeline of the first TRACED_STEPS training steps.  A step ends with the last of its calls of `adamw`."""
    first = now = 0                                     # numbers of steps, from 1 on

    def call(self, op: Any, run: Callable, *arrays: Any, **static: Any) -> tuple[Any, Any]:
        if op.name == "adamw":
            self.now = static["t"]
            self.first = self.first or self.now
        elif self.now and self.now - self.first == TRACED_STEPS - 1:
            self.stop()
            return run(*arrays, **static)
        return super().call(op, run, *arrays, **static)
