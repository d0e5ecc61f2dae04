"""Localises a model that is no probability distribution over texts, and a training that does not end where it must.

log p(x) = Σ log p(x_t | x_<t); no model is better than the entropy of what it predicts, and a table of all pairs gets there.
"""
import itertools
import math

import numpy as np
import pytest

from refimpl.autograd import Params, Tensor, value_and_grad
from refimpl.comm import Mesh
from refimpl.models import Config, Context, decoder, init, placements
from refimpl.ops import cross_entropy, embedding, scale
from refimpl.parallel import parameter
from refimpl.rng import draw, integers, stream
from refimpl.train import AdamW, Data, Options, Trainer, evaluate, learning_rate

V, T = 3, 4
CFG = Config(vocab_size=V, n_layers=2, n_heads=2, d_model=8, max_seq_len=T + 1)
CHAIN = np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.3, 0.3, 0.4]])      # p(next | token)


def log_probabilities(tokens):
    """log p(x_t | x_<t) of all tokens but the first, of a model whose logits are far from equal."""
    table = placements(CFG, Mesh())
    params = {name: parameter(name, 6 * p.array, table[name]) for name, p in init(CFG, Mesh(), 1).items()}
    ctx = Context(Mesh(), np.arange(len(tokens)), np.arange(tokens.shape[1] - 1))
    y = decoder.forward(Tensor(tokens[:, :-1]), Params(params), CFG, ctx).array
    y = y - y.max(-1, keepdims=True)
    y = y - np.log(np.exp(y).sum(-1, keepdims=True))
    return np.take_along_axis(y, tokens[:, 1:, None], -1)[..., 0]


@pytest.mark.parametrize("first", range(V))
def test_the_probabilities_of_all_texts_sum_to_one(first):
    texts = np.array([(first, *rest) for rest in itertools.product(range(V), repeat=T)])
    p = np.exp(log_probabilities(texts).sum(axis=1))
    assert math.fsum(p) == pytest.approx(1, abs=1e-13) and p.max() > 3 * p.mean()


@pytest.mark.parametrize("t", range(1, T + 1))
def test_changing_a_token_changes_nothing_before_it(t):
    text = np.array([[0, 2, 1, 1, 2]])
    other = text.copy()
    other[0, t] = (text[0, t] + 1) % V
    a, b = log_probabilities(text)[0], log_probabilities(other)[0]
    np.testing.assert_allclose(a[:t - 1], b[:t - 1], rtol=1e-13)
    assert (np.abs(a - b)[t - 1:] > 1e-9).all()         # the token itself, and all that follow


def chain(n):
    """n tokens of the Markov chain, drawn by the hash."""
    u, tokens = integers(stream(0, "chain"), np.arange(n), 1 << 24) / 2 ** 24, [0]
    ends = CHAIN.cumsum(axis=1)
    for x in u[1:]:
        tokens.append(min(int(np.searchsorted(ends[tokens[-1]], x, side="right")), V - 1))
    return np.array(tokens)


def entropy_rate():
    """Σ_i π_i·H(row i), π the stationary distribution, in nats."""
    values, vectors = np.linalg.eig(CHAIN.T)
    pi = np.real(vectors[:, np.argmax(np.real(values))])
    return float(-(pi / pi.sum()) @ (CHAIN * np.log(CHAIN)).sum(axis=1))


def test_a_model_of_a_markov_chain_comes_near_its_entropy_rate_and_not_below():
    """The validation part has 2560 predicted tokens: their mean of -log p wavers by some 0.015 about its expectation."""
    options = Options(steps=150, batch_size=16, seq_len=T, lr=1e-2, schedule="cosine", eval_batches=40)
    trainer = Trainer(Data(chain(20_000)[:16_000], chain(20_000)[16_000:]), CFG, options, Mesh())
    before = evaluate(trainer.state.params, trainer.data, CFG, Mesh(), options).loss
    loss = trainer.run().evaluation.loss
    assert abs(before - math.log(V)) < 0.05 and entropy_rate() < 0.87
    assert entropy_rate() - 0.03 < loss < entropy_rate() + 0.05


def test_a_trained_table_of_pairs_reaches_the_empirical_conditional_entropy():
    tokens = chain(400)
    counts = np.zeros((V, V))
    np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    p = counts / counts.sum(axis=1, keepdims=True)
    entropy = -(counts * np.log(p)).sum() / counts.sum()
    optimizer, table = AdamW(0.1, weight_decay=0.0), {"w": Tensor(draw("w", (V, V)), name="w")}
    for step in range(400):
        def loss(params):
            total, count = cross_entropy(embedding(params["w"], tokens[:-1]), tokens[1:])
            return scale(total, by=1 / float(count))
        value, grads = value_and_grad(loss, table)
        optimizer.lr = learning_rate(step, 400, 0.1, "cosine")
        table = optimizer.step(table, grads)
    assert entropy <= float(value) < entropy + 1e-6
    assert np.abs(np.exp(table["w"].array) / np.exp(table["w"].array).sum(-1, keepdims=True) - p).max() < 1e-3
