"""The model of benchmarks/train.py in torch and in HIPS autograd, from the same initial weights, to be timed beside ours."""
import math
from typing import Any, Callable

import numpy as np

from refimpl.models import Config

BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1


Step = Callable[[np.ndarray, np.ndarray], float]


def torch_step(cfg: Config, weights: dict[str, np.ndarray], lr: float, threads: int) -> Step:
    """step(tokens, targets) -> loss, by torch, eager, with scaled_dot_product_attention and a fused q, k, v."""
    import torch
    import torch.nn.functional as F
    torch.set_num_threads(threads)
    D, H = cfg.d_model, cfg.n_heads
    p = {name: torch.tensor(w.T if w.ndim == 2 and name.startswith("layers") else w) for name, w in weights.items()}
    for i in range(cfg.n_layers):                       # torch stores (out, in), and one product makes q, k and v
        for part in "wb":
            p[f"layers.{i}.attn.qkv.{part}"] = torch.cat([p.pop(f"layers.{i}.attn.{n}.{part}") for n in "qkv"])
    p = {name: torch.nn.Parameter(t.contiguous()) for name, t in p.items()}
    optimizer = torch.optim.AdamW([{"params": [t for t in p.values() if t.ndim > 1], "weight_decay": DECAY},
                                   {"params": [t for t in p.values() if t.ndim == 1], "weight_decay": 0.0}],
                                  lr=lr, betas=BETAS, eps=EPS)

    def norm(x: Any, name: str) -> Any:
        return F.layer_norm(x, (D,), p[f"{name}.g"], p[f"{name}.b"], cfg.eps)

    def linear(x: Any, name: str) -> Any:
        return F.linear(x, p[f"{name}.w"], p[f"{name}.b"])

    def loss(tokens: Any, targets: Any) -> Any:
        B, T = tokens.shape
        x = F.embedding(tokens, p["embed.w"]) + p["positions.w"][:T]
        for i in range(cfg.n_layers):
            q, k, v = (t.view(B, T, H, D // H).transpose(1, 2)
                       for t in linear(norm(x, f"layers.{i}.norm1"), f"layers.{i}.attn.qkv").split(D, dim=2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D)
            x = x + linear(y, f"layers.{i}.attn.o")
            h = F.gelu(linear(norm(x, f"layers.{i}.norm2"), f"layers.{i}.mlp.up"), approximate="tanh")
            x = x + linear(h, f"layers.{i}.mlp.down")
        return F.cross_entropy(F.linear(norm(x, "norm"), p["embed.w"]).view(B * T, -1), targets.reshape(-1))

    def step(tokens: np.ndarray, targets: np.ndarray) -> float:
        value = loss(torch.from_numpy(tokens), torch.from_numpy(targets))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        return float(value.detach())
    return step


def hips_step(cfg: Config, weights: dict[str, np.ndarray], lr: float) -> Step:
    """step(tokens, targets) -> loss, by HIPS autograd and AdamW in numpy: what one writes without thinking of speed."""
    import autograd.numpy as anp
    from autograd import value_and_grad
    D, H = cfg.d_model, cfg.n_heads
    K = D // H
    p, t = dict(weights), [0]
    m, v = ({name: np.zeros_like(w) for name, w in weights.items()} for _ in range(2))

    def norm(x: Any, g: Any, b: Any) -> Any:
        x = x - anp.mean(x, axis=-1, keepdims=True)
        return g * (x / anp.sqrt(anp.mean(x * x, axis=-1, keepdims=True) + cfg.eps)) + b

    def gelu(x: Any) -> Any:
        return 0.5 * x * (1 + anp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))

    def log_softmax(x: Any) -> Any:
        x = x - anp.max(x, axis=-1, keepdims=True)
        return x - anp.log(anp.sum(anp.exp(x), axis=-1, keepdims=True))

    def loss(p: dict[str, Any], tokens: np.ndarray, targets: np.ndarray) -> Any:
        B, T = tokens.shape
        hidden = np.triu(np.full((T, T), -1e9, "float32"), 1)

        def heads(x: Any) -> Any:
            return anp.transpose(anp.reshape(x, (B, T, H, K)), (0, 2, 1, 3))
        x = p["embed.w"][tokens] + p["positions.w"][:T]
        for i in range(cfg.n_layers):
            w = {name.removeprefix(f"layers.{i}."): a for name, a in p.items() if name.startswith(f"layers.{i}.")}
            h = norm(x, w["norm1.g"], w["norm1.b"])
            q, k, v = (heads(anp.matmul(h, w[f"attn.{n}.w"]) + w[f"attn.{n}.b"]) for n in "qkv")
            s = anp.matmul(q, anp.transpose(k, (0, 1, 3, 2))) / math.sqrt(K) + hidden
            e = anp.exp(s - anp.max(s, axis=-1, keepdims=True))
            y = anp.matmul(e / anp.sum(e, axis=-1, keepdims=True), v)
            y = anp.reshape(anp.transpose(y, (0, 2, 1, 3)), (B, T, D))
            x = x + anp.matmul(y, w["attn.o.w"]) + w["attn.o.b"]
            h = gelu(anp.matmul(norm(x, w["norm2.g"], w["norm2.b"]), w["mlp.up.w"]) + w["mlp.up.b"])
            x = x + anp.matmul(h, w["mlp.down.w"]) + w["mlp.down.b"]
        logits = anp.matmul(norm(x, p["norm.g"], p["norm.b"]), p["embed.w"].T)
        return -anp.mean(log_softmax(logits)[np.arange(B)[:, None], np.arange(T), targets])

    gradient = value_and_grad(loss)

    def step(tokens: np.ndarray, targets: np.ndarray) -> float:
        value, grads = gradient(p, tokens, targets)
        t[0] += 1
        for name, g in grads.items():
            m[name] = BETAS[0] * m[name] + (1 - BETAS[0]) * g
            v[name] = BETAS[1] * v[name] + (1 - BETAS[1]) * g * g
            update = m[name] / (1 - BETAS[0] ** t[0]) / (np.sqrt(v[name] / (1 - BETAS[1] ** t[0])) + EPS)
            p[name] = p[name] - lr * (update + (DECAY if p[name].ndim > 1 else 0) * p[name])
        return float(value)
    return step
