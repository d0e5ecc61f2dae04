"""A small GPT in torch with one mistake in it, to be checked against golden values: docs/golden.md says how.

    python golden_torch.py MANIFEST DUMP

reads names, shapes and sizes from a bundle's manifest, makes weights and inputs by the hash, runs one step, and dumps it.
"""
import json
import math
import sys

import torch
import torch.nn.functional as F
from golden_init import ignored, stream, token, value
from safetensors.torch import save_file

manifest = json.load(open(sys.argv[1]))
recipe = manifest["recipe"]
config, seed = recipe["config"], recipe["seed"]
B, T, V = recipe["batch_size"], recipe["seq_len"], config["vocab_size"]
H, K = config["n_heads"], config["head_dim"]
dump = {}


def keep(name, y):
    """Dump what an op gives, and later the gradient by it."""
    y.retain_grad()
    dump[f"step1/act/{name}"] = y
    return y


def weight(name, shape, offset, scale):
    key = stream(seed, name)
    numbers = [value(key, i, offset, scale) for i in range(math.prod(shape))]
    return torch.tensor(numbers).reshape(shape).requires_grad_()


p = {name: weight(name, **row) for name, row in manifest["weights"].items()}
words = torch.tensor([token(seed, 1, i, V) for i in range(B * (T + 1))]).reshape(B, T + 1)
tokens, targets = words[:, :-1], words[:, 1:].clone()
targets[torch.tensor([ignored(seed, 1, i) for i in range(B * T)]).reshape(B, T)] = -100


def linear(name, x):
    return x @ p[f"{name}.w"] + p[f"{name}.b"]


def norm(name, x):
    y = F.layer_norm(x, x.shape[-1:], p[f"{name}.g"], p[f"{name}.b"], config["eps"])
    return keep(f"{name}.layer_norm", y)


def attention(layer, x):
    q, k, v = (keep(f"{layer}.{n}", linear(f"{layer}.{n}", x)) for n in "qkv")
    q, k, v = (a.reshape(B, T, H, K).transpose(1, 2) for a in (q, k, v))
    y = keep(f"{layer}.attention", F.scaled_dot_product_attention(q, k, v, is_causal=True))
    return keep(f"{layer}.add", linear(f"{layer}.o", y.transpose(1, 2).reshape(B, T, H * K)))


def mlp(layer, x):
    y = keep(f"{layer}.up", linear(f"{layer}.up", x))
    y = keep(f"{layer}.gelu_tanh", F.gelu(y))
    return keep(f"{layer}.add", linear(f"{layer}.down", y))


x = keep("embed", p["embed.w"][tokens])
x = keep("add", x + p["positions.w"][:T])
for i in range(config["n_layers"]):
    x = keep(f"layers.{i}.add", x + attention(f"layers.{i}.attn", norm(f"layers.{i}.norm1", x)))
    x = keep(f"layers.{i}.add#2", x + mlp(f"layers.{i}.mlp", norm(f"layers.{i}.norm2", x)))
logits = keep("head", norm("norm", x) @ p["embed.w"].T)
loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
loss.backward()

dump |= {name.replace("/act/", "/dact/"): y.grad for name, y in dump.items()}
dump |= {"step1/tokens": tokens, "step1/targets": targets, "step1/loss": loss}
dump |= {f"params/{name}": a for name, a in p.items()}
dump |= {f"step1/grad/{name}": a.grad for name, a in p.items()}
save_file({name: a.detach().clone().contiguous() for name, a in dump.items()}, sys.argv[2])
