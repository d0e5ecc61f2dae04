"""Other stacks' names and layouts for the same numbers, as data: a rule says what a name of theirs holds.

    Rule("h.{i}.attn.c_attn.weight", ("layers.{i}.attn.q.w", "...k.w", "...v.w"))       three side by side (last axis)
    Rule("model.layers.{i}.mlp.up_proj.weight", ("layers.{i}.mlp.up.w",), transposed=True)      stored (d_out, d_in)
    Rule("fcw", ("layers.{i}.mlp.up.w",), stacked=True, transposed=True)        all layers in one array, along axis 0

`to_ours` and `to_theirs` undo each other.  Names that no rule knows are an error, and modules that are left out are counted, so
nothing is left out silently.
"""
import re
from dataclasses import dataclass
from typing import Sequence

import numpy as np

QKV = "qkv"


@dataclass(frozen=True)
class Rule:
    """theirs holds `ours`, joined along the last axis (of the transpose where `transposed`), of each layer where `stacked`.

    heads  theirs is (B, T, heads·K), ours (B, heads, T, K)
    """
    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    stacked: bool = False
    heads: bool = False


@dataclass(frozen=True)
class Names:
    """params: of parameters, their gradients and moments; acts: of what modules give, and its gradients.

    optional  a prefix that their names may have or lack
    again     parameters that hold again what another does, in a model whose head has the embedding's matrix
    left_out  modules that give again what another does, or nothing of ours
    """
    params: tuple[Rule, ...]
    acts: tuple[Rule, ...]
    optional: str = ""
    again: tuple[Rule, ...] = ()
    left_out: tuple[str, ...] = ()

    def find(self, kind: str, theirs: str, tied: bool = False) -> tuple[Rule, str] | None:
        """The rule for a name of theirs, and the layer that stands in it ("" where none does)."""
        theirs = theirs.removeprefix(self.optional)
        for rule in self.acts if kind in ACTS else (*(self.again if tied else ()), *self.params):
            if found := fits(rule.theirs, theirs):
                return rule, (found.groups() or ("",))[0]
        return None

    def leaves_out(self, kind: str, theirs: str) -> bool:
        return kind in ACTS and any(fits(name, theirs.removeprefix(self.optional)) for name in self.left_out)


ACTS = ("act", "dact")


def fits(pattern: str, name: str) -> re.Match | None:
    """Whether a name is that of the pattern, for some layer {i}."""
    return re.fullmatch(re.escape(pattern).replace(r"\{i\}", "([0-9]+)"), name)


def to_ours(rule: Rule, array: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """The arrays of `shapes` that one of theirs holds, layer by layer.  Error: ValueError where they do not fit."""
    out: list[np.ndarray] = []
    for layer, a in enumerate(array if rule.stacked else [array]):
        wanted = shapes[layer * len(rule.ours):][:len(rule.ours)]
        if rule.heads:
            a = np.moveaxis(a.reshape(*a.shape[:-1], wanted[0][1], -1), -2, 1)
        a = a.T if rule.transposed else a
        if a.ndim == len(wanted[0]) + 1 and len(a) == 1:
            a = a[0]                                    # a batch of one: positions, which are the same for all samples
        parts = np.split(a, np.cumsum([shape[-1] for shape in wanted])[:-1], axis=-1)
        if [p.shape for p in parts] != list(wanted):
            raise ValueError(f"{rule.theirs} has shape {list(array.shape)}, which cannot be {', '.join(rule.ours)} of shape "
                             f"{', '.join(str(list(shape)) for shape in wanted)}")
        out += parts
    return out


def to_theirs(rule: Rule, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The other way: `arrays` are those of one layer, or, where stacked, of all layers in turn."""
    n = len(rule.ours)
    layers = [np.concatenate(arrays[k:k + n], axis=-1) for k in range(0, len(arrays), n)]
    layers = [a.T if rule.transposed else a for a in layers]
    if rule.heads:
        layers = [np.moveaxis(a, 1, -2) for a in layers]
        layers = [a.reshape(*a.shape[:-2], -1) for a in layers]
    return np.stack(layers) if rule.stacked else layers[0]


def side_by_side(part: str) -> tuple[str, ...]:
    return tuple(f"layers.{{i}}.attn.{p}{part}" for p in "qkv")


def weight_and_bias(theirs: str, ours: str, transposed: bool = False) -> tuple[Rule, Rule]:
    return Rule(f"{theirs}.weight", (f"{ours}.w",), transposed), Rule(f"{theirs}.bias", (f"{ours}.b",))


def gain_and_bias(theirs: str, ours: str) -> tuple[Rule, Rule]:
    return Rule(f"{theirs}.weight", (f"{ours}.g",)), Rule(f"{theirs}.bias", (f"{ours}.b",))


def each(table: dict[str, str], stacked: bool = False, transposed: bool = False) -> tuple[Rule, ...]:
    return tuple(Rule(theirs, (ours,), transposed, stacked) for theirs, ours in table.items())


L = "layers.{i}"
M = "model.layers.{i}"
HF_GPT2 = Names(                                        # transformers' GPT2LMHeadModel: Conv1D keeps (d_in, d_out), as we do
    params=(*each({"wte.weight": "embed.w", "wpe.weight": "positions.w"}), *gain_and_bias("h.{i}.ln_1", f"{L}.norm1"),
            Rule("h.{i}.attn.c_attn.weight", side_by_side(".w")), Rule("h.{i}.attn.c_attn.bias", side_by_side(".b")),
            *weight_and_bias("h.{i}.attn.c_proj", f"{L}.attn.o"), *gain_and_bias("h.{i}.ln_2", f"{L}.norm2"),
            *weight_and_bias("h.{i}.mlp.c_fc", f"{L}.mlp.up"), *weight_and_bias("h.{i}.mlp.c_proj", f"{L}.mlp.down"),
            *gain_and_bias("ln_f", "norm"), Rule("lm_head.weight", ("head.w",), transposed=True)),
    acts=(Rule("h.{i}.attn.c_attn", side_by_side("")), *each({
        "wte": "embed", "wpe": "positions", "drop": "add", "h.{i}.ln_1": f"{L}.norm1.layer_norm",
        "h.{i}.attn.c_proj": f"{L}.attn.add",
        "h.{i}.ln_2": f"{L}.norm2.layer_norm", "h.{i}.mlp.c_fc": f"{L}.mlp.up", "h.{i}.mlp.act": f"{L}.mlp.gelu_tanh",
        "h.{i}.mlp.c_proj": f"{L}.mlp.add", "h.{i}": f"{L}.add#2", "ln_f": "norm.layer_norm", "lm_head": "head"})),
    optional="transformer.", again=(Rule("lm_head.weight", ("embed.w",)),),
    left_out=("h.{i}.attn", "h.{i}.mlp", "h.{i}.attn.attn_dropout", "h.{i}.attn.resid_dropout", "h.{i}.mlp.dropout"))
HF_LLAMA = Names(                                       # transformers' LlamaForCausalLM: nn.Linear keeps (d_out, d_in)
    params=(*each({"embed_tokens.weight": "embed.w", "layers.{i}.input_layernorm.weight": f"{L}.norm1.g",
                   "layers.{i}.post_attention_layernorm.weight": f"{L}.norm2.g", "norm.weight": "norm.g"}),
            *(rule for p in "qkvo" for rule in weight_and_bias(f"layers.{{i}}.self_attn.{p}_proj", f"{L}.attn.{p}", True)),
            *(r for p in ("gate", "up", "down") for r in weight_and_bias(f"layers.{{i}}.mlp.{p}_proj", f"{L}.mlp.{p}", True)),
            Rule("lm_head.weight", ("head.w",), transposed=True)),
    acts=each({"embed_tokens": "embed", "layers.{i}.input_layernorm": f"{L}.norm1.rms_norm",
               **{f"layers.{{i}}.self_attn.{p}_proj": f"{L}.attn.{p}" for p in "qkv"},
               "layers.{i}.self_attn.o_proj": f"{L}.attn.reduce_from",
               "layers.{i}.post_attention_layernorm": f"{L}.norm2.rms_norm",
               "layers.{i}.mlp.gate_proj": f"{L}.mlp.gate", "layers.{i}.mlp.up_proj": f"{L}.mlp.up",
               "layers.{i}.mlp.down_proj": f"{L}.mlp.reduce_from", "layers.{i}": f"{L}.add#2", "norm": "norm.rms_norm",
               "lm_head": "head"}),
    optional="model.", again=(Rule("lm_head.weight", ("embed.w",)),),
    left_out=("layers.{i}.self_attn", "layers.{i}.mlp", "layers.{i}.mlp.act_fn", "rotary_emb"))
LLM_C = Names(                                          # train_gpt2.c: all layers in one array; weights are (d_out, d_in)
    params=(*each({"wte": "embed.w", "wpe": "positions.w", "lnfw": "norm.g", "lnfb": "norm.b"}),
            *each({"ln1w": f"{L}.norm1.g", "ln1b": f"{L}.norm1.b", "attprojb": f"{L}.attn.o.b", "ln2w": f"{L}.norm2.g",
                   "ln2b": f"{L}.norm2.b", "fcb": f"{L}.mlp.up.b", "fcprojb": f"{L}.mlp.down.b"}, stacked=True),
            *each({"attprojw": f"{L}.attn.o.w", "fcw": f"{L}.mlp.up.w", "fcprojw": f"{L}.mlp.down.w"}, True, True),
            Rule("qkvw", side_by_side(".w"), transposed=True, stacked=True), Rule("qkvb", side_by_side(".b"), stacked=True)),
    acts=(*each({"encoded": "add", "lnf": "norm.layer_norm", "logits": "head"}), Rule("qkv", side_by_side(""), stacked=True),
          Rule("atty", (f"{L}.attn.attention",), stacked=True, heads=True),
          *each({"ln1": f"{L}.norm1.layer_norm", "attproj": f"{L}.attn.add", "residual2": f"{L}.add",
                 "ln2": f"{L}.norm2.layer_norm", "fch": f"{L}.mlp.up", "fch_gelu": f"{L}.mlp.gelu_tanh",
                 "fcproj": f"{L}.mlp.add", "residual3": f"{L}.add#2"}, stacked=True)))
NAMES = {"hf-gpt2": HF_GPT2, "hf-llama": HF_LLAMA, "llm.c": LLM_C}
