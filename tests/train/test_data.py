"""Localises faults of the data order: samples that depend on the mesh, shifted labels, lost or repeated rows."""
import numpy as np
import pytest

from refimpl.comm import Mesh
from refimpl.rng import GOLDEN_GAMMA, MASK, fnv1a64, mix64
from refimpl.text import BPETokenizer, ByteTokenizer, open_tokens, write_tokens
from refimpl.train import Data, Options, Sampler

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


# -- the order is the hash's ------------------------------------------------------------------------------------------


def place(seed, use, n, below):
    """Where sample n begins, in Python's integers."""
    def draw(i):
        return mix64((key + (i + 1) * GOLDEN_GAMMA) & MASK) >> 40
    key = mix64(fnv1a64(use) ^ mix64(seed))
    return (draw(2 * n) << 24 | draw(2 * n + 1)) % below


@pytest.mark.parametrize("use", ("data", "validation"))
def test_a_sample_is_where_the_hash_of_seed_and_number_says(use):
    rows = np.array([0, 1, 7, 10 ** 6, 10 ** 9])
    for seed in (0, 5):
        tokens = Sampler(CORPUS, 6, seed, use).batch(rows).tokens
        assert tokens[:, 0].tolist() == [place(seed, use, int(n), 994) for n in rows]


def test_samples_to_learn_from_and_to_judge_by_have_orders_of_their_own():
    learnt, judged = (Sampler(CORPUS, 6, 0, use).batch(np.arange(9)).tokens[:, 0].tolist() for use in ("data", "validation"))
    assert learnt != judged


def test_a_step_sees_what_it_would_have_seen_in_a_run_from_the_beginning():
    """No state: the samples of step k do not depend on which steps came before."""
    sampler = Sampler(CORPUS, 6, 0)
    through = [next(sampler.step(k, 4, 1, Mesh())).tokens.tolist() for k in range(5)]
    assert next(Sampler(CORPUS, 6, 0).step(4, 4, 1, Mesh())).tokens.tolist() == through[4]
    assert len({str(t) for t in through}) == 5


@pytest.fixture(params=[256, 70_000])
def kept(request, tmp_path):
    """Tokens in memory and the same, mapped: of two bytes, and of four."""
    tokenizer = ByteTokenizer() if request.param == 256 else BPETokenizer([], specials=["x"] * (70_000 - 256))
    tokens = np.arange(3000) * 7919 % request.param
    write_tokens(tmp_path / "t", tokens, tokenizer)
    mapped, _ = open_tokens(tmp_path / "t")
    assert isinstance(mapped, np.memmap) and mapped.dtype == (np.uint16 if request.param == 256 else np.uint32)
    return tokens, mapped


def test_mapped_tokens_give_the_samples_of_those_in_memory(kept):
    batches = [Sampler(tokens, 6, 3).batch(np.arange(50)) for tokens in kept]
    for name in ("tokens", "targets"):
        a, b = (getattr(batch, name) for batch in batches)
        assert a.dtype == b.dtype == np.int64 and not isinstance(b, np.memmap)
        np.testing.assert_array_equal(a, b)


def test_a_text_is_known_by_its_tokens_not_by_how_they_are_kept(kept):
    in_memory, mapped = (Data.split(tokens, Options()).fingerprint for tokens in kept)
    assert in_memory == mapped
    changed = kept[0].copy()
    changed[-1] += 1
    assert Data.split(changed, Options()).fingerprint != in_memory
    assert Data.split(kept[0], Options(validation=0.1)).fingerprint != in_memory


def test_a_split_of_mapped_tokens_stays_mapped(kept):
    data = Data.split(kept[1], Options())
    assert isinstance(data.train, np.memmap) and isinstance(data.validation, np.memmap)


# -- what is kept to judge by -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("total, share, kept_back", [
    (1000, 0.0, 0), (1000, 0.05, 50), (1000, 0.5, 500), (1000, 0.0001, 7),       # a sample of 7 tokens at least
    (1000, 0.9999, 993),                                                        # ... and one to learn from
    (14, 0.05, 7), (14, 0.9, 7), (15, 0.05, 7), (15, 0.9, 8), (13, 0.5, 0), (7, 0.5, 0), (3, 0.5, 0), (0, 0.5, 0),
])
def test_the_end_of_the_text_is_kept_in_whole_samples(total, share, kept_back):
    data = Data.split(np.arange(total), Options(seq_len=6, validation=share))
    assert len(data.validation) == kept_back
    np.testing.assert_array_equal(np.concatenate([data.train, data.validation]), np.arange(total))
    if kept_back:
        Sampler(data.train, 6, 0), Sampler(data.validation, 6, 0, "validation")


def test_no_sample_to_learn_from_has_a_token_that_is_judged_by():
    data = Data.split(np.arange(100), Options(seq_len=6, validation=0.3))
    learnt = Sampler(data.train, 6, 0).batch(np.arange(300))
    judged = Sampler(data.validation, 6, 0, "validation").batch(np.arange(300))
    assert learnt.targets.max() == 69 and judged.tokens.min() == 70 and judged.targets.max() == 99
