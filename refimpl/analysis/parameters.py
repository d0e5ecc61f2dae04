"""How many parameters published models have that are no form of models/decoder.py: closed forms, nothing is allocated.

Those that are: `refimpl.models.count(PRESETS["llama-7b"])`.  Shape letters: L layers, D model, F feed-forward, V vocabulary.
"""
from dataclasses import replace

from refimpl.models import PRESETS, count


def mixtral(n_experts: int = 8) -> int:
    """Mistral 7B with `n_experts` MLPs in each layer, and a router.  Jiang et al. 2024, table 1."""
    cfg = replace(PRESETS["mistral-7b"], max_seq_len=32768)
    one_mlp = 3 * cfg.d_model * cfg.d_ff
    return count(cfg) + cfg.n_layers * ((n_experts - 1) * one_mlp + cfg.d_model * n_experts)


def bert(L: int, D: int, V: int = 30522, positions: int = 512, segments: int = 2) -> int:
    """An encoder with biases everywhere, two norms a layer and one of the embedding, and a pooler; F = 4D.

    Devlin et al. 2019, section 3.
    """
    F, norm = 4 * D, 2 * D
    layer = 4 * (D * D + D) + (D * F + F) + (F * D + D) + 2 * norm
    return (V + positions + segments) * D + norm + L * layer + (D * D + D)


def t5(L: int, D: int, heads: int, F: int, V: int = 32128, head_dim: int = 64, buckets: int = 32) -> int:
    """L encoder and L decoder layers without biases, a tied embedding, one table of relative biases for each of the two.

    Raffel et al. 2020, section 2.1 and 3.1.
    """
    attention, mlp = 4 * D * heads * head_dim, 2 * D * F
    encoder, decoder = attention + mlp + 2 * D, 2 * attention + mlp + 3 * D
    return V * D + L * (encoder + decoder) + 2 * D + 2 * buckets * heads


def gopher(L: int, D: int, V: int = 32000) -> int:
    """Matrices alone: attention with a projection of relative positions (Transformer-XL), F = 4D, a tied embedding.

    Rae et al. 2021, table 1; Hoffmann et al. 2022 (Chinchilla), table 4.
    """
    return V * D + L * (5 * D * D + 8 * D * D)


PUBLISHED = {
    "mixtral-8x7b": mixtral(),
    "bert-base": bert(12, 768), "bert-large": bert(24, 1024),
    "t5-small": t5(6, 512, 8, 2048), "t5-base": t5(12, 768, 12, 3072), "t5-large": t5(24, 1024, 16, 4096),
    "gopher": gopher(80, 16384), "chinchilla": gopher(80, 8192),
}
