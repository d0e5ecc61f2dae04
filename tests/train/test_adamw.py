"""Localises faults of the optimizer: bias correction, decoupled decay, state, and an update that is not sharded = serial."""
import numpy as np
import pytest

from refimpl.autograd import Layout, LayoutError, Tensor
from refimpl.comm import Mesh
from refimpl.models import Config, init
from refimpl.train import AdamW
from refimpl.train.adamw import GROUPS, adamw, group_of


def test_first_step_is_the_sign_of_the_gradient():
    # m̂ = g and v̂ = g² at t = 1, so p moves by lr·g/(|g| + eps)
    p, m, v = adamw(np.array([1.0, 2.0]), np.array([0.5, -4.0]), np.zeros(2), np.zeros(2), t=1, lr=0.1, eps=0.0)
    np.testing.assert_allclose(p, [0.9, 2.1], rtol=1e-15)
    np.testing.assert_allclose(m, 0.1 * np.array([0.5, -4.0]), rtol=1e-15)
    np.testing.assert_allclose(v, 0.05 * np.array([0.25, 16.0]), rtol=1e-15)


def test_two_steps_by_hand():
    # g = 1, then 3; β = (0.5, 0.5): m = 0.5, 1.75; v = 0.5, 4.75; divided by 1 - 0.5² = 0.75 in step 2
    p, m, v = adamw(np.zeros(1), np.ones(1), np.zeros(1), np.zeros(1), t=1, lr=1.0, betas=(0.5, 0.5), eps=0.0)
    p, m, v = adamw(p, np.full(1, 3.0), m, v, t=2, lr=1.0, betas=(0.5, 0.5), eps=0.0)
    np.testing.assert_allclose((m, v), ([1.75], [4.75]), rtol=1e-15)
    np.testing.assert_allclose(p, -1 - (1.75 / 0.75) / np.sqrt(4.75 / 0.75), rtol=1e-15)


def test_decay_is_decoupled_from_the_gradient():
    # with a zero gradient only the decay is left: p·(1 - lr·wd), and the moments stay 0
    p, m, v = adamw(np.array([2.0]), np.zeros(1), np.zeros(1), np.zeros(1), t=1, lr=0.1, weight_decay=0.5)
    assert (p, m, v) == (2.0 * (1 - 0.05), 0, 0)


def test_decay_touches_matrices_only():
    params = {"w": Tensor(np.ones((2, 2)), name="w"), "b": Tensor(np.ones(2), name="b")}
    grads = {name: Tensor(np.zeros(p.shape)) for name, p in params.items()}
    new = AdamW(lr=0.1, weight_decay=0.5).step(params, grads)
    np.testing.assert_allclose(new["w"].array, 0.95)
    np.testing.assert_array_equal(new["b"].array, 1)


def test_moments_survive_between_steps_and_arguments_are_not_written_to():
    p = {"w": Tensor(np.ones(3), name="w")}
    g = {"w": Tensor(np.array([1.0, 2.0, 3.0]))}
    optimizer = AdamW(lr=0.1)
    for _ in range(3):
        new = optimizer.step(p, g)
    assert optimizer.t == 3 and new["w"].array is not p["w"].array
    np.testing.assert_array_equal(p["w"].array, 1)
    np.testing.assert_allclose(optimizer.m["w"], (1 - 0.9 ** 3) * np.array([1, 2, 3]), rtol=1e-14)


def test_float32_stays_float32():
    p, m, v = adamw(*(np.ones(2, np.float32) for _ in range(4)), t=1)
    assert p.dtype == m.dtype == v.dtype == np.float32


def test_a_partial_gradient_is_refused():
    axes = frozenset({"dp"})
    with pytest.raises(LayoutError, match="gradient of w is partial over dp: reduce_gradients first"):
        AdamW(lr=0.1).step({"w": Tensor(np.ones(1), name="w")}, {"w": Tensor(np.ones(1), Layout(axes, axes))})


@pytest.mark.parametrize("lr", [-1.0, float("nan"), float("inf")])
def test_a_senseless_learning_rate_is_refused(lr):
    """0 is where a cosine ends."""
    with pytest.raises(ValueError, match="learning rate must be finite and at least 0, got"):
        AdamW(lr=lr)


# -- groups -----------------------------------------------------------------------------------------------------------

TIED = Config(vocab_size=5, n_layers=1, n_heads=2, d_model=4, max_seq_len=3, biases=("norm", "qkv", "o", "mlp", "head"))
UNTIED = Config(vocab_size=5, n_layers=1, n_heads=2, d_model=4, max_seq_len=3, tied=False, ffn="swiglu", norm="rms_norm",
                qk_norm=True, biases=())
BLOCK = {f"layers.0.{name}.w" for name in ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down")}


@pytest.mark.parametrize("cfg, embeddings, matrices", [
    (TIED, {"embed.w", "positions.w"}, BLOCK), (UNTIED, {"embed.w", "positions.w"}, BLOCK | {"layers.0.mlp.gate.w", "head.w"})])
def test_the_groups_of_a_decoders_parameters(cfg, embeddings, matrices):
    """A tied matrix, embedding and head in one, is an embedding; gains and biases are vectors."""
    found = {name: group_of(name, t.array.ndim) for name, t in init(cfg, Mesh(), 0).items()}
    assert {name for name, group in found.items() if group == "embeddings"} == embeddings
    assert {name for name, group in found.items() if group == "matrices"} == matrices
    assert {name[-2:] for name, group in found.items() if group == "vectors"} <= {".g", ".b"} and len(found) > 10


@pytest.mark.parametrize("decay", [(), ("matrices",), ("embeddings",), ("vectors",), ("vectors", "matrices"), GROUPS])
def test_only_the_listed_groups_decay_and_the_others_move_by_adam_alone(decay):
    params = {name: Tensor(t.array + 1, t.layout, None, name) for name, t in init(TIED, Mesh(), 0).items()}
    draw = np.random.default_rng(0)
    grads = {name: Tensor(draw.standard_normal(t.shape)) for name, t in params.items()}
    adam = AdamW(lr=0.1, weight_decay=0.0).step(params, grads)
    new = AdamW(lr=0.1, weight_decay=0.5, decay=decay).step(params, grads)
    for name, t in params.items():
        decayed = 0.1 * 0.5 * t.array if group_of(name, t.array.ndim) in decay else 0
        np.testing.assert_allclose(new[name].array, adam[name].array - decayed, rtol=1e-14)


def test_a_matrix_that_is_a_vector_for_its_rank_is_still_a_matrix():
    """The group goes by the number of axes, which a cut leaves: a rank with one column of a matrix decays it."""
    column = {"layers.0.attn.q.w": Tensor(np.ones((4, 1)), name="layers.0.attn.q.w")}
    new = AdamW(lr=0.1, weight_decay=0.5, decay=("matrices",)).step(column, {n: Tensor(np.zeros((4, 1))) for n in column})
    np.testing.assert_allclose(new["layers.0.attn.q.w"].array, 0.95)
