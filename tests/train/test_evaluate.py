"""Localises a validation loss that depends on the mesh, on dropout or on what was learnt from, and bits of the wrong bytes."""
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from refimpl.autograd import Params, Round, Tensor, bfloat16
from refimpl.comm import Mesh, run_threads
from refimpl.models import Config, Context, decoder, init
from refimpl.rng import GOLDEN_GAMMA, MASK, fnv1a64, mix64
from refimpl.text import BPETokenizer, ByteTokenizer
from refimpl.train import Data, Options, Sampling, Trainer
from refimpl.train.evaluate import Evaluation, evaluate

CFG = Config(vocab_size=17, n_layers=2, n_heads=4, d_model=8, max_seq_len=6, dropout=0.3, windows=(3, 0))
TOKENS = np.arange(300) * 31 % 97 % 17
DATA = Data(np.full(50, 10 ** 6), TOKENS)               # what is learnt from must not be looked at: these are no tokens
OPTIONS = Options(batch_size=5, seq_len=6, eval_batches=3, seed=3)


def by_hand(params, cfg, tokens, seed, samples, seq_len):
    """Nats of the samples' targets: windows by the hash in Python's integers, softmax as it is written in a book."""
    def draw(i):
        return mix64((key + (i + 1) * GOLDEN_GAMMA) & MASK) >> 40
    key, nats, seen = mix64(fnv1a64("validation") ^ mix64(seed)), [], []
    for n in range(samples):
        start = (draw(2 * n) << 24 | draw(2 * n + 1)) % (len(tokens) - seq_len)
        window = tokens[start:start + seq_len + 1].astype(np.int64)
        ctx = Context(Mesh(), np.array([n]), np.arange(seq_len))
        logits = decoder.forward(Tensor(window[None, :-1]), Params(params), cfg, ctx).array[0].astype(np.float64)
        p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        nats += [-math.log(p[t, window[t + 1]]) for t in range(seq_len)]
        seen += window[1:].tolist()
    return nats, seen


def test_the_loss_is_that_of_a_plain_softmax_over_the_same_samples():
    params = init(CFG, Mesh(), 1)
    nats, _ = by_hand(params, CFG, TOKENS, 3, 15, 6)
    found = evaluate(params, DATA, CFG, Mesh(), OPTIONS)
    np.testing.assert_allclose(found.loss, np.mean(nats), rtol=1e-12)
    assert found.bits_per_byte is None


@pytest.mark.parametrize("batch_size", (5, 1))          # 1: most ranks of dp have no sample at all
def test_every_mesh_finds_the_same(ranks, batch_size):
    options = replace(OPTIONS, batch_size=batch_size)
    data = replace(DATA, tokenizer=BPETokenizer([], specials=["é" * (k % 3 + 1) for k in range(17)]))
    data.tokenizer.lengths = data.tokenizer.lengths[256:]                       # 2, 4 and 6 bytes
    nats, seen = by_hand(init(CFG, Mesh(), 1), CFG, TOKENS, 3, 3 * batch_size, 6)
    bits = sum(nats) / math.log(2) / sum(2 * (t % 3 + 1) for t in seen)

    def check(mesh):
        if mesh.tp.size <= 4:
            found = evaluate(init(CFG, mesh, 1), data, CFG, mesh, options)
            np.testing.assert_allclose((found.loss, found.bits_per_byte), (np.mean(nats), bits), rtol=1e-12)
    ranks.run_meshes(check)


def test_dropout_is_off_and_evaluating_twice_is_the_same():
    params = init(CFG, Mesh(), 1)
    found = [evaluate(params, DATA, cfg, Mesh(), OPTIONS) for cfg in (CFG, replace(CFG, dropout=0.0), CFG)]
    assert found[0] == found[1] == found[2]


def test_more_batches_are_more_samples_and_a_seed_has_its_own():
    params = init(CFG, Mesh(), 1)

    def loss(**options):
        return evaluate(params, DATA, CFG, Mesh(), replace(OPTIONS, **options)).loss
    six = loss(batch_size=2, eval_batches=3)
    assert six == pytest.approx(loss(batch_size=6, eval_batches=1), rel=1e-14)
    assert six != loss(batch_size=2, eval_batches=2) and six != loss(batch_size=2, eval_batches=3, seed=4)


def test_training_goes_on_as_if_nobody_had_evaluated():
    data = Data(TOKENS[:200], TOKENS[200:])
    plain, judged = (Trainer(data, CFG, replace(OPTIONS, steps=4, eval_every=n), Mesh()).run() for n in (0, 1))
    assert plain.losses == judged.losses and plain.evaluation == judged.evaluation


# -- bits per byte ----------------------------------------------------------------------------------------------------


def uniform(vocab_size, **options):
    """A model whose logits are all 0: each token costs ln V."""
    cfg = Config(vocab_size=vocab_size, n_layers=1, n_heads=1, d_model=2, max_seq_len=6)
    params = {name: Tensor(0 * t.array, t.layout, None, name, t.cut, t.shared) for name, t in init(cfg, Mesh(), 0).items()}

    def bits(tokens, tokenizer):
        return evaluate(params, Data(np.zeros(0, int), tokens, tokenizer), cfg, Mesh(), Options(seq_len=6, **options))
    return bits


def test_no_knowledge_of_bytes_is_eight_bits_per_byte():
    found = uniform(256)(ByteTokenizer().encode("né 🚀, any text"), ByteTokenizer())
    np.testing.assert_allclose((found.loss, found.bits_per_byte), (math.log(256), 8), rtol=1e-14)


def test_no_knowledge_of_byte_pairs_is_the_bits_of_a_token_over_its_bytes():
    """Tokens a, bc, abc in turn: every window of six predicts each twice, 1 + 2 + 3 bytes for three tokens."""
    tokenizer = BPETokenizer([(98, 99), (97, 256)])
    found = uniform(258)(np.tile([97, 256, 257], 20), tokenizer)
    np.testing.assert_allclose((found.loss, found.bits_per_byte), (math.log(258), math.log2(258) * 3 / 6), rtol=1e-14)


def test_the_bytes_are_those_of_the_targets_not_of_what_is_seen():
    """One window: its first token, of one byte, is seen only; the six that follow have two each."""
    tokens = np.array([97] + 6 * [256])
    found = uniform(257, batch_size=1, eval_batches=1)(tokens, BPETokenizer([(98, 99)]))
    np.testing.assert_allclose(found.bits_per_byte, math.log2(257) / 2, rtol=1e-14)


def test_without_a_tokenizer_bits_are_not_known():
    assert uniform(256)(np.zeros(20, int), None) == Evaluation(pytest.approx(math.log(256)), None)


# -- in training ------------------------------------------------------------------------------------------------------


def test_what_is_judged_is_what_the_step_has_made(tmp_path):
    """The validation loss in the log is that of the parameters after the step."""
    data = Data(TOKENS[:200], TOKENS[200:])
    result = Trainer(data, CFG, replace(OPTIONS, steps=2), Mesh(), tmp_path).run()
    assert result.evaluation == evaluate(result.params, data, CFG, Mesh(), OPTIONS)


def test_bfloat16_judges_the_rounded_weights():
    data = Data(TOKENS[:200], TOKENS[200:])
    trainer = Trainer(data, CFG, replace(OPTIONS, steps=1, lr=0.1, dtype="bfloat16"), Mesh())
    result = trainer.run()
    rounded = {name: Tensor(bfloat16(t.array), t.layout, None, name, t.cut, t.shared) for name, t in result.params.items()}
    assert any((rounded[name].array != t.array).any() for name, t in result.params.items())
    with Round():
        assert evaluate(rounded, data, CFG, Mesh(), OPTIONS) == result.evaluation


def judged(monkeypatch, losses, tmp_path, steps=40, **options):
    """The steps and validation losses of a run whose evaluations find `losses`, one after the other."""
    found = iter(losses)
    monkeypatch.setattr("refimpl.train.loop.evaluate", lambda *args: Evaluation(next(found), None))
    data = Data(TOKENS[:200], TOKENS[200:])
    trainer = Trainer(data, CFG, Options(steps=steps, batch_size=1, seq_len=6, **options), Mesh(), tmp_path)
    trainer.run()
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()][1:]
    return {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}, rows[-1]["step"], trainer


@pytest.mark.parametrize("losses, patience, last", [
    ([3, 2, 1, 2, 3], 2, 10),                           # the third was the best; two were not better
    ([3, 4, 2, 3, 1, 1, 1], 2, 14),                     # one that is better starts the count anew; an equal one is not better
    ([5, 5], 1, 4), ([5, 4, 3, 2, 1, 0], 1, 12), ([1, 2, 3, 4, 5, 6], 0, 12), ([1, 2, 3, 4, 5, 6], 6, 12),
])
def test_training_stops_after_so_many_evaluations_without_a_better_one(monkeypatch, tmp_path, losses, patience, last):
    steps = 12 if len(losses) == 6 else 40
    found, ended, _ = judged(monkeypatch, losses, tmp_path, steps, eval_every=2, patience=patience)
    assert list(found.items()) == [(2 * (k + 1), loss) for k, loss in enumerate(losses)] and ended == last


def test_stopping_is_said_with_the_best_loss(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("refimpl.train.loop.evaluate", lambda *args: Evaluation(2.5, None))
    data = Data(TOKENS[:200], TOKENS[200:])
    result = Trainer(data, CFG, Options(steps=9, batch_size=1, seq_len=6, eval_every=2, patience=1), Mesh()).run(bar=True)
    assert "step 2: validation loss 2.5000\n" in capsys.readouterr().err
    assert result.stopped == "stopped at step 4 of 9: the best validation loss is still 2.5000 (patience 1)"


def test_patience_counts_on_after_a_resume(monkeypatch, tmp_path):
    _, _, first = judged(monkeypatch, [1, 2], tmp_path, steps=4, eval_every=2, patience=3, save_every=4)
    assert (first.best, first.waited) == (1, 1)
    monkeypatch.setattr("refimpl.train.loop.evaluate", lambda *args: Evaluation(1.5, None))
    again = Trainer(first.data, CFG, replace(first.options, steps=40), Mesh(), tmp_path)
    again.resume(tmp_path / "checkpoints" / "step-00000004")
    assert (again.best, again.waited) == (1, 1)
    again.run()
    assert again.state.optimizer.t == 8                 # two more that were not better


def test_every_rank_stops_at_the_same_step_and_takes_the_same_sample():
    """At this learning rate each evaluation is worse than the first; a rank that went on would wait for the others."""
    data = Data(TOKENS[:200], TOKENS[200:], ByteTokenizer())
    cfg = replace(CFG, vocab_size=256, dropout=0.0)
    options = replace(OPTIONS, steps=40, lr=2.0, eval_every=1, patience=2)

    def run(comm):
        result = Trainer(data, cfg, options, Mesh(dp=comm.size, comm=comm), None, Sampling("a", 3)).run()
        return len(result.losses), result.sample, result.evaluation
    found = run_threads(3, run, timeout=30)
    assert found[0] == found[1] == found[2] and found[0][0] < 40


def test_without_a_validation_part_nothing_is_judged(tmp_path):
    with pytest.raises(ValueError, match="patience needs something to evaluate on"):
        Trainer(Data(TOKENS), CFG, replace(OPTIONS, steps=2, eval_every=1, patience=1), Mesh())
    result = Trainer(Data(TOKENS), CFG, replace(OPTIONS, steps=2, eval_every=1), Mesh(), tmp_path).run()
    assert result.evaluation is None and len(result.losses) == 2
    assert "validation_loss" not in (tmp_path / "log.jsonl").read_text()


def test_a_validation_part_that_is_too_short_is_refused_before_the_first_step():
    with pytest.raises(ValueError, match="the validation part of the text has 6 tokens: a sample needs seq_len \\+ 1 = 7"):
        Trainer(Data(TOKENS, TOKENS[:6]), CFG, OPTIONS, Mesh())
