"""Localises dropout masks that depend on the mesh, repeat from step to step, or are the same in two places of the model."""
from dataclasses import replace

import numpy as np

from refimpl.autograd import Params, Tensor
from refimpl.comm import Mesh, shares
from refimpl.models import Config, Context
from refimpl.models.context import drop
from refimpl.ops import Mask

CFG = Config(vocab_size=5, n_layers=1, n_heads=2, d_model=16, max_seq_len=32, dropout=0.25)
B, T = 6, 8


def mask(rows=range(B), positions=range(T), mesh=None, name="layers.0.mlp", seed=1, step=0, cfg=CFG):
    """The mask that drop applies to a block of ones."""
    ctx = Context(mesh or Mesh(), np.array(rows, int), np.array(positions, int), seed=seed, step=step)
    return drop(Tensor(np.ones((len(rows), len(positions), cfg.d_model))), Params({}, name), cfg, ctx).array


def test_a_rank_makes_its_slice_of_the_serial_mask(ranks):
    serial = mask()

    def check(mesh: Mesh):
        ends = np.cumsum((0, *shares(B, mesh.dp.size)))
        mine = slice(ends[mesh.dp.rank], ends[mesh.dp.rank + 1])
        assert np.array_equal(mask(range(mine.start, mine.stop), mesh=mesh), serial[mine])      # whatever the tp rank
    ranks.run_meshes(check)


def test_any_block_of_samples_and_positions_is_that_block_of_the_mask():
    serial = mask()
    assert np.array_equal(mask(positions=range(3, 7)), serial[:, 3:7])
    assert np.array_equal(mask(rows=[4, 0], positions=[7, 1]), serial[np.ix_([4, 0], [7, 1])])
    assert mask(rows=[10 ** 9]).shape == (1, T, CFG.d_model)                     # samples are numbered without end


def test_longer_batches_do_not_change_the_first_samples():
    assert np.array_equal(mask(rows=range(20))[:B], mask())


def test_masks_differ_by_step_seed_place_and_sample():
    masks = [mask(), mask(step=1), mask(seed=2), mask(name="layers.1.mlp"), mask(name="layers.0.attn"),
             mask(rows=range(B, 2 * B))]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            agree = np.mean((a > 0) == (b > 0))
            assert abs(agree - (0.75 ** 2 + 0.25 ** 2)) < 0.1                    # independent: 0.625 ± 0.018


def test_a_quarter_is_dropped_and_the_rest_scaled():
    m = mask(rows=range(100))
    assert set(np.unique(m)) == {0.0, 1 / 0.75}
    assert abs(np.mean(m == 0) - 0.25) < 0.02                                    # 12,800 draws: ± 0.004


def test_without_a_step_or_a_rate_nothing_happens():
    x = Tensor(np.ones((1, 2, CFG.d_model)))
    without = Config(vocab_size=5, n_layers=1, n_heads=2, d_model=16, max_seq_len=32)
    for cfg, step in ((CFG, None), (without, 3)):
        assert drop(x, Params({}, "embed"), cfg, Context(Mesh(), np.arange(1), np.arange(2), step=step)) is x


def test_a_layers_window_narrows_the_masks_and_never_widens_it():
    ctx = Context(Mesh(), np.arange(1), np.arange(4))
    narrow = replace(ctx, mask=Mask(causal=True, window=2))
    assert ctx.within(None) is ctx and ctx.within(3).mask == Mask(causal=True, window=3)
    assert narrow.within(None).mask.window == narrow.within(3).mask.window == 2 and narrow.within(1).mask.window == 1
