"""Localises a sharded model that is not the serial one: in the loss, in one parameter's gradient, in its initial weights or in
what it sends.  And a decoder that sees the future, or has the wrong number of parameters.

Equal means: float64, |a - b| <= 1e-12·scale, scale the largest absolute value of the serial gradient of that parameter.
"""
import functools
import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from refimpl.autograd import Layout, Params, Record, Tensor, value_and_grad
from refimpl.comm import Comm, Mesh, shares
from refimpl.models import GPT2_SMALL, Config, Context, decoder, init, parameters, placements
from refimpl.ops import sum as total
from refimpl.parallel import Replicated, box, gather, reduce_gradients, shard, total_over

B, T, V = 5, 6, 11                                      # 5 samples: on 8 dp ranks some have none
EVEN = Config(vocab_size=V, n_layers=2, n_heads=8, d_model=16, max_seq_len=8, d_ff=24, dropout=0.25)
UNEVEN = Config(vocab_size=V, n_layers=2, n_heads=9, d_model=18, max_seq_len=8, d_ff=19, dropout=0.25)
THREE_HEADS = Config(vocab_size=V, n_layers=1, n_heads=3, d_model=12, max_seq_len=8, d_ff=7)
CONFIGS = {"even": EVEN, "uneven": UNEVEN}
SERIAL = Mesh()


@functools.cache
def whole_parameters(cfg: Config) -> dict[str, np.ndarray]:
    """Global arrays with nothing at zero, so that every path carries a gradient."""
    draw = np.random.default_rng(0)
    return {name: (row.scale is None) + draw.normal(0, 0.3, row.shape) for name, row in parameters(cfg, SERIAL).items()}


def batch(mesh: Mesh):
    """This rank's rows, tokens and targets; every second target of sample 1 is ignored, and all of sample 3."""
    draw = np.random.default_rng(1)
    tokens, targets = draw.integers(0, V, (2, B, T))
    targets[1, ::2], targets[3] = -100, -100
    ends = np.cumsum((0, *shares(B, mesh.dp.size)))
    rows = np.arange(B)[ends[mesh.dp.rank]:ends[mesh.dp.rank + 1]]
    return rows, Tensor(tokens[rows], Layout(frozenset({"dp"}))), targets[rows]


def loss_and_gradients(cfg: Config, mesh: Mesh, step: int | None):
    """Sum of the loss, count, and global gradients (of the sum) on any mesh."""
    rows, tokens, targets = batch(mesh)
    ctx = Context(mesh, rows, np.arange(T), seed=7, step=step)
    table = placements(cfg, mesh)
    params = shard(whole_parameters(cfg), table, mesh)
    (value, count), grads = value_and_grad(lambda p: decoder.loss(tokens, targets, p, cfg, ctx), params)
    loss, count = total_over(mesh, float(value), int(count.array))
    return loss, count, gather(reduce_gradients(grads, mesh), table, mesh)


@functools.cache
def serial(cfg: Config, step: int | None):
    return loss_and_gradients(cfg, SERIAL, step)


@functools.cache
def key_bias_scale(cfg: Config, step: int | None, name: str) -> float:
    """Σ |dk| over samples and positions: the sum that makes the gradient of attn.k.b, over absolute values."""
    with Record() as record:
        loss_and_gradients(cfg, SERIAL, step)
    return float(np.abs(record[name.removesuffix(".b")].dy[0]).sum(axis=(0, 1)).max())


def require_equal(cfg: Config, mesh: Mesh, step: int | None):
    loss, count, grads = loss_and_gradients(cfg, mesh, step)
    want_loss, want_count, want = serial(cfg, step)
    assert count == want_count == B * T - T // 2 - T
    assert abs(loss - want_loss) <= 1e-12 * want_loss
    assert list(grads) == list(want)
    for name, row in parameters(cfg, SERIAL).items():
        scale = key_bias_scale(cfg, step, name) if row.gauge else np.abs(want[name]).max()
        assert grads[name].shape == row.shape and np.abs(grads[name] - want[name]).max() <= 1e-12 * scale, name


def prepare(cfg: Config, step: int | None):
    """The serial run once, before there are threads."""
    serial(cfg, step)
    for name, row in parameters(cfg, SERIAL).items():
        if row.gauge:
            key_bias_scale(cfg, step, name)


# -- serial = the formulas ------------------------------------------------------------------------------------------


def loss_by_hand(w, cfg, tokens, targets):
    """GPT-2 in plain numpy, sample by sample and head by head; nothing of refimpl."""
    def norm(x, name):
        centred = x - x.mean(axis=1, keepdims=True)
        return centred / np.sqrt((centred ** 2).mean(axis=1, keepdims=True) + cfg.eps) * w[name + ".g"] + w[name + ".b"]

    def dense(x, name):
        return x @ w[name + ".w"] + w[name + ".b"]

    def softmax(s):
        return np.exp(s) / np.exp(s).sum(axis=1, keepdims=True)
    out, K = 0.0, cfg.d_model // cfg.n_heads
    for sample, wanted in zip(tokens, targets):
        x = w["embed.w"][sample] + w["positions.w"][:T]
        for layer in (f"layers.{i}" for i in range(cfg.n_layers)):
            h = norm(x, f"{layer}.norm1")
            q, k, v = (dense(h, f"{layer}.attn.{part}").reshape(T, cfg.n_heads, K) for part in "qkv")
            future = np.triu(np.full((T, T), -np.inf), 1)
            heads = [softmax(q[:, j] @ k[:, j].T / math.sqrt(K) + future) @ v[:, j] for j in range(cfg.n_heads)]
            x = x + dense(np.concatenate(heads, axis=1), f"{layer}.attn.o")
            h = dense(norm(x, f"{layer}.norm2"), f"{layer}.mlp.up")
            x = x + dense(h / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h ** 3))), f"{layer}.mlp.down")
        p = softmax(norm(x, "norm") @ w["embed.w"].T)
        out -= sum(math.log(p[t, y]) for t, y in enumerate(wanted) if y != -100)
    return out


@pytest.mark.parametrize("cfg", (EVEN, UNEVEN, THREE_HEADS))
def test_the_serial_loss_is_gpt2s(cfg):
    _, tokens, targets = batch(SERIAL)
    by_hand = loss_by_hand(whole_parameters(cfg), cfg, tokens.array, targets)
    assert abs(serial(cfg, None)[0] - by_hand) <= 1e-12 * by_hand


# -- sharded = serial ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", (None, 3), ids=("no dropout", "dropout"))
@pytest.mark.parametrize("sizes", CONFIGS)
def test_loss_and_every_gradient_equal_serial_on_every_mesh(ranks, sizes, step):
    prepare(CONFIGS[sizes], step)
    ranks.run_meshes(lambda mesh: require_equal(CONFIGS[sizes], mesh, step))


def test_three_heads_on_two_ranks_equal_serial(ranks):
    prepare(THREE_HEADS, None)

    def check(mesh: Mesh):
        if mesh.tp.size <= 3:
            require_equal(THREE_HEADS, mesh, None)
    ranks.run_meshes(check)


def test_more_ranks_than_heads_are_the_same_sentence_on_every_rank(ranks):
    def check(comm: Comm):
        if comm.size > 3:
            mesh = Mesh(tp=comm.size, comm=comm)
            with pytest.raises(ValueError, match=f"tp={comm.size} needs at least as many heads, the model has n_heads 3"):
                parameters(THREE_HEADS, mesh)
    ranks.run(check)


@pytest.mark.parametrize("step", (None, 3))
def test_serial_gradient_is_the_slope_of_the_loss(step):
    """Along a random direction through all parameters, by fourth-order central differences."""
    whole, table = whole_parameters(UNEVEN), placements(UNEVEN, SERIAL)
    draw = np.random.default_rng(2)
    direction = {name: draw.normal(0, 1, a.shape) for name, a in whole.items()}
    rows, tokens, targets = batch(SERIAL)
    ctx = Context(SERIAL, rows, np.arange(T), seed=7, step=step)

    def at(h):
        p = shard({name: a + h * direction[name] for name, a in whole.items()}, table, SERIAL)
        return float(decoder.loss(tokens, targets, Params(p), UNEVEN, ctx)[0])
    h = 2.0 ** -12
    slope = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
    grads = serial(UNEVEN, step)[2]
    expected = sum(float((g * direction[name]).sum()) for name, g in grads.items())
    scale = math.sqrt(sum(float((g * g).sum()) for g in grads.values()))
    assert abs(slope - expected) <= 1e-7 * scale


def test_gauge_parameters_have_no_gradient_and_no_other_has_none():
    """Softmax does not see a bias of k: its gradient, a sum of dk that cancels, is within 1e-12 of Σ |dk|."""
    grads = serial(EVEN, None)[2]
    for name, row in parameters(EVEN, SERIAL).items():
        assert row.gauge == name.endswith("attn.k.b")
        if row.gauge:
            scale = key_bias_scale(EVEN, None, name)
            assert scale > 1e-2 and np.abs(grads[name]).max() <= 1e-12 * scale
            assert np.abs(grads[name.replace(".k.", ".q.")]).max() > 1e-3 * scale
        else:
            assert np.abs(grads[name]).max() > 1e-3, name


# -- what travels --------------------------------------------------------------------------------------------------


def test_a_layer_sends_four_times_its_activation_over_tp_and_gradients_travel_once_over_dp(ranks):
    """Two all_reduces of B·T·D forward (g), two backward (f), in every layer; one g of the embedding, one f of the head; of the
    loss a maximum, a sum and the target's logit for each target that counts.  All gradients once in one bucket."""
    def check(mesh: Mesh):
        mesh.ledger.clear()
        rows, tokens, targets = batch(mesh)
        params = shard(whole_parameters(UNEVEN), placements(UNEVEN, mesh), mesh)
        ctx = Context(mesh, rows, np.arange(T))
        _, grads = value_and_grad(lambda p: decoder.loss(tokens, targets, p, UNEVEN, ctx), params)
        payload, n = len(rows) * T * UNEVEN.d_model, 2 * UNEVEN.n_layers + 1
        tp, dp = mesh.tp.size > 1, mesh.dp.size > 1
        for phase, calls, elements in (("forward", n + 2, n * payload + 3 * int((targets != -100).sum())),
                                       ("backward", n, n * payload)):
            found = mesh.ledger.total(axes="tp", phase=phase)
            assert (found.calls, found.elements) == (calls * tp, elements * tp)
        everything = mesh.ledger.total()
        assert everything.calls == (2 * n + 2) * tp
        reduce_gradients(grads, mesh)
        found = mesh.ledger.total(axes="dp", operation="all_reduce")
        assert (found.calls, found.elements) == (dp, dp * sum(t.array.size for t in params.values()))
        assert mesh.ledger.total().calls == everything.calls + dp
    ranks.run_meshes(check)


# -- initial weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ("float64", "float32"))
def test_a_shards_initial_weights_are_the_bits_of_the_serial_slice(ranks, dtype):
    whole = init(UNEVEN, SERIAL, seed=5, dtype=dtype)

    def check(mesh: Mesh):
        local = init(UNEVEN, mesh, seed=5, dtype=dtype)
        for name, row in parameters(UNEVEN, mesh).items():
            part = whole[name].array[box(row.placement, row.shape, mesh)]
            assert local[name].array.dtype == np.dtype(dtype) and local[name].array.tobytes() == part.tobytes(), name
    ranks.run_meshes(check)


WIDE = Config(vocab_size=V, n_layers=2, n_heads=8, d_model=64, max_seq_len=8)


def test_standard_deviation_does_not_depend_on_tp(ranks):
    """A fan-in read off the shard would double it on 4 ranks: o.w and down.w are cut along their inputs."""
    def check(comm: Comm):
        local = init(WIDE, Mesh(tp=comm.size, comm=comm), seed=0)
        for part, scale in (("attn.q.w", 2 ** -5), ("mlp.up.w", 2 ** -5), ("attn.o.w", 2 ** -6), ("mlp.down.w", 2 ** -6)):
            std = local[f"layers.0.{part}"].array.std()
            assert abs(std / (scale / math.sqrt(3)) - 1) < 0.1, part             # 512 elements or more: 4 standard errors
    ranks.run(check)


def test_weights_differ_between_seeds_and_parameters():
    one, other = init(EVEN, SERIAL, seed=1), init(EVEN, SERIAL, seed=2)
    assert not np.array_equal(one["embed.w"].array, other["embed.w"].array)
    assert not np.array_equal(one["layers.0.attn.q.w"].array, one["layers.1.attn.q.w"].array)
    assert all((one[name].array == fill).all() for name, fill in (("norm.g", 1), ("norm.b", 0), ("layers.0.mlp.up.b", 0)))


def test_the_loss_starts_at_ln_v(ranks):
    def check(mesh: Mesh):
        cfg = replace(EVEN, dropout=0)
        rows, tokens, targets = batch(mesh)
        value, count = decoder.loss(tokens, targets, Params(init(cfg, mesh, seed=3)), cfg, Context(mesh, rows, np.arange(T)))
        loss, count = total_over(mesh, float(value), int(count.array))
        assert abs(loss / count - math.log(V)) < 0.05
    ranks.run_meshes(check)


# -- the function itself -------------------------------------------------------------------------------------------


def test_no_output_depends_on_a_later_input(ranks):
    """The gradient of output t is exactly 0 at inputs after t, and nowhere else."""
    def check(comm: Comm):
        mesh = Mesh(tp=comm.size, comm=comm)
        params = shard(whole_parameters(EVEN), placements(EVEN, mesh), mesh)
        ctx = Context(mesh, np.arange(2), np.arange(T))
        x = Tensor(np.random.default_rng(4).normal(size=(2, T, EVEN.d_model)))
        for t in range(T):
            only_t = np.zeros((2, T, EVEN.d_model))
            only_t[:, t] = 1 + np.arange(EVEN.d_model)

            def output(p: Params) -> Tensor:
                y = p["x"]
                for i in range(EVEN.n_layers):
                    y = decoder.block(y, Params(params, f"layers.{i}"), EVEN, ctx)
                return total(y * Tensor(only_t))
            dx = value_and_grad(output, {"x": x})[1]["x"].array
            assert not dx[:, t + 1:].any()
            assert dx[:, :t + 1].any(axis=2).all()
    ranks.run(check)


def logits(whole, tokens, cfg=EVEN):
    ctx = Context(SERIAL, np.arange(len(tokens)), np.arange(tokens.shape[1]))
    p = shard(whole, placements(cfg, SERIAL), SERIAL)
    return decoder.forward(Tensor(tokens), Params(p), cfg, ctx).array


def permuted(whole, name, axis, order):
    return {n: np.take(a, order, axis) if n == name else a for n, a in whole.items()}


def test_what_has_no_order_may_be_permuted():
    """Heads, hidden units, samples and the vocabulary."""
    draw = np.random.default_rng(5)
    whole, tokens = whole_parameters(EVEN), batch(SERIAL)[1].array
    y = logits(whole, tokens)
    allowed = 1e-12 * np.abs(y).max()
    channels = (draw.permutation(8)[:, None] * 2 + np.arange(2)).ravel()         # heads move as a whole
    units, words = draw.permutation(24), draw.permutation(V)
    moved = whole
    for i in range(EVEN.n_layers):
        for part in "qkv":
            moved = permuted(moved, f"layers.{i}.attn.{part}.w", 1, channels)
            moved = permuted(moved, f"layers.{i}.attn.{part}.b", 0, channels)
        moved = permuted(moved, f"layers.{i}.attn.o.w", 0, channels)
        moved = permuted(permuted(moved, f"layers.{i}.mlp.up.w", 1, units), f"layers.{i}.mlp.up.b", 0, units)
        moved = permuted(moved, f"layers.{i}.mlp.down.w", 0, units)
    assert np.abs(logits(moved, tokens) - y).max() <= allowed
    assert np.abs(logits(whole, tokens[::-1])[::-1] - y).max() <= allowed
    relabelled = permuted(whole, "embed.w", 0, np.argsort(words))                # word v is now called words[v]
    assert np.abs(logits(relabelled, words[tokens])[..., words] - y).max() <= allowed


def test_a_text_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="9 positions, the model has max_seq_len 8"):
        logits(whole_parameters(EVEN), np.zeros((1, 9), int))


def test_gpt2_small_has_its_published_number_of_parameters():
    """124,439,808 (Radford et al. 2019 print 117M, corrected in their repository), from shapes alone."""
    tracemalloc.start()
    rows = parameters(GPT2_SMALL, SERIAL)
    assert sum(math.prod(row.shape) for row in rows.values()) == 124_439_808
    assert tracemalloc.get_traced_memory()[1] < 10e6
    tracemalloc.stop()


def test_the_ranks_parameters_add_up(ranks):
    """Cut ones once, replicated ones once on every rank."""
    def check(comm: Comm):
        mesh = Mesh(tp=comm.size, comm=comm)
        rows = parameters(GPT2_SMALL, mesh)
        mine = [math.prod(s.stop - s.start for s in box(row.placement, row.shape, mesh)) for row in rows.values()]
        for held, (name, row) in zip(comm.all_reduce(np.array(mine)), rows.items()):
            copies = comm.size if isinstance(row.placement, Replicated) else 1
            assert held == copies * math.prod(row.shape), name
    ranks.run(check)
