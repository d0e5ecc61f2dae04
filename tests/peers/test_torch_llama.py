"""Localises a decoder that is not LLaMA, Qwen, Mistral, Gemma, StarCoder2 or OPT where it says so: against transformers.

    ours                    LlamaForCausalLM                                matrices lie (d_out, d_in), but for embeddings
    embed.w, norm.g         model.embed_tokens.weight, model.norm.weight
    head.w                  lm_head.weight                                  tied: lm_head.weight is the embedding's
    layers.3.norm1.g        model.layers.3.input_layernorm.weight
    layers.3.norm2.g        model.layers.3.post_attention_layernorm.weight
    layers.3.attn.q.w .b    model.layers.3.self_attn.q_proj.weight .bias    likewise k, v, o, and q_norm, k_norm
    layers.3.mlp.up.w .b    model.layers.3.mlp.up_proj.weight .bias         likewise gate, down; RENAMED: what others call them

The weights are ours; nothing is downloaded.  Float64 on both sides, which theirs are not by `model.double()` alone: whatever
the dtype of the model they take norms, the softmax of attention, RoPE's frequencies and angles, and Gemma's gain in float32,
and make Gemma's factor of the embedding a float32.  `in_float64` answers each such request with float64, and `Float64Only`
fails the test if any operation of theirs, forward or backward, still returns another float.

Equal means: |a - b| <= 1e-12·scale, scale the largest absolute value of the logits, the loss or that parameter's gradient; for
a bias of k without RoPE, whose gradient is rounding alone, that of q's bias.

Left out: what our configuration cannot say.  Gemma2's norms after the sublayers are replaced by the identity, and its cap of
the attention scores is off, so that its windows and its cap of the logits can be compared.
"""
import contextlib
import functools
import importlib
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from refimpl.autograd import Params, Tensor, value_and_grad
from refimpl.comm import Mesh, run_threads
from refimpl.models import Config, Context, decoder, parameters, placements
from refimpl.parallel import gather, reduce_gradients, shard
from refimpl.rng import draw, integers, stream

B, T, WORDS = 3, 7, 13
TOKENS, TARGETS = (integers(stream(0, name), np.arange(B * T), WORDS).reshape(B, T) for name in ("tokens", "targets"))
TARGETS[1, ::2] = -100
NAMES = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "positions": "model.embed_positions"}
IN_LAYER = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
IN_LAYER |= {f"attn.{name}": f"self_attn.{name}_proj" for name in "qkvo"}
IN_LAYER |= {f"attn.{name}": f"self_attn.{name}" for name in ("q_norm", "k_norm")}
IN_LAYER |= {f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
RENAMED = {
    "Gemma2": {"post_attention_layernorm": "pre_feedforward_layernorm"},
    "Starcoder2": {"up_proj": "c_fc", "down_proj": "c_proj"},
    "OPT": {"model.norm": "model.final_layer_norm", "model.": "model.decoder.", "input_layernorm": "self_attn_layer_norm",
            "post_attention_layernorm": "final_layer_norm", "o_proj": "out_proj", "mlp.up_proj": "fc1", "mlp.down_proj": "fc2"},
}


@dataclass(frozen=True)
class Case:
    """A model in our words, and what their configuration says besides the sizes."""
    family: str
    cfg: Config
    theirs: dict = field(default_factory=dict)


LLAMA = Config(vocab_size=WORDS, n_layers=3, n_heads=4, n_kv_heads=2, d_model=24, max_seq_len=9, d_ff=28, norm="rms_norm",
               eps=1e-3, positions="rope", rope_theta=123.0, ffn="swiglu", biases=(), tied=False)
NINE = replace(LLAMA, n_heads=9, n_kv_heads=3, d_model=36, head_dim=4)
GEMMA = replace(LLAMA, n_kv_heads=1, d_model=20, head_dim=6, norm="rms_norm_1+w", ffn="geglu_tanh", tied=True,
                embed_scale=20 ** 0.5)
BIASES = ("norm", "qkv", "o", "mlp")
STARCODER = replace(LLAMA, norm="layer_norm", ffn="gelu_tanh", biases=BIASES, windows=(3,), tied=True)
OPT = Config(vocab_size=WORDS, n_layers=3, n_heads=4, d_model=24, max_seq_len=9, d_ff=28, ffn="relu")
CASES = {
    "llama": Case("Llama", replace(LLAMA, n_kv_heads=4)),
    "llama grouped": Case("Llama", LLAMA),
    "llama multi-query": Case("Llama", replace(LLAMA, n_kv_heads=1)),
    "llama padded": Case("Llama", replace(LLAMA, vocab_multiple=8)),
    "llama padded tied": Case("Llama", replace(LLAMA, vocab_multiple=8, tied=True)),
    "llama 9/3 heads": Case("Llama", NINE),
    "llama 9/3 heads tied": Case("Llama", replace(NINE, tied=True)),
    "llama biases": Case("Llama", replace(LLAMA, biases=("qkv", "o", "mlp")), {"attention_bias": True, "mlp_bias": True}),
    "llama geglu": Case("Llama", replace(LLAMA, ffn="geglu_erf"), {"hidden_act": "gelu"}),
    "qwen2": Case("Qwen2", replace(LLAMA, biases=("qkv",))),
    "qwen3": Case("Qwen3", replace(LLAMA, head_dim=8, qk_norm=True)),
    "qwen3 9/3 heads": Case("Qwen3", replace(NINE, d_model=24, qk_norm=True, tied=True)),
    "mistral": Case("Mistral", replace(LLAMA, windows=(3,)), {"sliding_window": 3}),
    "gemma": Case("Gemma", GEMMA),
    "gemma2": Case("Gemma2", replace(GEMMA, n_kv_heads=2, windows=(3, 0), soft_cap=2.5), {
        "sliding_window": 3, "final_logit_softcapping": 2.5, "attn_logit_softcapping": None, "query_pre_attn_scalar": 6}),
    "starcoder2": Case("Starcoder2", STARCODER, {"sliding_window": 3, "norm_epsilon": 1e-3}),
    "starcoder2 9/3 heads": Case("Starcoder2", replace(NINE, norm="layer_norm", ffn="gelu_erf", biases=BIASES), {
        "hidden_act": "gelu", "norm_epsilon": 1e-3}),
    "opt": Case("OPT", OPT, {"ffn_dim": 28}),
    "opt 350m": Case("OPT", replace(OPT, norm_place="post"), {"ffn_dim": 28, "do_layer_norm_before": False}),
}


def their_name(name, family):
    name, part = name.rsplit(".", 1)
    if name in NAMES:
        name = NAMES[name]
    else:
        _, layer, name = name.split(".", 2)
        name = f"model.layers.{layer}.{IN_LAYER[name]}"
    for llamas, own in RENAMED.get(family, {}).items():
        name = name.replace(llamas, own)
    return f"{name}.{'bias' if part == 'b' else 'weight'}"


def to_theirs(ours, family):
    """Our global arrays under their names: matrices transposed, without words that do not count; OPT's first two positions are
    never used."""
    out = {name: a.T if name.endswith(".w") and name not in ("embed.w", "positions.w") else a for name, a in ours.items()}
    out |= {name: out[name][:WORDS] for name in ("embed.w", "head.w") if name in out}
    out |= {"positions.w": np.pad(out["positions.w"], ((2, 0), (0, 0)))} if "positions.w" in out else {}
    return {their_name(name, family): a for name, a in out.items()}


@functools.cache
def weights(case):
    """Nothing at 0 or 1, so that every path carries a gradient."""
    table = parameters(CASES[case].cfg, Mesh())
    return {name: (row.scale is None) + draw(name, row.shape, 0.5) for name, row in table.items()}


class Torch64:
    """torch as their module sees it, where float32 means float64."""
    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


class Float64Only(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor) and t.is_floating_point():
                assert t.dtype == torch.float64, f"{func} returns {t.dtype}"
        return out


@contextlib.contextmanager
def in_float64(family):
    """Every float that their code of this family asks for is a float64."""
    name = family.lower()
    with pytest.MonkeyPatch.context() as patch, Float64Only():
        patch.setattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), "torch", Torch64())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)          # of what they make from Python's numbers
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


@functools.cache
def theirs(case):
    """Logits, loss (the mean over valid targets) and the gradient of every parameter, by transformers in float64."""
    family, cfg = CASES[case].family, CASES[case].cfg
    config = getattr(transformers, f"{family}Config")(
        vocab_size=cfg.vocab_size, max_position_embeddings=cfg.max_seq_len, hidden_size=cfg.d_model, head_dim=cfg.head_dim,
        num_hidden_layers=cfg.n_layers, num_attention_heads=cfg.n_heads, num_key_value_heads=cfg.n_kv_heads,
        intermediate_size=cfg.d_ff, rms_norm_eps=cfg.eps, tie_word_embeddings=cfg.tied, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": cfg.rope_theta},
        pad_token_id=None, bos_token_id=None, eos_token_id=None,    # padding's embedding has no gradient: Gemma's is word 0
        **CASES[case].theirs)
    with in_float64(family):
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        if family == "Gemma2":
            for layer in model.model.layers:
                layer.post_attention_layernorm = layer.post_feedforward_layernorm = torch.nn.Identity()
        state = {name: torch.tensor(a) for name, a in to_theirs(weights(case), family).items()}
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert missing == ["lm_head.weight"] * cfg.tied and not unexpected
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == cfg.tied
        logits = model(torch.tensor(TOKENS)).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(B * T, -1), torch.tensor(TARGETS.reshape(-1)))
        loss.backward()
    return logits.detach().numpy(), float(loss.detach()), {name: p.grad.numpy() for name, p in model.named_parameters()}


def ours(case, mesh, params=None, **changes):
    """The same three, by refimpl on this mesh; with other weights, or a configuration that is changed after they are made."""
    cfg = replace(CASES[case].cfg, **changes)
    tokens, ctx, table = Tensor(TOKENS), Context(mesh, np.arange(B), np.arange(T)), placements(cfg, mesh)
    params = shard(params or weights(case), table, mesh)
    logits = decoder.forward(tokens, Params(params), cfg, ctx)
    (total, count), grads = value_and_grad(lambda p: decoder.loss(tokens, TARGETS, p, cfg, ctx), params)
    whole = gather(reduce_gradients(grads, mesh, table), table, mesh)
    assert not whole["embed.w"][WORDS:].any() and (cfg.tied or not whole["head.w"][:, WORDS:].any()), "padding has a gradient"
    grads = {name: g / int(count) for name, g in to_theirs(whole, CASES[case].family).items()}
    return logits.array, float(total) / int(count), grads


def require_close(name, a, b, scale):
    wrong = float(np.abs(a - b).max())
    assert a.shape == b.shape and wrong <= 1e-12 * scale, f"{name} is off by {wrong:.1e}, allowed is {1e-12 * scale:.1e}"


def require_equal(case, mesh, **mistake):
    (logits, loss, grads), (their_logits, their_loss, their_grads) = ours(case, mesh, **mistake), theirs(case)
    require_close("logits", logits, their_logits, np.abs(their_logits).max())
    require_close("loss", np.array(loss), np.array(their_loss), their_loss)
    table = parameters(CASES[case].cfg, Mesh())
    assert {their_name(name, CASES[case].family) for name in table} == set(grads) == set(their_grads)
    for name, row in table.items():
        scale_of = name.replace("attn.k.b", "attn.q.b") if row.gauge else name
        name, scale_of = (their_name(n, CASES[case].family) for n in (name, scale_of))
        scale = np.abs(their_grads[scale_of]).max()
        assert scale > 1e-4, f"{name} has no gradient: the test does not see it"
        require_close(name, grads[name], their_grads[name], scale)


@pytest.mark.parametrize("tp", (1, 2, 4))
@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_every_gradient_equal_theirs(case, tp):
    theirs(case)                                        # once, before there are threads
    run_threads(tp, lambda comm: require_equal(case, Mesh(tp=tp, comm=comm)))


@pytest.mark.parametrize("name", (
    "embed.w", "head.w", "norm.g", "layers.1.norm2.g", "layers.1.attn.k.w", "layers.2.mlp.gate.w"))
def test_a_wrong_weight_is_found(name):
    theirs("llama grouped")
    wrong = {**weights("llama grouped"), name: weights("llama grouped")[name] * (1 + 1e-9)}
    with pytest.raises(AssertionError, match="logits is off"):
        require_equal("llama grouped", Mesh(), params=wrong)


@pytest.mark.parametrize("case, wrong", (
    ("llama grouped", {"rope_pairing": "interleaved"}), ("llama grouped", {"rope_theta": 123 * (1 + 1e-9)}),
    ("llama grouped", {"eps": 1e-3 * (1 + 1e-8)}), ("llama geglu", {"ffn": "geglu_tanh"}),
    ("qwen3", {"rope_pairing": "interleaved"}),
    ("mistral", {"windows": (2,)}), ("mistral", {"windows": (4,)}), ("mistral", {"windows": (3, 0)}),
    ("gemma", {"embed_scale": float(np.float32(20 ** 0.5))}), ("gemma", {"ffn": "geglu_erf"}), ("gemma", {"norm": "rms_norm"}),
    ("gemma2", {"windows": (0, 3)}), ("gemma2", {"soft_cap": 2.5 * (1 + 1e-9)}), ("starcoder2", {"ffn": "gelu_erf"})))
def test_a_wrong_form_is_found(case, wrong):
    theirs(case)
    with pytest.raises(AssertionError, match="logits is off"):
        require_equal(case, Mesh(), **wrong)


def test_float32_inside_their_code_is_found(monkeypatch):
    monkeypatch.setattr(Torch64, "float32", torch.float32)
    with pytest.raises(AssertionError, match="returns torch.float32"):
        theirs.__wrapped__("llama")
