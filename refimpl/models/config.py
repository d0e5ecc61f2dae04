"""The configuration of a decoder: sizes and choices, nothing about ranks.  presets.py has those of published models."""
from dataclasses import asdict, dataclass, fields
from typing import Any

from refimpl.ops.rope import PAIRINGS

CHOICES = {
    "norm": ("layer_norm", "rms_norm", "rms_norm_1+w"),             # 1+w: Gemma's gain, initially w = 0
    "norm_place": ("pre", "post"),                                  # before each sublayer, or after its residual sum
    "positions": ("learned", "rope", "none"),
    "rope_pairing": PAIRINGS,
    "ffn": ("gelu_tanh", "gelu_erf", "relu", "swiglu", "geglu_tanh", "geglu_erf"),
}
BIASED = ("norm", "qkv", "o", "mlp", "head")                        # the parts that can have a bias
SIZES = ("vocab_size", "n_layers", "n_heads", "d_model", "max_seq_len", "d_ff", "n_kv_heads", "head_dim", "vocab_multiple")


@dataclass(frozen=True)
class Config:
    """The defaults are GPT-2's form; LLaMA's is norm="rms_norm", positions="rope", ffn="swiglu", biases=(), tied=False.

    Error: ValueError that names the field and what would be right.
    """
    vocab_size: int
    n_layers: int
    n_heads: int
    d_model: int
    max_seq_len: int
    d_ff: int = 0                                       # 0: four times d_model
    n_kv_heads: int = 0                                 # 0: n_heads; 1: multi-query attention; between: grouped
    head_dim: int = 0                                   # 0: d_model / n_heads
    norm: str = "layer_norm"
    norm_place: str = "pre"
    eps: float = 1e-5
    positions: str = "learned"
    rope_theta: float = 10000.0
    rope_pairing: str = "half"
    ffn: str = "gelu_tanh"
    biases: tuple[str, ...] = ("norm", "qkv", "o", "mlp")
    qk_norm: bool = False                               # normalise each head's q and k, before RoPE
    windows: tuple[int, ...] = ()                       # keys that a query sees, for each layer in turn; 0: all before it
    embed_scale: float = 1.0                            # the embedding is multiplied by it (Gemma: the root of d_model)
    tied: bool = True                                   # the head's matrix is the embedding's
    soft_cap: float = 0.0                               # logits become cap·tanh(logits / cap); 0: as they are
    vocab_multiple: int = 1                             # the vocabulary is padded to a multiple with words that never count
    dropout: float = 0.0                                # after the embedding and each sublayer

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, of_kind(f.name, getattr(self, f.name)))
        for name, value in (("d_ff", 4 * self.d_model), ("n_kv_heads", self.n_heads),
                            ("head_dim", self.d_model // max(1, self.n_heads))):
            if getattr(self, name) == 0:
                if name == "head_dim" and self.d_model % max(1, self.n_heads):
                    raise ValueError(f"d_model must be a multiple of n_heads, got d_model {self.d_model}, n_heads "
                                     f"{self.n_heads} (or give head_dim)")
                object.__setattr__(self, name, value)
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for part in self.biases:
            if part not in BIASED:
                raise ValueError(f"biases must be among {', '.join(BIASED)}, got {part!r}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads must be a multiple of n_kv_heads, got {self.n_heads} and {self.n_kv_heads}")
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"rope turns pairs of channels: head_dim must be even, got {self.head_dim}")
        if self.windows and (min(self.windows) < 0 or len(self.windows) > self.n_layers):
            raise ValueError(f"windows must be at most n_layers = {self.n_layers} numbers of keys (0: all), got {self.windows}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        for name in ("eps", "rope_theta", "embed_scale"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a positive number, got {getattr(self, name)}")
        if not 0 <= self.soft_cap < float("inf"):
            raise ValueError(f"soft_cap must be finite and at least 0, got {self.soft_cap}")

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding: vocab_size, and padding up to a multiple of vocab_multiple."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate besides up and down."""
        return "glu" in self.ffn

    def window(self, layer: int) -> int | None:
        """Keys that a query of this layer sees, itself included; None: all before it."""
        return (self.windows[layer % len(self.windows)] or None) if self.windows else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: lists for tuples.  Config(**d) makes the same again."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


KINDS = {int: "an integer", float: "a number", str: "a text", bool: "True or False"}


def of_kind(name: str, value: Any) -> Any:
    """The value; lists as tuples.  Error: ValueError where it is not of the field's kind."""
    kind: Any = Config.__annotations__[name]
    if kind in KINDS:
        if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool) != (kind is bool):
            raise ValueError(f"{name} must be {KINDS[kind]}, got {value!r}")
        return value
    part = kind.__args__[0]
    if not isinstance(value, (list, tuple)) or any(type(v) is not part for v in value):
        raise ValueError(f"{name} must be a list, each {KINDS[part]}, got {value!r}")
    return tuple(value)
