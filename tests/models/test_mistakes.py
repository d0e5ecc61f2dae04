"""Localises wrong sharding of the model that nobody is told of: a line too few, too many or too early must be one sentence that
says what to do, the same on every rank and on any number of ranks, one included.

The wrong programs are the model's own files with a line changed, or its table of placements with an entry changed.
"""
import importlib
import inspect
import re
from typing import Any, NamedTuple

import numpy as np
import pytest

from refimpl import ops, parallel
from refimpl.autograd import Layout, LayoutError, Tensor, recompute, value_and_grad
from refimpl.comm import Comm, Mesh
from refimpl.models import Config, Context, parameters, placements
from refimpl.parallel import Cut, Replicated, as_partial, gather, reduce_from, reduce_gradients, shard, total_over

SIZES = {"vocab_size": 11, "n_layers": 1, "n_heads": 8, "d_model": 16, "max_seq_len": 4, "d_ff": 24}
LLAMA = {"norm": "rms_norm", "positions": "rope", "ffn": "swiglu", "biases": (), "tied": False}
MODELS = {"gpt2": Config(**SIZES, dropout=0.25), "llama": Config(**SIZES | LLAMA),
          "post-norm": Config(**SIZES | LLAMA, norm_place="post"),
          "geglu": Config(**SIZES | LLAMA | {"ffn": "geglu_tanh"}), "qk-norm": Config(**SIZES | LLAMA, qk_norm=True)}
B, T = 3, 4
SERIAL, TP = Mesh(), frozenset({"tp"})
Changes = tuple[tuple[str, str, str], ...]              # (file, line, new line)


def program(changes: Changes) -> dict[str, Any]:
    """The names of decoder.py, made anew with changed lines.  New lines may use every op."""
    every_op, layers = {name: getattr(where, name) for where in (ops, parallel) for name in where.__all__}, dict[str, Any]()
    for file in ("mlp", "attention", "decoder"):
        source = inspect.getsource(importlib.import_module(f"refimpl.models.{file}"))
        for _, line, new in (change for change in changes if change[0] == file):
            assert source.count(line) == 1, f"{file}.py must have this once: {line}"
            source = source.replace(line, new)
        names = every_op | {"ops": ops, "recompute": recompute}
        exec(compile(source, f"the changed {file}.py", "exec"), names)
        names |= layers                                 # the decoder's layers are the changed ones
        layers[file] = names.get(file)
    return names


def loss_and_gradients(mesh: Mesh, model: str = "gpt2", changes: Changes = (), placed: tuple[tuple[str, int | None], ...] = ()):
    """The loss, the gathered gradients, and the gradients before they are reduced, of a program."""
    cfg, rows = MODELS[model], parameters(MODELS[model], SERIAL)
    draw = np.random.default_rng(0)
    whole = {name: (row.scale is None) + draw.normal(0, 0.3, row.shape) for name, row in rows.items()}
    table = placements(cfg, mesh) | {name: Replicated() if axis is None else Cut.even(axis, rows[name].shape[axis], mesh.tp)
                                     for name, axis in placed}
    tokens, targets = draw.integers(0, cfg.vocab_size, (2, B, T))
    ctx = Context.over(mesh, np.arange(B), T, seed=1, step=0)
    given = Tensor(ctx.own(tokens), Layout(frozenset({"dp", "cp"})), cut=ctx.cut)
    loss = program(changes)["loss"]
    (value, _), grads = value_and_grad(lambda p: loss(given, ctx.own(targets), p, cfg, ctx), shard(whole, table, mesh))
    return total_over(mesh, float(value))[0], gather(reduce_gradients(grads, mesh, table), table, mesh), grads


class Mistake(NamedTuple):
    words: str
    changes: Changes = ()
    placed: tuple[tuple[str, int | None], ...] = ()     # (parameter, another axis of its cut, or None: replicated)
    model: str = "gpt2"


MLP, ATTN = "layers.0.mlp", "layers.0.attn"
F, NO_ENTER = "x, again = enter(x, ctx)", "again = None"
F_TWICE = "x, again = copy_to(enter(x, ctx)[0], comm=ctx.mesh.tp), None"
CUT_X = "x, again = scatter_to(x, comm=ctx.mesh.tp), None"
UP, GATE = (f'column_parallel_linear(x, p["{of}.w"], p.get("{of}.b"), again=again)' for of in ("up", "gate"))
UP = f"h = {UP}"
DOWN, OUT = 'row_parallel_linear(h, p["down.w"])', 'row_parallel_linear(merge_heads(y), p["o.w"])'
G_DOWN, G_OUT = f"leave({DOWN}, ctx)", f"leave({OUT}, ctx)"
QKV = 'column_parallel_linear(x, p[f"{of}.w"], p.get(f"{of}.b"), again=again)'
EACH = "heads(x, of, p, cfg, again) for of"
LOOKUP = 'vocab_parallel_embedding(p["embed.w"], tokens, comm=ctx.mesh.tp, **words(cfg))'
G_EMBED, HEAD = "x = leave(x, ctx)", 'column_parallel_linear(x, w, p.get("head.b"), again=again)'
LOGITS = "logits(tokens, p, cfg, ctx)"
GATHERED = f"all_gather({LOGITS}, comm=ctx.mesh.tp, sizes=[len(part) for part in np.array_split(range(11), ctx.mesh.tp.size)])"
LOSS = f"return cross_entropy({LOGITS}, targets, cfg, ctx)"
LAST = 'return x + mlp(norm(x, p / "norm2", cfg), p / "mlp", cfg, ctx)'
RECOMPUTED = ("decoder", 'layer(x, p / f"layers.{i}"', 'recompute(layer, x, p / f"layers.{i}"')

NO_F = r"linear: an activation of shape .* is replicated over tp, its partner is not: copy_to it first \(f\)"
F_AGAIN = "copy_to over tp takes a replicated value, but .* is varying there: a second f would add its gradient up twice"
G_AGAIN = "reduce_from over tp takes a partial value, but .* is replicated there: only a sum over ranks may be reduced"
UNREDUCED = "{} over tp takes a {} value, but .* is partial there: reduce_from it first"
PARTIAL = r"{0} of a value that is partial over tp: reduce before a nonlinearity \(reduce_from\): {0} of a sum"
ADDED = "add of a value that is partial over tp and {} of shape .*, which is not: .* once per rank; reduce_from before the"
BIAS = "linear: the product with {} is partial over tp; its bias would be added once per rank: add it after reduce_from"
ALONG = "{} works along axis {} of {} of shape .*, which is cut over tp: .* its own part only; gather_from it first"
UNCUT = "{}: {} must be cut along axis {} over a mesh axis, its cut is {}$"
NO_ROWS = "linear: an activation .* is cut by columns over tp, {} is not cut by rows there"
ALONE = r"add: an activation of shape .* is replicated over tp, its partner is not: copy_to it first \(f\)"

FORGOTTEN_F = {
    "before q, k and v": Mistake(NO_F, (("attention", F, NO_ENTER),)),
    "before k and v, but not q": Mistake(NO_F, (
        ("attention", F, NO_ENTER),
        ("attention", EACH, EACH.replace("(x", '(copy_to(x, comm=ctx.mesh.tp) if of == "q" else x')))),
    "before up": Mistake(NO_F, (("mlp", F, NO_ENTER),)),
    "before the gate, but not up": Mistake(
        NO_F, (("mlp", F, f"whole = x; {F}"), ("mlp", GATE, GATE.replace("(x", "(whole"))), model="llama"),
    "before up, in a block that is recomputed": Mistake(NO_F, (("mlp", F, NO_ENTER), RECOMPUTED)),
    "before a tied head": Mistake(NO_F, (("decoder", F, NO_ENTER),)),
    "before a head of its own": Mistake(NO_F, (("decoder", F, NO_ENTER),), model="llama"),
    "for a cut of the input": Mistake(NO_ROWS.format(f"{MLP}.up.w"), (("mlp", F, CUT_X),)),
}
DOUBLED_F = {
    "before q, k and v": Mistake(F_AGAIN, (("attention", F, F_TWICE),)),
    "before up": Mistake(F_AGAIN, (("mlp", F, F_TWICE),)),
    "before the head": Mistake(F_AGAIN, (("decoder", F, F_TWICE),)),
}
FORGOTTEN_G = {
    "after o, then the bias": Mistake(ADDED.format(f"the parameter {ATTN}.o.b"), (("attention", G_OUT, OUT),)),
    "after o, then the residual": Mistake(ADDED.format("an activation"), (("attention", G_OUT, OUT),), model="llama"),
    "after down, then the bias": Mistake(ADDED.format(f"the parameter {MLP}.down.b"), (("mlp", G_DOWN, DOWN),)),
    "after down, then the residual": Mistake(ADDED.format("an activation"), (("mlp", G_DOWN, DOWN),), model="post-norm"),
    "after a plain product with down": Mistake(
        ADDED.format("an activation"), (("mlp", G_DOWN, 'ops.linear(h, p["down.w"])'),), model="llama"),
    "until after the residual": Mistake(ADDED.format("an activation"), (
        ("mlp", G_DOWN, DOWN),
        ("decoder", LAST, LAST.replace("x +", "reduce_from(x +") + ", comm=ctx.mesh.tp)")), model="llama"),
    "after the embedding, then positions": Mistake(ADDED.format("an activation"), (("decoder", G_EMBED, "pass"),)),
    "after the embedding, then a norm": Mistake(PARTIAL.format("rms_norm"), (("decoder", G_EMBED, "pass"),), model="llama"),
    "for an f": Mistake(UNREDUCED.format("copy_to", "replicated"), (("decoder", G_EMBED, F),), model="llama"),
    "for a gather_from": Mistake(UNREDUCED.format("gather_from", "varying"), (
        ("mlp", G_DOWN, f"gather_from({DOWN}, comm=ctx.mesh.tp)"),)),
    "for a reduce_scatter": Mistake(ALONE, (
        ("attention", G_OUT, f"reduce_scatter({OUT}, comm=ctx.mesh.tp)"),), model="llama"),
}
DOUBLED_G = {
    "after o": Mistake(G_AGAIN, (("attention", G_OUT, f"reduce_from({G_OUT}, comm=ctx.mesh.tp)"),)),
    "after down": Mistake(G_AGAIN, (("mlp", G_DOWN, f"reduce_from({G_DOWN}, comm=ctx.mesh.tp)"),)),
    "after the embedding": Mistake(G_AGAIN, (("decoder", G_EMBED, f"{G_EMBED}; {G_EMBED}"),)),
    "with as_partial": Mistake(UNREDUCED.format("as_partial", "varying"), (
        ("mlp", DOWN, f"as_partial({DOWN}, comm=ctx.mesh.tp)"),)),
}
EARLY = {
    "bias of down, in the product": Mistake(BIAS.format(f"{MLP}.down.w"), (
        ("mlp", DOWN, 'row_parallel_linear(h, p["down.w"], p["down.b"])'),)),
    "bias of o, in a plain product": Mistake(BIAS.format(f"{ATTN}.o.w"), (
        ("attention", OUT, 'ops.linear(merge_heads(y), p["o.w"], p["o.b"])'),)),
    "bias of down": Mistake(ADDED.format(f"the parameter {MLP}.down.b"), (("mlp", DOWN, f'{DOWN} + p["down.b"]'),)),
    "bias of o": Mistake(ADDED.format(f"the parameter {ATTN}.o.b"), (("attention", OUT, f'{OUT} + p["o.b"]'),)),
    **{name: Mistake(PARTIAL.format(name), (("mlp", DOWN, f"ops.{name}({DOWN}{rest})"),))
       for name, rest in {"gelu_tanh": "", "gelu_erf": "", "relu": "", "softmax": "", "rms_norm": ', p["down.b"]',
                          "layer_norm": ', p["down.b"], p["down.b"]', "max": ", axis=0"}.items()},
}
CUTS = {
    "rows first, then columns": Mistake(
        PARTIAL.format("gelu_tanh"), (
            ("mlp", F, CUT_X), ("mlp", UP, 'h = row_parallel_linear(x, p["up.w"])'),
            ("mlp", G_DOWN, 'gather_from(column_parallel_linear(h, p["down.w"]), comm=ctx.mesh.tp)')),
        ((f"{MLP}.up.w", 0), (f"{MLP}.down.w", 1))),
    "rows first, gated": Mistake(
        PARTIAL.format("swiglu"), (
            ("mlp", F, CUT_X), ("mlp", UP, 'h = row_parallel_linear(x, p["up.w"])'),
            ("mlp", GATE, 'row_parallel_linear(x, p["gate.w"])')), ((f"{MLP}.up.w", 0), (f"{MLP}.gate.w", 0)), "llama"),
    "the row layer for the column layer": Mistake(
        UNCUT.format("row_parallel_linear", f"{MLP}.up.w", 0, "{'tp': 1}"), (("mlp", UP, UP.replace("column", "row")),)),
    "up by rows": Mistake(UNCUT.format("column_parallel_linear", f"{MLP}.up.w", 1, "{'tp': 0}"), (), ((f"{MLP}.up.w", 0),)),
    "down by columns": Mistake(
        UNCUT.format("row_parallel_linear", f"{MLP}.down.w", 0, "{'tp': 1}"), (), ((f"{MLP}.down.w", 1),)),
    "the gate whole": Mistake(
        UNCUT.format("column_parallel_linear", f"{MLP}.gate.w", 1, "none"), (), ((f"{MLP}.gate.w", None),), "llama"),
    "the gate by rows": Mistake(
        UNCUT.format("column_parallel_linear", f"{MLP}.gate.w", 1, "{'tp': 0}"), (), ((f"{MLP}.gate.w", 0),), "llama"),
    "k whole": Mistake(UNCUT.format("column_parallel_linear", f"{ATTN}.k.w", 1, "none"), (), ((f"{ATTN}.k.w", None),)),
    "o whole": Mistake(UNCUT.format("row_parallel_linear", f"{ATTN}.o.w", 0, "none"), (), ((f"{ATTN}.o.w", None),)),
    "o whole, in a plain product": Mistake(
        NO_ROWS.format(f"{ATTN}.o.w"), (("attention", OUT, 'ops.linear(merge_heads(y), p["o.w"])'),), ((f"{ATTN}.o.w", None),)),
    "the embedding whole": Mistake(
        "vocab_parallel_embedding: the parameter embed.w .* must be cut along axis 0 over tp, its cut is none: embedding "
        "looks up in a whole matrix", (), (("embed.w", None),), "llama"),
    "the embedding by words, in a plain lookup": Mistake(
        ALONG.format("embedding", 0, "the parameter embed.w"), (("decoder", LOOKUP, 'embedding(p["embed.w"], tokens)'),)),
    "the bias of o": Mistake(ALONE, (), ((f"{ATTN}.o.b", 0),)),
    "a gain": Mistake(ALONE.replace("add", "layer_norm"), (), (("layers.0.norm1.g", 0),)),
    "the bias of up whole": Mistake("mlp.up.w is cut by columns over tp, its bias is not: each rank needs those of its own", (),
                                    ((f"{MLP}.up.b", None),)),
    "a whole value to a matrix cut by rows": Mistake("attn.o.w is cut by rows over tp, so x must be cut by columns there", (
        ("attention", "return output(y, p, cfg, ctx)", 'return leave(row_parallel_linear(x, p["o.w"]), ctx)'),)),
}
ALONG_A_CUT = {
    "rms_norm of the hidden units": Mistake(ALONG.format("rms_norm", 2, "an activation"), (
        ("mlp", UP, f'{UP}; h = rms_norm(h, p["up.b"])'),)),
    "layer_norm of all heads together": Mistake(ALONG.format("layer_norm", 2, "an activation"), (
        ("attention", QKV, f'ops.layer_norm({QKV}, p[f"{{of}}.b"], p[f"{{of}}.b"])'),)),
    "softmax of the hidden units": Mistake(ALONG.format("softmax", 2, "an activation"), (
        ("mlp", UP, f"{UP}; h = softmax(h)"),)),
    "mean of the hidden units": Mistake(ALONG.format("mean", 2, "an activation"), (
        ("mlp", UP, f"{UP}; h = h - mean(h, axis=-1, keepdims=True)"),)),
    "softmax of the own words": Mistake(ALONG.format("softmax", 2, "an activation"), (("decoder", HEAD, f"softmax({HEAD})"),)),
    "loss of the own words": Mistake(ALONG.format("cross_entropy", 2, "an activation"), (
        ("decoder", LOSS, f"return ops.cross_entropy({LOGITS}, targets)"),)),
}
LOSSES = {
    "of gathered logits, as if of the own words": Mistake(
        "vocab_parallel_cross_entropy over tp takes a varying value, but .* is replicated there: it has the columns of all "
        "ranks already, which would be counted once per rank: cross_entropy takes it", (
            ("decoder", LOSS, LOSS.replace("logits", "forward")),)),
    "each rank's own": Mistake(
        "the loss differs between the ranks over tp: reduce_from it first, or gather_from what it is made of", (
            ("decoder", LOSS, f"return ops.cross_entropy({GATHERED}, targets)"),)),
    "f before it": Mistake("the loss differs between the ranks over tp", (
        ("decoder", LOSS, "return ops.cross_entropy(copy_to(forward(tokens, p, cfg, ctx), comm=ctx.mesh.tp), targets)"),)),
    "a sum that is not complete": Mistake("the loss is partial over tp: reduce_from it first", (
        ("decoder", LOSS, f"return ops.sum({LOGITS}), None"),)),
    "all_gathered logits, as if of the own words": Mistake("vocab_parallel_cross_entropy: .* must be cut over tp along", (
        ("decoder", LOSS, LOSS.replace(LOGITS, GATHERED)),)),
}
MISTAKES = {f"{kind}: {name}": mistake for kind, mistakes in {
    "f forgotten": FORGOTTEN_F, "f twice": DOUBLED_F, "g forgotten": FORGOTTEN_G, "g twice": DOUBLED_G, "before g": EARLY,
    "cut": CUTS, "along a cut": ALONG_A_CUT, "loss": LOSSES}.items() for name, mistake in mistakes.items()}
ONLY_SIZES_TELL = {
    "the gate whole, in a plain product": Mistake("swiglu: gate.* and up.* must have one shape", (
        ("mlp", GATE, 'ops.linear(x, p["gate.w"])'),), ((f"{MLP}.gate.w", None),), "llama"),
    "the gate whole, GEGLU": Mistake("mul: .*broadcast", (
        ("mlp", GATE, 'ops.linear(x, p["gate.w"])'),), ((f"{MLP}.gate.w", None),), "geglu"),
}


def sentence(mesh: Mesh, mistake: Mistake, error: type = LayoutError) -> str:
    with pytest.raises(error) as caught:
        loss_and_gradients(mesh, mistake.model, mistake.changes, mistake.placed)
    return str(caught.value)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_on_every_rank_and_on_any_number_of_ranks(ranks, name):
    mistake = MISTAKES[name]
    serial = re.sub(r"\([\d, ]+\)", "()", sentence(SERIAL, mistake))            # without shapes

    def check(comm: Comm):
        words = sentence(Mesh(tp=comm.size, comm=comm), mistake)
        assert re.search(mistake.words, words), words
        assert re.sub(r"\([\d, ]+\)", "()", words) == serial
    ranks.run(check)


ATTEND = "parallel.attention(q, k, v, ctx.mesh.cp, ctx.sequence, ctx.mask, ctx.plan.attention, ctx.plan.ring)"
OWN_KEYS = {                                            # with the positions cut over cp
    "naive": (ATTEND, "ops.attention(q, k, v, mask=ctx.mask)", "attention works along axis 2"),
    "blockwise": (ATTEND, "ops.blockwise_attention(q, k, v, mask=ctx.mask)", "blockwise_attention works along axis 2"),
    "values that stay": (ATTEND, "ops.attention(q, parallel.whole_keys(k, v, ctx.mesh.cp, ctx.sequence)[0], v, mask=ctx.mask)",
                         "attention works along axis 2")}


@pytest.mark.parametrize("name", OWN_KEYS)
@pytest.mark.parametrize("model", ("gpt2", "llama"))
def test_attention_to_the_own_keys_alone_is_refused_also_on_one_rank(ranks, name, model):
    line, new, words = OWN_KEYS[name]

    def check(comm: Comm):
        for mesh in (Mesh(cp=comm.size, comm=comm), Mesh()):
            with pytest.raises(LayoutError, match=words):
                loss_and_gradients(mesh, model, (("attention", line, new),))
    ranks.run(check)


@pytest.mark.parametrize("name", ONLY_SIZES_TELL)
def test_a_mistake_that_only_sizes_tell_is_refused_on_several_ranks(ranks, name):
    """No tag tells a whole value that varies from a part whose cut is unknown.  On one rank the numbers are right."""
    mistake = ONLY_SIZES_TELL[name]

    def check(comm: Comm):
        mesh = Mesh(tp=comm.size, comm=comm)
        if comm.size == 1:
            assert loss_and_gradients(mesh, mistake.model, mistake.changes, mistake.placed)
            return
        words = sentence(mesh, mistake, ValueError)
        assert re.search(mistake.words, words), words
    ranks.run(check)


# -- what looks wrong and is right -----------------------------------------------------------------------------------

GAINS = {f"layers.0.norm{i}.{part}" for i in (1, 2) for part in "gb"}
RIGHT: dict[str, tuple[str, Changes]] = {
    **{name: (name, ()) for name in MODELS},
    "recomputed blocks": ("gpt2", (RECOMPUTED,)),
    "dropout of a partial sum": ("gpt2", (
        ("mlp", G_DOWN, f'reduce_from(drop({DOWN}, p, cfg, ctx), comm=ctx.mesh.tp)'),
        ("mlp", 'y = y + p["down.b"] if', 'y = y + drop(p["down.b"] + ops.scale(y, by=0.0), p, cfg, ctx) if'),
        ("mlp", "return drop(y, p, cfg, ctx)", "return y"))),
    "f before the norms": ("gpt2", (
        ("attention", F, NO_ENTER), ("mlp", F, NO_ENTER),
        ("decoder", 'attention(norm(x, p / "norm1"', 'attention(norm(copy_to(x, comm=ctx.mesh.tp), p / "norm1"'),
        ("decoder", LAST, LAST.replace("norm(x", "norm(copy_to(x, comm=ctx.mesh.tp)")))),
    "an f for each of q, k and v": ("gpt2", (
        ("attention", F, NO_ENTER), ("attention", EACH, EACH.replace("(x", "(copy_to(x, comm=ctx.mesh.tp)")))),
    "plain products, which see the cuts too": ("llama", (
        ("mlp", UP, 'h = ops.linear(x, p["up.w"], p.get("up.b"))'),
        ("attention", OUT, 'ops.linear(merge_heads(y), p["o.w"])'))),
    "gathered logits to the plain loss": ("gpt2", (
        ("decoder", LOSS, "return ops.cross_entropy(forward(tokens, p, cfg, ctx), targets)"),)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_accepted_and_gives_the_loss_and_gradients_of_one_rank(ranks, name):
    model, changes = RIGHT[name]
    want_loss, want, _ = loss_and_gradients(SERIAL, model)
    parts = {"f before the norms": GAINS, "qk-norm": {f"{ATTN}.{part}_norm.g" for part in "qk"}}.get(name, set())

    def check(comm: Comm):
        loss, got, raw = loss_and_gradients(Mesh(tp=comm.size, comm=comm), model, changes)
        assert abs(loss - want_loss) <= 1e-12 * want_loss
        largest = max(np.abs(a).max() for a in want.values())
        assert all(np.abs(got[key] - want[key]).max() <= 1e-12 * largest for key in want)
        assert {key for key, g in raw.items() if TP <= g.partial} == parts
    ranks.run(check)


def test_a_whole_gain_on_cut_data_is_summed_over_the_ranks(ranks):
    """x̂ = 1, 2 on rank 0 and 3, 4 on rank 1, dy = 1: the gain's gradient is 10 on both; unreduced it would be 3 and 7."""
    def check(comm: Comm):
        mesh, own = Mesh(tp=comm.size, comm=comm), np.array_split(np.arange(1.0, 5), comm.size)[comm.rank]
        _, grads = value_and_grad(
            lambda p: reduce_from(as_partial(ops.sum(Tensor(own, Layout(TP)) * p["g"]), comm=mesh.tp), comm=mesh.tp),
            {"g": Tensor(np.ones(1), name="g")})
        assert grads["g"].layout == Layout(TP, TP)
        assert grads["g"].array.tolist() == [[3, 7][comm.rank] if comm.size == 2 else own.sum()]
        assert reduce_gradients(grads, mesh)["g"].array.tolist() == [10]
    ranks.run(check)
