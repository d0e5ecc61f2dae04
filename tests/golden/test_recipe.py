"""Localises faults of what golden values are made of: weights and batches that depend on the mesh, or that hide mistakes."""
from dataclasses import replace

import numpy as np
import pytest

from refimpl.comm import Mesh, run_threads
from refimpl.golden.recipe import EMBEDDINGS, MODELS, Recipe, batch, spread, values, weights
from refimpl.models.placements import parameters
from refimpl.ops.losses import IGNORE
from refimpl.parallel import box

GPT, LLAMA = (Recipe(MODELS[name]) for name in ("gpt-micro", "llama-micro"))
RECIPES = {"gpt": GPT, "llama": LLAMA, "gpt of seed 5": replace(GPT, seed=5),
           "padded": Recipe(replace(MODELS["gpt-micro"], vocab_size=37, vocab_multiple=8)),
           "1+w": Recipe(replace(MODELS["llama-micro"], norm="rms_norm_1+w"))}
WIDE = replace(GPT, batch_size=500)


@pytest.mark.parametrize("name", RECIPES)
def test_weights_on_any_mesh_are_the_slices_of_the_serial_ones(ranks, name):
    recipe = RECIPES[name]
    serial = weights(recipe, Mesh())

    def check(mesh):
        mine, rows = weights(recipe, mesh), parameters(recipe.config, mesh)
        assert list(mine) == list(serial) == list(rows)
        for key, t in mine.items():
            where = box(rows[key].placement, rows[key].shape, mesh)
            assert t.array.tobytes() == serial[key].array[where].tobytes() and t.array.shape == serial[key].array[where].shape
            assert t.name == key and t.dtype == "float64"
    for dims in ranks.meshes():
        if dims["tp"] <= recipe.config.n_heads:
            ranks.run(lambda comm: check(Mesh(**dims, comm=comm)))


@pytest.mark.parametrize("name", RECIPES)
def test_weights_are_exact_in_float32_and_as_their_spread_says(name):
    recipe = RECIPES[name]
    rows = parameters(recipe.config, Mesh())
    for key, t in weights(recipe, Mesh()).items():
        offset, scale = spread(key, rows[key])
        assert t.array.astype(np.float32).astype(np.float64).tobytes() == t.array.tobytes(), key
        assert np.log2(scale) == round(np.log2(scale)) and t.shape == rows[key].shape
        assert offset - scale <= t.array.min() < offset < t.array.max() < offset + scale
        middle = 5 * scale / np.sqrt(3 * t.array.size)          # of a mean of uniform numbers: 5 standard errors
        assert abs(t.array.mean() - offset) < middle, key


def test_nothing_is_zero_or_one_and_no_two_parameters_are_alike():
    for recipe in RECIPES.values():
        params = weights(recipe, Mesh())
        for key, t in params.items():
            assert np.isin(t.array, (0.0, 1.0)).mean() < 0.01 and len(np.unique(t.array)) > 0.9 * t.array.size, key
        assert len({t.array.tobytes() for t in params.values()}) == len(params)


def test_gains_biases_and_weights_have_sizes_that_move_numbers():
    params = weights(GPT, Mesh())
    for key, t in params.items():
        if key.endswith(".g"):
            assert 0.5 <= t.array.min() and t.array.max() < 1.5
        elif key.endswith(".b"):
            assert np.abs(t.array).max() <= 0.25 and np.abs(t.array).mean() > 0.05
        elif key not in EMBEDDINGS:                     # a product of x of size 1 is about 1: k terms of variance s²/3
            assert 0.5 < np.sqrt(t.shape[0]) * np.sqrt(np.mean(t.array ** 2)) < 2, key
    one_plus = weights(RECIPES["1+w"], Mesh())["norm.g"].array          # the gain is 1 + w
    assert np.abs(one_plus).max() <= 0.25


def test_a_gain_is_exact_in_float32_whatever_is_drawn():
    found = values(0, "x", np.arange(200_000), 1.0, 0.5)
    assert np.array_equal(found.astype(np.float32).astype(np.float64), found)
    assert 0.5 <= found.min() < 0.501 and 1.499 < found.max() < 1.5 and abs(found.mean() - 1) < 5 * 0.5 / np.sqrt(6e5)


def test_another_seed_gives_other_weights_and_tokens():
    other = RECIPES["gpt of seed 5"]
    assert not any(np.array_equal(a.array, b.array) for a, b in zip(weights(GPT, Mesh()).values(),
                                                                    weights(other, Mesh()).values(), strict=True))
    assert not np.array_equal(batch(GPT, Mesh(), 1).tokens, batch(other, Mesh(), 1).tokens)


@pytest.mark.parametrize("recipe", [GPT, replace(GPT, batch_size=7, seq_len=5)], ids=["4 x 8", "7 x 5"])
def test_every_dp_ranks_samples_are_those_of_the_serial_batch(ranks, recipe):
    """In the order of the ranks, each once; shares may be uneven, and on many ranks some have none."""
    def check(mesh):
        for step in (1, 2):
            serial, mine = batch(recipe, Mesh(), step), batch(recipe, mesh, step)
            assert mine.tokens.shape == mine.targets.shape == (len(mine.rows), recipe.seq_len)
            assert np.array_equal(mine.tokens, serial.tokens[mine.rows])
            assert np.array_equal(mine.targets, serial.targets[mine.rows])
            rows = [int(r) for text in mesh.dp.gather_texts(" ".join(map(str, mine.rows))) for r in text.split()]
            assert rows == list(range(recipe.batch_size)) == serial.rows.tolist()
    ranks.run_meshes(check)


def test_tokens_are_in_range_and_targets_are_the_tokens_that_follow_or_ignored():
    b = batch(WIDE, Mesh(), 1)
    assert b.tokens.min() == 0 and b.tokens.max() == WIDE.config.vocab_size - 1
    kept = b.targets != IGNORE
    assert np.array_equal(b.targets[:, :-1][kept[:, :-1]], b.tokens[:, 1:][kept[:, :-1]])
    assert 0 <= b.targets[kept].min() and b.targets[kept].max() < WIDE.config.vocab_size
    assert len(np.unique(b.targets[:, -1])) == WIDE.config.vocab_size + 1          # the last target is a token, too


def test_one_target_in_sixteen_is_ignored():
    ignored = np.concatenate([batch(WIDE, Mesh(), step).targets for step in (1, 2, 3)]) == IGNORE
    assert abs(ignored.mean() - 1 / 16) < 5 * np.sqrt(1 / 16 * 15 / 16 / ignored.size)
    assert (np.abs(ignored.mean(axis=0) - 1 / 16) < 5 * np.sqrt(1 / 16 * 15 / 16 / len(ignored))).all()     # at any position


def test_the_recipes_batches_have_ignored_and_valid_targets_and_steps_differ():
    for recipe in (GPT, LLAMA):
        batches = [batch(recipe, Mesh(), step) for step in range(1, recipe.steps + 1)]
        assert all(0 < (b.targets == IGNORE).sum() < b.targets.size / 2 for b in batches)
        assert len({b.tokens.tobytes() for b in batches}) == recipe.steps


def test_padded_ids_are_no_tokens():
    recipe = replace(RECIPES["padded"], batch_size=500)
    assert recipe.config.padded_vocab == 40 and batch(recipe, Mesh(), 1).tokens.max() == 36


REFUSED = {
    "seq_len is 9, the model has max_seq_len 8": {"seq_len": 9},
    "seq_len must be at least 1, got 0": {"seq_len": 0},
    "steps must be at least 1, got 0": {"steps": 0},
    "batch_size must be at least 1, got -1": {"batch_size": -1},
    "golden values are made without dropout, the model has dropout 0.1": {"config": replace(GPT.config, dropout=0.1)},
    "layout must be one of contiguous, zigzag, striped, got 'spiral'": {"layout": "spiral"},
    "attention must be one of naive, blockwise, ring, all_to_all, got 'flash'": {"attention": "flash"},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_be_made_is_refused_with_a_sentence(sentence):
    with pytest.raises(ValueError) as caught:
        replace(GPT, **REFUSED[sentence])
    assert str(caught.value) == sentence


def test_a_recipe_says_everything_that_it_depends_on():
    said = GPT.to_dict()
    assert Recipe(**said | {"config": type(GPT.config)(**said["config"])}) == GPT
    assert said["mesh"] == {"dp": 1, "cp": 1, "tp": 1} and said["config"]["d_model"] == 16


def test_a_mesh_with_more_dp_ranks_than_samples_leaves_some_without():
    rows = run_threads(3, lambda comm: batch(replace(GPT, batch_size=2), Mesh(dp=3, comm=comm), 1).tokens.shape)
    assert rows == [(1, 8), (1, 8), (0, 8)]
