"""Localises a golden check that fails a right stack, or passes a wrong one: real stacks, trained three steps, by torch.

Right ones: transformers' GPT2LMHeadModel and LlamaForCausalLM, their attention "eager" and "sdpa", in each format, and under
autocast.  All that their modules give and get is dumped under their own names.  In bfloat16 and float16 the optimizer has
float32 copies of the weights.  rho must stay within the limits, in the whole trace and in local replay.

Wrong ones: a GPT of our names with one mistake each, which must be found, and named where refimpl knows it.
"""
import contextlib
import functools
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from test_torch_llama import in_float64
from torch import nn

from refimpl.comm.base import SerialComm
from refimpl.golden.actual import read as read_dump
from refimpl.golden.bundle import read
from refimpl.golden.make import make
from refimpl.golden.names import NAMES, to_theirs
from refimpl.golden.recipe import MODELS, Recipe
from refimpl.golden.session import How, compared
from refimpl.models import Config

CONFIGS = {
    "gpt2": Config(vocab_size=40, n_layers=2, n_heads=4, d_model=24, max_seq_len=8, d_ff=32),       # no head_dim of its own
    "llama": MODELS["llama-micro"],
    "gpt": MODELS["gpt-micro"],
}
NO_ARRAY = ("rotary_emb", "transformer", "model", "")   # modules that give several, or none


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """Each model's bundle, made when it is first asked for."""
    @functools.cache
    def of(model):
        out = tmp_path_factory.mktemp("golden") / model
        make(Recipe(CONFIGS[model]), SerialComm(), out)
        return read(out)
    return of


def train(model, bundle, dtype, kept, name_of=lambda name, a: (name, a), autocast=False, loss=F.cross_entropy,
          decayed=lambda p: p.ndim > 1, clip=True, optimizer=torch.optim.AdamW):
    """All that three steps of `model` give, by key.

    kept     what its modules gave in the last forward, filled by its hooks
    name_of  (name, array) -> the name and the array that are dumped
    clip     whether; or a function that does it otherwise
    """
    r, narrow = bundle.recipe, getattr(torch, dtype)
    wide = torch.promote_types(narrow, torch.float32)
    masters = {name: p.detach().to(wide, copy=True).requires_grad_() for name, p in model.named_parameters()}
    model.to(wide if autocast else narrow)
    told = dict(lr=r.lr, betas=(r.beta1, r.beta2), eps=r.eps)
    groups = [{"params": [p for p in masters.values() if decayed(p) == yes], "weight_decay": r.weight_decay * yes}
              for yes in (True, False)]
    adamw = optimizer([g for g in groups if g["params"]], **told)
    out = {}

    def put(kind, arrays):
        for name, a in arrays:
            theirs, a = name_of(name, a.detach())
            out[f"{kind}/{theirs}"] = a.to("cpu", copy=True).contiguous()
    put("params", masters.items())
    for step in range(1, r.steps + 1):
        tokens, targets = (torch.tensor(bundle.value(f"step{step}/{name}")) for name in ("tokens", "targets"))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
        model.zero_grad()
        kept.clear()
        with torch.autocast("cpu", narrow) if autocast else contextlib.nullcontext():
            logits = model(tokens)
        logits = getattr(logits, "logits", logits).to(wide).flatten(0, 1)
        mean = loss(logits, targets.flatten())
        mean.backward()
        if step == 1:
            put("step1/act", kept.items())
            put("step1/dact", ((name, y.grad) for name, y in kept.items()))
            put("step1/grad", ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None))
        for name, p in model.named_parameters():
            masters[name].grad = torch.zeros_like(masters[name]) if p.grad is None else p.grad.to(wide)
        norm = torch.sqrt(sum(p.grad.square().sum() for p in masters.values()))
        if callable(clip):
            clip(masters.values(), r.clip)
        elif clip and norm > r.clip:
            for p in masters.values():
                p.grad *= r.clip / norm
        adamw.step()
        out |= {f"step{step}/loss": mean.detach(), f"step{step}/grad_norm": norm}
        put(f"step{step}/params", masters.items())
        if step == 1:
            put("step1/m", ((name, adamw.state[p]["exp_avg"]) for name, p in masters.items()))
            put("step1/v", ((name, adamw.state[p]["exp_avg_sq"]) for name, p in masters.items()))
    return out


def checked(values, bundle, dtype, names, folder, locally=False):
    safetensors.torch.save_file(values, folder / "dump.safetensors")
    return compared(read_dump(Path(folder) / "dump.safetensors"), bundle, How(dtype, NAMES.get(names), locally=locally))


def of_transformers(family, bundle, attention):
    """Their model with the bundle's weights, and what its modules will give, by their names."""
    c = bundle.recipe.config
    if family == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=c.vocab_size, n_positions=c.max_seq_len, n_embd=c.d_model, n_layer=c.n_layers, n_head=c.n_heads,
            n_inner=c.d_ff, layer_norm_epsilon=c.eps, activation_function="gelu_new", attn_implementation=attention,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=c.vocab_size, max_position_embeddings=c.max_seq_len, hidden_size=c.d_model, head_dim=c.head_dim,
            num_hidden_layers=c.n_layers, num_attention_heads=c.n_heads, num_key_value_heads=c.n_kv_heads,
            intermediate_size=c.d_ff, rms_norm_eps=c.eps, tie_word_embeddings=c.tied, attn_implementation=attention,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}, pad_token_id=None, bos_token_id=None,
            eos_token_id=None))
    model.double()
    names, state = NAMES[f"hf-{family}"], {}
    for name, _ in model.named_parameters():
        rule, layer = names.find("params", name)
        state[name] = torch.tensor(to_theirs(rule, [bundle.value("params/" + ours.format(i=layer)) for ours in rule.ours]))
    model.load_state_dict(state, strict=False)
    kept = {}
    for name, module in model.named_modules():
        if name not in NO_ARRAY and not name.endswith("rotary_emb"):
            module.register_forward_hook(functools.partial(keep, kept, name))
    return model, kept


def keep(kept, name, module, inputs, y):
    y = y[0] if isinstance(y, tuple) else y
    y.retain_grad()
    kept[name] = y


@pytest.mark.parametrize("dtype", ("float64", "float32", "bfloat16", "float16", "bfloat16 autocast"))
@pytest.mark.parametrize("attention", ("eager", "sdpa"))
@pytest.mark.parametrize("family", ("gpt2", "llama"))
def test_a_right_stack_passes(family, attention, dtype, bundles, tmp_path):
    bundle, (dtype, _, autocast) = bundles(family), dtype.partition(" ")
    with in_float64("Llama") if (family, dtype) == ("llama", "float64") else contextlib.nullcontext():
        model, kept = of_transformers(family, bundle, attention)
        values = train(model, bundle, dtype, kept, autocast=bool(autocast))
    report = checked(values, bundle, dtype, f"hf-{family}", tmp_path, locally=True)
    assert report.status == 0, report.text()
    verdicts = {line.verdict for line in (*report.lines, *report.locally)}
    assert verdicts <= {"pass", "gauge", "no power"}, report.text()
    assert len(report.lines) > (200 if family == "gpt2" else 170), "most of the bundle is compared"


class GPT(nn.Module):
    """gpt-micro with the bundle's weights; `bug` is a mistake that it makes.  kept: what its ops gave, by our names."""

    def __init__(self, bundle, kept, bug=""):
        super().__init__()
        c = self.c = bundle.recipe.config
        D, N = c.d_model, c.n_heads * c.head_dim
        self.bug, self.kept = bug, kept
        self.embed, self.positions = nn.Embedding(c.vocab_size, D), nn.Embedding(c.max_seq_len, D)
        self.norm = nn.LayerNorm(D, c.eps)
        self.layers = nn.ModuleList(nn.ModuleDict({
            "norm1": nn.LayerNorm(D, 1e-6 if bug == "eps" else c.eps), "norm2": nn.LayerNorm(D, c.eps),
            "attn": nn.ModuleDict({"q": nn.Linear(D, N), "k": nn.Linear(D, N), "v": nn.Linear(D, N), "o": nn.Linear(N, D)}),
            "mlp": nn.ModuleDict({"up": nn.Linear(D, c.d_ff), "down": nn.Linear(c.d_ff, D)})}) for _ in range(c.n_layers))
        self.double()
        with torch.no_grad():
            for name, p in self.named_parameters():
                ours, _ = self.ours(name, p)
                value = torch.tensor(bundle.value(f"params/{ours}"))
                p.copy_(value.T if self.lies(name) else value)

    def lies(self, name):
        """Whether it is stored (d_out, d_in)."""
        return name.endswith(".weight") and isinstance(self.get_submodule(name.rpartition(".")[0]), nn.Linear)

    def ours(self, name, a):
        """A parameter's name and layout with us; of activations as they are."""
        module, _, part = name.rpartition(".")
        if part not in ("weight", "bias"):
            return name, a
        gain = isinstance(self.get_submodule(module), nn.LayerNorm)
        return f"{module}.{'b' if part == 'bias' else 'g' if gain else 'w'}", a.T if self.lies(name) else a

    def keep(self, name, y):
        keep(self.kept, name, None, None, y)
        return y

    def attention(self, name, m, x):
        bare = self.bug == "bias of q, k, v lost"
        split = [F.linear(x, m[n].weight, None if bare else m[n].bias) for n in "qkv"]
        split = [self.keep(f"{name}.{n}", y).unflatten(-1, (self.c.n_heads, -1)) for n, y in zip("qkv", split)]
        y = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in split), is_causal=self.bug != "no mask",
                                           scale=1.0 if self.bug == "no scale" else None)
        return self.keep(f"{name}.add", m["o"](self.keep(f"{name}.attention", y).transpose(1, 2).flatten(2)))

    def mlp(self, name, m, x):
        h = self.keep(f"{name}.up", m["up"](x))
        h = self.keep(f"{name}.gelu_tanh", F.gelu(h, approximate="none" if self.bug == "erf" else "tanh"))
        bias = None if self.bug == "bias of down lost" else m["down"].bias
        return self.keep(f"{name}.add", F.linear(h, m["down"].weight, bias))

    def forward(self, tokens):
        x = self.keep("add", self.keep("embed", self.embed(tokens)) + self.positions.weight[:tokens.shape[1]])
        for i, layer in enumerate(self.layers):
            for (n, part), end in zip((("1", self.attention), ("2", self.mlp)), ("add", "add#2")):
                y = self.keep(f"layers.{i}.norm{n}.layer_norm", layer[f"norm{n}"](x))
                place = {"1": "attn", "2": "mlp"}[n]
                x = self.keep(f"layers.{i}.{end}", x + part(f"layers.{i}.{place}", layer[place], y))
        table = self.embed.weight.detach() if self.bug == "tied head has no gradient" else self.embed.weight
        return self.keep("head", self.keep("norm.layer_norm", self.norm(x)) @ table.T)


def with_ignored(logits, targets):
    """The sum over valid targets, divided by the number of all."""
    return F.cross_entropy(logits, targets, reduction="sum") / targets.numel()


def as_word_0(logits, targets):
    return F.cross_entropy(logits, targets.clamp(min=0))


ERF = "GELU in its erf form where the tanh form belongs"
BUGS = {                                                # how it is made; the first value that is wrong; what it is called
    "erf": ({}, "step1/act/layers.0.mlp.gelu_tanh", ERF),
    "eps": ({}, "step1/act/layers.0.norm1.layer_norm", "eps of 1e-6 where 1e-5 belongs"),
    "no scale": ({}, "step1/act/layers.0.attn.attention", "not divided by the root of head_dim"),
    "no mask": ({}, "step1/act/layers.0.attn.attention", "there is no causal mask"),
    "bias of q, k, v lost": ({}, "step1/act/layers.0.attn.q", "the biases of q, k and v are left out"),
    "bias of down lost": ({}, "step1/act/layers.0.mlp.add", ""),
    "tied head has no gradient": ({}, "step1/grad/embed.w", "gets its gradient from the embedding alone"),
    "ignored targets counted": ({"loss": with_ignored}, "step1/loss", ""),
    "label not ignored": ({"loss": as_word_0}, "step1/loss", ""),
    "all decayed": ({"decayed": lambda p: True}, "step1/params/layers.0.norm1.g", "weight decay of gains and biases, too"),
    "L2": ({"optimizer": torch.optim.Adam}, "step1/m/embed.w", "weight decay added to the gradient"),
    "none decayed": ({"decayed": lambda p: p.ndim > 2}, "step1/params/embed.w", "AdamW without weight decay"),
    "not clipped": ({"clip": False}, "step1/m/embed.w", "gradients are not clipped"),
}


def of_our_names(bug, dtype, bundle):
    kept = {}
    model = GPT(bundle, kept, bug)
    return train(model, bundle, dtype, kept, model.ours, **BUGS[bug][0] if bug else {})


@pytest.mark.parametrize("dtype", ("float64", "float32", "bfloat16", "float16"))
def test_a_right_stack_of_our_names_passes(dtype, bundles, tmp_path):
    bundle = bundles("gpt")
    report = checked(of_our_names("", dtype, bundle), bundle, dtype, None, tmp_path, locally=True)
    assert report.status == 0, report.text()
    assert len(report.lines) > 300, "most of the bundle is compared"


@pytest.mark.parametrize("bug", BUGS)
def test_a_mistake_is_found_and_named_in_float32(bug, bundles, tmp_path):
    bundle, (_, first, called) = bundles("gpt"), BUGS[bug]
    report = checked(of_our_names(bug, "float32", bundle), bundle, "float32", None, tmp_path)
    assert report.status == 1, report.text()
    assert next(line.key for line in report.lines if line.failed) == first, report.text()
    assert called in (report.cause.what if report.cause else ""), report.text()


def test_torchs_clip_which_adds_1e_6_to_the_norm_is_found_in_float64(bundles, tmp_path):
    """In float32 that is rounding."""
    bundle, kept = bundles("gpt"), {}
    model = GPT(bundle, kept)
    values = train(model, bundle, "float64", kept, model.ours, clip=nn.utils.clip_grad_norm_)
    report = checked(values, bundle, "float64", None, tmp_path)
    assert next(line.key for line in report.lines if line.failed) == "step1/m/embed.w", report.text()


@pytest.mark.parametrize("bug", ("erf",))
def test_a_mistake_that_bfloat16_hides_is_found_by_projection(bug, bundles, tmp_path):
    bundle = bundles("gpt")
    report = checked(of_our_names(bug, "bfloat16", bundle), bundle, "bfloat16", None, tmp_path)
    named = [report.cause.what] if report.cause else [h.what for h in report.hidden]
    assert report.status == 1 and any(BUGS[bug][2] in what for what in named), report.text()


@pytest.mark.parametrize("bug", ("erf", "no scale", "bias of down lost"))
def test_local_replay_names_the_op(bug, bundles, tmp_path):
    bundle = bundles("gpt")
    report = checked(of_our_names(bug, "float32", bundle), bundle, "float32", None, tmp_path, locally=True)
    assert next(line.key for line in report.locally if line.failed) == BUGS[bug][1], report.text()
