"""Localises tools that see the wrong thing: names, phases, what travelled, dy, FLOPs; and frames that leak to other threads.

All of it on the decoder with two layers, two tensor-parallel ranks, and not a line of the model changed.
"""
import weakref

import numpy as np
import pytest

from refimpl.autograd import Clock, Count, Frame, Record, Replace, Tensor, difference, recompute, stack, value_and_grad
from refimpl.comm import Mesh, run_threads, shares
from refimpl.models import Config, Context, decoder, init, parameters
from refimpl.ops import gelu_tanh, linear, mul, sum

CONFIG = Config(vocab_size=11, n_layers=2, n_heads=2, d_model=6, max_seq_len=5, d_ff=10)
TOKENS = np.array([[1, 2, 3, 4], [5, 6, 7, 10]])
TARGETS = np.array([[2, 3, 4, -100], [6, 7, 10, 0]])
B, T = TOKENS.shape

ATTENTION = ["norm1.layer_norm", "attn.copy_to",
             "attn.q", "attn.reshape", "attn.transpose", "attn.k", "attn.reshape#2", "attn.transpose#2",
             "attn.v", "attn.reshape#3", "attn.transpose#3", "attn.attention", "attn.transpose#4", "attn.reshape#4",
             "attn.o", "attn.reduce_from", "attn.reduce_from.all_reduce", "attn.add", "add"]
MLP = ["norm2.layer_norm", "mlp.copy_to", "mlp.up", "mlp.gelu_tanh", "mlp.down", "mlp.reduce_from",
       "mlp.reduce_from.all_reduce", "mlp.add", "add#2"]


def train(mesh, *frames, loss=decoder.loss):
    """One gradient of the decoder inside `frames` -> (loss, gradients)."""
    for frame in frames:
        frame.__enter__()
    try:
        ctx = Context(mesh, np.arange(B), np.arange(T))
        return value_and_grad(lambda p: loss(TOKENS, TARGETS, p, CONFIG, ctx), init(CONFIG, mesh, seed=1))
    finally:
        for frame in reversed(frames):
            frame.__exit__(None)


def on_ranks(fn, size=2):
    return run_threads(size, lambda comm: fn(Mesh(tp=size, comm=comm)))


def recorded(mesh, *frames):
    record = Record()
    _, grads = train(mesh, *frames, record)
    return record, grads


# -- Record -----------------------------------------------------------------------------------------------------------

def test_record_names_every_activation_of_a_block():
    for record, _ in on_ranks(recorded):
        forward = [e.name for e in record if e.phase == "forward"]
        assert [name for name in forward if name.startswith("layers.1.")] == [f"layers.1.{n}" for n in ATTENTION + MLP]
        ops = [name for name in forward if "all_reduce" not in name]
        assert ops[:4] == ["embed", "reduce_from", "positions", "add"]
        assert ops[-5:] == ["norm.layer_norm", "copy_to", "transpose", "column_parallel_linear", "vocab_parallel_cross_entropy"]


def test_a_serial_run_has_the_same_names():
    names = [[(e.name, e.phase) for e in record] for record in (recorded(Mesh())[0], *(r for r, _ in on_ranks(recorded)))]
    assert names[0] == names[1] == names[2]


def test_record_sees_what_travels_and_in_which_phase():
    records = [record for record, _ in on_ranks(recorded)]
    for name, phase in [("layers.0.mlp.reduce_from.all_reduce", "forward"), ("layers.0.mlp.copy_to.all_reduce", "backward")]:
        sent = [record[name].inputs[1] for record in records]           # inputs: the communicator and the array
        assert not np.allclose(sent[0], sent[1])
        assert all(np.allclose(record[name].y, sent[0] + sent[1], rtol=0, atol=1e-15) for record in records)
        assert all(record[name].phase == phase and record[name].dy is None for record in records)
    backward = [e.name for e in records[0] if e.phase == "backward"]
    assert backward == [f"{where}copy_to.all_reduce" for where in ("", *(f"layers.{i}.{part}." for i in (1, 0)
                                                                         for part in ("mlp", "attn")))]


def test_dy_on_ranks_is_a_part_of_the_serial_dy():
    serial, _ = recorded(Mesh())
    parts = [record for record, _ in on_ranks(recorded)]
    for name in ("layers.0.mlp.gelu_tanh", "layers.1.mlp.up", "layers.0.attn.q"):       # columns over tp
        assert np.allclose(np.concatenate([r[name].dy[0] for r in parts], axis=-1), serial[name].dy[0], rtol=0, atol=1e-14)
        assert np.allclose(np.concatenate([r[name].y for r in parts], axis=-1), serial[name].y, rtol=0, atol=1e-14)
    for name in ("layers.0.mlp.reduce_from", "layers.1.add", "reduce_from"):            # replicated
        assert all(np.allclose(r[name].dy[0], serial[name].dy[0], rtol=0, atol=1e-14) for r in parts)


def test_dy_is_the_derivative_of_the_loss_by_the_activation():
    """The activation is moved by ±h·v from outside; the loss changes by 2h·<dy, v>."""
    name, h = "layers.0.mlp.gelu_tanh", 1e-4
    record, _ = recorded(Mesh())
    v = np.cos(np.arange(record[name].y.size)).reshape(record[name].y.shape)

    def moved(by):
        def fn(x):
            y, vjp = gelu_tanh.array(x)
            return y + by * v, vjp
        return float(train(Mesh(), Replace("gelu_tanh", name, fn))[0][0])
    assert (moved(h) - moved(-h)) / (2 * h) == pytest.approx(np.sum(record[name].dy[0] * v), rel=1e-6)


def test_recomputed_calls_have_their_own_phase():
    def loss(tokens, targets, p, cfg, ctx):
        x = decoder.embed(tokens, p, cfg, ctx)
        for i in range(cfg.n_layers):
            x = recompute(decoder.block, x, p / f"layers.{i}", cfg, ctx)
        return decoder.cross_entropy(decoder.head(x, p, cfg, ctx), targets, cfg, ctx)

    def run(mesh):
        record = Record()
        return record, train(mesh, record, loss=loss)[1]
    plain, again = on_ranks(recorded)[0], on_ranks(run)[0]
    forward = [e.name for e in plain[0] if e.phase == "forward"]
    assert [e.name for e in again[0] if e.phase == "forward"] == forward
    blocks = [[name for name in forward if name.startswith(f"layers.{i}.")] for i in (1, 0)]
    assert [e.name for e in again[0] if e.phase == "recompute"] == blocks[0] + blocks[1]
    assert all(np.array_equal(again[1][name].array, g.array) for name, g in plain[1].items())


def test_a_missing_name_lists_the_names_there_are():
    with pytest.raises(KeyError, match="nothing called 'layers.0.attn.qkv' was recorded; names: .*layers.0.attn.q"):
        recorded(Mesh())[0]["layers.0.attn.qkv"]


def test_replay_gives_the_same_bits_for_every_call():
    def replayed(mesh):
        record, _ = recorded(mesh)
        return [(entry.name, worst) for entry, worst in record.replay()], len(record.entries)
    for replay, n in on_ranks(replayed):
        assert len(replay) == n > 60
        assert {worst for _, worst in replay} == {0.0}


def test_replay_finds_an_output_and_a_gradient_that_were_changed():
    record, _ = recorded(Mesh())
    record["layers.0.mlp.gelu_tanh"].y = record["layers.0.mlp.gelu_tanh"].y + 0.5
    entry = record["layers.1.mlp.up"]
    entry.dx = (entry.dx[0], entry.dx[1] + 0.25, entry.dx[2])
    found = {entry.name: worst for entry, worst in record.replay() if worst}
    assert found == {"layers.0.mlp.gelu_tanh": pytest.approx(0.5), "layers.1.mlp.up": pytest.approx(0.25)}


def test_difference_looks_into_structures_and_takes_nan_for_infinite():
    nan = np.array([np.nan, 1.0])
    assert difference((np.ones(2), None), (np.array([1, 1.5]), None)) == 0.5
    assert difference(nan, nan) == 0 and difference(np.array([-np.inf]), np.array([-np.inf])) == 0
    assert difference(nan, np.ones(2)) == np.inf
    assert difference(np.ones(2), np.ones(3)) == np.inf and difference(None, np.ones(2)) == np.inf


# -- Replace ----------------------------------------------------------------------------------------------------------

def without_f(x, comm=None):
    """copy_to whose backward forgets the all_reduce."""
    return x.view(), lambda dy: dy


def test_a_planted_missing_f_is_found_by_name():
    """Compared backward, the first call that differs is the mistake; the gradients say what it spoils."""
    place = "layers.1.mlp.copy_to"

    def compare(mesh):
        (right, grads), (wrong, wrong_grads) = recorded(mesh), recorded(mesh, Replace("copy_to", place, without_f))
        forward = [(a, b) for a, b in zip(right, wrong) if a.phase == "forward"]
        assert all(a.name == b.name and difference(a.y, b.y) == 0 for a, b in forward)
        differs = [a.name for a, b in reversed(forward) if a.dy and max(difference(a.dy, b.dy), difference(a.dx, b.dx)) > 0]
        table = parameters(CONFIG, mesh)
        hit = {name for name, g in grads.items() if not table[name].gauge
               and difference(g.array, wrong_grads[name].array) > 1e-9 * np.abs(g.array).max()}
        return differs[:3], hit
    for first, hit in on_ranks(compare):
        assert first == [place, "layers.1.norm2.layer_norm", "layers.1.add"]
        untouched = {"norm.g", "norm.b", *(f"layers.1.mlp.{n}" for n in ("up.w", "up.b", "down.w", "down.b"))}
        gauge = {f"layers.{i}.attn.k.b" for i in (0, 1)}
        assert hit == set(parameters(CONFIG, Mesh())) - untouched - gauge


def test_a_mistake_can_be_planted_in_a_seam():
    """An all_reduce that returns this rank's part: the output of g is the first that differs."""
    def compare(mesh):
        right, _ = recorded(mesh)
        wrong, _ = recorded(mesh, Replace("all_reduce", "layers.0.attn.reduce_from.*", lambda comm, x: x))
        return next(a.name for a, b in zip(right, wrong) if difference(a.y, b.y))
    assert on_ranks(compare) == ["layers.0.attn.reduce_from"] * 2


def test_a_pattern_replaces_all_that_match():
    with Replace("gelu_tanh", "layers.*.mlp.gelu_tanh", gelu_tanh.array) as replace:
        train(Mesh())
    assert replace.used == CONFIG.n_layers


@pytest.mark.parametrize("op_name, scope", [("gelu_tanh", "layers.7.*"), ("gelu", "*"), ("copy_to", "layers.0.mlp")])
def test_a_replacement_that_matches_nothing_is_an_error(op_name, scope):
    with pytest.raises(ValueError, match=r"Replace\('.*', '.*'\) matched no call"):
        with Replace(op_name, scope, without_f):
            train(Mesh())


def test_a_replacement_does_not_hide_the_real_error():
    with pytest.raises(ZeroDivisionError):
        with Replace("no such op", "*", without_f):
            1 / 0


# -- Count ------------------------------------------------------------------------------------------------------------

def forward_flops(cfg, tp, rank):
    """2mnk per product on one rank: q, k, v, o; scores and values; up and down; the head, whose words are shared out."""
    D, F, V = cfg.d_model, cfg.d_ff, shares(cfg.vocab_size, tp)[rank]
    block = 4 * (2 * B * T * D * D) + 2 * (2 * B * T * T * D) + 2 * (2 * B * T * D * F)
    return cfg.n_layers * block // tp + 2 * B * T * D * V


@pytest.mark.parametrize("tp", [1, 2])
def test_flops_equal_the_formula(tp):
    def count(mesh):
        frame = Count()
        train(mesh, frame)
        return frame
    for rank, frame in enumerate(on_ranks(count, tp)):
        flops = forward_flops(CONFIG, tp, rank)
        assert dict(frame.flops) == {"forward": flops, "backward": 2 * flops}
        assert frame.calls["attention"] == 2 and frame.calls["all_reduce"] == 4 + 4 + 4    # words: g, f, two of the loss
        assert (frame.calls["column_parallel_linear"], frame.calls["row_parallel_linear"]) == (2 * 4 + 1, 2 * 2)


def test_live_bytes_rise_and_fall():
    count = Count()
    value, grads = train(Mesh(), count)
    logits = B * T * CONFIG.vocab_size * 8
    assert count.peak > 2 * logits                      # the logits and their softmax at least
    assert count.peak < 100_000
    del value, grads
    assert count.live == 0


def test_live_bytes_by_hand():
    """x[2, 3], w[3, 4] are inputs; alive at most: y[2, 4] of linear and that of gelu."""
    with Count() as count:
        x = Tensor(np.ones((2, 3)))
        value_and_grad(lambda p: sum(gelu_tanh(linear(x, p["w"]))), {"w": Tensor(np.ones((3, 4)))})
    assert count.peak == 8 * (8 + 8)


def test_recomputation_costs_flops_and_saves_memory():
    def loss(tokens, targets, p, cfg, ctx):
        x = decoder.embed(tokens, p, cfg, ctx)
        for i in range(cfg.n_layers):
            x = recompute(decoder.block, x, p / f"layers.{i}", cfg, ctx)
        return decoder.cross_entropy(decoder.head(x, p, cfg, ctx), targets, cfg, ctx)
    plain, again = Count(), Count()
    train(Mesh(), plain)
    train(Mesh(), again, loss=loss)
    head = 2 * B * T * CONFIG.d_model * CONFIG.vocab_size
    assert again.flops == {**plain.flops, "recompute": plain.flops["forward"] - head}
    assert again.peak < 0.8 * plain.peak


# -- Clock ------------------------------------------------------------------------------------------------------------

def test_clock_has_a_span_for_every_call():
    def clocked(mesh):
        clock = Clock()
        return recorded(mesh, clock)[0], clock.spans
    for record, spans in on_ranks(clocked):
        assert all(span.start <= span.stop for span in spans)
        base = [e.name.partition("#")[0] for e in record]
        timed = [(s.name, s.op) for s in spans if s.phase == "forward" and s.op not in ("product", "row_dot")]
        assert sorted(timed) == sorted((name, e.op.name) for name, e in zip(base, record) if e.phase == "forward")
        timed = [(s.name, s.op) for s in spans if s.phase == "backward" and s.op not in ("product", "row_dot")]
        assert sorted(timed) == sorted([(name, e.op.name) for name, e in zip(base, record) if e.phase == "backward" or e.dy])
        outer = next(s for s in spans if s.name == "layers.0.attn.q")
        inner = next(s for s in spans if s.name == "layers.0.attn.q.product")
        assert outer.start <= inner.start <= inner.stop <= outer.stop


# -- the stack of frames ----------------------------------------------------------------------------------------------

def test_a_frame_is_in_force_on_its_own_thread_only():
    def body(comm):
        record = Record()
        if comm.rank == 0:
            record.__enter__()
        comm.barrier()
        for _ in range(comm.rank + 1):
            gelu_tanh(Tensor(np.ones(2)))
        comm.barrier()
        return [e.name for e in record if e.op is gelu_tanh]
    with Record() as outside:
        assert run_threads(2, body) == [["gelu_tanh"], []]
    assert outside.entries == []


def test_the_newest_frame_is_outermost():
    order = []

    class Noisy(Frame):
        def __init__(self, name):
            self.name = name

        def call(self, op, run, *arrays, **static):
            order.append(self.name)
            return run(*arrays, **static)
    with Noisy("old"), Noisy("new"):
        gelu_tanh(Tensor(np.ones(2)))
    assert order == ["new", "old"]


def test_frames_are_gone_after_an_error():
    with pytest.raises(ZeroDivisionError):
        with Record(), Count():
            1 / 0
    assert stack.frames == []


def test_a_frame_changes_no_number():
    plain = train(Mesh())
    framed = train(Mesh(), Record(), Count(), Clock(), Frame())
    assert float(plain[0][0]) == float(framed[0][0])
    assert all(np.array_equal(g.array, framed[1][name].array) for name, g in plain[1].items())


def test_without_frames_nothing_is_kept():
    x = Tensor(np.ones(4))
    y = mul(x, x)
    ref = weakref.ref(y.array)
    del y
    assert ref() is None
