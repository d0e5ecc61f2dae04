"""What a stack can do in more than one way, and which way the golden values are made: the first rung of every comparison.

Each is (value, sentence).  A stack may state its own values, in a file conventions.json, of any of them:

    {"rope_pairing": "interleaved", "eps": 1e-06, "tied": false, "betas": [0.9, 0.95]}
"""
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

from refimpl.files import parse_json
from refimpl.golden.recipe import Recipe
from refimpl.ops.losses import IGNORE

FILE = "conventions.json"
MAX_BYTES = 100_000
MAX_TEXT, MAX_LIST = 1000, 1000
Value = Any                                             # a text, a number, True or False; or a list of those


@dataclass(frozen=True)
class Stated:
    """A convention of which a stack says what it does; `right` and the sentence are the bundle's."""
    name: str
    value: Value
    right: Value
    sentence: str

    @property
    def agrees(self) -> bool:
        return self.value == self.right                 # 1e-5 is 0.00001, and 1 is 1.0


def conventions(recipe: Recipe) -> dict[str, tuple[Value, str]]:
    """For this model: name -> (value, in words)."""
    c, each = recipe.config, recipe.config.n_heads // recipe.config.n_kv_heads
    gelu = {"gelu_tanh": "0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))", "gelu_erf": "0.5·x·(1 + erf(x/√2))"}
    activation = {"relu": "max(x, 0)", "swiglu": "silu(gate)·up", "geglu_tanh": "GELU of tanh form(gate)·up",
                  "geglu_erf": "GELU of erf form(gate)·up"} | gelu
    norm = {"layer_norm": "(x - mean)/√(var + eps)·g + b, var is the mean of (x - mean)²",
            "rms_norm": "x/√(mean(x²) + eps)·g", "rms_norm_1+w": "x/√(mean(x²) + eps)·(1 + w)"}
    place = {"pre": "before each sublayer, and before the head", "post": "after each residual sum"}
    positions = {"learned": "a row for each position is added to the embedding", "none": "the model has none",
                 "rope": "q and k are turned, by positions from 0"}
    rope = {"half": "channel i turns with channel i + head_dim/2 (GPT-NeoX, Hugging Face)",
            "interleaved": "channel 2i turns with channel 2i + 1 (RoFormer, Meta's LLaMA)"}
    layout = {"contiguous": "cp rank r has the r-th piece of the positions",
              "zigzag": "of 2·cp pieces of the positions cp rank r has the r-th from the front and the r-th from the back",
              "striped": "cp rank r has positions r, r + cp, r + 2·cp ..."}
    out = {
        "weight_layout": ("d_in,d_out", "y = x @ w + b, w is stored (d_in, d_out); torch's nn.Linear keeps the transpose"),
        "norm": (c.norm, norm[c.norm]),
        "norm_place": (c.norm_place, place[c.norm_place]),
        "eps": (c.eps, "of norms, inside the root"),
        "qk_norm": (c.qk_norm, "whether each head's q and k are normalised, before RoPE"),
        "biases": (list(c.biases), "the parts that have a bias"),
        "activation": (c.ffn, activation[c.ffn]),
        "attention_scale": ("1/sqrt(head_dim)", f"softmax(q·k/√{c.head_dim}), scores and softmax in the precision of the run"),
        "mask": ("causal", "query i sees keys j ≤ i"),
        "windows": (list(c.windows), "keys that a query sees, the own one included, of the layers in turn; 0, or none: all"),
        "query_heads_per_kv_head": (each, f"query head h uses kv head h // {each}"),
        "positions": (c.positions, positions[c.positions])}
    if recipe.mesh["cp"] > 1:
        out["sequence_layout"] = (recipe.layout, layout[recipe.layout])
    if c.positions == "rope":
        out |= {"rope_pairing": (c.rope_pairing, rope[c.rope_pairing]),
                "rope_theta": (c.rope_theta, "pair i turns by position·theta^(-2i/head_dim)")}
    return out | {
        "embed_scale": (c.embed_scale, "what the embedding is multiplied by"),
        "soft_cap": (c.soft_cap, "logits = cap·tanh(logits/cap); 0: as they are"),
        "tied": (c.tied, "whether the head's matrix is the embedding's, transposed"),
        "loss": ("mean over valid targets of all ranks", "one division by their number"),
        "ignored_target": (IGNORE, "a target that does not count"),
        "dact": ("of the mean loss", "gradient by what an op gave, all its uses together"),
        "grad": ("summed over ranks, before clipping", "gradient of that mean loss by a parameter"),
        "clip": (recipe.clip, "largest norm of all gradients together: where it exceeds that, all are scaled down to it"),
        "optimizer": ("adamw", "Adam with decoupled weight decay"),
        "lr": (recipe.lr, "learning rate"),
        "betas": ([recipe.beta1, recipe.beta2], "decay of the first and of the second moment"),
        "bias_correction": (True, "whether moments are divided by 1 - beta^t"),
        "adam_eps": (recipe.eps, "added to the root of the second moment, not inside of it"),
        "weight_decay": (recipe.weight_decay, "times lr times the parameter, taken from it"),
        "decayed": ("matrices and embeddings", "the parameters that decay; gains and biases do not")}


def read_stated(path: Path, right: Mapping[str, tuple[Value, str]]) -> list[Stated]:
    """What a stack's file says of the bundle's conventions.  Error: ValueError, one sentence."""
    if not path.is_file():
        raise ValueError(f"{path} is not there, or no file")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"{path} has {size} bytes; conventions have at most {MAX_BYTES}")
    try:
        said = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None
    if not isinstance(said, dict):
        raise ValueError(f"{path} must be a table: {{name: value}}")
    for name, value in said.items():
        if name not in right:
            raise ValueError(f"{path}: the bundle has no convention {name[:100]!r}, it has {', '.join(right)}")
        wanted = right[name][0]
        if not is_value(value) or kind(value) != kind(wanted):
            raise ValueError(f"{path}: {name} must be {kind(wanted)}, as {text_of(wanted)}, not {str(value)[:100]!r} "
                             f"(known are {', '.join(right)})")
    return [Stated(name, value, *right[name]) for name, value in said.items()]


def is_value(value: Any) -> bool:
    """Whether JSON of others is a short value of a convention."""
    if type(value) is list:
        return len(value) <= MAX_LIST and all(type(v) is not list and is_value(v) for v in value)
    return is_text(value) or type(value) is bool or type(value) in (int, float) and abs(value) <= sys.float_info.max


def is_text(value: Any) -> bool:
    return type(value) is str and len(value) <= MAX_TEXT and value.isprintable()


def kind(value: Value) -> str:
    return {bool: "true or false", int: "a number", float: "a number", list: "a list"}.get(type(value), "a text")


def text_of(value: Value) -> str:
    """Short: half, 1e-05, true, [0.9, 0.95], none (of an empty list)."""
    if type(value) is list:
        return f"[{', '.join(map(text_of, value))}]" if value else "none"
    return str(value).lower() if type(value) is bool else f"{value:.9g}" if type(value) is float else str(value)
