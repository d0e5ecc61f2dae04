"""Localises faults of sampling: a sample that depends on the mesh, a wrong temperature, a context that is not slid."""
import numpy as np
import pytest

from refimpl.autograd import Params, Tensor
from refimpl.comm import Mesh
from refimpl.generate import sample
from refimpl.models import Config, Context, decoder, init

CFG = Config(vocab_size=13, n_layers=1, n_heads=4, d_model=8, max_seq_len=5)


def test_every_mesh_samples_the_same_text(ranks):
    serial = sample(init(CFG, Mesh(), 1), np.array([3]), 8, CFG, Mesh(), seed=2)

    def check(mesh):
        if mesh.tp.size <= 4:
            assert sample(init(CFG, mesh, 1), np.array([3]), 8, CFG, mesh, seed=2).tolist() == serial.tolist()
    ranks.run_meshes(check)


def test_temperature_zero_takes_the_largest_logit_of_the_last_positions():
    params = init(CFG, Mesh(), 1)
    tokens = sample(params, np.array([3, 1]), 6, CFG, Mesh(), temperature=0)
    for i in range(2, 8):
        seen = tokens[max(0, i - 5):i]
        ctx = Context(Mesh(), np.zeros(1, int), np.arange(len(seen)))
        assert tokens[i] == decoder.forward(Tensor(seen[None]), Params(params), CFG, ctx).array[0, -1].argmax()


def test_the_context_slides_over_a_text_that_is_longer():
    """What came before the last max_seq_len tokens does not matter, and the last ones do."""
    params = init(CFG, Mesh(), 1)
    texts = np.array([[3, 1, 4, 1, 5, 9, 2, 6], [7, 7, 7, 1, 5, 9, 2, 6]])
    a, b = (sample(params, text, 4, CFG, Mesh(), temperature=0)[8:].tolist() for text in texts)
    short = sample(params, texts[0, 3:], 4, CFG, Mesh(), temperature=0)[5:].tolist()
    assert a == b == short
    nexts = {int(sample(params, np.array([3, 1, 4, 1, 5, 9, 2, last]), 1, CFG, Mesh(), temperature=0)[8]) for last in range(13)}
    assert len(nexts) > 1


def test_draws_follow_the_softmax():
    params = init(CFG, Mesh(), 1)
    ctx = Context(Mesh(), np.zeros(1, int), np.arange(1))
    logits = decoder.forward(Tensor(np.array([[3]])), Params(params), CFG, ctx).array[0, 0] / 0.05
    p = np.exp(logits - logits.max())
    p /= p.sum()
    n = 400
    counts = np.bincount([sample(params, np.array([3]), 1, CFG, Mesh(), 0.05, seed)[1] for seed in range(n)], minlength=13)
    assert np.all(np.abs(counts - n * p) <= 5 * np.sqrt(n * p * (1 - p)) + 1)           # 5 sigma


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="at least one token of prompt"):
        sample(init(CFG, Mesh(), 1), np.zeros(0, int), 1, CFG, Mesh())
