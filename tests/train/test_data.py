"""Localises faults of the data order: samples that depend on the mesh, shifted labels, lost or repeated rows."""
import numpy as np
import pytest

from refimpl.comm import Mesh
from refimpl.train import Sampler

CORPUS = np.arange(1000)


def test_targets_are_the_tokens_that_follow():
    batch = Sampler(CORPUS, 6, 0).batch(np.arange(5))
    np.testing.assert_array_equal(batch.targets, batch.tokens + 1)          # the corpus counts up


def test_every_mesh_sees_the_same_samples(ranks):
    sampler = Sampler(CORPUS, 6, seed=4)
    whole = next(sampler.step(3, 11, 1, Mesh()))
    np.testing.assert_array_equal(whole.rows, np.arange(33, 44))

    def check(mesh):
        for accumulate in (1, 2):
            micro = list(sampler.step(3, 11, accumulate, mesh))
            assert len(micro) == accumulate
            rows = np.concatenate([b.rows for b in micro])
            np.testing.assert_array_equal(np.concatenate([b.tokens for b in micro]), whole.tokens[rows - 33])
            counts = mesh.dp.all_reduce(np.bincount(rows - 33, minlength=11))
            assert counts.tolist() == [1] * 11                              # every sample once over dp, none lost
    ranks.run_meshes(check)


def test_windows_reach_both_ends_of_the_corpus():
    starts = Sampler(np.arange(9), 6, 0).batch(np.arange(200)).tokens[:, 0]
    assert set(starts.tolist()) == {0, 1, 2}


def test_a_corpus_shorter_than_a_sample_is_refused():
    with pytest.raises(ValueError, match="the text has 6 tokens: a sample needs seq_len \\+ 1 = 7"):
        Sampler(np.arange(6), 6, 0)
