"""Localises a decoder that is not GPT-2, or an AdamW that is not AdamW: against transformers and torch, from our weights.

    ours                    GPT2LMHeadModel
    embed.w, positions.w    transformer.wte.weight, transformer.wpe.weight
    layers.3.norm1.g .b     transformer.h.3.ln_1.weight .bias               norm2: ln_2; norm: transformer.ln_f
    layers.3.attn.q k v     one transformer.h.3.attn.c_attn, side by side   attn.o: attn.c_proj
    layers.3.mlp.up down    transformer.h.3.mlp.c_fc c_proj                 all stored (d_in, d_out), as ours

Float64 on both sides; nothing is downloaded.  Equal means: |a - b| <= 1e-12·scale, scale the largest absolute value of the
logits, the loss or that parameter's gradient; for the bias of k, whose gradient is rounding alone, that of q's bias.
"""
import functools

import numpy as np
import pytest
import torch
import transformers

from refimpl.autograd import Params, Tensor, value_and_grad
from refimpl.comm import Mesh, run_threads
from refimpl.models import Config, Context, decoder, parameters, placements
from refimpl.parallel import gather, reduce_gradients, shard
from refimpl.rng import draw, integers, stream
from refimpl.train import AdamW

CFG = Config(vocab_size=13, n_layers=3, n_heads=4, d_model=20, max_seq_len=9, d_ff=28)
B, T = 3, 7
TOKENS, TARGETS = (integers(stream(0, name), np.arange(B * T), CFG.vocab_size).reshape(B, T) for name in ("tokens", "targets"))
TARGETS[1, ::2] = -100
NAMES = {"embed.w": "wte.weight", "positions.w": "wpe.weight", "norm.g": "ln_f.weight", "norm.b": "ln_f.bias"}
IN_LAYER = {"norm1.g": "ln_1.weight", "norm1.b": "ln_1.bias", "norm2.g": "ln_2.weight", "norm2.b": "ln_2.bias",
            "attn.o.w": "attn.c_proj.weight", "attn.o.b": "attn.c_proj.bias", "mlp.up.w": "mlp.c_fc.weight",
            "mlp.up.b": "mlp.c_fc.bias", "mlp.down.w": "mlp.c_proj.weight", "mlp.down.b": "mlp.c_proj.bias"}


def to_theirs(ours):
    """Our global arrays under their names; q, k and v become one."""
    out = {theirs: ours[name] for name, theirs in NAMES.items()}
    for i in range(CFG.n_layers):
        out |= {f"h.{i}.{theirs}": ours[f"layers.{i}.{name}"] for name, theirs in IN_LAYER.items()}
        for part, theirs in (("w", "weight"), ("b", "bias")):
            out[f"h.{i}.attn.c_attn.{theirs}"] = np.concatenate([ours[f"layers.{i}.attn.{n}.{part}"] for n in "qkv"], axis=-1)
    return {f"transformer.{name}": a for name, a in out.items()}


@functools.cache
def weights():
    """Nothing at 0 or 1, so that every path carries a gradient."""
    return {name: (row.scale is None) + draw(name, row.shape, 0.5) for name, row in parameters(CFG, Mesh()).items()}


@functools.cache
def theirs():
    """Logits, loss (the mean over valid targets) and the gradient of every parameter, by transformers in float64."""
    config = transformers.GPT2Config(
        vocab_size=CFG.vocab_size, n_positions=CFG.max_seq_len, n_embd=CFG.d_model, n_layer=CFG.n_layers, n_head=CFG.n_heads,
        n_inner=CFG.d_ff, layer_norm_epsilon=CFG.eps, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0,
        eos_token_id=0, attn_implementation="eager", activation_function="gelu_new")
    model = transformers.GPT2LMHeadModel(config).double()
    state = {name: torch.tensor(a) for name, a in to_theirs(weights()).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected, "the head is the embedding: it is tied, not missing"
    assert model.lm_head.weight is model.transformer.wte.weight
    logits = model(torch.tensor(TOKENS)).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(B * T, -1), torch.tensor(TARGETS.reshape(-1)))
    loss.backward()
    assert logits.dtype == torch.float64
    return logits.detach().numpy(), float(loss.detach()), {name: p.grad.numpy() for name, p in model.named_parameters()}


def ours(mesh):
    """The same three, by refimpl on this mesh."""
    tokens, ctx, table = Tensor(TOKENS), Context(mesh, np.arange(B), np.arange(T)), placements(CFG, mesh)
    params = shard(weights(), table, mesh)
    logits = decoder.forward(tokens, Params(params), CFG, ctx)
    (total, count), grads = value_and_grad(lambda p: decoder.loss(tokens, TARGETS, p, CFG, ctx), params)
    whole = gather(reduce_gradients(grads, mesh), table, mesh)
    return logits.array, float(total) / int(count), {name: g / int(count) for name, g in to_theirs(whole).items()}


def require_close(name, a, b, scale):
    wrong = float(np.abs(a - b).max())
    assert a.shape == b.shape and wrong <= 1e-12 * scale, f"{name} is off by {wrong:.1e}, allowed is {1e-12 * scale:.1e}"


def require_equal(mesh):
    (logits, loss, grads), (their_logits, their_loss, their_grads) = ours(mesh), theirs()
    require_close("logits", logits, their_logits, np.abs(their_logits).max())
    require_close("loss", np.array(loss), np.array(their_loss), their_loss)
    assert set(grads) == set(their_grads)
    for name, g in their_grads.items():
        assert np.abs(g).max() > 1e-4, f"{name} has no gradient: the test does not see it"
        if name.endswith("c_attn.bias"):                # q, k and v side by side: the scale is that of q for q and k
            D = CFG.d_model
            require_close(name, grads[name][:2 * D], g[:2 * D], np.abs(g[:D]).max())
            require_close(name, grads[name][2 * D:], g[2 * D:], np.abs(g[2 * D:]).max())
        else:
            require_close(name, grads[name], g, np.abs(g).max())


@pytest.mark.parametrize("tp", (1, 2, 4))
def test_logits_loss_and_every_gradient_equal_gpt2s(tp):
    theirs()                                            # once, before there are threads
    run_threads(tp, lambda comm: require_equal(Mesh(tp=tp, comm=comm)))


def test_a_wrong_weight_is_found(monkeypatch):
    wrong = {**weights(), "layers.1.attn.k.w": weights()["layers.1.attn.k.w"] * (1 + 1e-9)}
    theirs()
    monkeypatch.setitem(globals(), "weights", lambda: wrong)
    with pytest.raises(AssertionError, match="logits is off"):
        require_equal(Mesh())


@pytest.mark.parametrize("settings", (
    dict(lr=1e-2), dict(lr=0.3, betas=(0.5, 0.999), eps=1e-3, weight_decay=0.25), dict(lr=1e-3, weight_decay=0.0)))
def test_three_steps_of_adamw_equal_torchs(settings):
    """The third gradient of `m` is 0.  torch decays whatever it is told to: here, matrices only."""
    start = {"m": draw("m", (3, 5)), "v": draw("v", (7,))}
    steps = [{name: draw(f"{name} {t}", a.shape, 10.0 ** -3 * t) * (t < 3 or name == "v") for name, a in start.items()}
             for t in (1, 2, 3)]
    params, optimizer = {name: Tensor(a, name=name) for name, a in start.items()}, AdamW(**settings)
    twins = {name: torch.tensor(a, requires_grad=True) for name, a in start.items()}
    torchs = torch.optim.AdamW(
        [{"params": [twins["m"]], "weight_decay": optimizer.weight_decay}, {"params": [twins["v"]], "weight_decay": 0.0}],
        lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps)
    for grads in steps:
        params = optimizer.step(params, {name: Tensor(g) for name, g in grads.items()})
        for name, t in twins.items():
            t.grad = torch.tensor(grads[name])
        torchs.step()
        for name, t in twins.items():
            state = torchs.state[t]
            for what, a, b in (("parameter", params[name].array, t.detach()), ("m of", optimizer.m[name], state["exp_avg"]),
                               ("v of", optimizer.v[name], state["exp_avg_sq"])):
                require_close(f"{what} {name}", a, b.numpy(), float(b.abs().max()))
