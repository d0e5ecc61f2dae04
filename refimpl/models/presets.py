"""Configurations of published models that this decoder can be.  Their parameters are counted to the last digit by `count`.

Not here, for they need what decoder.py does not have: Mixtral (experts), BERT (segments, a pooler), T5 (an encoder), Gopher and
Chinchilla (relative positions).  analysis/parameters.py counts those.
"""
import math

from refimpl.models.config import Config


def gpt2(n_layers: int, d_model: int, **changes: object) -> Config:
    """Radford et al. 2019, table 2.  Heads are 64 wide."""
    form = {"vocab_size": 50257, "n_heads": d_model // 64, "max_seq_len": 1024, "dropout": 0.1} | changes
    return Config(n_layers=n_layers, d_model=d_model, **form)       # type: ignore[arg-type]


def llama(n_layers: int, d_model: int, **changes: object) -> Config:
    """Touvron et al. 2023, table 2.  Heads are 128 wide; d_ff is 8/3·d_model, rounded up to a multiple of 256."""
    form = {"vocab_size": 32000, "n_heads": d_model // 128, "max_seq_len": 2048, "d_ff": -(-8 * d_model // (3 * 256)) * 256,
            "norm": "rms_norm", "eps": 1e-6, "positions": "rope", "rope_pairing": "interleaved", "ffn": "swiglu", "biases": (),
            "tied": False} | changes
    return Config(n_layers=n_layers, d_model=d_model, **form)       # type: ignore[arg-type]


def gemma(n_layers: int, d_model: int, d_ff: int, **changes: object) -> Config:
    """Gemma Team 2024, table 1.  d_ff is one branch of the gated MLP (the table prints both together)."""
    form = {"vocab_size": 256128, "n_heads": 16, "head_dim": 256, "max_seq_len": 8192, "d_ff": d_ff, "norm": "rms_norm_1+w",
            "eps": 1e-6, "positions": "rope", "ffn": "geglu_tanh", "biases": (), "embed_scale": math.sqrt(d_model)} | changes
    return Config(n_layers=n_layers, d_model=d_model, **form)       # type: ignore[arg-type]


PRESETS = {
    "gpt2-small": gpt2(12, 768),
    "gpt2-medium": gpt2(24, 1024),
    "gpt2-large": gpt2(36, 1280),
    "gpt2-xl": gpt2(48, 1600),
    **{f"megatron-{size}": gpt2(n_layers, d_model, n_heads=d_model // 96, vocab_multiple=1024) for size, n_layers, d_model in (
        ("1.2b", 40, 1536), ("2.5b", 54, 1920), ("4.2b", 64, 2304), ("8.3b", 72, 3072))},        # Shoeybi et al. 2019, table 1
    "gpt3": gpt2(96, 12288, n_heads=96, max_seq_len=2048, dropout=0.0),         # Brown et al. 2020, table 2.1; all layers dense
    "llama-7b": llama(32, 4096),
    "llama-13b": llama(40, 5120),
    "llama-33b": llama(60, 6656),
    "llama-65b": llama(80, 8192),
    "llama2-70b": llama(80, 8192, d_ff=28672, n_kv_heads=8, max_seq_len=4096, eps=1e-5),
    "mistral-7b": llama(32, 4096, d_ff=14336, n_kv_heads=8, max_seq_len=8192, eps=1e-5, windows=(4096,)),
    "smollm2-135m": llama(30, 576, n_heads=9, n_kv_heads=3, d_ff=1536, vocab_size=49152, max_seq_len=8192, eps=1e-5,
                          rope_theta=1e5, rope_pairing="half", tied=True),
    "gemma-2b": gemma(18, 2048, 16384, n_heads=8, n_kv_heads=1),
    "gemma-7b": gemma(28, 3072, 24576),
}
GPT2_SMALL = PRESETS["gpt2-small"]
