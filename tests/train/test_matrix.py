"""Localises options of the decoder, and ways to cut it, that give another loss, gradient, norm or update than one rank does.

Every option of Config is in at least one model.  Every model is trained for three steps on every mesh, with dropout or without,
in one micro-batch or three: in turn, so that each model has all four on some meshes.  The optimizer's state is whole, or each
dp rank has that of its rows (ZeRO-1).  Where cp cuts sequences, the ways to attend and the layouts take turns as well.
"""
import functools
from dataclasses import fields, replace

import numpy as np
import pytest

from refimpl.autograd import Record
from refimpl.comm import Mesh, run_threads, shares
from refimpl.comm.paper import paper_mesh
from refimpl.models import Config, Plan, parameters, placements
from refimpl.models.config import BIASED, CHOICES
from refimpl.parallel import (ATTENTIONS, LAYOUTS, Reduction, RowReduction, check_replicas, clip, gather, gather_rows,
                              gradient_norm, shard)
from refimpl.train import AdamW, Batch, State, gradients

B, T, V = 7, 6, 13                                      # on 8 dp ranks some have no sample
SIZES = {"vocab_size": V, "n_layers": 2, "n_heads": 8, "d_model": 24, "max_seq_len": 8}
LLAMA = {"norm": "rms_norm", "positions": "rope", "ffn": "swiglu", "biases": (), "tied": False}
SERIAL = Mesh()
LR, EPS, STEPS, CLIP = 1e-3, 1e-8, 3, 0.5

MODELS = {
    "gpt2": {"head_dim": 3},
    "llama, grouped heads": {"head_dim": 4, "n_kv_heads": 2, "d_ff": 20} | LLAMA,
    "9 query and 3 kv heads": {"n_heads": 9, "n_kv_heads": 3, "head_dim": 2, "d_ff": 19} | LLAMA,
    "12 query and 4 kv heads": {"n_heads": 12, "n_kv_heads": 4, "head_dim": 2, "rope_pairing": "interleaved"} | LLAMA,
    "windows": {"head_dim": 4, "n_kv_heads": 4, "windows": (3, 0), "rope_theta": 100.0} | LLAMA,
    "gemma, one kv head": {"head_dim": 6, "n_kv_heads": 1, "embed_scale": 24 ** 0.5, "vocab_multiple": 8} | LLAMA | {
        "norm": "rms_norm_1+w", "ffn": "geglu_tanh", "tied": True, "soft_cap": 3.0},
    "more padding than words of a rank": {"vocab_multiple": 32, "eps": 1e-3, "ffn": "gelu_erf"},
    "post-norm": {"norm_place": "post", "ffn": "relu", "positions": "none", "biases": BIASED, "tied": False},
    "norms of q and k": {"qk_norm": True, "ffn": "geglu_erf", "positions": "rope", "head_dim": 4, "biases": ("norm",)},
    "norms without bias": {"qk_norm": True, "ffn": "gelu_tanh", "biases": ("qkv", "mlp", "head")},
}
PLANS = [Plan(attention, layout, parallel, regather=parallel and (a + b) % 2 == 1)
         for a, attention in enumerate(ATTENTIONS) for b, layout in enumerate(LAYOUTS) for parallel in (False, True)]
PLANS += [Plan("blockwise", layout, block=2) for layout in LAYOUTS]
VARIANTS = [(rate, accumulate) for accumulate in (1, 3) for rate in (0.0, 0.25)]       # dropout, micro-batches of a step


def config(name, dropout=0.0):
    return Config(**SIZES | MODELS[name], dropout=dropout)


def variant(name, mesh, zero=False):
    """With `zero` dp is more than 1, so 2, 4, 6 and 8 take turns as well."""
    return VARIANTS[(list(MODELS).index(name) + (mesh.dp.size // 2 if zero else mesh.dp.size) + 2 * mesh.tp.size) % 4]


def test_every_option_is_in_a_model():
    models = [config(name) for name in MODELS]
    for f in fields(Config):
        if f.name not in ("vocab_size", "n_layers", "d_model", "max_seq_len", "dropout"):
            assert len({getattr(cfg, f.name) for cfg in models}) > 1, f.name
    for name, choices in CHOICES.items():
        assert {getattr(cfg, name) for cfg in models} == set(choices), name
    assert {part for cfg in models for part in BIASED if part not in cfg.biases} == set(BIASED)
    for name in MODELS:                                 # on the meshes of up to four ranks, which MPI has, too
        meshes = [paper_mesh(f"dp={dp},tp={tp}") for dp in (1, 2, 4) for tp in (1, 2, 4) if dp * tp <= 4]
        assert {variant(name, mesh) for mesh in meshes} == set(VARIANTS)


@functools.cache
def whole_parameters(name):
    """Global arrays with nothing at zero, so that every path carries a gradient."""
    draw, cfg = np.random.default_rng(0), config(name)
    return {key: (row.scale is None) + draw.normal(0, 0.3, row.shape) for key, row in parameters(cfg, SERIAL).items()}


def batches(mesh, accumulate):
    """This rank's micro-batches; every second target of sample 1 is ignored, and all of samples 3 and 4."""
    draw = np.random.default_rng(1)
    tokens, targets = draw.integers(0, V, (2, B, T))
    targets[1, ::2], targets[3:5] = -100, -100
    first = 0
    for size in shares(B, accumulate):
        ends = first + np.cumsum((0, *shares(size, mesh.dp.size)))
        rows = np.arange(ends[mesh.dp.rank], ends[mesh.dp.rank + 1])
        yield Batch(rows, tokens[rows], targets[rows])
        first += size


def three_steps(name, mesh, dropout, accumulate, zero=False, plan=Plan()):
    """Of each step: the loss, the count, the norm of the gradient and the global gradient; and the global parameters after."""
    cfg = config(name, dropout)
    table = placements(cfg, mesh)
    params, optimizer, out = shard(whole_parameters(name), table, mesh), AdamW(LR, eps=EPS, weight_decay=0.1), []
    state, reduction = State(cfg, mesh, params, optimizer, zero), RowReduction if zero else Reduction
    for step in range(STEPS):
        check_replicas(state.params, table, mesh)
        g = gradients(state.params, batches(mesh, accumulate), cfg, mesh, seed=7, step=step, reduction=reduction, plan=plan)
        norm = gradient_norm(g.grads, state.optimizer_table, mesh)
        state.update(clip(g.grads, norm, CLIP))
        whole = gather_rows(g.grads, state.params, mesh) if zero else g.grads
        out.append((g.loss, g.count, norm, gather(whole, table, mesh)))
    return out, gather(state.params, table, mesh)


@functools.cache
def serial(name, *how):
    return three_steps(name, SERIAL, *how)


@functools.cache
def gauge_scales(name, *how):
    """Of a bias that all keys share: Σ |dk| over samples and positions, the sum that makes its gradient, in absolute values."""
    with Record() as record:
        three_steps(name, SERIAL, *how)
    sizes = {}
    for entry in record:
        if entry.dy:
            size, key = np.abs(entry.dy[0]), entry.name.partition("#")[0] + ".b"
            sizes[key] = max(sizes.get(key, 0.0), float(size.sum(axis=tuple(range(size.ndim - 1))).max(initial=0.0)))
    return {key: sizes[key] for key, row in parameters(config(name), SERIAL).items() if row.gauge}


def close(got, want, scale):
    return np.abs(np.asarray(got) - want).max(initial=0) <= 1e-12 * scale


def plan_of(name, mesh):
    """T is 6, so some of more than 6 cp ranks have no position.  Where sequences are whole, the plan is another on tp ranks."""
    n, (dp, cp, tp) = list(MODELS).index(name), mesh.dims.values()
    if cp > 1:
        plan = PLANS[(2 * n + 7 * cp + 7 * tp) % len(PLANS)]
        return replace(plan, ring=2) if plan.attention == "all_to_all" and cp % 2 == 0 and n % 2 else plan
    parallel = (n + dp + tp // 2) % 2 == 1
    return Plan(sequence_parallel=parallel, regather=parallel and (n // 2 + tp // 2) % 2 == 1)


def test_every_plan_is_used():
    meshes = [paper_mesh(f"dp={dp},cp={cp},tp={tp}") for dp in (1, 2) for cp in (2, 4) for tp in (1, 2) if dp * cp * tp <= 4]
    plans = {plan_of(name, mesh) for name in MODELS for mesh in meshes}
    assert {replace(plan, ring=1) for plan in plans} == set(PLANS) and {plan.ring for plan in plans} == {1, 2}
    for tp in (2, 4):                                   # each model with and without, on some mesh of these tp ranks
        assert all({plan_of(name, paper_mesh(f"dp={dp},tp={tp}")).sequence_parallel for dp in (1, 2)} == {False, True}
                   for name in MODELS)


def require_the_steps_of_one_rank(name, mesh, zero):
    """Losses, gradients and norms within 1e-12 of their scale.  An update is lr·m/(√v + eps), whose error is that of the
    gradient over the gradient itself where that is small."""
    how, rows = variant(name, mesh, zero), parameters(config(name), SERIAL)
    (steps, after), scales = serial(name, *how), gauge_scales(name, *how)
    smallest = {key: np.min([np.abs(g[key]) * min(1, CLIP / norm) for _, _, norm, g in steps], axis=0) for key in rows}
    got_steps, got_after = three_steps(name, mesh, *how, zero, plan_of(name, mesh))
    for (loss, count, norm, grads), (want_loss, want_count, want_norm, want) in zip(got_steps, steps):
        assert count == want_count == B * T - T // 2 - 2 * T
        assert close(loss, want_loss, want_loss) and close(norm, want_norm, want_norm)
        assert norm > CLIP and set(grads) == set(rows)
        for key, row in rows.items():
            scale = scales[key] / count if row.gauge else np.abs(want[key]).max()
            assert grads[key].shape == row.shape and close(grads[key], want[key], scale), key
            assert row.gauge or scale > 1e-4, key       # a gradient is there
    for key, row in rows.items():
        if not row.gauge:
            gradient = max(np.abs(grads[key]).max() for _, _, _, grads in steps)
            allowed = 1e-12 * (np.abs(after[key]).max() + 10 * STEPS * LR * gradient / (smallest[key] + EPS))
            assert (np.abs(got_after[key] - after[key]) <= allowed).all(), key


def prepare(name):
    """The runs of one rank, before there are threads."""
    for how in VARIANTS:
        serial(name, *how), gauge_scales(name, *how)


@pytest.mark.parametrize("cut", (False, True), ids=("whole sequences", "cut sequences"))
@pytest.mark.parametrize("zero", (False, True), ids=("whole state", "rows of the state"))
@pytest.mark.parametrize("name", MODELS)
def test_three_steps_are_those_of_one_rank_on_every_mesh(ranks, name, zero, cut):
    prepare(name)

    def check(mesh: Mesh):
        if not zero or mesh.dp.size > 1:                # else the state is whole there, too
            require_the_steps_of_one_rank(name, mesh, zero)
    ranks.run_meshes(check, cut)


@pytest.mark.parametrize("dims", ({"cp": 16}, {"dp": 2, "cp": 4, "tp": 2}, {"dp": 2, "cp": 2, "tp": 4}, {"dp": 4, "cp": 4}),
                         ids=str)
@pytest.mark.parametrize("name", ("gpt2", "9 query and 3 kv heads"))
def test_sixteen_ranks_are_as_one(name, dims):
    """More cp ranks than positions among them."""
    prepare(name)
    run_threads(16, lambda comm: require_the_steps_of_one_rank(name, Mesh(**dims, comm=comm), False), timeout=60)


def test_a_bias_that_all_keys_share_has_no_gradient_and_no_other_parameter_has_none():
    """Softmax does not see it, unless RoPE turns it or a norm comes after it."""
    found = {}
    for name in MODELS:
        rows = parameters(config(name), SERIAL)
        found[name] = {key.split(".", 3)[-1] for key, row in rows.items() if row.gauge}
        for key, scale in gauge_scales(name, 0.0, 1).items():
            assert np.abs(serial(name, 0.0, 1)[0][0][3][key]).max() <= 1e-12 * scale
    assert {name for name, keys in found.items() if keys} == {"gpt2", "more padding than words of a rank", "post-norm"}
    layer_norms = Config(**SIZES, qk_norm=True)
    assert [key for key, row in parameters(layer_norms, SERIAL).items() if row.gauge] == [
        f"layers.{i}.attn.k_norm.b" for i in range(2)]
    draw = np.random.default_rng(2)
    whole = {key: 0.5 + draw.random(row.shape) for key, row in parameters(layer_norms, SERIAL).items()}
    params = shard(whole, placements(layer_norms, SERIAL), SERIAL)
    grads = gradients(params, batches(SERIAL, 1), layer_norms, SERIAL).grads
    for i in range(2):
        q, k = (np.abs(grads[f"layers.{i}.attn.{part}_norm.b"].array).max() for part in "qk")
        assert q > 1e-9 and k <= 1e-10 * q
