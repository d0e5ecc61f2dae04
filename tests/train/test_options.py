"""Localises an option that is accepted and senseless, refused and sensible, or refused without its name and what is right."""
import dataclasses
import re

import numpy as np
import pytest

from refimpl.comm import Mesh
from refimpl.models import Config
from refimpl.train import Data, Options, Sampling, train

NAN, INF = float("nan"), float("inf")
CFG = Config(vocab_size=17, n_layers=1, n_heads=2, d_model=8, max_seq_len=6)
CORPUS = Data(np.arange(300) * 31 % 97 % 17)


@pytest.mark.parametrize("name, values, words", [
    *((name, (0, -1), "must be at least 1, got") for name in ("steps", "batch_size", "seq_len", "accumulate", "eval_batches")),
    *((name, (-1,), "must be finite and at least 0, got")
      for name in ("warmup", "eval_every", "patience", "sample_every", "save_every", "keep", "check_replicas")),
    *((name, (-0.1, NAN, INF), "must be finite and at least 0, got") for name in ("weight_decay", "clip")),
    *((name, (1.0, -0.1, NAN, 2), "must be in [0, 1), got") for name in ("beta1", "beta2", "validation")),
    ("floor", (1.1, -0.1, NAN), "must be in [0, 1], got"),
    ("lr", (0.0, -1.0, NAN, INF), "the learning rate must be a positive number, got"),
    ("schedule", ("linear", "", "Cosine"), "schedule must be one of constant, cosine, got"),
    ("dtype", ("float16", "bf16", ""), "dtype must be one of float64, float32, bfloat16, got"),
    ("decay", (("norms",), ("matrices", "w"), (1,), ("w", 1)), "decay must list some of matrices, embeddings, vectors, got"),
])
def test_a_senseless_value_is_named_with_what_is_right(name, values, words):
    sentence = words if words.startswith((name, "the")) else f"{name} {words}"
    for value in values:
        with pytest.raises(ValueError, match="^" + re.escape(sentence)) as error:
            Options(**{name: value})
        got = str(error.value).partition(", got ")[2]
        assert got in {str(value), repr(value), *(map(repr, value) if isinstance(value, tuple) else ())}


@pytest.mark.parametrize("name, value", [
    ("floor", 1.0), ("beta1", 0.0), ("beta2", 0.0), ("validation", 0.0), ("validation", 0.99), ("decay", ()), ("seed", -5),
    ("decay", ("vectors", "embeddings", "matrices")), ("weight_decay", 0), ("clip", 0), ("keep", 0), ("warmup", 10 ** 6),
    ("lr", 5e-324), ("schedule", "cosine"), ("dtype", "bfloat16"), ("accumulate", 99),
])
def test_a_value_at_the_edge_is_accepted(name, value):
    assert getattr(Options(**{name: value}), name) == value


def test_options_cannot_be_changed_and_tell_themselves_apart():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().steps = 3
    assert Options() == Options() != Options(seed=1) and hash(Options()) == hash(Options())


@pytest.mark.parametrize("dtype, stored", [("float64", "float64"), ("float32", "float32"), ("bfloat16", "float32")])
def test_bfloat16_has_masters_of_float32(dtype, stored):
    assert Options(dtype=dtype).array_dtype == stored


@pytest.mark.parametrize("sampling", [{"sample": -1}, {"temperature": -0.1}, {"temperature": NAN}, {"temperature": INF}])
def test_a_senseless_sampling_is_refused(sampling):
    with pytest.raises(ValueError, match="sample and temperature must be at least 0, got "):
        Sampling(**sampling)


CHANGES = {"lr": 1e-2, "schedule": "cosine", "warmup": 2, "beta1": 0.5, "beta2": 0.5, "weight_decay": 0.9,
           "decay": ("vectors",), "clip": 0.01, "seed": 1, "batch_size": 3, "seq_len": 5}


@pytest.mark.parametrize("name", CHANGES)
def test_an_option_reaches_the_numbers(name):
    """A flag that nothing listens to gives the run without it."""
    plain = train(CORPUS, CFG, Options(steps=4, batch_size=2, seq_len=6), Mesh())
    other = train(CORPUS, CFG, Options(**{"steps": 4, "batch_size": 2, "seq_len": 6} | {name: CHANGES[name]}), Mesh())
    assert plain.losses[-1] != other.losses[-1], name


@pytest.mark.parametrize("change", [{"accumulate": 2}, {"eval_every": 1}, {"validation": 0.5}, {"check_replicas": 1},
                                    {"floor": 0.5}, {"keep": 1}, {"zero": True}, {"clip": 1e9}])
def test_an_option_that_is_not_of_the_numbers_leaves_them(change):
    """`validation` is for who cuts a text (Data.split); `floor` for the cosine; micro-batches are summed in another order."""
    plain = train(CORPUS, CFG, Options(steps=4, batch_size=4, seq_len=6), Mesh())
    other = train(CORPUS, CFG, Options(steps=4, batch_size=4, seq_len=6, **change), Mesh())
    np.testing.assert_allclose(other.losses, plain.losses, rtol=1e-13)
