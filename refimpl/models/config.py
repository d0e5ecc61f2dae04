"""The configuration of a decoder: sizes and choices, nothing about ranks."""
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Config:
    """GPT-2's form: pre-norm, layer_norm, learned positions, GELU (tanh form), biases everywhere, tied head.

    Error: ValueError that names the field and what would be right.
    """
    vocab_size: int
    n_layers: int
    n_heads: int
    d_model: int
    max_seq_len: int
    d_ff: int = 0                                       # 0: four times d_model
    dropout: float = 0.0                                # after the embedding and each sublayer
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.d_ff == 0:
            object.__setattr__(self, "d_ff", 4 * self.d_model)
        for name in ("vocab_size", "n_layers", "n_heads", "d_model", "max_seq_len", "d_ff"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model must be a multiple of n_heads, got d_model {self.d_model}, n_heads {self.n_heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


GPT2_SMALL = Config(vocab_size=50257, n_layers=12, n_heads=12, d_model=768, max_seq_len=1024, dropout=0.1)
