"""Localises learning rates that jump, end elsewhere than they should, or are not those that the update uses."""
import json

import numpy as np
import pytest

from refimpl.comm import Mesh
from refimpl.models import Config
from refimpl.train import Data, Options, learning_rate, train

CFG = Config(vocab_size=17, n_layers=1, n_heads=2, d_model=8, max_seq_len=6)
CORPUS = Data(np.arange(300) * 31 % 97 % 17)


def test_warm_up_is_a_line_to_the_whole_rate():
    assert [learning_rate(step, 9, 0.5, warmup=4) for step in range(6)] == [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("steps, warmup, floor", ((10, 0, 0.0), (100, 10, 0.1), (5, 4, 0.5), (2, 1, 0.0), (1, 0, 0.1)))
def test_cosine_goes_down_to_the_floor_in_the_last_step(steps, warmup, floor):
    rates = [learning_rate(step, steps, 2.0, "cosine", warmup, floor) for step in range(steps)]
    assert rates[warmup] == 2.0 and (steps == warmup + 1 or abs(rates[-1] - 2.0 * floor) <= 1e-15)
    down = np.diff(rates[warmup:])
    assert (down < 0).all() and (np.abs(down) <= 2.0 * (1 - floor) * np.pi / 2 / max(1, steps - 1 - warmup)).all()


def test_the_updates_use_the_rate_that_is_logged(tmp_path):
    """AdamW's first update moves an element by the learning rate, whatever its gradient."""
    options = Options(steps=3, batch_size=2, seq_len=6, lr=0.25, schedule="cosine", warmup=2, weight_decay=0.0)
    one, half = (train(CORPUS, CFG, Options(steps=1, batch_size=2, seq_len=6, lr=lr, weight_decay=0.0), Mesh()).params
                 for lr in (0.25, 0.125))
    train(CORPUS, CFG, options, Mesh(), tmp_path)
    rates = [json.loads(line)["lr"] for line in (tmp_path / "log.jsonl").read_text().splitlines()[1:]]
    assert rates == [0.125, 0.25, 0.25]
    warm = train(CORPUS, CFG, Options(steps=1, batch_size=2, seq_len=6, lr=0.25, warmup=2, weight_decay=0.0), Mesh()).params
    for name in one:
        assert np.array_equal(warm[name].array, half[name].array)
    assert not np.array_equal(one["embed.w"].array, half["embed.w"].array)


@pytest.mark.parametrize("wrong, words", (
    ({"schedule": "linear"}, "schedule must be one of constant, cosine, got 'linear'"),
    ({"warmup": -1}, "warmup must be finite and at least 0, got -1"),
    ({"floor": 1.5}, r"floor must be in \[0, 1\], got 1.5")))
def test_options_that_cannot_be_are_named(wrong, words):
    with pytest.raises(ValueError, match=words):
        Options(**wrong)
