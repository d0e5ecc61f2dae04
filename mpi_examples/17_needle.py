"""A needle in a haystack: does a model find one sentence in a long context, wherever it stands?

    mpirun -n 4 python mpi_examples/17_needle.py
    python mpi_examples/17_needle.py --simulate 4                     (four threads, no MPI needed)
    ... --plot FILE                                                   draws it (needs matplotlib)

    sea 4 dog hill 7 old  magic 3  moon 9 tree the ...  magic      ->  3
    |---- depth ----------|        C words           |  the question

The haystack is made of words and stray numbers; the needle is the one number that follows "magic".  The test asks for it at
many lengths C and depths, from 0% (it comes first) to 100% (last).  The context is on all ranks:

    zigzag on 4 ranks    rank  0   1   2   3   3   2   1   0          ring attention brings the needle's keys and values from
                              [ ][ ][ ][n][ ][ ][ ][?]                whoever has it to whoever has the question

What it is honestly: a toy.  A decoder of two layers with RoPE, 32 wide, 32 words of vocabulary, learns this one task in
seconds: the first layer sees two words (windows), so that a number can know what stands before it; the second looks it up.
It learns with short contexts first, where there is less to confuse, then with those of all trained lengths.  It tells nothing
of large models but how they are measured.  There (Kamradt 2023; the lecture's slides 43 and 44) the needle is a sentence in
essays.

A test must be tested: a reader that searches the text with a regular expression must score 100%; one that sees the last words
only must score 100% where the needle is among them, and 0% elsewhere.  (A model that sees the last words only guesses.)

What to expect: these two; then the model, trained with its contexts cut over all ranks: more than 90% at every trained length,
on haystacks that it has not seen, and what happens beyond; and the same losses and the same grid as from one rank alone.
"""
import argparse
import re
from pathlib import Path
from typing import Callable, Mapping

import numpy as np

from refimpl.autograd import Params, Tensor
from refimpl.comm import Comm, Mesh, launch
from refimpl.commands.pictures import NO_PICTURE, pyplot
from refimpl.models import Config, Context, Plan, decoder, init
from refimpl.ops import IGNORE, Mask
from refimpl.rng import draw24, integers, stream
from refimpl.train import AdamW, Batch, gradients
from refimpl.train.step import OVER_SAMPLES

NUMBERS = 10                                            # words 1 to 10 of the vocabulary are the numbers 0 to 9
WORDS = ["magic", *map(str, range(NUMBERS)),
         *"sea dog hill old moon tree the red rain stone door wind lake bird salt road leaf star fire snow grass".split()]
MAGIC, STRAY = 0, 0.3                                   # the word; the share of numbers in the haystack
CFG = Config(vocab_size=len(WORDS), n_layers=2, n_heads=2, d_model=32, d_ff=64, max_seq_len=257, windows=(2, 0),
             positions="rope", norm="rms_norm", ffn="swiglu", biases=())
TRAINED, BEYOND = (16, 32, 48, 64), (128, 256)          # words of the haystack
DEPTHS = (0, 20, 40, 60, 80, 100)                       # percent of it that is before the needle
STEPS, SHORT, BATCH, RATE = 84, 64, 64, 1e-2            # steps, how many of them with the shortest contexts; samples; lr
SCALE = 8                                               # init's 0.02 suits a width of 768; of 32, five times as much or more
EACH, SIGHT = 10, 24                                    # haystacks for each cell; words that a short-sighted reader sees
LATER = 1e-6                                            # losses differ by rounding, 1e-15; training multiplies that
RING, ALONE = Plan("ring", "zigzag"), Plan()
Reader = Callable[[np.ndarray], np.ndarray]             # tokens int[B, C + 1] -> the numbers that it answers, int[B]


def haystacks(name: str, at: np.ndarray, C: int) -> Batch:
    """One haystack of C words and the question for each place in `at`, at which its needle begins."""
    B, where = len(at), np.arange(len(at) * C).reshape(-1, C)

    def below(n: int, what: str, index: np.ndarray) -> np.ndarray:
        return integers(stream(0, f"{name} {what}"), index, n)
    number, word = 1 + below(NUMBERS, "number", where), 1 + NUMBERS + below(len(WORDS) - 1 - NUMBERS, "word", where)
    tokens = np.where(draw24(stream(0, f"{name} stray"), where) < STRAY * 2 ** 24, number, word)
    tokens = np.concatenate([tokens, np.full((B, 1), MAGIC)], axis=1)
    answer = 1 + below(NUMBERS, "answer", np.arange(B))
    tokens[np.arange(B), at], tokens[np.arange(B), at + 1] = MAGIC, answer
    targets = np.full(tokens.shape, IGNORE)
    targets[:, C] = answer                              # the loss counts the answer alone
    return Batch(np.arange(B), tokens, targets)


def train(mesh: Mesh, plan: Plan, right: list[float] | None = None) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters and losses; each loss is compared with that of one rank, where these are given."""
    params = {name: t.like(t.array * SCALE) if t.array.ndim == 2 else t for name, t in init(CFG, mesh, seed=0).items()}
    optimizer, losses = AdamW(RATE, weight_decay=0.0), []
    for step in range(STEPS):
        C = TRAINED[0] if step < SHORT else TRAINED[step % len(TRAINED)]
        at = integers(stream(0, "place", step), np.arange(BATCH), C - 1)
        g = gradients(params, [haystacks(f"train {step}", at, C)], CFG, mesh, plan=plan)
        if right:
            limit = 1e-12 if step < 10 else LATER
            assert abs(g.loss - right[step]) <= limit, f"rank {mesh.world.rank}, step {step + 1}: {g.loss}, not {right[step]}"
        params = optimizer.step(params, g.grads)
        losses.append(g.loss)
    return params, losses


def reader(params: Mapping[str, Tensor], mesh: Mesh, plan: Plan, sight: int | None = None) -> Reader:
    """The model as a reader; with `sight`, each word sees so many words, itself included."""
    def read(tokens: np.ndarray) -> np.ndarray:
        ctx = Context.over(mesh, np.arange(len(tokens)), tokens.shape[1], plan, mask=Mask(causal=True, window=sight))
        y = decoder.forward(Tensor(ctx.own(tokens), OVER_SAMPLES), Params(params), CFG, ctx).array      # of own positions
        said = mesh.cp.all_gather(y.argmax(axis=-1), axis=1, sizes=ctx.sequence.sizes(mesh.cp.size))
        last = ctx.sequence.order(mesh.cp.size) == tokens.shape[1] - 1      # where the question is
        return said[:, last][:, 0] - 1
    return read


def searcher(sight: int | None = None) -> Reader:
    """Finds the needle in the text, or in its last `sight` words, by a regular expression; -1 where it does not."""
    def read(tokens: np.ndarray) -> np.ndarray:
        texts = [" ".join(WORDS[t] for t in row[:-1][-(sight or len(row)):]) for row in tokens]
        found = [re.search(r"magic (\d)", text) for text in texts]
        return np.array([int(match[1]) if match else -1 for match in found])
    return read


def places(C: int) -> np.ndarray:
    """Where the needle begins, for each of DEPTHS."""
    return np.array([depth * (C - 2) // 100 for depth in DEPTHS])


def grid(read: Reader) -> np.ndarray:
    """The share of the haystacks of each cell that is answered rightly: (lengths, depths)."""
    scores = []
    for C in TRAINED + BEYOND:
        for depth, at in zip(DEPTHS, places(C)):
            batch = haystacks(f"test {C} {depth}", np.repeat(at, EACH), C)
            scores.append(np.mean(read(batch.tokens) == batch.targets[:, -1] - 1))
    return np.array(scores).reshape(-1, len(DEPTHS))


def main(comm: Comm, plot: Path | None = None) -> None:
    near = np.array([places(C) >= C - SIGHT for C in TRAINED + BEYOND])     # where the needle is among the last words
    assert (grid(searcher()) == 1).all(), "the test is wrong: who reads everything must find everything"
    assert (grid(searcher(SIGHT)) == near).all(), "the test is wrong: a needle is found where it is not, or not where it is"

    losses, alone = np.zeros(STEPS), np.zeros(near.shape)
    if comm.rank == 0:                                                      # the others wait
        params, losses = train(Mesh(), ALONE)
        alone = grid(reader(params, Mesh(), ALONE))
    right, alone = comm.broadcast(np.array(losses)), comm.broadcast(alone)

    mesh = Mesh(cp=comm.size, comm=comm)
    params, losses = train(mesh, RING, right.tolist())
    everything, sighted = grid(reader(params, mesh, RING)), grid(reader(params, mesh, RING, SIGHT))
    assert np.array_equal(everything, alone), f"rank {comm.rank}: the grid is not that of one rank:\n{everything}\n{alone}"
    assert everything[:len(TRAINED)].min() > 0.9, f"rank {comm.rank}: it does not find the needle:\n{everything}"
    assert sighted[near].min() > 0.9 and sighted[~near].mean() < 0.2, f"rank {comm.rank}: short sight:\n{sighted}"
    comm.barrier()                                                          # all have come this far: none has failed
    if comm.rank == 0:
        example, off = haystacks("shown", np.array([4]), TRAINED[0]), np.abs(losses - right)
        print(" ".join(WORDS[t] for t in example.tokens[0]), " -> ", WORDS[example.targets[0, -1]])
        print(f"\nloss of step 1, {SHORT} and {STEPS}: {losses[0]:.3f}, {losses[SHORT - 1]:.3f}, {losses[-1]:.3f}; off from "
              f"one rank's by {off[:10].max():.0e} at most in 10 steps, {off.max():.0e} in all\n")
        print(table(f"the model, its context on {comm.size} ranks", everything))
        print(table(f"the same model, where each word sees {SIGHT} words only", sighted))
        print(f"in the {near.sum()} cells whose needle is among the last {SIGHT} words it finds {sighted[near].mean():.0%}, in "
              f"the other {(~near).sum()} it guesses: {sighted[~near].mean():.0%}\na regular expression finds 100%; in the "
              f"last {SIGHT} words only, 100% in the former and 0% in the latter")
        if plot:
            print("\n" + picture(plot, {"the model": everything, f"each word sees {SIGHT} words": sighted,
                                        f"regular expression, last {SIGHT} words": near}))
        print(f"\nOK: more than 90% of unseen needles are found in every trained cell; the same on {comm.size} ranks as on one")


def table(title: str, scores: np.ndarray) -> str:
    lines = [f"{title}: found, of {EACH} in each cell",
             f"{'words':>9s}   depth" + "".join(f"{depth:>6d}%" for depth in DEPTHS)]
    for C, row in zip(TRAINED + BEYOND, scores):
        cells = "".join(f"{score:>7.0%}" for score in row)
        lines.append(f"{C:>9d}        " + cells + ("   not trained" if C in BEYOND else ""))
    return "\n".join(lines) + "\n"


def picture(file: Path, grids: dict[str, np.ndarray]) -> str:
    """Length across, depth down, red to green.  Says where it is, or what is missing."""
    plot = pyplot()
    if plot is None:
        return NO_PICTURE
    figure, all_axes = plot.subplots(1, len(grids), figsize=(11, 3.6), sharey=True, layout="constrained")
    for axes, (title, scores) in zip(all_axes, grids.items()):
        image = axes.imshow(scores.T, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        axes.set_title(title, fontsize=11)
        axes.set_xticks(range(len(TRAINED + BEYOND)), [f"{C}" for C in TRAINED + BEYOND])
        axes.set_yticks(range(len(DEPTHS)), [f"{depth}%" for depth in DEPTHS])
        axes.set_xticks(np.arange(len(TRAINED + BEYOND)) - 0.5, minor=True)
        axes.set_yticks(np.arange(len(DEPTHS)) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.5)
        axes.tick_params(which="minor", length=0)
        axes.axvline(len(TRAINED) - 0.5, color="black", linewidth=1.5)
    figure.supxlabel("words of the haystack (right of the black line: more than in training)", fontsize=10)
    all_axes[0].set_ylabel("depth of the needle")
    figure.colorbar(image, ax=all_axes, label="needles found", ticks=[0, 0.5, 1])
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    plot.close(figure)
    return f"picture: {file}"


if __name__ == "__main__":
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--plot", type=Path, metavar="FILE")
    own, rest = flags.parse_known_args()
    launch(lambda comm: main(comm, own.plot), ranks=(2, 4), argv=rest)
