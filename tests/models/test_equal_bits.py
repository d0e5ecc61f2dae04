"""Localises bits of the loss, the logits or a gradient that depend on how many ranks have computed them."""
import functools

import numpy as np
import pytest

from refimpl.autograd import Layout, Params, Tensor
from refimpl.comm import Comm, Mesh, run_threads
from refimpl.models import Config, Context, EqualBits, Plan, decoder, init, placements
from refimpl.parallel import gather
from refimpl.train import Batch, gradients

GPT2 = Config(vocab_size=250, n_layers=2, n_heads=8, d_model=64, max_seq_len=32, vocab_multiple=8, dropout=0.1)
LLAMA = Config(vocab_size=256, n_layers=2, n_heads=16, n_kv_heads=8, d_model=96, d_ff=136, max_seq_len=32, norm="rms_norm",
               positions="rope", ffn="swiglu", biases=(), tied=False, qk_norm=True, soft_cap=5.0)
NARROW = Config(vocab_size=8, n_layers=1, n_heads=8, d_model=16, d_ff=8, max_seq_len=32, head_dim=1)     # pieces of one column
FORMS = {"gpt2": GPT2, "llama": LLAMA, "narrow": NARROW}
TEXT = np.random.default_rng(0).integers(0, 250, (4, 33))


def bits(cfg, comm, dtype, equal=True, B=4, T=32):
    """Of the loss, the logits and every global gradient."""
    text = TEXT[:B, :T + 1] % cfg.vocab_size
    mesh = Mesh(tp=comm.size, comm=comm.fixed_order())
    params = init(cfg, mesh, 0, dtype)
    batch = Batch(np.arange(B), text[:, :-1], text[:, 1:])

    def run():
        ctx = Context(mesh, np.arange(B), np.arange(T))
        logits = decoder.forward(Tensor(text[:, :-1], Layout(frozenset({"dp"}))), Params(params), cfg, ctx)
        return gradients(params, [batch], cfg, mesh, seed=0, step=3), logits.array
    if equal:
        with EqualBits(cfg, mesh):
            g, logits = run()
    else:
        g, logits = run()
    arrays = {"loss": np.float64(g.loss), "logits": logits, **gather(g.grads, placements(cfg, mesh), mesh)}
    return {name: a.tobytes() for name, a in arrays.items()}


@functools.cache
def serial(form, dtype, B, T):
    return run_threads(1, lambda comm: bits(FORMS[form], comm, dtype, True, B, T))[0]


@pytest.mark.parametrize("B, T", ((4, 32), (2, 5), (1, 1)))
@pytest.mark.parametrize("dtype", ("float64", "float32"))
@pytest.mark.parametrize("form", FORMS)
def test_loss_logits_and_gradients_have_the_bits_of_one_rank(ranks, form, dtype, B, T):
    """Under MPI, too: those of one thread."""
    want = serial(form, dtype, B, T)

    def check(comm: Comm):
        if comm.size in (1, 2, 4, 8):
            got = bits(FORMS[form], comm, dtype, True, B, T)
            assert [name for name in want if got[name] != want[name]] == []
    ranks.run(check)


def test_without_the_pieces_nearly_everything_differs():
    """Else the test above would show nothing."""
    one, four = (run_threads(tp, lambda comm: bits(GPT2, comm, "float64", equal=False))[0] for tp in (1, 4))
    differ = [name for name in one if one[name] != four[name]]
    assert "logits" in differ and len(differ) > len(one) / 2


def test_pieces_change_rounding_alone():
    pieces, whole = (run_threads(2, lambda comm: bits(LLAMA, comm, "float64", equal))[0] for equal in (True, False))
    for name in whole:
        a, b = np.frombuffer(pieces[name]), np.frombuffer(whole[name])
        assert np.abs(a - b).max() <= 1e-12 * np.abs(b).max(), name


def test_what_cannot_be_cut_into_equal_pieces_is_refused(ranks):
    def check(comm: Comm):
        mesh, loose = Mesh(tp=comm.size, comm=comm.fixed_order()), Mesh(tp=comm.size, comm=comm)
        if comm.size in (3, 5, 6, 7):
            with pytest.raises(ValueError, match=f"got 8 and tp={comm.size}"):
                EqualBits(GPT2, mesh)
            return
        if comm.size > 1:
            with pytest.raises(ValueError, match=r"need sums in a fixed order: Mesh\(..., comm=comm.fixed_order\(\)\)"):
                EqualBits(GPT2, loose)
        with pytest.raises(ValueError, match="need a multiple of 8 as padded_vocab, got 250"):
            EqualBits(Config(vocab_size=250, n_layers=1, n_heads=8, d_model=64, max_seq_len=32), mesh)
        with pytest.raises(ValueError, match="need a multiple of 8 as n_kv_heads, got 4"):
            EqualBits(Config(vocab_size=256, n_layers=1, n_heads=8, n_kv_heads=4, d_model=64, max_seq_len=32), mesh)
        with pytest.raises(ValueError, match="need a power of two of pieces, .*: got 0 and tp="):
            EqualBits(GPT2, mesh, pieces=0)
    ranks.run(check)


def test_equal_bits_with_shared_positions_are_refused(ranks):
    """Each product has an all_reduce of its own, and sequence parallelism's reduce_scatter would add its gradient up again."""
    def check(comm: Comm):
        mesh, rows = Mesh(tp=comm.size, comm=comm.fixed_order()), np.arange(2)
        if comm.size in (1, 2, 4, 8):
            ctx = Context.over(mesh, rows, 8, Plan(sequence_parallel=True))
            with EqualBits(GPT2, mesh), pytest.raises(ValueError, match="equal bits are not to be had with sequence_parallel"):
                decoder.forward(Tensor(TEXT[:2, :8]), Params(init(GPT2, mesh, 0)), GPT2, ctx)
    ranks.run(check)
