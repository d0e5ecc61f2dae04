"""Localises faults of one training step: the token rule, accumulation, gradient reductions, and their agreement with serial."""
import dataclasses

import numpy as np
import pytest

from refimpl.autograd import Tensor
from refimpl.comm import Mesh
from refimpl.golden import compare, gauge_scales
from refimpl.models import Config, init, parameters, placements
from refimpl.parallel import gather
from refimpl.train import AdamW, Batch, Sampler, gradients

CFG = Config(vocab_size=31, n_layers=2, n_heads=8, d_model=16, d_ff=40, max_seq_len=8, dropout=0.2)
CORPUS = (np.arange(400) * 7919 % 211 % 31)
GAUGES = {name for name, row in parameters(CFG, Mesh()).items() if row.gauge}
SAMPLER = Sampler(CORPUS, 8, seed=5)
LR, EPS = 1e-3, 1e-8


def run(mesh, step, accumulate, cfg=CFG):
    """Loss, gathered gradient and gathered parameters after one AdamW step, for a batch of 12 (uneven on 8 ranks)."""
    params = init(cfg, mesh, seed=3)
    g = gradients(params, SAMPLER.step(1, 12, accumulate, mesh), cfg, mesh, seed=3, step=step)
    new = AdamW(LR, eps=EPS).step(params, g.grads)
    table = placements(cfg, mesh)
    return g.loss, gather(g.grads, table, mesh), gather(new, table, mesh)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("step", [None, 7], ids=["plain", "dropout"])
def test_loss_every_gradient_and_an_adamw_step_equal_serial(ranks, step, accumulate):
    loss, grads, new = run(Mesh(), step, 1)

    def check(mesh):
        loss_here, grads_here, new_here = run(mesh, step, accumulate)
        assert abs(loss_here - loss) <= 1e-12 * loss
        worst = compare(grads_here, grads, gauge_scales(GAUGES))[0]
        assert worst.relative <= 1e-12, worst
        for name in set(new) - GAUGES:
            # the update's slope by g is at most lr·eps/(|g| + eps)², so that much of the gradient's allowance arrives
            g = np.abs(grads[name])
            allowed = 1e-12 * np.abs(new[name]).max() + LR * EPS / (g + EPS) ** 2 * 1e-12 * g.max()
            assert np.all(np.abs(new_here[name] - new[name]) <= allowed), name
    ranks.run_meshes(check)


def test_micro_batches_and_ranks_without_valid_targets_add_zero(ranks):
    """One valid token in the whole batch: the mean is that token's loss, on every mesh and with every accumulation."""
    whole = SAMPLER.batch(np.arange(8))
    targets = np.full_like(whole.targets, -100)
    targets[5, 3] = whole.targets[5, 3]
    serial = gradients(init(CFG, Mesh(), 0), [Batch(whole.rows, whole.tokens, targets)], CFG, Mesh())
    assert serial.count == 1

    def check(mesh):
        n = 8 // mesh.dp.size
        mine = slice(mesh.dp.rank * n, (mesh.dp.rank + 1) * n)
        micro = [Batch(r, t, y) for r, t, y in ((x.rows[mine][s], x.tokens[mine][s], y[mine][s])
                                                for x, y in [(whole, targets)] for s in (slice(0, 1), slice(1, None)))]
        here = gradients(init(CFG, mesh, 0), micro, CFG, mesh)
        assert here.count == 1 and abs(here.loss - serial.loss) <= 1e-12 * serial.loss
        worst = compare(gather(here.grads, placements(CFG, mesh), mesh),
                        {name: g.array for name, g in serial.grads.items()}, gauge_scales(GAUGES))[0]
        assert worst.relative <= 1e-12, worst
    if 8 % ranks.size == 0:
        ranks.run_meshes(check)


def test_a_batch_without_any_valid_target_is_an_error(ranks):
    batch = SAMPLER.batch(np.arange(2))
    blank = dataclasses.replace(batch, targets=np.full_like(batch.targets, -100))

    def check(comm):
        mesh = Mesh(dp=comm.size, comm=comm)
        with pytest.raises(ValueError, match="no valid target"):
            gradients(init(CFG, mesh, 0), [blank], CFG, mesh)
    ranks.run(check)


def test_means_of_unequal_parts_are_not_averaged():
    """known_failures: 10 tokens at 2.0 and 100 at 1.0 are 120/110 = 1.0909, not 1.5.  Here: mean of all = Σ/Σ."""
    params = init(CFG, Mesh(), 0)
    small, large = SAMPLER.batch(np.arange(1)), SAMPLER.batch(np.arange(1, 8))
    a, b = (gradients(params, [x], CFG, Mesh()).loss for x in (small, large))
    both = gradients(params, [small, large], CFG, Mesh()).loss
    assert abs(both - (8 * a + 56 * b) / 64) < 1e-14 and abs(both - (a + b) / 2) > 1e-4


def test_accumulated_gradients_add():
    params = init(CFG, Mesh(), 0)
    one = [SAMPLER.batch(np.arange(n, n + 1)) for n in range(3)]
    parts = [gradients(params, [b], CFG, Mesh()).grads["norm.g"].array for b in one]
    whole = gradients(params, one, CFG, Mesh()).grads["norm.g"].array
    np.testing.assert_allclose(whole, sum(parts) / 3, rtol=1e-12, atol=1e-15)


def test_gradients_say_where_they_vary(ranks):
    def check(mesh):
        g = gradients(init(CFG, mesh, 0), SAMPLER.step(0, 8, 1, mesh), CFG, mesh).grads
        assert all(isinstance(t, Tensor) and not t.partial for t in g.values())
        assert g["layers.0.mlp.up.w"].varies == {"tp"} and g["positions.w"].varies == frozenset()
    ranks.run_meshes(check)
