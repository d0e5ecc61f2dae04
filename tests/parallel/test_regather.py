"""Localises faults of what is gathered again: a whole that is kept, gathered too often, or another one than before."""
import numpy as np
import pytest

from refimpl.autograd import Frame, Params, Tensor, recompute, residuals, stack, value_and_grad
from refimpl.comm import Mesh
from refimpl.models import Config, Context, Plan, decoder, init
from refimpl.parallel import Regathered
from refimpl.rng import draw

MODELS = {"gpt2": {}, "llama": {"ffn": "swiglu", "norm": "rms_norm", "positions": "rope", "biases": (), "tied": False}}
SIZES = (3, 0, 2, 1)


@pytest.mark.parametrize("uses", (1, 2, 3))
def test_the_first_use_gathers_the_others_share_it_and_the_last_lets_go(ranks, uses):
    def check(comm):
        sizes = [SIZES[r % 4] for r in range(comm.size)]
        parts = [draw(f"part {r}", (2, n, 3)) for r, n in enumerate(sizes)]
        mesh = Mesh(tp=comm.size, comm=comm)
        again = Regathered(parts[comm.rank], mesh.tp, 1, sizes)
        assert all(again.keep() is parts[comm.rank] for _ in range(uses))
        for backward in range(2):                       # a second one starts anew
            mesh.ledger.clear()
            given = [again() for _ in range(uses)]
            assert all(a is given[0] for a in given) and np.array_equal(given[0], np.concatenate(parts, axis=1))
            assert again.whole is None and mesh.ledger.total("tp", "all_gather").calls == (comm.size > 1)
    ranks.run(check)


class Shares(Frame):
    """How many positions there are of what products with cut columns keep."""

    def __init__(self):
        self.kept = {}

    def call(self, op, run, *arrays, **static):
        y, vjp = run(*arrays, **static)
        if op.name == "column_parallel_linear":
            self.kept[stack.name] = residuals(vjp)["x"].shape[1]
        return y, vjp


@pytest.mark.parametrize("form", MODELS)
def test_no_product_keeps_more_than_the_share(ranks, form):
    cfg = Config(vocab_size=11, n_layers=1, n_heads=8, d_model=16, max_seq_len=9, **MODELS[form])
    products = {f"layers.0.attn.{of}" for of in "qkv"} | {f"layers.0.mlp.{of}" for of in ("up", "gate")[:1 + cfg.gated]}

    def check(comm):
        mesh, tokens = Mesh(tp=comm.size, comm=comm), np.arange(2 * 9).reshape(2, 9) % 11
        for again in (False, True):
            ctx = Context.over(mesh, np.arange(2), 9, Plan(sequence_parallel=True, regather=again))
            with Shares() as shares:
                decoder.loss(Tensor(tokens), tokens, Params(init(cfg, mesh, 0)), cfg, ctx)
            assert products < set(shares.kept) and len(shares.kept) == len(products) + 1            # and the head
            assert set(shares.kept.values()) == {len(ctx.between) if again else 9}
    ranks.run(check)


@pytest.mark.parametrize("form", MODELS)
@pytest.mark.parametrize("again", (False, True), ids=("once", "recomputed"))
def test_gradients_have_the_same_bits_and_each_f_gathers_once_more(ranks, form, again):
    """Also where a block is recomputed, which gathers anew forward, and after that once for its own backward pass."""
    cfg = Config(vocab_size=11, n_layers=2, n_heads=8, d_model=16, max_seq_len=9, **MODELS[form])

    def check(comm):
        mesh = Mesh(tp=comm.size, comm=comm.fixed_order())
        tokens, params, found = np.arange(2 * 9).reshape(2, 9) % 11, init(cfg, mesh, 0), {}
        for plan in (Plan(sequence_parallel=True), Plan(sequence_parallel=True, regather=True)):
            ctx = Context.over(mesh, np.arange(2), 9, plan)

            def loss(p):
                whole = recompute(decoder.loss, Tensor(tokens), tokens, p, cfg, ctx) if again else decoder.loss(
                    Tensor(tokens), tokens, p, cfg, ctx)
                return whole[0]
            mesh.ledger.clear()
            value, grads = value_and_grad(loss, Params(params))
            sent = mesh.ledger.total("tp", "all_gather")
            found[plan.regather] = float(value), {k: g.array.tobytes() for k, g in grads.items()}, sent.calls, sent.elements
        once, more = found[False], found[True]
        assert once[:2] == more[:2]
        f = 2 * cfg.n_layers + 1                        # of attention, of the MLP, of the head
        own = ctx.between.size * 2 * cfg.d_model
        assert comm.size == 1 or (more[2] - once[2], more[3] - once[3]) == (f, f * own)
    ranks.run(check)
